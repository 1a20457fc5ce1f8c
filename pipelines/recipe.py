"""The recipe: one YAML file that says what a run is for. Checked whole before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, StringConstraints, field_validator, model_validator

from hpml.components.bundle.config import BundleConfig
from hpml.components.compress import AnyMethod
from hpml.components.diagnose.config import DiagnoseConfig
from hpml.components.peaks.config import PeaksConfig
from hpml.components.register.config import RegisterConfig
from hpml.components.train.config import ModelConfig, TrainConfig
from hpml.core import regular_files, strict_yaml
from hpml.core.contract import Config, validate
from hpml.core.errors import ConfigInvalid
from hpml.io.overrides import with_overrides
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.goals import Goals
from hpml.models import ARCHITECTURES
from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.engine.run_record import RunRecord
from hpml.pipelines.retired import RENAMED_KEYS, SECTIONS, drop_retired, rename_sections, tell, tell_renamed
from hpml.targets import AnyTarget
from hpml.tasks import AnySource
from hpml.tasks.image_classification.augment_options import Augment
from hpml.tasks.metric import Limits

STORED = "recipe.yaml"  # in the folder of a run

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,62}$")]
VariantName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.+-]{0,62}$")]


class Recipe(Config):
    """What a run is for: data, model and training, variants, targets, goals. Only `data` has no default."""

    name: Name = "model"  # of the run and of the model in the registry; the file's name if not given
    data: AnySource
    train: TrainConfig = TrainConfig()
    variants: dict[VariantName, tuple[AnyMethod, ...]] = Field(
        default={"fp32": (), "int8": ("quantize",)},  # type: ignore[dict-item]  # a name, expanded
        min_length=1,
    )
    targets: tuple[AnyTarget, ...] = Field(
        default=("onnx",),  # type: ignore[arg-type]  # likewise
        min_length=1,
    )
    benchmark: BenchmarkConfig = BenchmarkConfig()
    peaks: PeaksConfig = PeaksConfig()
    diagnose: DiagnoseConfig = DiagnoseConfig()
    goals: Goals = Goals()
    registry: RegisterConfig = RegisterConfig()
    bundle: BundleConfig = BundleConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _fits_the_task(self) -> Self:
        """What the data says: the network, whether rows can be augmented, the metrics if the task is ours."""
        if self.train.augment != Augment() and not self.data.augments:
            raise ValueError(f"train.augment: rows of {self.data.source} are not augmented; leave it out")
        if "model" not in self.train.model_fields_set and not self.data.default_architecture:
            raise ValueError("train.model is missing: your own task needs its own network")
        ours, model = self.data.task_class.architectures, self.train.model.architecture
        if "model" in self.train.model_fields_set and ours and model in ARCHITECTURES and model not in ours:
            raise ValueError(
                f"train.model: {model} is not for data of {self.data.source}; give one of {', '.join(ours)},"
                " or your own as package.module:callable"
            )
        metrics = {one.name: one.limits for one in getattr(self.data.task_class, "metrics", ())}
        if wrong := self.impossible(metrics):
            raise ValueError("; ".join(wrong.values()))
        return self

    def impossible(self, metrics: Mapping[str, Limits]) -> dict[str, str]:
        """Why what is asked of quality cannot be, by key. metrics: of the task; none: they are not known."""
        if not metrics:
            return {}
        judged_by = self.goals.metric or next(iter(metrics))
        asked = {f"train.required.{name}": name for name in self.train.required} | {"goals.metric": judged_by}
        if unknown := {key: name for key, name in asked.items() if name not in metrics}:
            known = ", ".join(metrics)
            return {
                key: f"{key}: the task has no metric {name!r}; give one of {known}"
                for key, name in unknown.items()
            }
        found = {}
        for name, value in self.train.required.items():
            key = f"train.required.{name}"
            if why := _beyond(metrics[name].least, value, metrics[name].most):
                found[key] = f"{key}: {value:g} cannot be, {name} is {why}"
        key, loss = "goals.max_quality_loss", self.goals.max_quality_loss
        if why := _beyond(0.0, loss, metrics[judged_by].loss):
            found[key] = f"{key}: {loss:g} allows any loss of {judged_by}; give {why}, such as 0.01"
        return found

    @field_validator("targets")
    @classmethod
    def _named_once(cls, targets: tuple[AnyTarget, ...]) -> tuple[AnyTarget, ...]:
        labels = [target.label for target in targets]
        twice = next((label for label in labels if labels.count(label) > 1), "")
        if twice:
            raise ValueError(
                f"{twice} is there twice, and both would be called VARIANT/{twice}: take one out"
            )
        return targets


def _beyond(least: float | None, value: float, most: float | None) -> str:
    """From where to where `value` should be; empty if it is."""
    if (least is None or value >= least) and (most is None or value <= most):
        return ""
    return " and ".join(
        f"at {side} {bound:g}" for side, bound in (("least", least), ("most", most)) if bound is not None
    )


@dataclass(frozen=True)
class LoadedRecipe:
    """A checked recipe, the file it came from, and where the user's own modules are looked for."""

    recipe: Recipe
    file: Path

    @property
    def import_paths(self) -> tuple[str, ...]:
        """The folder of the recipe."""
        return (str(self.file.parent),)


