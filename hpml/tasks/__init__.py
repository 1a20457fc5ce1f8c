"""What depends on the kind of problem. A task is one folder here and one row of SOURCES.

Importing this package imports neither torch nor numpy: a recipe names a task by its source of data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Discriminator

from hpml.core.contract import BareName, canonical_json, validate
from hpml.core.errors import StageFailed
from hpml.tasks.base import Task
from hpml.tasks.custom.own_data import Custom
from hpml.tasks.custom.task import CustomTask
from hpml.tasks.data_source import Preview, Source
from hpml.tasks.image_classification.sources import SOURCES as IMAGE_SOURCES
from hpml.tasks.language_modeling.sources import SOURCES as TEXT_SOURCES
from hpml.tasks.metric import Metric
from hpml.tasks.prediction import Prediction
from hpml.tasks.sequence_to_sequence.sources import SOURCES as PAIRS_SOURCES
from hpml.tasks.users_code import users_task

SOURCES: dict[str, type[Source]] = {
    **IMAGE_SOURCES,
    **TEXT_SOURCES,
    **PAIRS_SOURCES,
    "custom": Custom,
}
# Of ours, by the name in their manifests; a user's own has its import path there.
TASKS: dict[str, type[Task]] = {
    kind.model_fields["task"].default: kind
    for kind in dict.fromkeys(source.task_class for source in SOURCES.values())
    if kind is not CustomTask
}

if TYPE_CHECKING:
    AnySource = Source
else:
    AnySource = Annotated[
        Union[tuple(SOURCES.values())],  # noqa: UP007
        Discriminator("source"),
        BareName("source"),
    ]


def task_of(described: Mapping[str, Any]) -> Task:
    """The task that a manifest carries, of ours or by the import path of a user's own.

    Raises StageFailed for one that this version does not know, ConfigInvalid as `users_task` does.
    """
    return _task_of(canonical_json(dict(described)))


@cache
def _task_of(described: str) -> Task:
    fields = json.loads(described)
    task: Task = validate(task_class(str(fields.get("task"))), fields, where="the task")
    return task


def task_class(name: str) -> type[Task]:
    """The class of a task by what manifests call it. Raises as `task_of`."""
    kind = users_task(name) if ":" in name else TASKS.get(name)
    if kind is None:
        raise StageFailed(f"there is no task {name!r} here", why=f"there are {', '.join(TASKS)}")
    return kind


__all__ = [
    "SOURCES",
    "TASKS",
    "AnySource",
    "CustomTask",
    "Metric",
    "Prediction",
    "Preview",
    "Source",
    "Task",
    "task_class",
    "task_of",
]
