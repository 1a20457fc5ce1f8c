"""What an argument of `hpml bench` is: a file, a folder, a server, an import path, an engine of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import MANIFEST, Artifact, open_artifact, read_manifest
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
from hpml.measuring.subjects.fills import Fill
from hpml.measuring.subjects.server import parse_url
from hpml.measuring.subjects.tensors import (
    FromOutside,
    Signature,
    Tensor,
    known_of_engine,
    operation_named,
    operation_tensors,
    parse_input,
)
from hpml.models import import_path
from hpml.pipelines import graph, plan, recipe
from hpml.pipelines.bench.recipe_network import RecipeNetwork, network_of
from hpml.pipelines.bench.sample_file import SampleFile
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.run_record import FINISHED
from hpml.pipelines.engine.step_artifacts import made_by
from hpml.tasks.image_classification.sources import ImageSource

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_KINDS = (
    "an ONNX file, the folder of a bundle or of an engine, http://HOST:PORT/v2/models/NAME, "
    "package.module:callable, or RUN:VARIANT such as latest:int8/onnx"
)


@dataclass(frozen=True)
class Hints:
    """What the command line says beside the engines.

    sizes: of the dimensions that models leave open, beside the batch. inputs, arguments: of torch modules.
    operation: of what has several; "" is the first of each. model: of servers given without one. recipe: says
    the arguments of its network, and by its data the input. samples: real ones, which say the sizes of
    dimensions that are open, too. network: that of the recipe, where its data are no pictures.
    """

    home: Path
    sizes: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[Tensor, ...] = ()
    arguments: Mapping[str, JsonValue] = field(default_factory=dict)
    recipe: Path | None = None
    operation: str = ""
    model: str = ""
    device: Literal["cpu", "cuda"] = "cpu"
    samples: SampleFile | None = None
    network: RecipeNetwork | None = None


@dataclass(frozen=True)
class Measurable:
    """An argument that can be measured.

    known: fields of `EngineFigures`. import_paths: where modules that it needs may lie. operations: by name,
    that which is measured in front; none of what answers in one way only.
    """

    subject: Subject
    signature: Signature
    known: dict[str, Any]
    import_paths: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()


def with_network(hints: Hints, arguments: Sequence[str]) -> Hints:
    """`hints` with what the recipe's task says of its network, if that is among `arguments`.

    Then all are given the task's validation rows, unless there are other samples. Of pictures nothing is
    prepared: their headers say enough. Raises what `network_of` does.
    """
    if not hints.recipe:
        return hints
    loaded = recipe.load(hints.recipe)
    model = loaded.recipe.train.model
    if isinstance(loaded.recipe.data, ImageSource) or import_path(model.architecture) not in arguments:
        return hints
    if hints.inputs:
        why = f"the task of {hints.recipe} says what its network takes"
        raise UsageError(
            "--input cannot be given here", why=why, fix="leave it out; samples of yours are --data"
        )
    given = {**model.arguments, **hints.arguments}
    network = network_of(hints.home, loaded, given, hints.operation)
    return replace(hints, network=network, samples=hints.samples or network.samples)


def measurables(arguments: Sequence[str], hints: Hints) -> dict[str, Measurable]:
    """Each argument by a name of its own: itself, and where it is given again, itself and a number.

    Those that take the same get the same numbers. Raises what `measurable` does.
    """
    found: dict[str, Measurable] = {}
    for argument in arguments:
        name, count = argument, 2
        while name in found:
            name, count = f"{argument} ({count})", count + 1
        found[name] = measurable(argument, hints)
    if hints.operation and not any(item.operations for item in found.values()):
        raise UsageError(
            f"there is no operation {hints.operation!r}",
            why=f"{', '.join(found)} {'have' if len(found) > 1 else 'has'} no named operations",
            fix="leave --operation out, or give what has some: the folder of a bundle, or RUN:VARIANT",
        )
    if hints.samples:
        hints.samples.check_all_taken()
        return found
    return _alike_filled(_aligned(found))


def _aligned(found: Mapping[str, Measurable]) -> dict[str, Measurable]:
    """With the same inputs as the first by name, but in another order: they are numbered as its are."""
    places = {tensor.name: tensor.position for tensor in next(iter(found.values())).signature.inputs}
    return {
        name: _with_inputs(
            item,
            [tensor.model_copy(update={"position": places[tensor.name]}) for tensor in item.signature.inputs],
        )
        if {tensor.name for tensor in item.signature.inputs} == places.keys()
        else item
        for name, item in found.items()
    }


def _alike_filled(found: Mapping[str, Measurable]) -> dict[str, Measurable]:
    """With the same numbers for the same inputs: what one of them tells holds for all; ids that all know."""
    fills: dict[str, Fill] = {}
    for tensor in (tensor for item in found.values() for tensor in item.signature.inputs):
        known, own = fills.get(tensor.samples), tensor.filling
        if known is None or (known.is_guess, known.below or math.inf) > (own.is_guess, own.below or math.inf):
            fills[tensor.samples] = own
    return {
        name: _with_inputs(
            item,
            [tensor.model_copy(update={"fill": fills[tensor.samples]}) for tensor in item.signature.inputs],
        )
        for name, item in found.items()
    }


def _with_inputs(item: Measurable, inputs: Sequence[Tensor]) -> Measurable:
    subject = item.subject
    if isinstance(subject, FromOutside):
        subject = subject.model_copy(update={"inputs": tuple(inputs)})
    return replace(item, subject=subject, signature=Signature(tuple(inputs), item.signature.batch))


def measurable(argument: str, hints: Hints) -> Measurable:
    """What `argument` is.

    Raises UsageError if it is nothing that can be measured, and what reading it raises: StageFailed for a
    damaged artifact, ConfigInvalid where a hint is missing, Unavailable for a server.
    """
    if "://" in argument:
        return _from_outside(parse_url(argument, hints.model), hints, argument)
    path = Path(argument)
    if path.is_file():
        if path.suffix == ".onnx":
            return _from_outside(OnnxSubject(file=path.resolve(), device=hints.device), hints, argument)
        raise UsageError(
            f"{argument} cannot be measured", why="it is not an .onnx file", fix=f"give {_KINDS}"
        )
    if path.is_dir():
        return _folder(path, hints)
    head, colon, tail = argument.partition(":")
    if colon and (head == "latest" or (hints.home / head / "run.json").is_file()):
        return _engine_of_run(hints, head, tail)
    if _IMPORT_PATH.fullmatch(argument):
        found = _from_outside(_torch_module(argument, hints), hints, argument)
        if network := hints.network:
            return replace(found, operations=network.operations, import_paths=network.import_paths)
        return found
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
    inputs, task, operation = hints.inputs, {}, None
    folders = [Path.cwd()]
    if hints.recipe:
        loaded = recipe.load(hints.recipe)
        network = loaded.recipe.train.model
        if path != import_path(network.architecture):
            why = f"its network is {import_path(network.architecture)}"
            raise UsageError(f"{path} is not the network of {hints.recipe}", why=why)
        if hints.network:
            task, operation = hints.network.task, hints.network.operation
            arguments = hints.network.arguments
        else:
            assert isinstance(loaded.recipe.data, ImageSource), "else there is the network"
            if not inputs or "num_classes" not in hints.arguments:
                inputs, arguments = _told_by_data(loaded.recipe.data, hints, hints.recipe)
            # Training adds two to a recipe's arguments: the channels, and the classes.
            arguments = {**arguments, "in_channels": inputs[0].shape[0]}
        arguments = {**arguments, **network.arguments}
        folders += map(Path, loaded.import_paths)
    return TorchSubject(
        path=path,
        arguments={**arguments, **hints.arguments},
        import_paths=tuple(folders),
        device=hints.device,
        inputs=inputs,
        task=task,
        operation=operation,
    )


def _told_by_data(
    data: ImageSource, hints: Hints, file: Path
) -> tuple[tuple[Tensor, ...], dict[str, JsonValue]]:
    """The inputs, and num_classes if it is known: what the headers of a recipe's images say.

    Raises ConfigInvalid if neither the command line nor the data says the shape of the images.
    """
    preview, why = None, data.unsupported_reason() or "its images are not known before prepare has read them"
    try:
        preview = data.preview_pictures()
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
        subject = BundleSubject(folder=path.resolve(), operation=hints.operation)
        return replace(
            _from_outside(subject, hints, str(path)), operations=_in_front(subject.operations, hints)
        )
    if not (path / MANIFEST).is_file():
        why = f"the folder has neither {BUNDLE} nor {MANIFEST}"
        raise UsageError(f"{path} cannot be measured", why=why, fix=f"give {_KINDS}")
    kind = read_manifest(path).kind
    if kind != "engine":
        raise UsageError(f"{path} cannot be measured", why=f"it is a {kind}", fix=f"give {_KINDS}")
    return _engine(open_artifact(path, kind="engine"), hints)


def _engine_of_run(hints: Hints, run: str, name: str) -> Measurable:
    engine, import_paths = engine_of_run(hints.home, run, name)
    return _engine(engine, hints, import_paths)


def engine_of_run(home: Path, run: str, name: str) -> tuple[Artifact[EngineSpec], tuple[str, ...]]:
    """The engine that a run built, whether or not it could be measured there; "" is the one that it chose.

    And where the user's own modules may lie. Raises UsageError if the run has no such engine, or did not get
    as far.
    """
    record = run_record.load(home, run)
    loaded = recipe.load_of_run(home, record)
    steps = plan.trace(graph.graph, loaded.recipe)
    by_stage = {node.stage: node for node in steps.nodes.values()}
    engines = by_stage["benchmark"].inputs["engines"]
    assert not isinstance(engines, str)
    engines = {**engines, "": by_stage["select"].name}
    if name not in engines:
        raise UsageError(
            f"run {record.id} has no engine {name!r}", why=f"it has {', '.join(filter(None, engines))}"
        )
    step = record.steps.get(engines[name])
    if step is None or step.status not in FINISHED:
        status = step.status if step else "not part of the run"
        what = f"build {name}" if name else "choose an engine"
        raise UsageError(f"run {record.id} did not {what}", why=f"its step {engines[name]} is {status}")
    return made_by(home, record, engines[name], loaded.recipe.cluster), loaded.import_paths


def _engine(engine: Artifact[EngineSpec], hints: Hints, import_paths: tuple[str, ...] = ()) -> Measurable:
    from hpml.tasks.golden import golden_file  # numpy, which the client does not have

    spec, where = engine.spec, f"the engine in {engine.path}"
    if spec.status != "built":
        raise StageFailed(f"{where} was not built", why=spec.reason)
    operation = operation_named(where, spec.operations, hints.operation)
    sizes = dict(hints.sizes)
    if hints.samples:
        declared = [(one.name, one.dtype, one.shape) for one in operation.inputs]
        sizes = hints.samples.sizes(where, declared, sizes)
    golden = {
        one.name: engine.file(golden_file(spec.operations, operation, one.name)) for one in operation.inputs
    }
    graph = engine.path / spec.graphs.get(operation.graph, spec.file)
    signature = Signature(operation_tensors(where, operation, sizes, golden, graph))
    if hints.samples:
        signature = hints.samples.fed(where, signature)
    subject = EngineSubject(
        folder=engine.path.resolve(),
        operation=operation.name,
        arrays={tensor.name: tensor.array for tensor in signature.inputs},
    )
    names = _in_front([one.name for one in spec.operations], hints)
    return Measurable(subject, signature, known_of_engine(spec), import_paths, names)


def _in_front(operations: Sequence[str], hints: Hints) -> tuple[str, ...]:
    """The names of several operations, that which is measured first; of one operation none."""
    chosen = hints.operation or operations[0]
    return (chosen, *(name for name in operations if name != chosen)) if len(operations) > 1 else ()


def _from_outside(subject: FromOutside, hints: Hints, argument: str) -> Measurable:
    if hints.samples:
        signature = _fed(subject, hints.sizes, hints.samples, argument)
    else:
        signature = subject.signature(hints.sizes)
    filled = subject.model_copy(update={"inputs": signature.inputs})
    if isinstance(filled, ServerSubject):  # asked once: what it refuses is told before anything is timed
        filled.check(filled.open(threads=1))
    return Measurable(filled, signature, filled.known())


def _fed(subject: FromOutside, sizes: Mapping[str, int], samples: SampleFile, where: str) -> Signature:
    """What it takes, fed with `samples`. where: how messages call it."""
    if isinstance(subject, TorchSubject) and not subject.operation:
        subject = subject.model_copy(update={"inputs": samples.described(where, subject.inputs)})
    return samples.fed(where, subject.signature(samples.sizes(where, subject.declared_inputs(), sizes)))


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
