"""A model that is served: opened from a bundle or an engine, verified, and tried before it answers."""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import EngineSettings
from hpml.artifacts.operation import Operation
from hpml.core import hardware
from hpml.core.contract import validate
from hpml.core.errors import HpmlError, StageFailed
from hpml.measuring.subjects import BundleSubject, EngineSubject
from hpml.targets import AnyTarget
from hpml.tasks import Task, task_of
from hpml.tasks.base import Runs
from hpml.tasks.drift.baseline import read_reference
from hpml.tasks.drift.live import Drift
from hpml.tasks.drift.observed import of_arrays
from hpml.tasks.endpoint import Endpoint
from hpml.tasks.packaging.base import PROCESSING

if TYPE_CHECKING:
    import onnx
    from numpy.typing import NDArray

_WITH_NAN = (1, 10, 11, 16)  # float, float16, double, bfloat16 of TensorProto.DataType
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
MOST_NODES = 100_000  # of a graph: ONNX Runtime takes minutes and gigabytes to open a larger one


@dataclass(frozen=True)
class Texts:
    """A model of texts: its task, and a folder of its own with the task's files."""

    task: Task
    own: tempfile.TemporaryDirectory[str]

    @property
    def files(self) -> Path:
        """Copies of the task's files: the bundle may be moved while it is served."""
        return Path(self.own.name)

    @property
    def continues(self) -> bool:
        """Whether it goes on with any text; else it answers turns only."""
        return type(self.task).continuation is not Task.continuation


@dataclass(frozen=True)
class ServedModel:
    """An engine that answered its golden samples as when it was made.

    digest: of the engine as it was exported. endpoint: how it is asked in the words of its task; None: only
    by named arrays. texts: where it goes on with texts. unverified: which goals it was not checked for, in
    words. release: of a bundle, the digest of all of it; answers carry it. drift: counts how far requests are
    from the validation split; None: there is no reference.
    """

    name: str
    version: str
    digest: str
    spec: EngineSpec
    runs: Runs
    settings: EngineSettings
    endpoint: Endpoint | None = None
    texts: Texts | None = None
    unverified: tuple[str, ...] = ()
    release: str = ""
    largest_sizes: Mapping[str, int] = field(default_factory=dict)  # of free dimensions
    drift: Drift | None = None

    @property
    def operations(self) -> Mapping[str, Operation]:
        """By the names that clients use: the first operation has the model's own, others follow a dot."""
        first, *others = self.spec.operations
        return {self.name: first} | {f"{self.name}.{one.name}": one for one in others}


def open_bundle(folder: Path, *, threads: int = 0, run_code: bool = False) -> ServedModel:
    """The model of the bundle in `folder`.

    threads: of its engine; 0: those it was measured with. run_code: whether the pre- and post-processing of a
    user's own task, which is Python in the bundle, is run.

    Raises StageFailed if a file is missing, changed or not listed, if the engine is bound to other hardware,
    is no graph that can be opened safely, or does not answer its golden samples within their tolerance;
    ConfigInvalid for an engine of a runtime that could run code of the bundle's.
    """
    folder = folder.resolve()  # a link may point elsewhere by and by
    subject = BundleSubject(folder=folder)
    told = subject.facts()
    if not _NAME.fullmatch(told.model_name):
        raise StageFailed("the bundle is not served", why=f"{told.model_name[:80]!r} is no name for a model")
    subject.check_files(told)
    settings = told.settings or EngineSettings(threads=hardware.usable_cores())
    settings = settings.model_copy(update={"threads": threads}) if threads else settings
    for file in told.graph_files:
        _check_graph(folder / file)
    spec, runs = subject.load(threads=settings.threads, spinning=settings.spinning)
    subject.check_answers(runs)
    _check_signature({one.name: subject.golden(one.name) for one in spec.operations}, spec, runs)
    return ServedModel(
        name=told.model_name,
        version=str(told.model_version),
        digest=told.engine_digest,
        spec=spec,
        runs=runs,
        settings=settings,
        endpoint=_endpoint(folder, spec, run_code=run_code),
        texts=_texts(spec, (folder / told.file).parent),
        largest_sizes=largest_sizes(spec),
        drift=_drift(spec, folder),
        unverified=told.unverified,
        release=subject.digest,
    )