def load(file: Path, overrides: tuple[str, ...] = (), *, say_retired: bool = True) -> LoadedRecipe:
    """Read and check a recipe; `overrides` are "a.b.c=value" with values in YAML.

    Relative paths in a recipe are relative to its file. Keys that no longer do anything are said on stderr;
    not so with `say_retired` false, for the recipe that is stored with a run: it names every key there was.
    Raises ConfigInvalid that names the key.
    """
    fields = _parse(_read(file), file)
    renamed = rename_sections(fields, where=str(file))
    retired = drop_retired(fields)
    fields.setdefault("name", re.sub(r"[^A-Za-z0-9_-]+", "-", file.stem).strip("-")[:63] or "model")
    if overrides:
        overrides, of_overrides = _with_renamed_keys(overrides)
        renamed += of_overrides
        fields = with_overrides(Recipe, fields, overrides, where=str(file))
        retired += drop_retired(fields)
    if say_retired:
        tell_renamed(renamed)
        tell(retired)
    recipe: Recipe = validate(Recipe, fields, where=str(file))
    if "model" not in recipe.train.model_fields_set:
        model = ModelConfig(architecture=recipe.data.default_architecture)
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"model": model})})
    if not recipe.registry.model_name:
        named = recipe.registry.model_copy(update={"model_name": recipe.name})
        recipe = recipe.model_copy(update={"registry": named})
    return LoadedRecipe(_with_absolute_paths(recipe, file.resolve().parent), file.resolve())


def _with_renamed_keys(overrides: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """The overrides with the keys that they change by the names of now, and which sections had another."""
    called, sections = [], []
    for override in overrides:
        key, separator, value = override.partition("=")
        section, dot, rest = RENAMED_KEYS.get(key, key).partition(".")
        called.append(SECTIONS.get(section, section) + dot + rest + separator + value)
        sections += [section] if section in SECTIONS else []
    return tuple(called), sections


def load_of_run(home: Path, record: RunRecord, overrides: tuple[str, ...] = ()) -> LoadedRecipe:
    """The resolved recipe that is stored with a run; the user's own modules are beside the original.

    Raises ConfigInvalid if it cannot be read.
    """
    stored = load(home / record.id / STORED, overrides, say_retired=False)
    return LoadedRecipe(stored.recipe, Path(record.recipe_file))


def check_targets(recipe: Recipe) -> None:
    """A recipe of which nothing can be built on this machine is refused before it starts.

    Raises ConfigInvalid with what each target lacks.
    """
    missing = {target.label: target.missing() for target in recipe.targets}
    if all(missing.values()):
        raise ConfigInvalid(
            "none of the recipe's targets can be built on this machine",
            why="; ".join(f"{name}: {reason}" for name, reason in missing.items()),
            fix="add the target onnx, or run where these are",
        )


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe, every default spelled out."""
    return strict_yaml.dump(recipe.model_dump(mode="json"))


def _read(file: Path) -> str:
    """The text of a recipe. Raises ConfigInvalid."""
    why, fix = regular_files.problem(file), "hpml init writes a new one"
    if not why:
        try:
            with file.open("rb") as opened:
                return opened.read(strict_yaml.MOST_BYTES + 1).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            why = f"is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}"
            fix = "save it as UTF-8"
        except OSError as error:
            why = f"cannot be read: {error.strerror or error}"
    raise ConfigInvalid(f"cannot read the recipe {file}", why=f"it {why}", fix=fix)


def _parse(text: str, file: Path) -> dict[str, Any]:
    fields = strict_yaml.parse(text, where=str(file))
    if not isinstance(fields, dict):
        raise ConfigInvalid(f"{file} is not a recipe", why="it holds no keys", fix="it needs at least: data")
    return fields


def _with_absolute_paths(value: Any, base: Path) -> Any:
    """`value` with every relative Path in it made absolute from `base`."""
    if isinstance(value, Path):
        return base / _expanded(value)
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: _with_absolute_paths(item, base) for name, item in value})
    if isinstance(value, tuple):
        return tuple(_with_absolute_paths(item, base) for item in value)
    if isinstance(value, dict):
        return {key: _with_absolute_paths(item, base) for key, item in value.items()}
    return value


def _expanded(path: Path) -> Path:
    """`path` with the home folder that a leading ~ stands for. Raises ConfigInvalid if nobody has it."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigInvalid(
            f"there is no home folder for {path.parts[0]}", fix="write the path out"
        ) from None
