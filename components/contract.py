"""What every stage agrees on: typed configs, the shape of `run`, and what it writes.

A stage is a function

    def run(config: SomeConfig, *, data: Artifact[DatasetSpec], out: Output) -> Result[ModelSpec]

Its config is the first parameter, its input artifacts are the keyword parameters, and everything else about
it (the command line of its container, the type of its output) is read off this signature by `signature`.
"""

from __future__ import annotations

import difflib
import inspect
import json
import time
import typing
from collections.abc import Callable, Mapping
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

from components.errors import ConfigInvalid


class Config(BaseModel):
    """Base of every config: immutable, and a key it does not know is an error, not a surprise."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    @property
    def label(self) -> str:
        """A short name that tells this config from its siblings in a step's name; empty if it needs none."""
        return ""

    def unmet(self) -> str:
        """Why this machine cannot run this config; empty if it can. Asked before anything is started."""
        return ""

    def fingerprint(self) -> str:
        """What this config refers to outside itself, as a digest; part of the cache key."""
        return ""


def canonical_json(value: Any) -> str:
    """`value` as JSON with sorted keys and no spaces: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


_T = TypeVar("_T")


def validate(expected: type[_T] | Any, value: Any, *, where: str) -> _T:
    """`value` as an `expected`.

    Raises ConfigInvalid that names `where`, the path of the first wrong key, what is allowed, and, for a
    misspelt key, the nearest right one.
    """
    try:
        return typing.cast(_T, TypeAdapter(expected).validate_python(value))
    except ValidationError as error:
        raise ConfigInvalid(f"{where} is not valid", why=_explain(error, expected), fix="") from None


def _explain(error: ValidationError, expected: Any) -> str:
    problems = error.errors(include_url=False, include_context=True)
    shown = [_explain_one(problem, expected) for problem in problems[:3]]
    if len(problems) > 3:
        shown.append(f"and {len(problems) - 3} more")
    return "; ".join(shown)


def _explain_one(problem: Any, expected: Any) -> str:
    path = ".".join(str(part) for part in problem["loc"]) or "the whole"
    if problem["type"] == "extra_forbidden":
        known = sorted(_known_keys(expected, on_top=len(problem["loc"]) == 1))
        near = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
        return f"{path}: no such key" + (f", did you mean {near[0]!r}?" if near else "")
    if problem["type"] == "value_error":
        return f"{path}: {problem['ctx']['error']}"
    if problem["type"] == "union_tag_invalid":
        context = problem["ctx"]
        allowed = str(context["expected_tags"]).replace("'", "")
        near = difflib.get_close_matches(str(context["tag"]), allowed.split(", "), n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        return f"{path}: {context['tag']!r} is unknown, allowed: {allowed}{hint}"
    given = problem.get("input")
    shown = "" if isinstance(given, Mapping | list) else f" (got {given!r})"
    return f"{path}: {problem['msg'][0].lower()}{problem['msg'][1:]}{shown}"


def _known_keys(expected: Any, *, on_top: bool) -> set[str]:
    """The keys of `expected` itself, if `on_top` and it has its own; else all that appear in its schema."""
    schema = TypeAdapter(expected).json_schema()
    if on_top and "properties" in schema:
        return set(schema["properties"])
    keys: set[str] = set()
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            properties = node.get("properties")
            if isinstance(properties, dict):
                keys.update(properties)
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
    return keys


# ------------------------------------------------------------------------------------------ a stage's output

SpecT = TypeVar("SpecT", bound=Config)
Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Result(Generic[SpecT]):
    """What a stage returns: the description of the artifact it wrote, and figures for the tracker.

    rejected: why a gate refuses what was written. The artifact is kept for a look, no reader opens it, and
    the step ends with exit code 5.
    """

    spec: SpecT
    metrics: Metrics = field(default_factory=dict)
    rejected: str = ""


class Events:
    """What a running step tells, one JSON object a line, appended to a file.

    The executor tails the file: for the progress bar, to hand metrics to the tracker, and for the notes that
    its user should see at once. The kinds and their fields are in components/relay.py.
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
    scratch: a folder that outlives a failed or interrupted attempt at the same work (checkpoints).
    threads: how many CPU threads the stage may use.
    """

    path: Path
    scratch: Path
    threads: int = 1
    events: Events = field(default_factory=lambda: Events(None))

    def metric(self, name: str, value: float, *, index: int) -> None:
        """Report one point of a curve, such as `loss` at epoch `index`."""
        self.events.write("metric", name=name, value=float(value), index=index)

    def progress(self, done: int, total: int, unit: str, note: str = "") -> None:
        """Report how far the stage is: `done` of `total` `unit`, a plural such as "steps"."""
        self.events.write("progress", done=done, total=total, unit=unit, note=note)


# --------------------------------------------------------------------------------------- a stage's signature


@dataclass(frozen=True)
class StageSignature:
    """What a stage's `run` says about itself."""

    stage: str
    config_type: Any
    inputs: dict[str, bool]  # name -> whether it is a mapping of artifacts rather than one
    input_kinds: dict[str, str]
    output_kind: str


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
    for parameter in rest:
        hint = hints[parameter.name]
        if hint is Output:
            continue
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
