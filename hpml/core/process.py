"""What a process is and does on Linux: its memory, its environment, an end with the one that started it."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hpml.core.errors import HpmlError

_PR_SET_PDEATHSIG = 1
# OpenMP's spinning threads collapse a machine that several steps share, and threads that sleep at once cost a
# quarter of a training's speed: these spin for about 0.1 ms.
_BRIEF_SPINNING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
_ours: set[str] = set()  # of them, those that this process did not find in its environment


def spin_briefly() -> None:
    """Have the waiting OpenMP threads of this process, and of those it starts, sleep after 0.1 ms.

    For the processes of steps; what the user's environment says stays. Called before torch is imported, as
    OpenMP reads it when it loads.
    """
    _ours.update(_BRIEF_SPINNING.keys() - os.environ.keys())
    os.environ.update({name: _BRIEF_SPINNING[name] for name in _ours})


def import_paths() -> tuple[str, ...]:
    """The folders of the user's own modules that this process was told of; see hpml/__init__.py."""
    return tuple(filter(None, os.environ.get("HPML_IMPORT_PATHS", "").split(os.pathsep)))


def users_environment() -> dict[str, str]:
    """The environment without what `spin_briefly` put into it: for what is measured as users run it."""
    return {name: value for name, value in os.environ.items() if name not in _ours}


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process `number` when `parent`, which started it, ends. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), number)


def limit_memory(size_bytes: int) -> None:
    """Refuse this process more than `size_bytes` of memory of its own: what asks for more gets an error."""
    _limit(resource.RLIMIT_DATA, size_bytes)


def limit_files(size_bytes: int) -> None:
    """Have this process write no file of more than `size_bytes`."""
    _limit(resource.RLIMIT_FSIZE, size_bytes)


def _limit(resource_kind: int, most: int) -> None:
    _, hard = resource.getrlimit(resource_kind)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource_kind, (most, most))


Methods = Mapping[str, Callable[..., dict[str, Any]]]


def serve(methods: Methods) -> None:
    """Answer JSON requests on the inherited socket FD until its other end closes.

    The command line is FD PARENT_PID MEMORY_BYTES, as `hpml.measuring.process.engine_process` gives it. A
    method gets a request's arguments; what it raises is answered as the error.
    """
    descriptor, parent, memory_bytes = (int(argument) for argument in sys.argv[1:])
    die_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this one
    if memory_bytes:
        limit_memory(memory_bytes)
    with Connection(descriptor) as channel:
        while True:
            try:
                request = json.loads(channel.recv_bytes())
            except EOFError:
                return
            channel.send_bytes(json.dumps(_answer(methods, request)).encode())


def _answer(methods: Methods, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": methods[request["do"]](**request["arguments"])}
    except HpmlError as error:
        return {"error": str(error), "exit_code": int(error.exit_code)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}


def peak_rss_bytes() -> int | None:
    """The largest resident set of this process since it began, in bytes; None where /proc does not say.

    Of its own memory, which a fork begins with what it shares and exec begins anew. `ru_maxrss` is no answer:
    it survives exec, so a small child of a large process has its parent's.
    """
    return proc_bytes("/proc/self/status", "VmHWM")


def proc_bytes(file: str, field: str) -> int | None:
    """What a file of /proc says in kB of `field`, in bytes; None where it does not."""
    try:
        found = re.search(rf"^{field}:\s*(\d+) kB$", Path(file).read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
