"""YAML from users: the values that JSON has, keys that are strings, each once; nothing that expands.

Beside YAML 1.1, which PyYAML reads, numbers such as 1e-3 are numbers (as in YAML 1.2), and dates are strings.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

import yaml

from hpml.core.errors import ConfigInvalid, shortened

MOST_BYTES = 1_000_000  # of a file
_MOST_VALUES = 100_000  # once every alias stands for what it names
_MOST_LEVELS = 64
_MOST_DIGITS = 40  # of an integer; Python refuses to read more than 4,300

_TAG = "tag:yaml.org,2002:"
_FLOAT = (f"{_TAG}float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+\Z"), list("-+0123456789"))
_KINDS = {"null": "null", "bool": "a truth value", "int": "a number", "float": "a number"}
_ALLOWED = {f"{_TAG}{name}" for name in (*_KINDS, "str", "seq", "map", "merge")}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own way
        first: [(tag, pattern) for tag, pattern in rows if tag != f"{_TAG}timestamp"]
        for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    pass


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(*_FLOAT)


def parse(text: str, *, where: str) -> Any:
    """The value that `text` is.

    Raises ConfigInvalid, with the line, for what is no YAML, and for what YAML allows and JSON does not have:
    other keys than strings, a key twice, tags, values that contain themselves; and beyond the limits above.
    """
    if len(text) > MOST_BYTES:
        _refuse(where, f"it has more than {MOST_BYTES:,} characters")
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _Check(loader, where).measure(node)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        _refuse(where, *_explain(error))
    except RecursionError:
        _refuse(where, "it is nested too deeply")


def dump(value: Any) -> str:
    """`value` as text that `parse` reads again."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _refuse(where: str, why: str, fix: str = "") -> NoReturn:
    raise ConfigInvalid(f"{where} is not valid YAML for a config", why=why, fix=fix)


def _explain(error: yaml.YAMLError) -> tuple[str, str]:
    """What is wrong, and what to do about it."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split()), ""
    fix = "indent with spaces" if "'\\t'" in str(error.problem) else ""
    return f"line {error.problem_mark.line + 1}: {error.problem}", fix


class _Check:
    """Walks the nodes of a document before anything is made of them."""

    def __init__(self, loader: _Loader, where: str) -> None:
        self._loader, self._where = loader, where
        self._measured: dict[int, tuple[int, int]] = {}
        self._open: set[int] = set()

    def measure(self, node: yaml.Node) -> tuple[int, int]:
        """How many values `node` stands for, and how many levels deep they are."""
        known = self._measured.get(id(node))
        if known:
            return known
        if id(node) in self._open:
            self._refuse(node, "this value contains itself")
        self._open.add(id(node))
        self._check_tag(node)
        values, levels = 1, 1
        for child in self._children(node):
            below, depth = self.measure(child)
            values, levels = values + below, max(levels, depth + 1)
        if levels > _MOST_LEVELS:
            self._refuse(node, f"it is nested too deeply, {_MOST_LEVELS} levels are allowed")
        if values > _MOST_VALUES:
            self._refuse(node, f"it expands to more than {_MOST_VALUES:,} values")
        self._open.remove(id(node))
        self._measured[id(node)] = values, levels
        return values, levels

    def _children(self, node: yaml.Node) -> list[yaml.Node]:
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)
            return [value for _, value in node.value]
        return node.value if isinstance(node, yaml.SequenceNode) else []

    def _check_tag(self, node: yaml.Node) -> None:
        if node.tag not in _ALLOWED:
            self._refuse(node, f"the tag {node.tag} is not allowed")
        if not isinstance(node, yaml.ScalarNode) or node.tag == f"{_TAG}str":
            return
        if node.tag.endswith(":int") and len(node.value) > _MOST_DIGITS:
            self._refuse(node, f"an integer of {len(node.value):,} digits is too large")
        plain = self._loader.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
        if plain != node.tag:
            self._refuse(node, f"{shortened(repr(node.value))} is not {_KINDS[node.tag.rpartition(':')[2]]}")

    def _check_keys(self, node: yaml.MappingNode) -> None:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(key, "a key is a string, not a list or a mapping")
            kind = key.tag.rpartition(":")[2]
            if kind in _KINDS:
                self._refuse(key, f"the key {shortened(key.value)} is {_KINDS[kind]}; write it in quotes")
            line = key.start_mark.line + 1
            if kind == "str" and key.value in lines:
                first = lines[key.value]
                self._refuse(key, f"the key {shortened(key.value)!r} appears twice, first in line {first}")
            lines[key.value] = line

    def _refuse(self, node: yaml.Node, why: str) -> NoReturn:
        _refuse(self._where, f"line {node.start_mark.line + 1}: {why}")
