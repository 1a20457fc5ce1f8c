"""What every data source is: a config that makes the dataset of a task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hpml.core.contract import Config, Output, Result
from hpml.tasks.base import Task

if TYPE_CHECKING:
    from hpml.artifacts.dataset import DatasetSpec


@dataclass(frozen=True)
class Preview:
    """What is known of a source's data before they are prepared.

    task: with what is known of them; None where even the inputs of the network are not. rows: of all splits
    together; bytes_prepared: what they will take on disk; each 0 where it is not known. problems: why prepare
    would refuse them. remarks: what else a user should know beforehand. is_guess: whether the task was told
    from some of the rows, or from the most that options allow, so that the data may change it.
    """

    task: Task | None = None
    rows: int = 0
    bytes_prepared: int = 0
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    is_guess: bool = False


class Source(Config, ABC):
    """Base of the sources. A subclass adds `source: Literal["its-name"]`, its options, and these methods.

    task_class: the task that it makes data for. So which one a recipe is for follows from `source` in it.
    """

    task_class: ClassVar[type[Task]]

    source: str
    test_fraction: float = Field(default=0.2, gt=0, lt=1)  # where the source has no test split of its own
    # Of what is not for testing, where the source has no validation split of its own.
    validation_fraction: float = Field(default=0.15, gt=0, lt=1)
    seed: int = Field(default=0, ge=0)  # of these splits

    @property
    def reads_unpinned_data(self) -> bool:
        """Whether it names the data by a path or URL, without a digest."""
        address = getattr(self, "path", None) or getattr(self, "url", None)
        return bool(address) and not getattr(self, "sha256", None)

    def preview(self) -> Preview:
        """What is known without reading the data. Raises HpmlError where prepare would surely fail."""
        return Preview()

    @property
    def default_architecture(self) -> str:
        """The network where a recipe names none; empty: it has to."""
        task = self.stand_in()
        return task.default_architecture if task else ""

    @property
    def augments(self) -> bool:
        """Whether its rows can be changed at random for training."""
        task = self.stand_in()
        return task is not None and task.draws > 0

    @property
    def users_task(self) -> str:
        """The import path of a task that is a user's own; empty for one of ours."""
        return ""

    def note_unused(self, own: Collection[str], out: Output) -> None:
        """Tell which fractions of a recipe are not used, `own` being the splits that the data has itself."""
        for split in ("test", "validation"):
            name = f"{split}_fraction"
            if split in own and getattr(self, name) != type(self).model_fields[name].default:
                out.note(f"{name} is not used: the data has a {split} split of its own")

    @abstractmethod
    def stand_in(self) -> Task | None:
        """The task with made-up facts: for what does not depend on the data, while these are not known.

        None where only a user's own code, which the command does not import, could tell it.
        """

    @abstractmethod
    def prepare(self, out: Output) -> Result[DatasetSpec]:
        """Write the arrays of every split, `<split>_<array>.npy` with rows in front, into `out.path`.

        `out.scratch` may hold what is expensive to fetch or to extract. Raises StageFailed if the data cannot
        be read or break the task's contract, naming the files or rows.
        """
