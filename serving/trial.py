"""A model is opened in a process of its own first: it may be made to take all memory, or never to answer.

`python -m hpml.serving.trial bundle|engine FOLDER THREADS PARENT_PID MEMORY_BYTES` opens it as a server does,
with no more memory than that beside what Python and its libraries take, and ends when its parent does. What
does not come through, whatever becomes of that process, leaves the server as it was.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hpml.core import hardware, memory
from hpml.core.errors import ExitCode, StageFailed, explained
from hpml.core.process import die_with_parent, limit_files, limit_memory, proc_bytes

Kind = Literal["bundle", "engine"]
_LEAST_S, _S_PER_GIB, _MOST_S = 60.0, 60.0, 300.0  # for a folder of so many bytes
# Likewise of memory: the runtime's copy of the weights, the layout of its kernels, activations.
_LEAST_BYTES, _TIMES_ITS_SIZE = 2 << 30, 4
_LARGEST_FILE_BYTES = 256 << 20  # of those that it writes: what it says, copies of tokenizers
_LAST_WORDS_BYTES = 16 << 10


def try_open(
    kind: Kind,
    folder: Path,
    *,
    threads: int,
    seconds: float | None = None,
    memory_bytes: int | None = None,
) -> None:
    """Return once the bundle or engine in `folder` could be opened; threads as of `open_bundle`.

    seconds, memory_bytes: what that may take; by default by the size of its files.
    Raises StageFailed if it takes more, or ends its process; else what opening it raised, by its exit code.
    """
    size_bytes = sum(file.lstat().st_size for file in folder.rglob("*"))
    seconds = seconds or min(_LEAST_S + _S_PER_GIB * size_bytes / 2**30, _MOST_S)
    memory_bytes = memory_bytes or min(_LEAST_BYTES + _TIMES_ITS_SIZE * size_bytes, memory.total_bytes())
    command = [sys.executable, "-m", "hpml.serving.trial", kind, str(folder), str(threads)]
    command += [str(os.getpid()), str(memory_bytes)]
    with tempfile.TemporaryFile() as said:
        try:
            status = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            raise StageFailed(
                f"the {kind} is not served", why=f"it was not open after {seconds:.0f} s"
            ) from None
        if status:
            raise _failure(kind, status, _last_line(said.fileno()), memory_bytes)


def _failure(kind: Kind, status: int, said: str, memory_bytes: int) -> StageFailed:
    if status < 0:
        why = f"the process that tried it was ended by {signal.Signals(-status).name}"
        return StageFailed(f"the {kind} is not served", why=why)
    if "out of memory" in said or "allocate memory" in said or "bad_alloc" in said:
        said += f" (opening it may take {memory.in_words(memory_bytes)})"
    failure = StageFailed(said.removeprefix("error: "))
    known = set(map(int, ExitCode))
    failure.exit_code = ExitCode(status) if status in known else ExitCode.STAGE_FAILED
    return failure


def _last_line(file: int) -> str:
    size_bytes = os.fstat(file).st_size
    words = os.pread(file, _LAST_WORDS_BYTES, max(0, size_bytes - _LAST_WORDS_BYTES))
    lines = words.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def main(arguments: Sequence[str]) -> None:
    """The process that tries."""
    kind, folder, threads, parent, memory_bytes = arguments
    die_with_parent(int(parent), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    limit_files(_LARGEST_FILE_BYTES)
    with explained():
        from hpml.artifacts.folder import open_artifact
        from hpml.serving.model import open_bundle, open_engine

        if not hardware.gpu_names():  # a GPU's driver maps more memory than it uses
            limit_memory(int(memory_bytes) + (proc_bytes("/proc/self/status", "VmData") or 0))
        if kind == "bundle":
            open_bundle(Path(folder), threads=int(threads))
        else:
            engine = open_artifact(Path(folder), kind="engine")
            open_engine(engine, name="tried", version="", threads=int(threads))


if __name__ == "__main__":
    main(sys.argv[1:])
