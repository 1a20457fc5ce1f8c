"""The static picture of a pipeline: what `graph` calls, traced once, without running anything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from hpml.core.contract import Config, Result, canonical_json, each_input, of_inputs, signature, stage_name
from hpml.core.errors import UsageError
from hpml.pipelines.stage_needs import needs_of

Handle = TypeVar("Handle")


class Step(Protocol[Handle]):
    """What a pipeline is written in: call it with a stage's `run`, its config, and the steps it reads.

    A step runs although one that it reads failed, without what that should have made, if the stage can do
    without (`Artifact[...] | None`), or if it is one of many and not the first: what the others are held
    against, such as the reference engine.
    """

    def __call__(
        self, run: Callable[..., Result[Any]], config: Config, /, **inputs: Handle | dict[str, Handle]
    ) -> Handle: ...


@dataclass(frozen=True)
class Node:
    """One step of a plan. `inputs` maps parameters of `run` to the names of the steps they come from."""

    name: str
    run: Callable[..., Result[Any]]
    config: Config
    inputs: Mapping[str, str | Mapping[str, str]]
    labels: tuple[str, ...]

    @property
    def stage(self) -> str:
        """The stage this step runs."""
        return stage_name(self.run)

    @property
    def run_path(self) -> str:
        """The import path of `run`."""
        return f"{self.run.__module__}:{self.run.__name__}"

    @property
    def is_exclusive(self) -> bool:
        """Whether nothing else of ours may run on the machine meanwhile."""
        return needs_of(self.stage).exclusive or self.config.decides_by_timing

    def parents(self) -> list[str]:
        """The names of the steps this one reads from, each once, in order."""
        return list(dict.fromkeys(self.sources().values()))

    def required(self) -> set[str]:
        """Those of the parents without which this step cannot run."""
        optional = signature(self.run).optional
        one_or_first = {
            name: source if isinstance(source, str) else next(iter(source.values()), "")
            for name, source in self.inputs.items()
        }
        return {step for name, step in one_or_first.items() if step and name not in optional}

    def sources(self) -> dict[str, str]:
        """The step that each input comes from, by the input's name or name/key."""
        return each_input(self.inputs)

    def present(self, made: Mapping[str, str]) -> dict[str, Any]:
        """`inputs` with what is made of each step in place of its name, without those of which nothing is."""
        return of_inputs(
            self.inputs, {name: made[step] for name, step in self.sources().items() if step in made}
        )


@dataclass
class Plan:
    """The steps of a pipeline in an order in which they could run."""

    nodes: dict[str, Node] = field(default_factory=dict)

    def only_shows(self) -> set[str]:
        """The steps whose failure is not the run's: they only show, and the run is for more than that."""
        read = {parent for node in self.nodes.values() for parent in node.parents()}
        showing = {name for name, node in self.nodes.items() if needs_of(node.stage).only_shows}
        return showing if set(self.nodes) - read - showing else set()

    def needed_for(self, target: str) -> Plan:
        """The part of the plan that ends in step `target`.

        Raises UsageError if there is no such step.
        """
        if target not in self.nodes:
            raise UsageError(f"there is no step {target!r}", why=f"the steps are {', '.join(self.nodes)}")
        wanted = {target}
        for node in reversed(self.nodes.values()):
            if node.name in wanted:
                wanted.update(node.parents())
        return Plan({name: node for name, node in self.nodes.items() if name in wanted})


def trace(pipeline: Callable[[Step[str], Any], None], recipe: Any) -> Plan:
    """Call `pipeline` with a `step` that only takes notes. A step is named after its stage and its labels."""
    nodes: dict[str, Node] = {}
    seen: dict[str, str] = {}

    def step(run: Callable[..., Result[Any]], config: Config, /, **inputs: str | dict[str, str]) -> str:
        identity = canonical_json([run.__module__, config.model_dump(mode="json"), inputs])
        if identity in seen:
            return seen[identity]
        _check_inputs(run, inputs, nodes)
        labels = _labels(config, inputs, nodes)
        name = _unused("-".join([stage_name(run), *labels]), nodes)
        nodes[name] = Node(name, run, config, inputs, labels)
        seen[identity] = name
        return name

    pipeline(step, recipe)
    return Plan(nodes)


def _labels(
    config: Config, inputs: Mapping[str, str | Mapping[str, str]], nodes: Mapping[str, Node]
) -> tuple[str, ...]:
    """The labels of the steps a labelled step builds on, then its own: ("prune50", "distill", "onnx")."""
    if not config.label:
        return ()
    single = [nodes[source].labels for source in inputs.values() if isinstance(source, str)]
    return (*max(single, key=len, default=()), config.label)


def _unused(name: str, taken: Mapping[str, Node]) -> str:
    names = itertools.chain([name], (f"{name}-{count}" for count in itertools.count(2)))
    return next(free for free in names if free not in taken)


def _check_inputs(
    run: Callable[..., Result[Any]], inputs: Mapping[str, str | Mapping[str, str]], nodes: Mapping[str, Node]
) -> None:
    """Hold a call of `step` against the signature of the stage: names, one or many, kinds."""
    shape = signature(run)
    if set(inputs) != set(shape.inputs):
        raise TypeError(f"{shape.stage} takes {sorted(shape.inputs)}, the pipeline gives {sorted(inputs)}")
    for name, source in inputs.items():
        if shape.inputs[name] == isinstance(source, str):
            raise TypeError(f"{shape.stage}: {name} takes {'many' if shape.inputs[name] else 'one'}")
        for parent in [source] if isinstance(source, str) else source.values():
            kind = signature(nodes[parent].run).output_kind
            if kind != shape.input_kinds[name]:
                raise TypeError(f"{shape.stage}: {name} is a {shape.input_kinds[name]}, {parent} is a {kind}")
