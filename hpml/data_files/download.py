"""Fetching one file over HTTPS, kept only if its checksum is right."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

from hpml.core.contract import Output
from hpml.core.errors import StageFailed, Unavailable
from hpml.data_files.user_files import require_sha256

TIMEOUT_S = 60
MOST_BYTES = 4 * 2**30
CHUNK_BYTES = 2**20


class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to another https address."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: object, newurl: str
    ) -> urllib.request.Request | None:
        if not newurl.startswith("https://"):
            raise StageFailed(f"{req.full_url} redirects to {newurl!r}", why="only https is followed")
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def download(url: str, *, sha256: str, to: Path, out: Output) -> None:
    """Fetch `url` into the file `to`, unless `to` is already there from an earlier attempt.

    Raises Unavailable if the server does not deliver, StageFailed if what it delivers has another checksum
    or is larger than 4 GiB; nothing is at `to` then.
    """
    if to.exists():
        return
    part = to.with_name(f"{to.name}.part")
    try:
        _fetch(url, part, out)
        require_sha256(part, sha256, given=url, fix="correct `sha256` or `url`")
        part.rename(to)
    finally:
        part.unlink(missing_ok=True)


def _fetch(url: str, part: Path, out: Output) -> None:
    opener = urllib.request.build_opener(_HttpsOnly)
    try:
        with opener.open(url, timeout=TIMEOUT_S) as response, part.open("wb") as file:
            expected = int(response.headers.get("Content-Length") or 0)
            received = 0
            while chunk := response.read(CHUNK_BYTES):
                received += len(chunk)
                if received > MOST_BYTES:
                    raise StageFailed(f"{url} is larger than {MOST_BYTES} bytes")
                file.write(chunk)
                out.progress(received, max(expected, received), "bytes", "download")
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        raise Unavailable(
            f"cannot fetch {url}",
            why=str(error) or type(error).__name__,
            fix="check the address and the network, or fetch it elsewhere and give `path`",
        ) from None
    if received < expected:
        raise Unavailable(f"cannot fetch {url}", why=f"it ended after {received} of {expected} bytes")
