"""`--set a.b.c=value` on top of a config, the same for a recipe and for one stage."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, TypeAdapter

from hpml.core import strict_yaml
from hpml.core.contract import validate
from hpml.core.errors import ConfigInvalid, shortened

_MOST_PARTS = 32  # of a key


def with_overrides(expected: Any, fields: Any, overrides: Iterable[str], *, where: str) -> Any:
    """`fields` with each "a.b.c=value" of `overrides` applied, values in YAML.

    expected: the type that the result will be checked against. The overrides reach what a shorthand or a
    default stands for. Defaults that none of them leads through are left out: where one names another source,
    method or target, those of the one before are nobody's wish.
    Raises ConfigInvalid if one is not KEY=VALUE, is not YAML, or leads nowhere.
    """
    checked = None
    try:
        checked = validate(expected, fields, where=where)
        resolved = _written(checked)
    except ConfigInvalid:  # perhaps an override mends it
        resolved = copy.deepcopy(fields)
    for override in overrides:
        path, separator, text = override.partition("=")
        parts = path.split(".")
        shown = f"--set {shortened(override)!r}"
        if not separator or not all(parts) or len(parts) > _MOST_PARTS:
            raise ConfigInvalid(f"{shown} is not KEY=VALUE", fix="for example train.epochs=3")
        value = strict_yaml.parse(text, where=f"the value of {shown}")
        _assign(resolved, parts, value, shown, checked)
    return resolved


def _written(config: Any) -> Any:
    """What was given of a checked config, without what is there by default."""
    return TypeAdapter(Any).dump_python(config, mode="json", exclude_unset=True)


def _assign(node: Any, path: list[str], value: Any, shown: str, checked: Any) -> None:
    """Set `value` at `path` below `node`; a part of the path is a key, or a number in a list.

    checked: what `node` was before all overrides, with its defaults; None where there was nothing.
    """
    name, *rest = path
    key: Any = name
    if isinstance(node, list):
        indices = {str(index): index for index in range(len(node))}
        if name not in indices:
            raise ConfigInvalid(shown, why=f"{shortened(name)!r} is not an index below {len(node)}")
        key = indices[name]
    elif not isinstance(node, dict):
        raise ConfigInvalid(shown, why=f"there is nothing to set below {shortened(name)!r}")
    if not rest:
        node[key] = value
        return
    below = _below(checked, key)
    if isinstance(node, dict) and key not in node:
        node[key] = {} if below is None else _written(below)
    _assign(node[key], rest, value, shown, below)


def _below(checked: Any, key: str | int) -> Any:
    """The field, key or item `key` of a checked config; None if there is none."""
    if isinstance(checked, BaseModel):
        return getattr(checked, str(key)) if key in type(checked).model_fields else None
    try:
        return checked[key]
    except (KeyError, IndexError, TypeError):
        return None
