"""Requests that a server keeps in a file, to be sent again to another version of its model.

A line is the JSON of one request to the model's first operation, by the Open Inference Protocol, so that
other tools can send, read and edit it. A server that is killed leaves whole lines, and at most a part of one
behind them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.operation import DATATYPES, Operation
from hpml.core import regular_files
from hpml.core.errors import UsageError
from hpml.serving.apis.open_inference import parse_request
from hpml.serving.bodies import read_json
from hpml.serving.config import MOST_RECORDED_BYTES, MOST_RECORDED_REQUESTS
from hpml.serving.errors import RequestRefused
from hpml.serving.model import largest_sizes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpml.tasks.base import Arrays

MOST_LINE_BYTES = 8_000_000  # JSON takes up to 20 times as much in memory while it is read
_EVERY_S = 0.1  # of busy servers not every request, so that a file is of more than their first second
_CLOSE_S = 5.0
_BEGINNING = b'{"inputs":[{"name":'


class Recorder:
    """Appends requests to `file`, from a thread of its own, until it has as many as it may have."""

    def __init__(
        self, file: Path, *, most_requests: int, most_bytes: int, tell: Callable[[str], None]
    ) -> None:
        """tell: where a line goes for whoever started the server.

        Raises UsageError if `file` cannot be written, is open to others, in use, or not of a recorder.
        """
        self._file, self._tell = file, tell
        self._most_requests, self._most_bytes = most_requests, most_bytes
        self._descriptor = _opened(file)
        self._requests, self._bytes = _kept(self._descriptor, file)
        self._is_over = False
        self._next_s = 0.0
        self._long_was_told = False
        self._waiting: queue.Queue[tuple[Operation, Arrays] | None] = queue.Queue(1)
        self._thread = threading.Thread(target=self._work, name="record", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        """What is kept where, for whoever started the server."""
        return (
            f"requests are recorded in {self._file}, which may then hold personal data: at most"
            f" {self._most_requests:,} and {self._most_bytes / 1e6:g} MB; {self._requests:,} are there"
        )

    def add(self, first: Operation, operation: str, feeds: Arrays) -> None:
        """Keep an answered request if it was to the `first` operation, and none was kept just before.

        Returns at once. Called in the event loop.
        """
        now_s = time.monotonic()
        if self._is_over or operation != first.name or now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        with suppress(queue.Full):  # the disk is slower than that
            self._waiting.put_nowait((first, feeds))

    def close(self) -> None:
        """Write what waits, and end; a disk that hangs is not waited for."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    # --------------------------------------------------------------------------------------- in its thread

    def _work(self) -> None:
        while (asked := self._waiting.get()) is not None:
            if self._is_over:
                continue
            try:
                self._write(*asked)
            except Exception as error:  # such as a full disk: what is only a copy ends nothing else
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._bytes)
                self._end(f"error: {error}")
        os.close(self._descriptor)

    def _write(self, operation: Operation, feeds: Arrays) -> None:
        size_bytes = sum(feeds[one.name].nbytes for one in operation.inputs)
        line = _line(operation, feeds) if size_bytes <= MOST_LINE_BYTES else b""
        if not line or len(line) > MOST_LINE_BYTES:
            if not self._long_was_told:
                self._tell(f"requests of more than {MOST_LINE_BYTES / 1e6:g} MB are not recorded")
            self._long_was_told = True
            return
        if self._requests >= self._most_requests or self._bytes + len(line) > self._most_bytes:
            self._end("that is as much as it may hold")
            return
        if os.write(self._descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._requests += 1
        self._bytes += len(line)

    def _end(self, why: str) -> None:
        self._is_over = True
        self._tell(f"no more requests are recorded in {self._file}: it has {self._requests:,}; {why}")


def _opened(file: Path) -> int:
    """A descriptor that appends, for its owner alone."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(file, flags, 0o600)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else str(error.strerror)
        raise _not_recording(file, why) from None
    status = os.fstat(descriptor)
    try:
        if not stat.S_ISREG(status.st_mode):
            raise _not_recording(file, "it is no regular file")
        if status.st_uid != os.geteuid():
            raise _not_recording(file, "it is another user's")
        if status.st_mode & 0o077:
            raise _not_recording(file, "others may open it", f"chmod 600 {file}")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise _not_recording(file, "another server records there") from None
    except UsageError:
        os.close(descriptor)
        raise
    return descriptor


def _kept(descriptor: int, file: Path) -> tuple[int, int]:
    """How many requests the file has, and their bytes; what a killed server left of another one goes."""
    size_bytes = os.fstat(descriptor).st_size
    content = os.pread(descriptor, min(size_bytes, MOST_RECORDED_BYTES), 0)
    if size_bytes > MOST_RECORDED_BYTES or (content and not content.startswith(_BEGINNING)):
        raise _not_recording(file, "something else is in it")
    whole_bytes = content.rfind(b"\n") + 1
    os.ftruncate(descriptor, whole_bytes)
    return content.count(b"\n"), whole_bytes


def _not_recording(file: Path, why: str, fix: str = "name another file") -> UsageError:
    return UsageError(f"requests cannot be recorded in {file}", why=why, fix=fix)


def _line(operation: Operation, feeds: Arrays) -> bytes:
    told = [
        {
            "name": one.name,
            "datatype": DATATYPES[one.dtype],
            "shape": feeds[one.name].shape,
            "data": _numbers(feeds[one.name]),
        }
        for one in operation.inputs
    ]
    return orjson.dumps({"inputs": told}, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def _numbers(array: NDArray[Any]) -> NDArray[Any]:
    """Flat, of a type that orjson writes."""
    return np.ascontiguousarray(array, np.float32 if array.dtype == np.float16 else None).ravel()


# ------------------------------------------------------------------------------------------------ reading


def read_requests(
    file: Path, spec: EngineSpec, *, max_rows: int, tell: Callable[[str], None]
) -> Iterator[Arrays]:
    """The inputs of each request in `file`, for the first operation of an engine; by name, rows in front.

    max_rows: of a request. tell: is told of a last line that is cut off, which is left out.
    Raises UsageError naming the line that is no request, or does not fit the engine, or if there is none, or
    too much.
    """
    what = f"the requests in {file} cannot be replayed"
    if why := regular_files.problem(file):
        raise UsageError(what, why=f"it {why}")
    operation, largest, number = spec.operations[0], largest_sizes(spec), 0
    with file.open("rb") as lines:
        if os.fstat(lines.fileno()).st_size > MOST_RECORDED_BYTES:
            raise UsageError(what, why=f"it has more than {MOST_RECORDED_BYTES / 1e6:g} MB")
        while line := lines.readline(MOST_LINE_BYTES + 1):
            number += 1
            if number > MOST_RECORDED_REQUESTS:
                raise UsageError(what, why=f"it has more than {MOST_RECORDED_REQUESTS:,}")
            if len(line) > MOST_LINE_BYTES:
                raise UsageError(what, why=f"line {number} has more than {MOST_LINE_BYTES / 1e6:g} MB")
            try:
                asked = parse_request(line, None, operation, max_rows, largest)
            except RequestRefused as refused:
                if _is_cut_off(line):
                    tell(f"the last line of {file} is cut off, and left out")
                    number -= 1
                    break
                raise UsageError(
                    f"line {number} of {file} is no request to this model",
                    why=refused.why,
                    fix="remove the line, or give requests that were recorded of such a model",
                ) from None
            yield asked.feeds
    if not number:
        raise UsageError(what, why="there is none")


def _is_cut_off(line: bytes) -> bool:
    """Whether it is what is left of a line whose server was killed while it wrote."""
    if line.endswith(b"\n"):
        return False
    try:
        read_json(line)
    except RequestRefused:
        return True
    return False
