"""Artifacts, checkpoints and small texts by URI: `s3://bucket/prefix`, or a path of this machine.

A path is read and written in place; what lists, deletes and uploads takes S3 only. For S3, credentials,
endpoint and region are the environment's: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL,
AWS_REGION. What may pass by itself (no connection, an answer of 5xx, "slow down") is waited for, see
`hpml.io.patience`; wrong credentials, or a bucket that is not there, are told at once. Imports boto3 only
when something is remote.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

from pydantic import StringConstraints

from hpml.artifacts.folder import MANIFEST, read_manifest
from hpml.core.atomic_files import write_text_atomic
from hpml.core.background import beside
from hpml.core.errors import HpmlError, StageFailed, Unavailable, UsageError
from hpml.io.credentials import without_credentials
from hpml.io.patience import patiently

if TYPE_CHECKING:
    from botocore.exceptions import ClientError

S3Uri = Annotated[str, StringConstraints(pattern=r"^s3://[a-z0-9.-]{3,63}/[^/].*")]  # of what users name

_S3 = "s3://"
_TRANSFERS_AT_ONCE = 8
_PART_BYTES = 64 << 20  # of a large file, transferred side by side
_MAX_TEXT_BYTES = 64 << 20
_CONNECT_S, _READ_S = 5, 60
_MIRROR_EVERY_S, _MIRROR_AT_LEAST_EVERY_S = 1.0, 30.0
_SLOW_DOWN = {"SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "RequestLimitExceeded"}

T = TypeVar("T")


class _Outage(Unavailable):
    """What may pass by itself."""


@dataclass(frozen=True)
class _Location:
    """A bucket, and a key or the beginning of keys in it, without slashes at its ends."""

    bucket: str
    key: str

    @property
    def address(self) -> dict[str, str]:
        """As the methods of a client take it."""
        return {"Bucket": self.bucket, "Key": self.key}

    def below(self, name: str) -> str:
        """The key of `name` below this place."""
        return f"{self.key}/{name}" if self.key else name


def is_remote(uri: str) -> bool:
    """Whether `uri` is in S3 rather than a path of this machine.

    Raises UsageError for another scheme, or an S3 URI without a bucket or with `..` in it.
    """
    if uri.startswith(_S3):
        _place(uri)
        return True
    if "://" in uri:
        raise UsageError(f"cannot use {without_credentials(uri)}", why="it is neither a path nor s3://...")
    return False


def _place(uri: str) -> _Location:
    bucket, _, key = uri.removeprefix(_S3).partition("/")
    place = _Location(bucket, key.strip("/"))
    if not uri.startswith(_S3) or not bucket or (place.key and not _is_harmless(place.key)):
        raise UsageError(f"{uri!r} is not s3://BUCKET/PREFIX")
    return place


def _is_harmless(name: str) -> bool:
    """Whether the relative path `name` stays below the folder it is relative to."""
    return all(part not in ("", ".", "..") for part in name.split("/")) and "\0" not in name


# -------------------------------------------------------------------------------------------------- texts


def exists(uri: str) -> bool:
    """Whether there is a file at `uri`. Raises Unavailable."""
    if not is_remote(uri):
        return Path(uri).exists()
    return _in_store(uri, lambda client, place: _object_at(client, place) is not None)


def read_text(uri: str) -> str:
    """The file at `uri`. Raises StageFailed if it is not there or no text, Unavailable."""
    most = _MAX_TEXT_BYTES + 1
    if is_remote(uri):
        data = _in_store(uri, lambda client, place: client.get_object(**place.address)["Body"].read(most))
    else:
        try:
            with Path(uri).open("rb") as file:
                data = file.read(most)
        except FileNotFoundError:
            raise StageFailed(f"there is nothing at {uri}") from None
    if len(data) == most:
        raise StageFailed(f"{uri} is too large for a text", why=f"over {_MAX_TEXT_BYTES >> 20} MiB")
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise StageFailed(f"{uri} is no text", why=str(error)) from None


def write_text(uri: str, text: str) -> None:
    """Put `text` at `uri`, whole or not at all; what was there is replaced. Raises Unavailable."""
    if is_remote(uri):
        _in_store(uri, lambda client, place: client.put_object(**place.address, Body=text.encode()))
    else:
        Path(uri).parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(Path(uri), text)


def list_names(uri: str) -> list[str]:
    """The files below the S3 URI `uri`, sorted, as paths relative to it; none if there is nothing.

    Raises StageFailed if one of the names would lead out of a folder, Unavailable.
    """
    return _in_store(uri, _names)


def _object_at(client: Any, place: _Location) -> Any:
    """What a listing says of the object at `place`; None if there is none."""
    found = client.list_objects_v2(Bucket=place.bucket, Prefix=place.key, MaxKeys=1).get("Contents", ())
    return next((item for item in found if item["Key"] == place.key), None)


def _objects(client: Any, place: _Location) -> Iterator[tuple[str, Any, datetime]]:
    """Of each object below `place` its relative name, what a listing says of it, and the store's time."""
    prefix = place.below("")
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=place.bucket, Prefix=prefix):
        now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
        for item in page.get("Contents", ()):
            yield item["Key"].removeprefix(prefix), item, now


