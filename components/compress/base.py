"""What every compression method is: a config that turns a trained network into a smaller one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from components.artifacts import Artifact, DatasetSpec, QuantizationSpec
from components.contract import Config, Output

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Network:
    """A network on its way through a method.

    module: the torch module, on the CPU. quantization: the spec an exporter will honour, if any.
    history: curves of a fine-tuning, as rows like {"epoch": 1, "loss": 0.3}; notes: what a reader should know.
    """

    module: nn.Module
    quantization: QuantizationSpec | None = None
    history: tuple[dict[str, float], ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)


class Method(Config, ABC):
    """Base of the methods. A subclass adds `method: Literal["its-name"]`, its options, and `apply`."""

    method: str

    @property
    def label(self) -> str:
        """The method's name, with what tells two uses of it apart."""
        return self.method

    @abstractmethod
    def apply(
        self, network: Network, teacher: nn.Module, data: Artifact[DatasetSpec], out: Output
    ) -> Network:
        """The compressed network. `teacher` is the trained model of the run, in evaluation mode."""
