"""The arguments of an architecture in a recipe, held against the annotations of its callable."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import JsonValue, TypeAdapter, ValidationError

from hpml.core.errors import ConfigInvalid, shortened


def require_types(path: str, make_network: Callable[..., Any], arguments: Mapping[str, JsonValue]) -> None:
    """Raise ConfigInvalid for an argument that is not what its annotation says.

    path: of the callable. What has no annotation, or one that JSON has no value for, is not looked at.
    """
    try:
        parameters = inspect.signature(make_network, eval_str=True).parameters
    except Exception:  # of C, or with names that exist for type checkers alone: building shows the rest
        return
    for name in arguments.keys() & parameters.keys():
        wanted, value = parameters[name].annotation, arguments[name]
        if wanted is inspect.Parameter.empty or value == parameters[name].default or _is_a(value, wanted):
            continue
        raise ConfigInvalid(
            f"the model {path!r} does not take {name} {shortened(json.dumps(value))}",
            why=f"{name} is {inspect.formatannotation(wanted)}",
            fix=f"correct train.model.arguments.{name} (--arg {name} in hpml bench)",
        )


def _is_a(value: JsonValue, wanted: Any) -> bool:
    try:
        adapter = TypeAdapter(wanted)
    except Exception:  # pydantic's, of types that it has no schema for, such as a tensor
        return True
    try:
        adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return False
    return True