def _names(client: Any, place: _Location) -> list[str]:
    names = sorted(name for name, *_ in _objects(client, place))
    names = [name for name in names if name and not name.endswith("/")]  # as consoles show a folder
    for name in names:
        if not _is_harmless(name):
            raise StageFailed(
                f"the store has an object with a hostile name: {place.below(name)!r}",
                why="it would be written outside of its folder",
                fix="delete it, and ask who may write to this bucket",
            )
    return names


@dataclass(frozen=True)
class Stored:
    """An object: its size, and how long ago, by the store's own clock, it was written."""

    size_bytes: int
    age_s: float


def stored(uri: str) -> dict[str, Stored]:
    """The objects below the S3 URI `uri`, by their paths relative to it. Raises Unavailable."""

    def look(client: Any, place: _Location) -> dict[str, Stored]:
        return {
            name: Stored(int(item["Size"]), (now - item["LastModified"]).total_seconds())
            for name, item, now in _objects(client, place)
        }

    return _in_store(uri, look)


def delete(uri: str) -> None:
    """Delete what is at and below the S3 URI `uri`; nothing there is no error. Raises Unavailable."""
    if not _place(uri).key:
        raise UsageError(f"will not delete the whole bucket {uri}")

    def empty(client: Any, place: _Location) -> None:
        for key in (*map(place.below, _names(client, place)), place.key):
            client.delete_object(Bucket=place.bucket, Key=key)

    _in_store(uri, empty)


# ------------------------------------------------------------------------------------------------- folders


def fetch(uri: str, folder: Path, *, may_be_empty: bool = False) -> Path:
    """Where the folder at `uri` is on this machine: `folder`, into which it was downloaded, or itself.

    Raises StageFailed if there is nothing at `uri`, or names in it are hostile; Unavailable.
    """
    if not is_remote(uri):
        return Path(uri)
    names = list_names(uri)
    if not names and not may_be_empty:
        raise StageFailed(f"there is nothing at {uri}", fix="run the step that writes it")
    for parent in {str(parent) for name in names for parent in PurePosixPath(name).parents} & set(names):
        raise StageFailed(f"{uri}/{parent} is a file and a folder", why="no disk can hold both")
    folder.mkdir(parents=True, exist_ok=True)
    missing = {name: folder / name for name in names}
    for file in missing.values():
        file.parent.mkdir(parents=True, exist_ok=True)
    _in_store(uri, lambda client, place: _download(client, place, missing))
    return folder


def etags(uri: str) -> dict[str, str]:
    """The ETag of the object at `uri`, by the name "", or of all below it, by their relative names.

    Raises StageFailed if a name is hostile, Unavailable.
    """

    def look(client: Any, place: _Location) -> dict[str, str]:
        if found := _object_at(client, place):
            return {"": str(found["ETag"])}
        below = {name: str(item["ETag"]) for name, item, _ in _objects(client, place)}
        return {name: below[name] for name in _names(client, place)}

    return _in_store(uri, look)


def fetch_file(uri: str, file: Path) -> None:
    """Download the object at the S3 URI `uri`. Raises StageFailed if it is not there, Unavailable."""
    _in_store(uri, lambda client, place: _download(client, _Location(place.bucket, ""), {place.key: file}))


def upload(folder: Path, uri: str) -> None:
    """Put the artifact in `folder` at the S3 URI `uri`, its manifest last: it is found whole or not at all.

    The same content there already is no error. Raises StageFailed if another artifact is there, Unavailable.
    """
    digest, found = read_manifest(folder).digest, digest_at(uri)
    if found == digest:
        return
    if found:
        raise StageFailed(
            f"{uri} holds another artifact",
            why=f"its digest is {found[:12]}, not {digest[:12]}",
            fix="name a new place: an artifact is never overwritten",
        )
    files = sorted(file for file in folder.rglob("*") if not file.is_dir())
    missing = {file.relative_to(folder).as_posix(): file for file in files}
    manifest = {MANIFEST: missing.pop(MANIFEST)}

    def put(client: Any, place: _Location) -> None:
        _upload(client, place, missing)
        _upload(client, place, manifest)

    _in_store(uri, put)


