"""Token and certificate come from files that may change while they are served: a Secret that is rotated.

The kubelet swaps a link to a folder; others rename a file, or write into it. Whether one has changed is seen
by what it is, not by its content, whenever it is needed: some microseconds. A new one that cannot be used
leaves the one before in its place, which is said, and counted.
"""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from hpml.core import regular_files
from hpml.core.errors import ConfigInvalid

_LEAST_TOKEN, _MOST_TOKEN = 16, 4096  # characters
_Content = TypeVar("_Content")


class Watched(Generic[_Content]):
    """What `read` makes of `files`, as they are when it is asked for."""

    def __init__(
        self, files: tuple[Path, ...], read: Callable[[], _Content], failed: Callable[[ConfigInvalid], None]
    ) -> None:
        """Raises what `read` does. failed: is told, once, of a change that `read` then refuses."""
        self._files, self._read, self._failed = files, read, failed
        self._seen = self._status()
        self._content = read()

    def current(self) -> _Content:
        """Of the latest files that could be used."""
        status = self._status()  # before they are read: what changes meanwhile is read again
        if status != self._seen:
            self._seen = status
            try:
                self._content = self._read()
            except ConfigInvalid as error:
                self._failed(error)
        return self._content

    def _status(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(_status, self._files))


def _status(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns


class Token:
    """What requests have to bring; without a file, nothing."""

    def __init__(self, file: Path | None, failed: Callable[[ConfigInvalid], None]) -> None:
        """Raises ConfigInvalid for a token that cannot be used; failed: see `Watched`."""
        self._watched = Watched((file,), lambda: _read_token(file), failed) if file else None

    @property
    def is_needed(self) -> bool:
        """Whether there is one."""
        return self._watched is not None

    def allows(self, authorization: str) -> bool:
        """Whether a request with this header may be answered."""
        if self._watched is None:
            return True
        scheme, _, given = authorization.partition(" ")
        is_known = hmac.compare_digest(given.strip().encode(errors="surrogatepass"), self._watched.current())
        return is_known and scheme.lower() == "bearer"


def _read_token(file: Path) -> bytes:
    try:
        if why := regular_files.problem(file):
            raise OSError(f"it {why}")
        with file.open(encoding="ascii") as content:
            token = content.read(_MOST_TOKEN + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"the token in {file} cannot be read", why=str(error)) from None
    if not _LEAST_TOKEN <= len(token) <= _MOST_TOKEN or not token.isprintable() or " " in token:
        raise ConfigInvalid(
            f"the token in {file} is refused",
            why=f"it needs {_LEAST_TOKEN} to {_MOST_TOKEN:,} printable characters without spaces",
            fix="python -c 'import secrets; print(secrets.token_urlsafe())'",
        )
    return token.encode()


class Certificate:
    """A certificate and its key, for HTTP as a context of TLS, for gRPC as bytes."""

    def __init__(self, certificate: Path, key: Path, failed: Callable[[ConfigInvalid], None]) -> None:
        """Raises ConfigInvalid if they cannot be read, or do not belong together; failed: see `Watched`."""
        self._watched = Watched((certificate, key), lambda: _read_pair(certificate, key), failed)

    def pair(self) -> tuple[bytes, bytes]:
        """The key and the certificate, in PEM."""
        return self._watched.current()[1]

    def use_in(self, context: ssl.SSLContext) -> None:
        """Have each handshake of `context` use those of the moment."""

        def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self._watched.current()[0]

        context.sni_callback = choose  # is called for every client, also for one that names no host


def _read_pair(certificate: Path, key: Path) -> tuple[ssl.SSLContext, tuple[bytes, bytes]]:
    for file in (certificate, key):
        if why := regular_files.problem(file):
            raise ConfigInvalid(f"{file} cannot be read", why=f"it {why}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: b"")
        return context, (key.read_bytes(), certificate.read_bytes())
    except (ssl.SSLError, ValueError, OSError) as error:
        raise ConfigInvalid(
            f"{certificate} and {key} cannot be used for TLS",
            why=getattr(error, "reason", None) or str(error),
            fix="give a PEM certificate and its key, without a pass phrase",
        ) from None
