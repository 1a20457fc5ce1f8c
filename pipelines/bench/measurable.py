"""What an argument of `hpml bench` is: a file, a folder, a server, an import path, an engine of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import MANIFEST, Artifact, open_artifact, read_manifest
from hpml.components.prepare.sources import Source
from hpml.core import regular_files, strict_yaml
from hpml.core.contract import validate
from hpml.core.errors import ConfigInvalid, HpmlError, StageFailed, UsageError
from hpml.measuring.subjects import (
    BundleSubject,
    EngineSubject,
    OnnxSubject,
    ServerSubject,
    Subject,
    TorchSubject,
)
from hpml.measuring.subjects.bundle import BUNDLE
from hpml.measuring.subjects.server import parse_url
from hpml.measuring.subjects.tensors import FromOutside, Signature, Tensor, known_of_engine, parse_input
from hpml.models import import_path
from hpml.pipelines import graph, plan, recipe
from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.run_record import FINISHED, RunRecord, StepRecord
from hpml.pipelines.engine.store import Store

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_KINDS = (
    "an ONNX file, the folder of a bundle or of an engine, http://HOST:PORT/v2/models/NAME, "
    "package.module:callable, or RUN:VARIANT such as latest:int8/onnx"
)


@dataclass(frozen=True)
class Hints:
    """What the command line says beside the engines.

    sizes: of the dimensions that models leave open, beside the batch. inputs, arguments: of torch modules.
    model: of servers given without one. recipe: says the arguments of its network, and by its data the input.
    """

    home: Path
    sizes: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[Tensor, ...] = ()
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    recipe: Path | None = None
    model: str = ""
    device: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True)
class Measurable:
    """An argument that can be measured.

    known: fields of `EngineFigures`. import_paths: where modules that it needs may lie.
    """

    subject: Subject
    signature: Signature
    known: dict[str, Any]
    import_paths: tuple[str, ...] = ()


def measurables(arguments: Sequence[str], hints: Hints) -> dict[str, Measurable]:
    """Each argument by a name of its own: itself, and where it is given again, itself and a number."""
    found: dict[str, Measurable] = {}
    for argument in arguments:
        name, count = argument, 2
        while name in found:
            name, count = f"{argument} ({count})", count + 1
        found[name] = measurable(argument, hints)
    return found


def measurable(argument: str, hints: Hints) -> Measurable:
    """What `argument` is.

    Raises UsageError if it is nothing that can be measured, and what reading it raises: StageFailed for a
    damaged artifact, ConfigInvalid where a hint is missing, Unavailable for a server.
    """
    if "://" in argument:
        return _from_outside(parse_url(argument, hints.model), hints)
    path = Path(argument)
    if path.is_file():
        if path.suffix == ".onnx":
            return _from_outside(OnnxSubject(file=path.resolve(), device=hints.device), hints)
        raise UsageError(
            f"{argument} cannot be measured", why="it is not an .onnx file", fix=f"give {_KINDS}"
        )
    if path.is_dir():
        return _folder(path, hints)
    head, colon, tail = argument.partition(":")
    if colon and (head == "latest" or (hints.home / head / "run.json").is_file()):
        return _engine_of_run(hints.home, head, tail)
    if _IMPORT_PATH.fullmatch(argument):
        return _from_outside(_torch_module(argument, hints), hints)
    why = f"it {regular_files.problem(path)}" if path.exists() else "there is no such file or folder"
    if colon:
        why = f"there is no run {head!r} in {hints.home}"
    raise UsageError(f"{argument!r} cannot be measured", why=why, fix=f"give {_KINDS}")


def _torch_module(path: str, hints: Hints) -> TorchSubject:
    """The module at an import path, built with the recipe's arguments and those of the command line.

    With a recipe, its data says what the command line does not. Raises UsageError if it is not the recipe's
    network, and ConfigInvalid if the data does not say what that takes.
    """
    arguments: dict[str, JsonValue] = {}
    inputs = hints.inputs
    folders = [Path.cwd()]
    if hints.recipe:
        loaded = recipe.load(hints.recipe)
        network = loaded.recipe.train.model
        if path != import_path(network.architecture):
            why = f"its network is {import_path(network.architecture)}"
            raise UsageError(f"{path} is not the network of {hints.recipe}", why=why)
        if not inputs or "num_classes" not in hints.arguments:
            inputs, arguments = _told_by_data(loaded.recipe.data, hints, hints.recipe)
        # Training adds two to a recipe's arguments: the channels, and the classes.
        arguments = {**arguments, "in_channels": inputs[0].shape[0], **network.arguments}
        folders += map(Path, loaded.import_paths)
    return TorchSubject(
        path=path,
        arguments={**arguments, **hints.arguments},
        import_paths=tuple(folders),
        device=hints.device,
        inputs=inputs,
    )


def _told_by_data(data: Source, hints: Hints, file: Path) -> tuple[tuple[Tensor, ...], dict[str, JsonValue]]:
    """The inputs, and num_classes if it is known: what the headers of a recipe's images say.

    Raises ConfigInvalid if neither the command line nor the data says the shape of the images.
    """
    preview, why = None, data.unsupported_reason() or "its images are not known before prepare has read them"
    try:
        preview = data.preview()
    except HpmlError as error:
        why = str(error)
    shape_chw = preview.shape_chw(data.image_size) if preview else None
    if not hints.inputs and not shape_chw:
        classes = "" if preview or "num_classes" in hints.arguments else " --arg num_classes=10"
        raise ConfigInvalid(
            f"the data of {file} does not say what the network takes",
            why="its images are of different sizes, and data.image_size is not set" if preview else why,
            fix=f"give the shape of an image: --input 3x32x32{classes}",
        )
    known: dict[str, JsonValue] = {"num_classes": preview.class_count} if preview else {}
    return hints.inputs or parse_inputs(["x".join(map(str, shape_chw or ()))]), known


def _folder(path: Path, hints: Hints) -> Measurable:
    if (path / BUNDLE).is_file():
        return _from_outside(BundleSubject(folder=path.resolve()), hints)
    if not (path / MANIFEST).is_file():
        why = f"the folder has neither {BUNDLE} nor {MANIFEST}"
        raise UsageError(f"{path} cannot be measured", why=why, fix=f"give {_KINDS}")
    kind = read_manifest(path).kind
    if kind != "engine":
        raise UsageError(f"{path} cannot be measured", why=f"it is a {kind}", fix=f"give {_KINDS}")
    return _engine(open_artifact(path, kind="engine"))


def _engine_of_run(home: Path, run: str, name: str) -> Measurable:
    """The engine that a run built, whether or not it could be measured there.

    Raises UsageError if the run has no such engine, or did not get as far.
    """
    record = run_record.load(home, run)
    loaded = recipe.load_of_run(home, record)
    steps = plan.trace(graph.graph, loaded.recipe)
    engines = next(node.inputs["engines"] for node in steps.nodes.values() if node.stage == "benchmark")
    assert not isinstance(engines, str)
    if name not in engines:
        raise UsageError(f"run {record.id} has no engine {name!r}", why=f"it has {', '.join(engines)}")
    step = record.steps.get(engines[name])
    if step is None or step.status not in FINISHED:
        status = step.status if step else "not part of the run"
        raise UsageError(f"run {record.id} did not build {name}", why=f"its step {engines[name]} is {status}")
    return _engine(_open(home, record, step, loaded.recipe.cluster), loaded.import_paths)


def _open(home: Path, record: RunRecord, step: StepRecord, cluster: ClusterConfig) -> Artifact[EngineSpec]:
    """What a step made, from the workspace's store, or from that of the cluster that it ran in."""
    if not step.digest:
        raise UsageError(f"the engines of run {record.id} are not here", why="they are in Kubeflow's store")
    here = Store(home)
    if not record.store or here.object_path(step.digest).exists():
        return here.open(step.digest)
    from hpml.pipelines.cluster.store import open_store
    from hpml.pipelines.terminal.console import err

    store = open_store(home, cluster, lambda text: err.print(text, markup=False, soft_wrap=True))
    if store.lookup(step.key) != step.digest:
        raise StageFailed(
            f"the engine {step.digest[:12]} is no longer in {record.store}",
            fix=f"hpml run {record.recipe_file} --executor kubernetes",
        )
    return store.open(step.digest)


