"""Code of a user's own: found by an import path, given a time limit, its errors told as what failed."""

from __future__ import annotations

import importlib
import importlib.machinery
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from hpml.core.errors import ConfigInvalid, HpmlError
from hpml.core.process import import_paths
from hpml.tasks.custom.task import CustomTask

BUILD_S = 300.0  # for importing and building a network; weights that it downloads included


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


def users_task(path: str) -> type[CustomTask]:
    """The user's own class of tasks at the import path "package.module:Class".

    Only folders that a run or a user named are looked in (a recipe's, HPML_IMPORT_PATHS): manifests name such
    paths, too, and opening somebody's artifact imports nothing else. Raises ConfigInvalid if it is not there,
    cannot be imported, or is no task that is whole.
    """
    module_name, _, attribute = path.partition(":")
    folders = import_paths()
    if importlib.machinery.PathFinder.find_spec(module_name.partition(".")[0], list(folders)) is None:
        raise ConfigInvalid(
            f"there is no module for the task {path!r}",
            why=f"it is looked for in {', '.join(folders) or 'no folder: no recipe is at hand'}",
            fix="put it beside the recipe, or name its folder, if you trust it, in HPML_IMPORT_PATHS",
        )
    may_not_be_found = users_code(
        f"cannot import the task {path!r}", fix="check the spelling, and its module"
    )
    with may_not_be_found, time_limit(BUILD_S, f"importing {module_name}"):
        found = getattr(importlib.import_module(module_name), attribute)
    if not (isinstance(found, type) and issubclass(found, CustomTask)):
        raise ConfigInvalid(
            f"{path!r} is not a task",
            why="it is no subclass of hpml.tasks.CustomTask",
            fix="see docs/add-a-task.md",
        )
    lacks = [*sorted(found.__abstractmethods__), *([] if getattr(found, "metrics", ()) else ["metrics"])]
    if lacks:
        raise ConfigInvalid(f"the task {path!r} is not whole", why=f"it lacks {', '.join(lacks)}")
    return found
