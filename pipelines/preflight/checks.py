"""What of a run would surely fail on this machine: all of it at once, before anything is started."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpml.components.compress import Method
from hpml.components.compress.distill import Distill
from hpml.components.compress.quantize import Quantize
from hpml.components.prepare.sources import Preview
from hpml.core import hardware, memory
from hpml.core.errors import ConfigInvalid, HpmlError
from hpml.pipelines.engine.execution import Forecast, Settings, forecast
from hpml.pipelines.executors.base import Executor, Watcher
from hpml.pipelines.plan import Plan
from hpml.pipelines.preflight import applicability
from hpml.pipelines.preflight.network_probe import Found, probe
from hpml.pipelines.recipe import LoadedRecipe, Recipe
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
    examined = _Examination(loaded, plan, to_run, settings.home, watcher)
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


class _Examination:
    def __init__(
        self, loaded: LoadedRecipe, plan: Plan, to_run: set[str], home: Path, watcher: Watcher
    ) -> None:
        self._loaded, self._recipe, self._plan = loaded, loaded.recipe, plan
        self._to_run, self._home, self._watcher = to_run, home, watcher

    def problems(self) -> Iterator[Problem]:
        known = unsupported_reason(self._plan)
        yield from known
        yield from self._targets()
        preview = None
        if "prepare" in self._plan.nodes and not any(problem.step == "prepare" for problem in known):
            try:
                if preview := self._recipe.data.preview():
                    yield from (Problem("prepare", why) for why in self._data(preview))
            except HpmlError as error:
                yield Problem("prepare", str(error))
        weights = 0
        if "train" in self._to_run:
            found = self._network(preview)
            weights = found.weights
            if why := found.problem or self._too_large(found.widest, preview):
                yield Problem("train", why)
        if "select" in self._plan.nodes:
            yield from (Problem("select", why) for why in unreachable_goals(self._recipe, weights))

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
        if preview.left_out:
            from hpml.components.prepare.checks import counted

            self._watcher.say(f"prepare will leave out, as no images: {counted(preview.left_out, 'file')}")
        if preview.class_count < 2:
            yield f"the data has {preview.class_count} class, two are needed"
        size, side = self._recipe.data.image_size, max(preview.largest_hw)
        if size is None and preview.smallest_hw != preview.largest_hw:
            yield "its images are of different sizes: set data.image_size"
        if size is not None and size < side and self._recipe.data.source != "folder":
            yield f"image_size {size} is smaller than the images, whose side is {side}"
        shape_chw = preview.shape_chw(size)
        needed = preview.images * math.prod(shape_chw or (0,))
        free = shutil.disk_usage(_existing(self._home)).free
        if needed > free:
            yield (
                f"the {preview.images:,} images take {memory.in_words(needed)} once prepared, the disk of"
                f" {self._home} has {memory.in_words(free)} left: lower data.image_size"
            )

    def _too_large(self, widest: int, preview: Preview | None) -> str:
        """Why a training step cannot fit into memory, by the one output that is largest; empty if it may."""
        if preview is None or hardware.gpu_names():
            return ""
        train = self._recipe.train
        rows = int(preview.images * (1 - self._recipe.data.test_fraction))
        images = min(train.batch_size, rows) // train.accumulate
        needed, here = images * widest * _HALF_BYTES, memory.total_bytes()
        if needed <= here:
            return ""
        return (
            f"the largest output of a layer takes at least {memory.in_words(needed)} for {images:,} images at"
            f" once, this machine has {memory.in_words(here)} of memory: lower train.batch_size, the model's"
            " sizes or data.image_size, or raise train.accumulate"
        )

    def _network(self, preview: Preview | None) -> Found:
        model = self._recipe.train.model
        architecture = {"name": model.architecture, "arguments": model.arguments}
        shape_chw = preview.shape_chw(self._recipe.data.image_size) if preview else None
        classes = preview.class_count if preview else 10
        weights = self._recipe.train.weights
        file = weights if isinstance(weights, Path) and not unsupported_weights(weights) else None
        if preview and preview.channels == 1 and preview.looked_at < preview.images:
            file = None  # one of those not looked at may be in colour
        trains = self._recipe.train.epochs > 0
        found = probe(architecture, shape_chw, classes, self._loaded.import_paths, file, trains=trains)
        if found.not_checked:
            self._watcher.say(f"the network was not checked: {found.not_checked}")
        return found


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


def _least_bytes_per_weight(methods: Sequence[Method]) -> int:
    """What a weight of the network takes at least; 0 where a method removes an unknown share of them."""
    if any(not isinstance(method, Quantize | Distill) for method in methods):
        return 0
    return _INT8_BYTES if any(isinstance(method, Quantize) for method in methods) else _HALF_BYTES