def _engine(engine: Artifact[EngineSpec], import_paths: tuple[str, ...] = ()) -> Measurable:
    if engine.spec.status != "built":
        raise StageFailed(f"the engine in {engine.path} was not built", why=engine.spec.reason)
    taken = Tensor(
        name=engine.spec.input.name, position=0, dtype="float32", shape=engine.spec.input.shape_chw
    )
    subject = EngineSubject(folder=engine.path.resolve())
    return Measurable(subject, Signature((taken,)), known_of_engine(engine.spec), import_paths)


def _from_outside(subject: FromOutside, hints: Hints) -> Measurable:
    signature = subject.signature(hints.sizes)
    filled = subject.model_copy(update={"inputs": signature.inputs})
    if isinstance(filled, ServerSubject):  # asked once: what it refuses is told before anything is timed
        filled.check(filled.open(threads=1))
    return Measurable(filled, signature, filled.known())


# ----------------------------------------------------------------------------------------------- the options


def parse_sizes(given: Sequence[str]) -> dict[str, int]:
    """{"seq": 128} of ("seq=128",).

    Raises UsageError for what is no name and size.
    """
    sizes = {}
    for text in given:
        name, _, size = text.rpartition("=")
        if not name or not size.isdecimal() or not int(size):
            raise UsageError(f"--dim {text} is not valid", fix="give a name and a size: --dim seq=128")
        sizes[name] = int(size)
    return sizes


def parse_arguments(given: Sequence[str]) -> dict[str, JsonValue]:
    """{"width": 32} of ("width=32",); values are YAML, as those of --set.

    Raises UsageError for what is no name and value.
    """
    arguments: dict[str, JsonValue] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise UsageError(f"--arg {text} is not valid", fix="give a name and a value: --arg width=32")
        try:
            parsed = strict_yaml.parse(value, where="it")
            arguments[name] = validate(JsonValue, parsed, where="it")
        except ConfigInvalid as error:
            raise UsageError(f"the value of --arg {name} is not valid", why=error.why) from None
    return arguments


def parse_inputs(given: Sequence[str]) -> tuple[Tensor, ...]:
    """The inputs that --input describes, in order."""
    return tuple(parse_input(text, position) for position, text in enumerate(given))


def parse_batches(given: str) -> tuple[int, ...]:
    """(1, 32) of "1,32".

    Raises UsageError for anything else.
    """
    parts = given.split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise UsageError(f"--batch {given} is not valid", fix="give batch sizes: --batch 1,32")
    return tuple(sorted({int(part) for part in parts}))


def check_batches(found: Mapping[str, Measurable], batches: Sequence[int]) -> None:
    """Raise ConfigInvalid that names what does not take all `batches` and batch 1, which always is timed."""
    for name, item in found.items():
        only = item.signature.batch
        wrong = [batch for batch in {1, *batches} if only is not None and batch != only]
        if wrong:
            raise ConfigInvalid(
                f"{name} takes batches of {only} only",
                why=f"it would be measured at batch {', '.join(map(str, sorted(wrong)))}",
                fix="give --batch 1" if only == 1 else "export it with a free batch",
            )
