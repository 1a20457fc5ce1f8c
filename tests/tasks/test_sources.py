"""What holds of every source of data."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from hpml.tasks import SOURCES, TASKS, AnySource, CustomTask

LEAST: dict[str, dict[str, Any]] = {"custom": {"task": "mine:Task"}}  # beside a path, what has to be said


def source(name: str, **fields: Any) -> Any:
    path = {"path": "nowhere"} if "path" in SOURCES[name].model_fields else {}
    return TypeAdapter(AnySource).validate_python({"source": name, **path, **LEAST.get(name, {}), **fields})


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_makes_data_for_its_task(name: str) -> None:
    one = source(name)
    stand_in = one.stand_in()
    if stand_in is None:
        assert one.task_class is CustomTask and one.users_task
    else:
        assert type(stand_in) is one.task_class is TASKS[stand_in.task]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("key", ["test_fraction", "validation_fraction"])
def test_the_share_of_a_split_can_be_stated_between_none_and_all(name: str, key: str) -> None:
    assert getattr(source(name, **{key: 0.5}), key) == 0.5
    for impossible in (0, 1, -0.1, 1.5):
        with pytest.raises(ValidationError, match=key):
            source(name, **{key: impossible})
