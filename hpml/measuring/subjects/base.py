"""What can be measured: a config that a worker opens in its own process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpml.artifacts.measurements import EngineSettings
from hpml.core.contract import Config

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[np.generic]]  # input name -> array (rows, ...)


@dataclass(frozen=True)
class Opened:
    """Something that answers requests.

    predict: answers one request. request: makes a request of named arrays that have a batch in front; it is
    called before anything is timed. device: "cpu", "cuda", or "remote". stream: the CUDA stream of torch's
    that it works on, if it is one. thread_safe: whether several threads may call `predict` at once.
    outputs: what it answers to named arrays, by the output's name; never timed.
    """

    predict: Callable[[Any], Any]
    request: Callable[[Arrays], Any]
    device: str = "cpu"
    stream: Any = None
    thread_safe: bool = True
    outputs: Callable[[Arrays], dict[str, Any]] | None = None


def of_each_variant(
    settings: Iterable[EngineSettings], variants: Iterable[str]
) -> tuple[EngineSettings, ...]:
    """`settings` for the default build of an engine, then for each of `variants`."""
    known = tuple(settings)
    return known + tuple(one.model_copy(update={"variant": name}) for name in variants for one in known)


class Subject(Config, ABC):
    """Base of the subjects. A subclass adds `subject: Literal["its-name"]`, its options, and `open`."""

    subject: str

    @abstractmethod
    def open(self, *, threads: int, spinning: bool | None = None) -> Opened:
        """Load it, with so many threads. Called once, in the process that is measured.

        spinning: as in `EngineSettings`; what has no such switch takes no notice of it.
        Raises StageFailed if it cannot be loaded.
        """

    def candidates(self, threads: int) -> tuple[EngineSettings, ...]:
        """The settings worth trying with at most `threads` threads, those of its runtime's default first."""
        return (EngineSettings(threads=threads),)

    def of_variant(self, name: str) -> Subject:
        """The build of it that `EngineSettings.variant` names; most have but one."""
        return self

    def check(self, opened: Opened) -> None:
        """Raise StageFailed if it does not answer as it should. Called after the first answer."""
