"""What every stage agrees on: typed configs, the shape of `run`, and what it writes.

A stage is a function

    def run(config: SomeConfig, *, data: Artifact[DatasetSpec], out: Output) -> Result[ModelSpec]

An input `dict[str, Artifact[...]]` is many by name; one `Artifact[...] | None = None` may be missing.
Its config is the first parameter, its input artifacts are the keyword parameters, and everything else about
it (the command line of its container, the type of its output) is read off this signature by `signature`.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import core_schema

from hpml.core.errors import ConfigInvalid, UsageError, shortened


class Config(BaseModel):
    """Base of every config: immutable, and a key it does not know is an error, not a surprise."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @property
    def label(self) -> str:
        """A short name that tells this config from its siblings in a step's name; empty if it needs none."""
        return ""

    @property
    def decides_by_timing(self) -> bool:
        """Whether a step with this config times what it makes, so that nothing else may run beside it."""
        return False

    @property
    def reads_unpinned_data(self) -> bool:
        """Whether it names data by an address alone, at which there may be other data the next time."""
        return False

    def unsupported_reason(self) -> str:
        """Why this machine cannot run this config; empty if it can. Asked before anything is started."""
        return ""

    def fingerprint(self) -> str:
        """What this config refers to outside itself, as a digest; part of the cache key."""
        return ""


