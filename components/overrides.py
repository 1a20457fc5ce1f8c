"""`--set a.b.c=value` on top of a config, the same for a recipe and for one stage."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import yaml
from pydantic import TypeAdapter

from components.contract import validate
from components.errors import ConfigInvalid


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
        if not separator or not path:
            raise ConfigInvalid(f"--set {override!r} is not KEY=VALUE", fix="for example train.epochs=3")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigInvalid(f"--set {override!r}", why=" ".join(str(error).split())) from None
        except RecursionError:
            raise ConfigInvalid(f"--set {path}=...", why="its value is nested too deep") from None
        _assign(resolved, path.split("."), value, override)
    return resolved


def _assign(node: Any, path: list[str], value: Any, override: str) -> None:
    """Set `value` at `path` below `node`; a part of the path is a key, or a number in a list."""
    key, *rest = path
    if isinstance(node, list):
        if not key.isdecimal() or int(key) >= len(node):
            raise ConfigInvalid(f"--set {override!r}", why=f"{key!r} is not an index below {len(node)}")
        if not rest:
            node[int(key)] = value
        else:
            _assign(node[int(key)], rest, value, override)
        return
    if not isinstance(node, dict):
        raise ConfigInvalid(f"--set {override!r}", why=f"there is nothing to set below {key!r}")
    if not rest:
        node[key] = value
    else:
        _assign(node.setdefault(key, {}), rest, value, override)
