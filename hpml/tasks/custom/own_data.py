"""The data of a user's own task, which loads them itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from hpml.artifacts.dataset import DatasetSpec
from hpml.core.contract import Output, Result, validate
from hpml.core.errors import ConfigInvalid
from hpml.data_files import user_files
from hpml.data_files.user_files import UserPath
from hpml.tasks.custom.task import CustomTask
from hpml.tasks.data_source import Source


class Custom(Source):
    """What the class at the import path `task`, a CustomTask in a module beside the recipe, loads."""

    task_class = CustomTask

    source: Literal["custom"] = "custom"
    task: str = Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$", max_length=200)
    options: dict[str, JsonValue] = Field(default_factory=dict)  # given to its `load`
    path: UserPath | None = None  # a file or folder that it reads; also at s3://BUCKET/KEY
    licence: str = "not stated"  # of the data, for the record

    @property
    def users_task(self) -> str:
        """The import path."""
        return self.task

    def unsupported_reason(self) -> str:
        """Whether `path` is missing."""
        return user_files.unsupported_reason(self.path) if self.path else ""

    def fingerprint(self) -> str:
        """A digest of the names, sizes and times of the files at `path`."""
        return user_files.fingerprint(self.path) if self.path else ""

    def stand_in(self) -> None:
        """None: only the user's class knows it, and only a process of its own imports that."""

    def prepare(self, out: Output) -> Result[DatasetSpec]:
        """Write what the task loads, with the facts that it finds in the training rows.

        Raises ConfigInvalid if the class cannot be imported or is not whole, or if its code fails;
        StageFailed if its arrays break the contract of `write_splits`, or are not what the task says.
        """
        import numpy as np

        from hpml.tasks.prepared_splits import write_splits
        from hpml.tasks.users_code import users_code, users_task

        kind = users_task(self.task)
        path = user_files.here(self.path, out) if self.path else None
        with users_code(f"{self.task} cannot load its data", fix="see the log, and data.options"):
            loaded = kind.load(path, self.options)
        splits = write_splits(
            loaded,
            out,
            test_fraction=self.test_fraction,
            validation_fraction=self.validation_fraction,
            seed=self.seed,
        )
        self.note_unused(loaded, out)
        train = {
            name: np.load(out.path / f"train_{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in loaded["train"]
        }
        with users_code(f"{self.task} does not fit its data", fix="see the log"):
            task = self._with_facts(kind, kind.facts(train))
            task.check({name: np.array(array[:4]) for name, array in train.items()})
        spec = DatasetSpec(
            task=task.model_dump(mode="json"), splits=splits, source=self.task, licence=self.licence
        )
        return Result(spec, {f"{name}_rows": split.rows for name, split in splits.items()})

    def _with_facts(self, kind: type[CustomTask], facts: object) -> CustomTask:
        if not isinstance(facts, dict):
            raise ConfigInvalid(
                f"facts() of {self.task} gives no dict", why=f"it gives {type(facts).__name__}"
            )
        task: CustomTask = validate(kind, {**facts, "task": self.task}, where=f"the facts of {self.task}")
        return task
