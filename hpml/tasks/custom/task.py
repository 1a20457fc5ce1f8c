"""What a user's own task is derived from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from hpml.tasks.base import Arrays
from hpml.tasks.prediction import Prediction


class CustomTask(Prediction):
    """Base of the tasks that a recipe names by their import path: {source: custom, task: "module:Class"}.

    It loads its own data. All else is as in Prediction.
    """

    @classmethod
    @abstractmethod
    def load(cls, path: Path | None, options: Mapping[str, JsonValue]) -> Mapping[str, Arrays]:
        """The arrays of each split by name, rows in front: {"train": {...}, "validation": ..., "test": ...}.

        Splits that are not given are drawn from train. path: `data.path` of the recipe on this machine, if
        it has one. options: `data.options`.
        """

    @classmethod
    def facts(cls, train: Arrays) -> Mapping[str, Any]:
        """The fields of the task, from its training rows."""
        return {}
