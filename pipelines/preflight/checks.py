"""What of a run would surely fail on this machine: all of it at once, before anything is started."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from hpml.artifacts.dataset import DatasetSpec
from hpml.components.compress import Method
from hpml.components.compress.distill import Distill
from hpml.components.compress.quantize import Quantize
from hpml.core import hardware, memory
from hpml.core.errors import ConfigInvalid, HpmlError
from hpml.pipelines.engine.execution import Forecast, Settings, forecast
from hpml.pipelines.executors.base import Executor, Watcher
from hpml.pipelines.plan import Plan
from hpml.pipelines.preflight import applicability
from hpml.pipelines.preflight.network_probe import Facts, Found, probe
from hpml.pipelines.recipe import LoadedRecipe, Recipe
from hpml.tasks import Preview
from hpml.training.weights import unsupported_reason as unsupported_weights

_HALF_BYTES, _INT8_BYTES = 2, 1  # of a number; what is not int8 may be fp16 or bf16


@dataclass(frozen=True)
class Problem:
    """Why a step would fail."""

    step: str
    why: str


def unsupported_reason(plan: Plan) -> list[Problem]:
    """What steps need and this machine, or its disk, does not have."""
    asked = ((name, node.config.unsupported_reason()) for name, node in plan.nodes.items())
    return [Problem(name, why) for name, why in asked if why]


def refuse(problems: Sequence[Problem]) -> None:
    """Raise ConfigInvalid with all `problems`, if there are any."""
    if len(problems) == 1:
        raise ConfigInvalid(f"step {problems[0].step} cannot run on this machine", why=problems[0].why)
    if problems:
        why = "; ".join(f"({number}) {item.step}: {item.why}" for number, item in enumerate(problems, 1))
        raise ConfigInvalid(f"the recipe cannot run on this machine, for {len(problems)} reasons", why=why)


def forecast_checked(
    loaded: LoadedRecipe, plan: Plan, settings: Settings, executor: Executor, watcher: Watcher
) -> tuple[list[Forecast], list[Problem]]:
    """What a run would find in the store, and what would fail: paths, data, network, methods, targets, goals.

    What is only worth knowing, such as a target that is left out here, is said to `watcher`.
    """
    forecasts = forecast(plan, settings, executor)
    to_run = {item.step for item in forecasts if item.outcome != "cached"}
    examined = _Examination(loaded, plan, to_run, settings.home, watcher, _prepared(forecasts, executor))
    problems = [problem for problem in examined.problems() if problem.step in to_run]
    try:
        applicability.tell(loaded, plan, settings, executor, watcher)
    except ConfigInvalid as error:
        compressing = [name for name in plan.nodes if plan.nodes[name].stage == "compress" and name in to_run]
        problems += [Problem(name, str(error)) for name in compressing[:1]]
    reasons = {step: tuple(item.why for item in problems if item.step == step) for step in to_run}
    marked = [
        Forecast(item.step, "would fail", reasons[item.step]) if reasons.get(item.step) else item
        for item in forecasts
    ]
    return marked, problems


def check_network(
    loaded: LoadedRecipe, plan: Plan, settings: Settings, executor: Executor, watcher: Watcher
) -> None:
    """Refuse a network that cannot be trained or exported, and what no metric can meet, before anything runs.

    Raises ConfigInvalid.
    """
    forecasts = forecast(plan, settings, executor)
    to_run = {item.step for item in forecasts if item.outcome != "cached"}
    examined = _Examination(loaded, plan, to_run, settings.home, watcher, _prepared(forecasts, executor))
    found = Found()
    if "train" in to_run:
        try:
            found = examined.network(loaded.recipe.data.preview())
        except HpmlError:  # prepare says so
            return
    problems = [*([Problem("train", found.problem)] if found.problem else []), *examined.metrics(found)]
    problems += too_large_for_targets(plan, found.largest_graph)
    refuse([problem for problem in problems if problem.step in to_run])


def _prepared(forecasts: Sequence[Forecast], executor: Executor) -> dict[str, JsonValue] | None:
    """What the data turned out to be, as a manifest tells the task; None if they are still to be prepared."""
    digest = next((item.digest for item in forecasts if item.step == "prepare"), "")
    return DatasetSpec.model_validate(executor.store.manifest(digest).spec).task if digest else None


class _Examination:
    def __init__(
        self,
        loaded: LoadedRecipe,
        plan: Plan,
        to_run: set[str],
        home: Path,
        watcher: Watcher,
        prepared: dict[str, JsonValue] | None = None,
    ) -> None:
        self._loaded, self._recipe, self._plan = loaded, loaded.recipe, plan
        self._to_run, self._home, self._watcher, self._prepared = to_run, home, watcher, prepared
        self._task = self._recipe.data.stand_in()

    @property
    def _rows(self) -> str:
        return self._task.rows if self._task else "rows"

    @property
    def _shape_options(self) -> str:
        return self._task.shape_options if self._task else "data"

    def problems(self) -> Iterator[Problem]:
        known = unsupported_reason(self._plan)
        yield from known
        yield from self._targets()
        preview = Preview()
        if "prepare" in self._plan.nodes and not any(problem.step == "prepare" for problem in known):
            try:
                preview = self._recipe.data.preview()
                self._task = preview.task or self._task
                yield from (Problem("prepare", why) for why in self._data(preview))
            except HpmlError as error:
                yield Problem("prepare", str(error))
        found = self.network(preview) if "train" in self._to_run else Found()
        yield from self.metrics(found)
        if why := found.problem or self._too_large(found.widest, preview):
            yield Problem("train", why)
        yield from too_large_for_targets(self._plan, found.largest_graph)
        if "select" in self._plan.nodes:
            yield from (Problem("select", why) for why in unreachable_goals(self._recipe, found.weights))

    def _targets(self) -> Iterator[Problem]:
        targets = {target.label: target.missing() for target in self._recipe.targets}
        missing = {label: why for label, why in targets.items() if why}
        if len(missing) < len(targets):
            for label, why in missing.items():
                self._watcher.say(f"engines of {label} will not be built here: {why}")
            return
        for node in self._plan.nodes.values():
            if node.stage == "export" and node.labels and node.labels[-1] in missing:
                yield Problem(node.name, missing[node.labels[-1]])

    def _data(self, preview: Preview) -> Iterator[str]:
        for remark in preview.remarks:
            self._watcher.say(remark)
        yield from preview.problems
        free = shutil.disk_usage(_existing(self._home)).free
        if preview.bytes_prepared > free:
            yield (
                f"the {preview.rows:,} {self._rows} take {memory.in_words(preview.bytes_prepared)} once"
                f" prepared, the disk of {self._home} has {memory.in_words(free)} left:"
                f" change {self._shape_options}"
            )

    def _too_large(self, widest: int, preview: Preview) -> str:
        """Why a training step cannot fit into memory, by the one output that is largest; empty if it may."""
        if not preview.rows or hardware.gpu_names():
            return ""
        train = self._recipe.train
        data = self._recipe.data
        rows = int(preview.rows * (1 - data.test_fraction) * (1 - data.validation_fraction))
        at_once = min(train.batch_size, rows) // train.accumulate
        needed, here = at_once * widest * _HALF_BYTES, memory.total_bytes()
        if needed <= here:
            return ""
        return (
            f"the largest output of a layer takes at least {memory.in_words(needed)} for {at_once:,}"
            f" {self._rows} at once, this machine has {memory.in_words(here)} of memory: lower"
            f" train.batch_size, the model's sizes or {self._shape_options}, or raise train.accumulate"
        )

    def network(self, preview: Preview) -> Found:
        """What shows of the network without training it; doubts, and why nothing shows, are said."""
        train = self._recipe.train
        try:
            known = train.known_architecture()
        except ConfigInvalid as error:
            return Found(problem="" if train.unsupported_reason() else str(error))
        tokenizer = getattr(self._recipe.data, "tokenizer", None)
        told_by = tokenizer if tokenizer and train.weights_folder and not preview.task else train.weights
        if known is None or told_by != train.weights:
            self._watcher.say(f"the network was not checked: it is known when {told_by} is read")
            return Found()
        architecture = known.model_dump(mode="json")
        weights = None if train.weights_folder else train.weights
        file = weights if isinstance(weights, Path) and not unsupported_weights(weights) else None
        task, facts = self._facts(preview)
        found = probe(
            architecture, task, self._loaded.import_paths, file, facts=facts, trains=train.epochs > 0
        )
        if found.doubt:
            self._watcher.say(f"train may fail, depending on the data: {found.doubt}")
        if found.not_checked:
            self._watcher.say(f"the network was not checked: {found.not_checked}")
        return found

    def _facts(self, preview: Preview) -> tuple[dict[str, JsonValue], Facts]:
        """The task as a manifest tells it, and how much of that is known."""
        if self._prepared:
            return self._prepared, "known"
        task = preview.task or self._recipe.data.stand_in()
        if task is None:
            return {"task": self._recipe.data.users_task}, "stand_in"
        facts: Facts = "stand_in" if preview.task is None else "guess" if preview.is_guess else "known"
        return task.model_dump(mode="json"), facts

    def metrics(self, found: Found) -> Iterator[Problem]:
        """What the recipe asks of a user's own task and it cannot give: those of ours are in the recipe."""
        metrics, task = found.metrics, self._recipe.data.users_task
        if task and not metrics and {"train", "select"} & self._to_run:
            metrics = probe(
                None, {"task": task}, self._loaded.import_paths, None, facts="stand_in", trains=False
            ).metrics
        for key, why in self._recipe.impossible(metrics).items():
            yield Problem("select" if key.startswith("goals") else "train", why)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def unreachable_goals(recipe: Recipe, weights: int) -> Iterator[str]:
    """Goals that no engine can meet, whatever is measured. weights: of the network; 0 if not known."""
    engines = {
        f"{variant}/{target.label}": methods
        for variant, methods in recipe.variants.items()
        for target in recipe.targets
    }
    candidates = {name: methods for name, methods in engines.items() if name != recipe.benchmark.reference}
    if not candidates:
        yield f"no engine can be chosen: the only one is the reference, {recipe.benchmark.reference}"
        return
    most_mb = recipe.goals.max_size_mb
    least_bytes = min(_least_bytes_per_weight(methods) for methods in candidates.values()) * weights
    if most_mb is not None and least_bytes > most_mb * 1e6:
        yield (
            f"goals.max_size_mb {most_mb:g} cannot be met: the {weights:,} weights take at least"
            f" {least_bytes / 1e6:.3g} MB in the smallest variant"
        )


def too_large_for_targets(plan: Plan, weights: int) -> Iterator[Problem]:
    """The exports of the whole network whose files cannot hold it. weights: of its largest graph."""
    for name, node in plan.nodes.items():
        most = getattr(node.config, "most_weights", None)
        made_by = [each.config for each in plan.needed_for(name).nodes.values()]
        is_whole = not any(isinstance(one, Method) and not _keeps_weights(one) for one in made_by)
        if most and weights > most and is_whole:
            yield Problem(
                name,
                f"the network has {weights:,} weights in one graph, an ONNX file holds at most {most:,}"
                " (2 GB of fp32): take a smaller model, or prune it in every variant",
            )


def _keeps_weights(method: Method) -> bool:
    """Whether a network has as many weights afterwards."""
    return isinstance(method, Quantize | Distill)


def _least_bytes_per_weight(methods: Sequence[Method]) -> int:
    """What a weight of the network takes at least; 0 where a method removes an unknown share of them."""
    if not all(map(_keeps_weights, methods)):
        return 0
    return _INT8_BYTES if any(isinstance(method, Quantize) for method in methods) else _HALF_BYTES