def canonical_json(value: Any) -> str:
    """`value` as JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def renamed(given: Any, **names: str) -> Any:
    """The fields of a config by the names of now, for its validator: old name = new name.

    Raises ValueError where both are there.
    """
    if not isinstance(given, dict):
        return given
    for old, new in names.items():
        if old in given and new in given:
            raise ValueError(f"{old} and {new} are both there: remove {old}, which is called {new} now")
    return {names.get(key, key): item for key, item in given.items()}


def texts_in(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_in([*value.keys(), *value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)


_INTEGERS = 2**63  # what torch, databases and most readers of JSON take
_SHOWN = 3  # problems of a config

_T = TypeVar("_T")


def validate(expected: type[_T] | Any, value: Any, *, where: str) -> _T:
    """`value` as an `expected`.

    Raises ConfigInvalid that names `where`, the path of the first wrong key, what is allowed, and, for a
    misspelt key, the nearest right one. A string that is no text, and a number that no other program reads
    as it is, are wrong wherever they stand.
    """
    unusable = list(_unusable(value))
    if unusable:
        raise ConfigInvalid(f"{where} is not valid", why=_listed(unusable[:_SHOWN], len(unusable)))
    try:
        return typing.cast(_T, TypeAdapter(expected).validate_python(value))
    except ValidationError as error:
        raise ConfigInvalid(f"{where} is not valid", why=_explain(error, expected, value)) from None


def validate_options(expected: type[_T] | Any, value: Any, *, where: str) -> _T:
    """As `validate`, of what a command line says: raises UsageError in place of ConfigInvalid."""
    try:
        return typing.cast(_T, validate(expected, value, where=where))
    except ConfigInvalid as error:
        raise UsageError(error.what, why=error.why, fix=error.fix) from None


def _unusable(value: Any) -> Iterator[str]:
    """The values in `value` that a config cannot hold: the key of each, and why."""
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        key, item = pending.pop()
        of_key = f"{shortened(key)}: " if key else ""
        if isinstance(item, dict | list | tuple):
            named = list(item.items() if isinstance(item, dict) else enumerate(item))
            pending += [(f"{key}.{name}" if key else f"{name}", below) for name, below in named]
            pending += [(key, name) for name, _ in named if isinstance(name, str)]
        elif isinstance(item, int) and not -_INTEGERS <= item < _INTEGERS:
            yield f"{of_key}integers are from -2^63 to 2^63 - 1, this one has {item.bit_length()} bits"
        elif isinstance(item, float) and not math.isfinite(item):
            yield f"{of_key}{item} is not a finite number"
        elif isinstance(item, str) and "\0" in item:
            yield f"{of_key}{shortened(item)!r} holds a NUL"
        elif isinstance(item, str) and any("\ud800" <= character <= "\udfff" for character in item):
            yield f"{of_key}{shortened(item)!r} holds a character that UTF-8 cannot encode"


# What to write in YAML, where pydantic speaks of Python's types; in braces what it tells besides.
_LIST, _KEYS = "a list, such as [a, b]", "keys with values, such as {{key: value}}"
_WANTED = {
    "tuple_type": _LIST,
    "list_type": _LIST,
    "dict_type": _KEYS,
    "model_type": _KEYS,
    "model_attributes_type": f"a name, or {_KEYS}",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("string_type", "path_type"), "text"),
    "string_pattern_mismatch": "text that matches {pattern}",
    "literal_error": "{expected}",
    "greater_than": "more than {gt:,.10g}",
    "greater_than_equal": "at least {ge:,.10g}",
    "less_than": "less than {lt:,.10g}",
    "less_than_equal": "at most {le:,.10g}",
}
_IN_YAML = {None: "null", True: "true", False: "false"}


def _explain(error: ValidationError, expected: Any, given: Any) -> str:
    by_path: dict[str, Any] = {}  # of a union pydantic tells what each branch lacks: the first says enough
    problems = error.errors(include_url=False)
    for problem in problems:
        # Of a list whose items are wrong pydantic also says that too few of them are right.
        place = problem["loc"]
        is_outer = any(place == other["loc"][: len(place)] != other["loc"] for other in problems)
        if problem["type"] != "too_short" or not is_outer:
            by_path.setdefault(_path(place, given), problem)
    told = [_explain_one(path, problem, expected) for path, problem in list(by_path.items())[:_SHOWN]]
    return _listed(told, len(by_path))


def _path(place: Sequence[str | int], given: Any) -> str:
    """The keys of `place` as the user wrote them in `given`: pydantic puts names of types between them."""
    kept: list[str] = []
    for part in place:
        is_item = isinstance(given, list | tuple) and isinstance(part, int) and part < len(given)
        if is_item or (isinstance(given, Mapping) and part in given):
            given = given[part]
        elif isinstance(given, str) and part == given:  # a bare name for the source, method or target
            given = {}
            continue
        elif not isinstance(given, Mapping) or part in given.values() or not str(part).isidentifier():
            continue
        else:  # missing, or there by an older name
            given = {}
        kept.append(str(part))
    return shortened(".".join(kept))


def _listed(shown: list[str], count: int) -> str:
    more = [f"and {count - len(shown)} more"] if count > len(shown) else []
    return "; ".join([*shown, *more])


def _explain_one(path: str, problem: Any, expected: Any) -> str:
    what = _what_is_wrong(problem, expected)
    return f"{path}: {what}" if path else what


def _what_is_wrong(problem: Any, expected: Any) -> str:
    kind, told, given = problem["type"], problem.get("ctx", {}), problem.get("input")
    if kind == "missing":
        return "it is missing"
    if kind == "extra_forbidden":
        known = sorted(_keys_at(problem["loc"][:-1], expected))
        near = difflib.get_close_matches(str(problem["loc"][-1])[:80], known, n=1)
        return "no such key" + (f", did you mean {near[0]!r}?" if near else "")
    if kind == "value_error":
        return str(told["error"])
    if kind == "union_tag_not_found":
        return f"it needs the key {told['discriminator']}"
    if kind == "union_tag_invalid":
        tag, allowed = (str(told[name]) for name in ("tag", "expected_tags"))
        allowed = allowed.replace("'", "")
        near = difflib.get_close_matches(tag[:80], allowed.split(", "), n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        return f"{shortened(tag)!r} is unknown, allowed: {allowed}{hint}"
    if kind == "too_short":
        return f"at least {told['min_length']} needed, {told['actual_length']} given"
    is_word = given is None or isinstance(given, bool)
    shown = f" (got {_IN_YAML[given] if is_word else shortened(repr(given))})"
    if kind in _WANTED:
        return f"it should be {_WANTED[kind].format(**told)}{shown}"
    return f"{problem['msg'][0].lower()}{problem['msg'][1:]}" + (
        "" if isinstance(given, Mapping | list) else shown
    )


def _keys_at(place: Sequence[str | int], expected: Any) -> set[str]:
    """The keys that may stand at `place` of `expected`, by its JSON schema; of a union, all branches."""
    schema = TypeAdapter(expected).json_schema()
    nodes = list(_branches(schema, schema))
    for part in place:
        nodes = [branch for node in nodes for branch in _branches(_inner(node, part), schema)]
    return {key for node in nodes for key in node.get("properties", {})}


def _branches(node: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "$ref" in node:
        yield from _branches(schema["$defs"][node["$ref"].rpartition("/")[2]], schema)
        return
    yield node
    for branch in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _branches(branch, schema)


def _inner(node: dict[str, Any], part: str | int) -> dict[str, Any]:
    """What the schema `node` says of its item or key `part`; `node` itself for the tag of a union."""
    found = node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)
    of_any_name = [node.get("additionalProperties"), *node.get("patternProperties", {}).values()]
    return next((inner for inner in (found, *of_any_name) if isinstance(inner, dict) and inner), node)


# ------------------------------------------------------------------------------------------ a stage's output

SpecT = TypeVar("SpecT", bound=Config)
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Result(Generic[SpecT]):
    """What a stage returns: the description of the artifact it wrote, and figures for the tracker.

    rejected: why a gate refuses what was written. The artifact is kept for a look, no reader opens it, and
    the step ends with exit code 5.
    incomplete: what is missing in what was written, and why. The artifact is handed on, but it is never a
    cache hit, and `Output.scratch` stays: the next attempt at the same work goes on from there.
    """

    spec: SpecT
    metrics: Metrics = field(default_factory=dict)
    rejected: str = ""
    incomplete: str = ""


class Events:
    """What a running step tells, one JSON object a line, appended to a file.

    The executor tails the file: for the progress bar, to hand metrics to the tracker, and for the notes that
    its user should see at once. The kinds and their fields are in hpml/io/relay.py.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file = path.open("a", buffering=1, encoding="utf-8") if path else None

    def write(self, kind: str, **fields: Any) -> None:
        if self._file:
            self._file.write(json.dumps({"event": kind, "time_s": time.time(), **fields}) + "\n")


