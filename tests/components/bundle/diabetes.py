"""A task of a user's own: the progression of diabetes from two groups of measurements (scikit-learn's)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpml.artifacts.operation import Operation, TensorSpec
from hpml.tasks.base import Task
from hpml.tasks.metric import Metric
from hpml.tasks.packaging.base import Packaging

GROUPS = {"body": ("age", "sex", "bmi", "bp"), "serum": ("s1", "s2", "s3", "s4", "s5", "s6")}
_INPUTS = tuple(
    TensorSpec(name=name, shape=("batch", len(columns)), content=f"{', '.join(columns)}, scaled")
    for name, columns in GROUPS.items()
)
_PROGRESSION = TensorSpec(name="progression", shape=("batch",), content="after a year, standardised")
_STATE = TensorSpec(name="state", shape=("batch", 8))


def _rmse(sums: Sequence[float]) -> float:
    return math.sqrt(sums[0] / sums[1])


class Diabetes(Task):
    """One graph, or with `is_split` an encoder and a decoder; `reads_json`: bundles ship a processing.py."""

    metrics: ClassVar[tuple[Metric, ...]] = (Metric("rmse", "RMSE", better="lower", value=_rmse),)
    files: ClassVar[tuple[str, ...]] = ("columns.txt",)
    default_architecture: ClassVar[str] = "tests.components.bundle.diabetes:Network"

    task: Literal["diabetes"] = "diabetes"
    mean: float
    std: float
    is_split: bool = False
    reads_json: bool = False

    def features(self, stored: Any) -> dict[str, Any]:
        return {name: stored[name] for name in GROUPS}

    def data_in_words(self) -> str:
        return "10 measurements"

    def row_in_words(self) -> str:
        return "10 measurements"

    def output_shape(self, rows: int) -> tuple[int, ...]:
        return (rows,)

    def model_arguments(self) -> dict[str, Any]:
        return {}

    def operations(self, network: nn.Module) -> tuple[Operation, ...]:
        if not self.is_split:
            return (Operation(inputs=_INPUTS, outputs=(_PROGRESSION,)),)
        return (
            Operation(name="encode", graph="encoder", inputs=_INPUTS, outputs=(_STATE,)),
            Operation(name="decode", graph="decoder", inputs=(_STATE,), outputs=(_PROGRESSION,)),
        )

    def graphs(self, network: nn.Module) -> dict[str, nn.Module]:
        if not self.is_split:
            return {"model": network}
        return {"encoder": network.encoder, "decoder": network.decoder}

    def example(self, rows: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(rows, len(columns)) for columns in GROUPS.values())

    def loss(self, outputs: Any, stored: Any, *, label_smoothing: float) -> Tensor:
        return functional.mse_loss(outputs, stored["progression"])

    def soft_loss(self, outputs: Any, of_teacher: Any, stored: Any, *, temperature: float) -> Tensor:
        return functional.mse_loss(outputs, of_teacher)

    def outputs(self, runs: Any, stored: Any) -> dict[str, Any]:
        if not self.is_split:
            return runs.run(self.features(stored))
        return runs.run(runs.run(self.features(stored), "encode"), "decode")

    def requests(self, runs: Any, stored: Any, operation: Operation) -> dict[str, Any]:
        if operation.name != "decode":
            return self.features(stored)
        return runs.run(self.features(stored), "encode")

    def statistics(self, outputs: Any, stored: Any) -> dict[str, Tensor]:
        squared = (outputs - stored["progression"]).double() ** 2
        return {"rmse": torch.stack([squared, torch.ones_like(squared)], dim=1)}

    def decisions(self, outputs: Any, stored: Any) -> None:
        return None

    def packaging(self) -> Packaging:
        here = Path(__file__)
        return Packaging(
            self.model_dump(mode="json"),
            processing=here.with_name("diabetes_processing.py") if self.reads_json else None,
        )


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 8)

    def forward(self, body: Tensor, serum: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.cat([body, serum], dim=1)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, state: Tensor) -> Tensor:
        return self.layer(state).squeeze(1)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, body: Tensor, serum: Tensor) -> Tensor:
        return self.decoder(self.encoder(body, serum))


def arrays() -> dict[str, np.ndarray]:
    """The 442 patients of scikit-learn's wheel; the progression is not scaled."""
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=True)
    columns = (bunch.data * math.sqrt(len(bunch.data))).astype(np.float32)
    place, found = 0, {}
    for name, group in GROUPS.items():
        found[name] = columns[:, place : place + len(group)]
        place += len(group)
    return {**found, "progression": bunch.target.astype(np.float32)}
