"""What every target is: a config that can build an engine from a model, and load it again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from components.artifacts import Artifact, DatasetSpec, EngineSpec, ModelSpec
from components.contract import Config, Output

if TYPE_CHECKING:
    import numpy as np


class Session(Protocol):
    """A loaded engine."""

    def predict(self, x_nchw: np.ndarray) -> np.ndarray:
        """Logits, float32 (batch, classes), of float32 images (batch, channels, height, width)."""
        ...


@dataclass(frozen=True)
class Built:
    """What a target wrote into the output folder.

    file: what the runtime opens. precision: "fp32", "fp16", "int8". identity: what the engine is bound to,
    and the runtime's version. notes: choices made while building that a reader should know.
    """

    file: str
    precision: str
    identity: dict[str, str]
    notes: tuple[str, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class NotBuilt:
    """This machine lacks what the target needs; the variant is reported with the reason."""

    reason: str


class Target(Config, ABC):
    """Base of the targets. A subclass adds `target: Literal["its-name"]`, its options, and these methods."""

    target: str

    @property
    def label(self) -> str:
        """The target's name."""
        return self.target

    def missing(self) -> str:
        """What this machine lacks to build or load such an engine; empty if nothing. Imports nothing heavy."""
        return ""

    @abstractmethod
    def build(self, model: Artifact[ModelSpec], data: Artifact[DatasetSpec], out: Output) -> Built | NotBuilt:
        """Write the engine of `model` into `out.path`."""

    @abstractmethod
    def load(self, folder: Path, engine: EngineSpec, *, threads: int) -> Session:
        """Load the engine in `folder` (an artifact's or a bundle's).

        Raises StageFailed if the engine is bound to other hardware or versions than these.
        """
