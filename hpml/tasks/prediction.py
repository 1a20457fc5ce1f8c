"""Tasks with one operation: rows of named arrays in, rows of named arrays out."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import JsonValue

from hpml.artifacts.operation import Operation, TensorSpec
from hpml.core.errors import StageFailed
from hpml.tasks.base import Arrays, Outputs, Task, Tensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn


class Prediction(Task):
    """Base of tasks whose networks answer a row at once: what the network takes and gives is listed.

    A subclass adds `metrics`, `inputs`, `answers`, `loss` and `statistics`, and as fields what it has to know
    of the training rows, such as their means. All else has a default that can be overridden: the network
    takes stored arrays as they are, learns from a teacher by the squared difference, and decides nothing.
    """

    default_architecture: ClassVar[str] = ""

    @abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]:
        """What the network takes, in the order of its arguments."""

    @abstractmethod
    def answers(self) -> tuple[TensorSpec, ...]:
        """What it returns, in this order; the first is what is judged."""

    # ---------------------------------------------------------------------------------------------- the data

    def features(self, stored: Arrays) -> dict[str, NDArray[Any]]:
        """The stored arrays of the names of its inputs."""
        return {one.name: stored[one.name] for one in self.inputs()}

    def data_in_words(self) -> str:
        """What the network takes."""
        return f"inputs {', '.join(one.name for one in self.inputs())}"

    def check(self, stored: Arrays) -> None:
        """Raise StageFailed if what it makes of some stored rows is not what it says.

        That is the features, and what loss and statistics make of answers that are all 0.
        """
        import numpy as np
        import torch

        features, inputs = self.features(stored), {one.name: one for one in self.inputs()}
        if list(features) != list(inputs):
            raise StageFailed(
                "features() does not give what inputs() lists",
                why=f"it gives {', '.join(features) or 'nothing'}, listed are {', '.join(inputs)}",
                fix="give the same names in the same order",
            )
        for name, array in features.items():
            told = inputs[name]
            if str(array.dtype) != told.dtype or not _fits(array.shape[1:], told.shape[1:]):
                raise StageFailed(
                    f"the input {name!r} is not what inputs() says",
                    why=f"a row is {_in_words(str(array.dtype), array.shape[1:])},"
                    f" said is {_in_words(told.dtype, told.shape[1:])}",
                    fix="correct inputs(), or convert it in features()",
                )
        rows = len(next(iter(stored.values())))
        zeros = tuple(
            torch.zeros(_sizes(one, rows), dtype=getattr(torch, one.dtype)) for one in self.answers()
        )
        outputs = zeros if len(zeros) > 1 else zeros[0]
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in stored.items()}
        loss = self.loss(outputs, tensors, label_smoothing=0.0)
        if loss.dim() or not loss.isfinite():
            raise StageFailed(
                "loss() is not one finite number", why=f"of answers that are all 0 it is {loss}"
            )
        expected = {metric.name: (rows, metric.statistics) for metric in self.metrics}
        found = {name: tuple(one.shape) for name, one in self.statistics(outputs, tensors).items()}
        if found != expected:
            raise StageFailed(
                "statistics() does not give what the metrics need",
                why=f"of {rows} rows it gives the shapes {found}, needed are {expected}",
            )

    # ------------------------------------------------------------------------------------------- the network

    def row_in_words(self) -> str:
        """The inputs with their types and shapes."""
        return " and ".join(f"{one.name}, {_in_words(one.dtype, one.shape[1:])}" for one in self.inputs())

    def output_shape(self, rows: int) -> tuple[int, ...]:
        """Of the first answer, free dimensions as `example` has them."""
        return _sizes(self.answers()[0], rows)

    def model_arguments(self) -> dict[str, JsonValue]:
        """Nothing."""
        return {}

    def operations(self, network: nn.Module | None = None) -> tuple[Operation, ...]:
        """One: from the inputs to the answers."""
        return (Operation(inputs=self.inputs(), outputs=self.answers()),)

    def example(self, rows: int) -> tuple[Tensor, ...]:
        """Zeros."""
        import torch

        return tuple(torch.zeros(_sizes(one, rows), dtype=getattr(torch, one.dtype)) for one in self.inputs())

    # -------------------------------------------------------------------------------- learning and answering

    def soft_loss(
        self, outputs: Outputs, of_teacher: Outputs, stored: Tensors, *, temperature: float
    ) -> Tensor:
        """The mean square of the first answer's difference from the teacher's; there is nothing to soften."""
        from torch.nn import functional

        return functional.mse_loss(_first(outputs), _first(of_teacher))

    def kept(self, outputs: Arrays) -> dict[str, NDArray[Any]]:
        """The first answer."""
        name = self.answers()[0].name
        return {name: outputs[name]}

    def decisions(self, outputs: Arrays, stored: Arrays) -> NDArray[np.int64] | None:
        """None: the answers are numbers, and are compared as such."""
        return None


def _sizes(tensor: TensorSpec, rows: int) -> tuple[int, ...]:
    """Of so many rows; what is free beside them has a size of 2."""
    return rows, *(2 if isinstance(size, str) else size for size in tensor.shape[1:])


def _fits(shape: tuple[int, ...], told: tuple[int | str, ...]) -> bool:
    return len(shape) == len(told) and all(
        isinstance(size, str) or size == own for own, size in zip(shape, told, strict=True)
    )


def _in_words(dtype: str, shape: tuple[int | str, ...]) -> str:
    return f"{dtype} of shape ({', '.join(map(str, shape))})" if shape else f"one {dtype}"


def _first(outputs: Outputs) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs
