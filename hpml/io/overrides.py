"""`--set a.b.c=value` on top of a config, the same for a recipe and for one stage."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from hpml.core import strict_yaml
from hpml.core.contract import validate
from hpml.core.errors import ConfigInvalid, shortened

_MOST_PARTS = 32  # of a key


def with_overrides(expected: Any, fields: Any, overrides: Iterable[str], *, where: str) -> Any:
    """`fields` with each "a.b.c=value" of `overrides` applied, values in YAML.

    expected: the type that the result will be checked against. The overrides go on top of the resolved
    config, so that they reach what a shorthand or a default stands for.
    Raises ConfigInvalid if one is not KEY=VALUE, is not YAML, or leads nowhere.
    """
    try:
        checked = validate(expected, fields, where=where)
        resolved = TypeAdapter(expected).dump_python(checked, mode="json")
    except ConfigInvalid:  # perhaps an override mends it
        resolved = copy.deepcopy(fields)
    for override in overrides:
        path, separator, text = override.partition("=")
        parts = path.split(".")
        shown = f"--set {shortened(override)!r}"
        if not separator or not all(parts) or len(parts) > _MOST_PARTS:
            raise ConfigInvalid(f"{shown} is not KEY=VALUE", fix="for example train.epochs=3")
        value = strict_yaml.parse(text, where=f"the value of {shown}")
        _assign(resolved, parts, value, shown)
    return resolved


def _assign(node: Any, path: list[str], value: Any, shown: str) -> None:
    """Set `value` at `path` below `node`; a part of the path is a key, or a number in a list."""
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
    else:
        _assign(node.setdefault(key, {}) if isinstance(node, dict) else node[key], rest, value, shown)