def digest_at(uri: str) -> str:
    """The content digest of the artifact at `uri`, as its manifest has it; "" if there is no manifest.

    Raises StageFailed if the manifest is damaged, Unavailable.
    """
    manifest = f"{uri.rstrip('/')}/{MANIFEST}"
    if not exists(manifest):
        return ""
    try:
        return str(json.loads(read_text(manifest))["digest"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StageFailed(f"{manifest} is no manifest", fix="delete it, and run its step again") from None


@contextmanager
def mirrored(folder: Path, uri: str, *, only: Sequence[str] = ("**/*",)) -> Iterator[None]:
    """While entered, `uri` in S3 is kept equal to `folder`; it starts with what is there already.

    Looked at every second, from a thread: a file that has appeared is uploaded, one that is gone is deleted.
    A file is taken to be whole when it appears (renamed into its place); those whose name begins with a dot
    are parts, and stay here. only: globs of what is mirrored. Leaving makes a last pass, whatever ended the
    work. While the store does not answer, that is said on stderr and tried less often; nothing fails of it.
    Entering raises Unavailable.
    """
    fetch(uri, folder, may_be_empty=True)
    with beside(_Mirror(folder, uri, only).keep_equal, "mirror"):
        yield


class _Mirror:
    def __init__(self, folder: Path, uri: str, only: Sequence[str]) -> None:
        self._folder, self._uri, self._only = folder, uri, only
        self._place, self._client = _place(uri), _client()
        self._there = self._whole_files()

    def keep_equal(self, stop: threading.Event) -> None:
        """Make the store equal to the folder, again and again, and once more after `stop`."""
        pause_s, behind = _MIRROR_EVERY_S, False
        while True:
            stopping = stop.wait(pause_s)
            try:
                with _explained(self._uri):
                    self._equalise()
            except (HpmlError, OSError) as error:
                if not behind or stopping:
                    lost = "; this is the last attempt" if stopping else "; trying again"
                    print(f"checkpoints do not reach the store: {error}{lost}", file=sys.stderr, flush=True)
                pause_s, behind = min(2 * pause_s, _MIRROR_AT_LEAST_EVERY_S), True
            else:
                if behind:
                    print(f"checkpoints reach {self._uri} again", file=sys.stderr, flush=True)
                pause_s, behind = _MIRROR_EVERY_S, False
            if stopping:
                return

    def _equalise(self) -> None:
        """Uploads come first: at no moment is there less in the store than was here."""
        here = self._whole_files()
        for name, identity in here.items():
            if self._there.get(name) == identity:
                continue
            with suppress(FileNotFoundError):  # dropped for a newer one since we looked
                _upload(self._client, self._place, {name: self._folder / name})
                self._there[name] = identity
        for name in self._there.keys() - here.keys():
            self._client.delete_object(Bucket=self._place.bucket, Key=self._place.below(name))
            del self._there[name]

    def _whole_files(self) -> dict[str, tuple[int, int]]:
        """The time of change and the size of each file that is to be mirrored, by name, oldest name first."""
        found = {}
        for file in sorted(file for pattern in self._only for file in self._folder.glob(pattern)):
            name = file.relative_to(self._folder)
            with suppress(FileNotFoundError):
                status = file.lstat()
                if stat.S_ISREG(status.st_mode) and not any(part.startswith(".") for part in name.parts):
                    found[name.as_posix()] = (status.st_mtime_ns, status.st_size)
        return found


# ---------------------------------------------------------------------------------------------------- boto3


def _in_store(uri: str, work: Callable[[Any, _Location], T]) -> T:
    """What `work` returns of a client and the place of `uri`; called again after an outage."""
    place = _place(uri)

    def attempt() -> T:
        with _explained(uri):
            return work(_client(), place)

    return patiently(attempt, outage=_Outage)


def _client() -> Any:
    """A client for the environment as it is now. Clients may be shared by threads."""
    return _client_in(tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith(("AWS_", "HOME")))))