def open_engine(engine: Artifact[EngineSpec], *, name: str, version: str, threads: int = 0) -> ServedModel:
    """The model of an engine artifact, as the registry has it; see `open_bundle`.

    Raises StageFailed as that does.
    """
    settings = EngineSettings(threads=threads or hardware.usable_cores())
    target: AnyTarget = validate(AnyTarget, engine.spec.target, where="the target of the engine")
    if target.is_standalone:
        for file in {engine.spec.file, *engine.spec.graphs.values()}:
            _check_graph(engine.file(file))
    for operation in engine.spec.operations:
        subject = EngineSubject(folder=engine.path, operation=operation.name)
        subject.check(subject.open(threads=settings.threads))
    return ServedModel(
        name=name,
        version=version,
        digest=engine.digest,
        spec=engine.spec,
        runs=target.load(engine.path, engine.spec, threads=settings.threads),
        settings=settings,
        endpoint=_endpoint(engine.path, engine.spec, run_code=False),
        texts=_texts(engine.spec, engine.path),
        largest_sizes=largest_sizes(engine.spec),
        drift=_drift(engine.spec, engine.path),
    )


def _endpoint(folder: Path, spec: EngineSpec, *, run_code: bool) -> Endpoint | None:
    """That of the task; of a user's own, whose module is not here, what the bundle ships of it."""
    if ":" not in str(spec.task.get("task")):
        return task_of(spec.task).endpoint()
    if not run_code or not (folder / PROCESSING).is_file():
        return None
    from hpml.serving.processing import processing_endpoint

    return processing_endpoint(folder)


def _texts(spec: EngineSpec, files: Path) -> Texts | None:
    """Where the task is one of ours that talks."""
    if ":" in str(spec.task.get("task")):
        return None
    task = task_of(spec.task)
    if not task.talks:
        return None
    own = tempfile.TemporaryDirectory(prefix="hpml-serve-")
    for name in task.files:
        shutil.copyfile(files / name, Path(own.name) / name)
    return Texts(task, own)


def _drift(spec: EngineSpec, folder: Path) -> Drift | None:
    reference = read_reference(folder, spec.operations)
    if reference is None:
        return None
    is_users = ":" in str(spec.task.get("task"))
    return Drift(reference, of_arrays if is_users else task_of(spec.task).observed)


def largest_sizes(spec: EngineSpec) -> dict[str, int]:
    """How large a request may make free dimensions, by their names, where the task is one of ours."""
    return {} if ":" in str(spec.task.get("task")) else task_of(spec.task).largest_sizes()


def _check_signature(golden: Mapping[str, Mapping[str, NDArray[Any]]], spec: EngineSpec, runs: Runs) -> None:
    """Raise StageFailed if the golden samples are not what the operations say, or the batch is not free."""
    for operation in spec.operations:
        arrays = golden[operation.name]
        for one in (*operation.inputs, *operation.outputs):
            array = arrays[one.name]
            fixed = [size for size in one.shape if isinstance(size, int)]
            own = [size for size, told in zip(array.shape, one.shape, strict=False) if isinstance(told, int)]
            if str(array.dtype) != one.dtype or array.ndim != len(one.shape) or fixed != own or not one.shape:
                raise StageFailed(
                    "the bundle is not served",
                    why=f"golden {one.name} of {operation.name} is {array.dtype} {array.shape}, not"
                    f" {one.dtype} {one.shape}",
                )
        first = {one.name: arrays[one.name][:1] for one in operation.inputs}
        outputs = runs.run(first, operation.name)
        for one in operation.outputs:
            if outputs[one.name].shape != arrays[one.name][:1].shape:
                raise StageFailed(
                    "the bundle is not served",
                    why=f"of one row, {one.name} of {operation.name} has the shape {outputs[one.name].shape}",
                )


def _check_graph(file: Path) -> None:
    """Raise StageFailed for a graph that is too large to be opened, or has weights that are no numbers."""
    from hpml.targets.onnx_file import inlined_nodes, nodes, read_runnable, tensors

    try:
        model = read_runnable(file)
    except HpmlError as error:
        raise StageFailed(f"{file.name} is not served", why=error.why or error.what) from None
    if (count := max(sum(1 for _ in nodes(model)), inlined_nodes(model))) > MOST_NODES:
        counted = "without end" if math.isinf(count) else f"{count:,.0f}"
        raise StageFailed(
            f"{file.name} is not served",
            why=f"its nodes, functions in their places, are {counted}; {MOST_NODES:,} are allowed",
        )
    for tensor in tensors(model):
        if tensor.data_type in _WITH_NAN and not _is_finite(tensor, file):
            raise StageFailed(
                f"{file.name} is not served", why=f"its weights {tensor.name!r} are not all numbers"
            )


def _is_finite(tensor: onnx.TensorProto, file: Path) -> bool:
    import numpy as np
    from onnx import numpy_helper

    try:
        return bool(
            np.isfinite(numpy_helper.to_array(tensor, base_dir=str(file.parent)).astype(np.float32)).all()
        )
    except Exception as error:  # whatever a hostile file makes of it
        raise StageFailed(
            f"{file.name} is not served", why=f"its weights {tensor.name!r} cannot be read: {error}"
        ) from None
