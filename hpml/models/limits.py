"""Time and memory for building a network: its code is the user's, and its sizes are numbers in a recipe."""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpml.core import memory
from hpml.core.errors import ConfigInvalid, HpmlError

BUILD_S = 300.0  # for importing and building a network; weights that it downloads included
_WORTH_A_LOOK = 2**24  # bytes of a tensor


class _TimeIsUp(BaseException):
    """Not an Exception: the user's code may go on after any of those."""


@contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Stop the body after so many seconds. Holds in the main thread, which is where stages run.

    Raises ConfigInvalid that says that `what`, such as "importing mynets", took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: object) -> NoReturn:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # and again, should the code have gone on
    try:
        yield
    except _TimeIsUp:
        raise ConfigInvalid(
            f"{what} did not end in {seconds:g} s",
            fix="look for a loop without an end, and for what it waits; download weights beforehand",
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)


@contextmanager
def users_code(what: str, *, fix: str, kind: type[ConfigInvalid] = ConfigInvalid) -> Iterator[None]:
    """Raise a `kind` of error, that `what` failed, for whatever a user's code in the body raises.

    Errors of ours pass, such as Terminated from the handler of SIGTERM.
    """
    try:
        yield
    except HpmlError:
        raise
    except Exception as error:
        raise kind(what, why=f"{type(error).__name__}: {error}", fix=fix) from None


class memory_limit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, refuses a tensor that does not fit into the memory left, before it is made.

    It sees every operator that makes a tensor of a given size: empty, zeros, randn and their kind. Raises
    ConfigInvalid that says how much `what`, such as "the model cnn", asked for.
    """

    def __init__(self, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        arguments = func._schema.arguments
        on_meta = str(given.get("device")) == "meta"
        if arguments and arguments[0].name == "size":
            dtype = given.get("dtype") or torch.get_default_dtype()
            wanted = math.prod(args[0] if args else given["size"]) * dtype.itemsize
            if wanted > _WORTH_A_LOOK and wanted > (sys.maxsize if on_meta else memory.available_bytes()):
                raise _does_not_fit(self._what, f"it asks for a tensor of {memory.in_words(wanted)}")
        return func(*args, **given)


def require_fits(what: str, build: Callable[[], nn.Module]) -> None:
    """Build a network without its weights, and raise ConfigInvalid if these would not fit into this machine.

    For networks of ours: what other code does then, such as keeping tensors for later, is not known.
    """
    try:
        with torch.device("meta"):
            skeleton = build()
    except (TypeError, RuntimeError) as error:  # of torch, with frames of C++
        if "Overflow when unpacking" in str(error):
            raise _does_not_fit(what, "one of its sizes has more than 64 bits") from None
        raise
    tensors = [*skeleton.parameters(), *skeleton.buffers()]
    weights_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if weights_bytes > memory.total_bytes():
        numbers = sum(tensor.numel() for tensor in tensors)
        raise _does_not_fit(what, f"its {numbers:,} weights take {memory.in_words(weights_bytes)}")


def _does_not_fit(what: str, why: str) -> ConfigInvalid:
    here = f"{memory.in_words(memory.available_bytes())} of {memory.in_words(memory.total_bytes())}"
    return ConfigInvalid(
        f"{what} does not fit into memory",
        why=f"{why}, this machine has {here} left",
        fix="lower its sizes, such as train.model.arguments.width (--arg width in hpml bench)",
    )