@dataclass(frozen=True)
class Output:
    """Where a stage writes.

    path: a fresh folder; what is in it when `run` returns becomes the artifact, whole or not at all.
    scratch: a folder that outlives a failed, interrupted or incomplete attempt at the same work; of a pod's,
    only the files `checkpoints-*/*` and `rounds/*` do, each from when it is renamed into its place.
    threads: how many CPU threads the stage may use. left_out: inputs that there are not because the steps
    that should have made them failed, "name" or "name/key", and why; told to stages that only show.
    """

    path: Path
    scratch: Path
    threads: int = 1
    events: Events = field(default_factory=lambda: Events(None))
    left_out: Mapping[str, str] = field(default_factory=dict)

    def metric(self, name: str, value: float, *, index: int) -> None:
        """Report one point of a curve, such as `loss` at epoch `index`."""
        self.events.write("metric", name=name, value=float(value), index=index)

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None:
        """Report how far the stage is: `done` of `total` `unit`, a plural such as "steps"."""
        self.events.write("progress", done=done, total=total, unit=unit, note=note)

    def note(self, text: str) -> None:
        """Say something that the user of a run should see at once."""
        self.events.write("note", text=text)


# --------------------------------------------------------------------------------------- a stage's signature


def each_input(inputs: Mapping[str, Any | Mapping[str, Any]]) -> dict[str, Any]:
    """What is given of each input, by its name, or by name/key where it is many."""
    given: dict[str, Any] = {}
    for name, one_or_many in inputs.items():
        if isinstance(one_or_many, Mapping):
            given |= {f"{name}/{key}": one for key, one in one_or_many.items()}
        else:
            given[name] = one_or_many
    return given


def of_inputs(inputs: Mapping[str, Any | Mapping[str, Any]], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, which are by name or name/key, in the shape of `inputs`, as far as there are any."""
    return {
        name: {key: values[f"{name}/{key}"] for key in given if f"{name}/{key}" in values}
        if isinstance(given, Mapping)
        else values[name]
        for name, given in inputs.items()
        if isinstance(given, Mapping) or name in values
    }


@dataclass(frozen=True)
class StageSignature:
    """What a stage's `run` says about itself."""

    stage: str
    config_type: Any
    inputs: dict[str, bool]  # name -> whether it is a mapping of artifacts rather than one
    input_kinds: dict[str, str]
    output_kind: str
    optional: frozenset[str]  # inputs that the stage can do without


def stage_name(run: Callable[..., Any]) -> str:
    """The folder of a stage, "train" for components/train/stage.py; elsewhere the function's own name."""
    module = run.__module__.split(".")
    return module[-2] if module[-1] == "stage" else run.__name__


def signature(run: Callable[..., Result[Any]]) -> StageSignature:
    """Read the typed signature of a stage's `run`; see the module docstring for its shape."""
    hints = typing.get_type_hints(run, include_extras=True)
    parameters = list(inspect.signature(run).parameters.values())
    config, *rest = parameters
    inputs: dict[str, bool] = {}
    kinds: dict[str, str] = {}
    optional = set()
    for parameter in rest:
        hint = hints[parameter.name]
        if hint is Output:
            continue
        if type(None) in typing.get_args(hint):  # Artifact[...] | None
            optional.add(parameter.name)
            hint = typing.get_args(hint)[0]
        many = typing.get_origin(hint) is dict
        artifact = typing.get_args(hint)[1] if many else hint
        inputs[parameter.name] = many
        kinds[parameter.name] = _kind_of(typing.get_args(artifact)[0])
    return StageSignature(
        stage=stage_name(run),
        config_type=hints[config.name],
        inputs=inputs,
        input_kinds=kinds,
        output_kind=_kind_of(typing.get_args(hints["return"])[0]),
        optional=frozenset(optional),
    )


def _kind_of(spec: Any) -> str:
    return str(spec.model_fields["kind"].default)


class BareName:
    """Lets a bare name stand for a mapping: with `BareName("method")`, "quantize" for {"method": "quantize"}.

    An annotation for pydantic, beside the type: the JSON Schema lists the names.
    """

    def __init__(self, key: str) -> None:
        self._key = key

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        def expand(value: Any) -> Any:
            return {self._key: value} if isinstance(value, str) else value

        return core_schema.no_info_before_validator_function(expand, handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        mapping = handler(schema)
        rows = mapping.get("discriminator", {}).get("mapping")
        name = {"enum": sorted(rows)} if rows else {"type": "string"}
        return {"anyOf": [name, mapping]}
