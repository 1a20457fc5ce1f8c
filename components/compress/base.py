"""What every compression method is: a config that turns a trained network into a smaller one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import QuantizationSpec
from hpml.core.contract import Config, Output
from hpml.core.errors import ConfigInvalid
from hpml.tasks import Task

if TYPE_CHECKING:
    from torch import nn


class DoesNotApply(ConfigInvalid):
    """A method cannot work on a network of this kind. The variant is not built, and the reason says why."""


@dataclass(frozen=True)
class Network:
    """A network on its way through a method.

    module: the torch module, on the CPU, in evaluation mode. quantization: what an exporter will do to it.
    history: the curves of a fine-tuning, as rows like {"epoch": 1, "loss": 0.3}.
    """

    module: nn.Module
    task: Task
    quantization: QuantizationSpec | None = None
    history: tuple[dict[str, float], ...] = ()


class Method(Config, ABC):
    """Base of the methods. A subclass adds `method: Literal["its-name"]`, its options, and `apply`."""

    method: str

    @property
    def label(self) -> str:
        """The method's name, with what tells two uses of it apart."""
        return self.method

    def check(self, network: nn.Module) -> None:
        """Raise DoesNotApply if the layers of `network` alone tell that the method cannot work on it.

        Asked before training, too, with a network on the meta device: its weights are not there.
        """

    @abstractmethod
    def apply(
        self, network: Network, teacher: nn.Module, data: Artifact[DatasetSpec], out: Output
    ) -> Network:
        """The compressed network; `network` may be changed in place.

        `teacher` is the trained model of the run, in evaluation mode. A method may change the sizes of layers
        (the channel plan records them), the weights and the quantization; not the architecture. Raises
        DoesNotApply where that shows only now.
        """
