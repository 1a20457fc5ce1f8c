"""The dataset that `prepare` writes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import JsonValue, model_validator

from hpml.core.contract import Config
from hpml.core.errors import StageFailed

_LOGITS = {"name": "logits", "content": "of each class"}


def of_images(given: Any) -> Any:
    """The fields of a dataset, model or engine of versions before there were tasks, as they are called now.

    All of these were about labelled images. What is of now is left as it is.
    """
    if not isinstance(given, dict) or "class_names" not in given or "task" in given:
        return given
    fields = dict(given)
    task = {"task": "image_classification", "class_names": fields.pop("class_names")}
    inputs = fields.pop("input", None)
    if inputs is None:
        task |= {name: fields.pop(name) for name in ("image_shape_hwc", "mean", "std")}
        task["pictures"] = fields.pop("pictures", None)
    else:
        inputs = inputs if isinstance(inputs, dict) else inputs.model_dump(mode="json")
        channels, height, width = inputs["shape_chw"]
        task |= {"image_shape_hwc": [height, width, channels], "mean": inputs["mean"], "std": inputs["std"]}
        task["pictures"] = inputs.get("pictures")
        x_nchw = {"name": inputs.get("name", "x_nchw"), "shape": ("batch", channels, height, width)}
        logits = _LOGITS | {"shape": ("batch", len(task["class_names"]))}
        fields["operations"] = ({"inputs": (x_nchw,), "outputs": (logits,)},)
    fields["task"] = task
    if "accuracy_top1" in fields:
        fields["quality"] = {"accuracy_top1": fields.pop("accuracy_top1")}
    return fields


class SplitSpec(Config):
    """One split of a dataset: `<split>_<array>.npy` for each of the task's arrays, rows in front."""

    rows: int
    class_counts: tuple[int, ...] = ()  # of each class, where rows are of one


class DatasetSpec(Config):
    """Memory-mappable arrays for each split; splits are named `train`, `validation` and `test`.

    All choices are made on validation; test is for one score of what was chosen in the end.
    """

    kind: Literal["dataset"] = "dataset"
    task: dict[str, JsonValue]  # see `hpml.tasks`
    splits: dict[str, SplitSpec]
    source: str
    licence: str
    notes: tuple[str, ...] = ()  # what was left out of the source, and why

    def split(self, name: str) -> SplitSpec:
        """One of the splits. Raises StageFailed if the dataset has no such split."""
        if name not in self.splits:
            raise StageFailed(
                f"the dataset has no {name} split",
                why=f"it has {', '.join(self.splits)}: a version before this one prepared it",
                fix="prepare it again, for example with hpml run",
            )
        return self.splits[name]

    @model_validator(mode="before")
    @classmethod
    def _of_versions_before(cls, given: Any) -> Any:
        return of_images(given)
