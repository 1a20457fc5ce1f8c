"""How far diabetes will have gone in a year, from ten measurements of a patient: a task and its network.

Data: 442 patients (Efron et al. 2004, Annals of Statistics 32:407-499), shipped by scikit-learn.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diabetes_processing
import numpy as np
import torch
from pydantic import JsonValue
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional

from hpml.artifacts.operation import TensorSpec
from hpml.tasks import CustomTask, Metric
from hpml.tasks.base import Arrays, Outputs, Tensors
from hpml.tasks.packaging.base import Packaging


def rmse(sums: list[float]) -> float:
    squared_error, _, _, rows = sums
    return float(np.sqrt(squared_error / rows))


def r2(sums: list[float]) -> float:
    squared_error, total, squares, rows = sums
    return 1 - squared_error / (squares - total**2 / rows)


class Progression(CustomTask):
    """`measurements` (9) and `sex` (a code) to `progression`, a score of 25 to 346."""

    row, rows = "patient", "patients"
    metrics = (
        Metric("rmse", "RMSE", better="lower", value=rmse, statistics=4),
        Metric("r2", "R²", better="higher", is_share=True, value=r2, statistics=4),
    )

    measurements_mean: tuple[float, ...]
    measurements_std: tuple[float, ...]
    progression_mean: float
    progression_std: float

    @classmethod
    def load(cls, path: Path | None, options: Mapping[str, JsonValue]) -> Mapping[str, Arrays]:
        table, progression = load_diabetes(return_X_y=True, scaled=False)
        train = {
            "measurements": np.delete(table, 1, axis=1).astype("float32"),
            "sex": table[:, 1].astype("int64") - 1,
            "progression": progression.astype("float32"),
        }
        return {"train": train}  # validation and test are drawn from it

    @classmethod
    def facts(cls, train: Arrays) -> Mapping[str, Any]:
        measurements, progression = train["measurements"], train["progression"]
        return {
            "measurements_mean": measurements.mean(axis=0).tolist(),
            "measurements_std": measurements.std(axis=0).tolist(),
            "progression_mean": float(progression.mean()),
            "progression_std": float(progression.std()),
        }

    def inputs(self) -> tuple[TensorSpec, ...]:
        measured = "age in years, body mass index, blood pressure in mmHg, six of blood serum"
        return (
            TensorSpec(name="measurements", shape=("batch", 9), content=measured),
            TensorSpec(name="sex", dtype="int64", shape=("batch",), content="0 or 1"),
        )

    def answers(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(name="progression", shape=("batch",), content="score after a year"),)

    def model_arguments(self) -> dict[str, JsonValue]:
        return self.model_dump(mode="json", exclude={"task"})

    def loss(self, outputs: Outputs, stored: Tensors, *, label_smoothing: float) -> Tensor:
        return functional.mse_loss(outputs, stored["progression"]) / self.progression_std**2

    def statistics(self, outputs: Outputs, stored: Tensors) -> dict[str, Tensor]:
        truth = stored["progression"].double()
        ones = torch.ones_like(truth)
        sums = torch.stack([(outputs.double() - truth) ** 2, truth, truth**2, ones], dim=1)
        return {"rmse": sums, "r2": sums}

    def packaging(self) -> Packaging:
        return Packaging(self.model_dump(mode="json"), processing=Path(diabetes_processing.__file__))


class Standardized(nn.Module):
    def __init__(self, mean: list[float], std: list[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("std", torch.tensor(std))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class Network(nn.Module):
    """Two hidden layers on the standardized measurements and an embedding of the code."""

    def __init__(
        self,
        *,
        measurements_mean: list[float],
        measurements_std: list[float],
        progression_mean: float,
        progression_std: float,
        width: int = 64,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.mean, self.std = progression_mean, progression_std
        self.standardized = Standardized(measurements_mean, measurements_std)
        self.sex = nn.Embedding(2, 4)
        self.hidden = nn.Sequential(
            nn.Linear(len(measurements_mean) + 4, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, 1),
        )

    def forward(self, measurements: Tensor, sex: Tensor) -> Tensor:
        """(batch, 9) and (batch,) to (batch,)."""
        rows = torch.cat([self.standardized(measurements), self.sex(sex)], dim=1)
        return self.hidden(rows).squeeze(1) * self.std + self.mean