@cache
def _client_in(environment: tuple[tuple[str, str], ...]) -> Any:
    from boto3.session import Session
    from botocore.config import Config

    config = Config(
        connect_timeout=_CONNECT_S,
        read_timeout=_READ_S,
        retries={"total_max_attempts": 1},  # we retry ourselves, and say so
        max_pool_connections=2 * _TRANSFERS_AT_ONCE,
        request_checksum_calculation="when_required",  # stores other than AWS lack the newer ones; every
        response_checksum_validation="when_required",  # reader of an artifact checks its SHA-256 anyway
    )
    names = dict(environment)
    region = names.get("AWS_REGION") or names.get("AWS_DEFAULT_REGION") or "us-east-1"
    return Session().client("s3", region_name=region, config=config)


def _download(client: Any, place: _Location, files: dict[str, Path]) -> None:
    """Bring the objects of these names below `place` here; what has arrived is taken out of `files`."""
    with _transfers(client) as manager:
        begun = {name: manager.download(place.bucket, place.below(name), str(files[name])) for name in files}
        _finish(begun, files)


def _upload(client: Any, place: _Location, files: dict[str, Path]) -> None:
    """Put `files` below `place` by their names; what is there is taken out of them."""
    with _transfers(client) as manager:
        begun = {name: manager.upload(str(files[name]), place.bucket, place.below(name)) for name in files}
        _finish(begun, files)


def _finish(transfers: dict[str, Any], files: dict[str, Path]) -> None:
    for name, transfer in transfers.items():
        transfer.result()
        del files[name]


def _transfers(client: Any) -> Any:
    """A manager of parallel transfers, to be used with `with`."""
    from boto3.s3.transfer import TransferConfig, create_transfer_manager

    config = TransferConfig(
        max_concurrency=_TRANSFERS_AT_ONCE,
        multipart_threshold=_PART_BYTES,
        multipart_chunksize=_PART_BYTES,
        preferred_transfer_client="classic",
    )
    return create_transfer_manager(client, config)


@contextmanager
def _explained(uri: str) -> Iterator[None]:
    """Turn what boto3 raises into one line without secrets: an _Outage, or what no waiting will mend."""
    from botocore import exceptions
    from botocore.parsers import ResponseParserError
    from s3transfer.exceptions import RetriesExceededError

    may_pass = (
        exceptions.EndpointConnectionError,
        exceptions.ConnectTimeoutError,
        exceptions.ProxyConnectionError,
        exceptions.HTTPClientError,
        exceptions.IncompleteReadError,
        RetriesExceededError,
    )
    no_credentials = (
        exceptions.NoCredentialsError,
        exceptions.PartialCredentialsError,
        exceptions.CredentialRetrievalError,
    )
    try:
        yield
    except exceptions.ClientError as error:
        _explain_answer(error, uri)
    except no_credentials:
        raise Unavailable(
            f"there are no credentials for {uri}",
            fix="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; in a cluster the store's Secret has them",
        ) from None
    except may_pass as error:
        raise _Outage(
            f"the store of {uri} cannot be reached",
            why=_brief(error),
            fix="check AWS_ENDPOINT_URL and that the store is up, then run again: what is finished is kept",
        ) from None
    except exceptions.ParamValidationError as error:
        raise UsageError(f"{uri} cannot be used", why=_brief(error)) from None
    except (exceptions.BotoCoreError, ResponseParserError, ValueError) as error:
        raise Unavailable(
            f"the store of {uri} cannot be used", why=_brief(error), fix="check AWS_ENDPOINT_URL"
        ) from None


def _explain_answer(error: ClientError, uri: str) -> NoReturn:
    """Only the code of an answer is quoted: its message may hold what was sent."""
    code = str(error.response.get("Error", {}).get("Code", ""))[:80]
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    kind: type[HpmlError] = Unavailable
    what, why, fix = f"the store refuses {uri}", f"it answers {status} {code}", ""
    if status >= 500 or status == 429 or code in _SLOW_DOWN:
        kind, what, why = _Outage, f"the store does not serve {uri}", why.removesuffix(f" {status}")
        fix = "see what the store says of itself, then run again: what is finished is kept"
    elif code == "NoSuchBucket":
        what, why = f"there is no bucket {_place(uri).bucket!r}", ""
        fix = "create it, or correct the URI or AWS_ENDPOINT_URL"
    elif status == 404:
        kind, what, why, fix = StageFailed, f"there is nothing at {uri}", "", "run the step that writes it"
    elif status in (401, 403):
        what, why = f"the store refuses access to {uri}", code
        fix = (
            "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (in a cluster: the store's Secret),"
            " and what they may do"
        )
    raise kind(what, why=why, fix=fix) from None


def _brief(error: Exception) -> str:
    cause = getattr(error, "last_exception", None) or error
    return without_credentials(" ".join(str(cause).split()))[:300]
