"""A deployable bundle, as the stage `bundle` wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, JsonValue, model_validator

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import MANIFEST, read_manifest
from hpml.artifacts.measurements import EngineSettings
from hpml.artifacts.operation import Operation
from hpml.core import regular_files
from hpml.core.contract import Config, validate
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.measuring.subjects.base import Opened
from hpml.measuring.subjects.tensors import (
    Declared,
    FromOutside,
    Signature,
    known_of_engine,
    operation_named,
    operation_tensors,
)
from hpml.targets import AnyTarget

if TYPE_CHECKING:
    from hpml.tasks.base import Runs

BUNDLE = "bundle.json"
_MOST_JSON_BYTES = 16 << 20
_MOST_GOLDEN_BYTES = 1 << 30  # of the inputs and outputs of an operation together


class _Operation(Config):
    """What bundle.json says of an operation; see `Operation` for the rest.

    golden: the file of each input and output. tolerance: of each output, of a number in it.
    """

    model_config = ConfigDict(extra="ignore")

    name: str
    golden: dict[str, str]
    tolerance: dict[str, float]


class BundleFacts(Config):
    """What is read of bundle.json."""

    model_config = ConfigDict(extra="ignore")

    model_name: str = "model"
    model_version: int | str = ""
    engine_digest: str = ""
    engine: EngineSpec
    file: str  # of the first operation's graph; others lie beside it
    unverified: tuple[str, ...] = ()  # goals that the engine was not checked for
    settings: EngineSettings | None = None  # it was measured with; None also of versions before
    measured: dict[str, JsonValue] = Field(
        default_factory=dict
    )  # figures of the engine, as they were registered
    measured_on: str = ""  # the CPU that they are of; of versions before unknown
    operations: tuple[_Operation, ...]
    files: dict[str, str]  # name -> SHA-256

    @model_validator(mode="before")
    @classmethod
    def _of_format_1(cls, given: Any) -> Any:
        """It had one operation, from images to logits."""
        if not isinstance(given, dict) or given.get("format") != 1:
            return given
        golden = given["golden"]
        x, logits = given["inputs"][0]["name"], given["outputs"][0]["name"]
        predict = {
            "name": "predict",
            "golden": {x: golden["x"], logits: golden["logits"]},
            "tolerance": {logits: golden["tolerance"]},
        }
        return {**given, "operations": [predict]}

    @property
    def graph_files(self) -> set[str]:
        """What the runtime opens."""
        return {str(PurePosixPath(self.file).parent / name) for name in self.engine.graphs.values()} | {
            self.file
        }

    @model_validator(mode="after")
    def _agrees_with_engine(self) -> BundleFacts:
        for told, one in zip(self.operations, self.engine.operations, strict=True):
            outputs = {tensor.name for tensor in one.outputs}
            known = {tensor.name for tensor in one.inputs} | outputs
            if told.name != one.name or told.golden.keys() != known or told.tolerance.keys() != outputs:
                raise ValueError("its operations are not those of its engine")
        return self


class BundleSubject(FromOutside):
    """One operation of the bundle in `folder`, checked against its digests and its golden samples.

    operation: "" is the first.
    """

    subject: Literal["bundle"] = "bundle"
    folder: Path
    operation: str = ""

    def signature(self, sizes: Mapping[str, int]) -> Signature:
        """The inputs of the operation, with a free batch; free sizes that are not given as in its samples.

        Raises ConfigInvalid as `_target` and `operation_tensors` do, and if there is no such operation;
        StageFailed naming the file that is missing, changed, or not of the bundle.
        """
        bundle = self.facts()
        self._target(bundle)
        operation = self._operation(bundle)
        self.check_files(bundle)
        golden = {name: self.folder / file for name, file in self._told(bundle).golden.items()}
        main = self.folder / bundle.file
        graph = main.with_name(bundle.engine.graphs.get(operation.graph, main.name))
        return Signature(operation_tensors(str(self.folder), operation, sizes, golden, graph))

    def declared_inputs(self) -> Sequence[Declared]:
        """Those of the operation."""
        return [(one.name, one.dtype, one.shape) for one in self._operation(self.facts()).inputs]

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of those that the bundle has."""
        return tuple(one.name for one in self.facts().operations)

    def known(self) -> dict[str, Any]:
        """What bundle.json says of the engine that is in it."""
        return known_of_engine(self.facts().engine)

    def open(self, *, threads: int, spinning: bool | None = None) -> Opened:
        """Check every file, then load the engine; raises what `load` does."""
        engine, session = self.load(threads=threads, spinning=spinning)
        operation = self._operation(self.facts()).name
        return Opened(
            lambda feeds: session.run(feeds, operation),
            self.feeds,
            engine.identity.get("device", "cpu"),
            outputs=lambda arrays: session.run(self.feeds(arrays), operation),
        )

    def load(self, *, threads: int, spinning: bool | None = None) -> tuple[EngineSpec, Runs]:
        """The engine, every file checked, and what answers its operations.

        Raises what `signature` does.
        """
        bundle = self.facts()
        self.check_files(bundle)
        path = PurePosixPath(bundle.file)
        engine = bundle.engine.model_copy(update={"file": path.name})
        return engine, self._target(bundle).load(
            self.engine_folder, engine, threads=threads, spinning=spinning
        )

    def check_files(self, bundle: BundleFacts) -> None:
        """Raise StageFailed naming the file that is missing, changed, or not of the bundle."""
        from hpml.tasks.packaging.engine_script import BundleError
        from hpml.tasks.packaging.engine_script import check_files as check_digests

        try:
            check_digests(self.folder, bundle.files)
        except BundleError as error:
            raise StageFailed(f"the bundle {self.folder} was changed", why=str(error)) from None
        golden = {file for operation in bundle.operations for file in operation.golden.values()}
        if unlisted := (bundle.graph_files | golden) - bundle.files.keys():
            raise StageFailed(f"the bundle {self.folder} was changed", why=f"{min(unlisted)} has no digest")

    @property
    def digest(self) -> str:
        """Of all its content, as its manifest has it; of one without, bundle.json lists all other files."""
        if (self.folder / MANIFEST).is_file():
            return read_manifest(self.folder).digest
        return regular_files.sha256(self.folder / BUNDLE)

    @property
    def is_whole(self) -> bool:
        """Whether every file is as bundle.json says."""
        try:
            self.check_files(self.facts())
        except StageFailed:
            return False
        return True

    @property
    def engine_folder(self) -> Path:
        """Where the engine lies, with the files of its task. Raises StageFailed if bundle.json is damaged."""
        return self.folder / PurePosixPath(self.facts().file).parent

    def candidates(self, threads: int) -> tuple[EngineSettings, ...]:
        """What the bundle says, as its own script runs it; where that is more than `threads`, or nothing, one
        with so many."""
        said = self.facts().settings
        return (said,) if said and said.threads <= threads else super().candidates(threads)

    def check(self, opened: Opened) -> None:
        """Raise StageFailed if the golden outputs are not reproduced within the bundle's own tolerance."""
        self._check(opened.predict)

    def check_answers(self, runs: Runs) -> None:
        """The same of `runs`, which `load` gave, for every operation."""
        for operation in self.facts().operations:
            subject = self.model_copy(update={"operation": operation.name})
            subject._check(partial(runs.run, operation=operation.name))

    def golden(self, operation: str) -> dict[str, Any]:
        """The golden inputs and outputs of an operation by name.

        Raises StageFailed naming the file that holds no array, or if they are too large to be read.
        """
        import numpy as np

        told = next(one for one in self.facts().operations if one.name == operation)
        found = {}
        for name, file in told.golden.items():
            try:
                found[name] = np.load(self.folder / file, mmap_mode="r", allow_pickle=False)
            except (ValueError, EOFError, OSError):
                raise StageFailed(f"{self.folder / file} holds no array of numbers") from None
        size_bytes = sum(array.nbytes for array in found.values())
        if size_bytes > _MOST_GOLDEN_BYTES:
            raise StageFailed(
                f"the golden samples of {operation} are not read",
                why=f"they have {size_bytes:,} bytes, {_MOST_GOLDEN_BYTES:,} are allowed",
            )
        return {name: np.array(array) for name, array in found.items()}

    def _check(self, predict: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        from hpml.tasks.packaging.engine_script import distance

        bundle = self.facts()
        operation, told = self._operation(bundle), self._told(bundle)
        golden = self.golden(operation.name)
        outputs = predict({one.name: golden[one.name] for one in operation.inputs})
        for name, allowed in told.tolerance.items():
            error = distance(outputs[name], golden[name])
            if not error <= allowed:  # NaN is an error too
                raise StageFailed(
                    "the bundle does not reproduce its golden outputs",
                    why=f"a number of {name} differs by {error:.3g}, {allowed:.3g} is allowed",
                )

    def _operation(self, bundle: BundleFacts) -> Operation:
        return operation_named(f"the bundle {self.folder}", bundle.engine.operations, self.operation)

    def _told(self, bundle: BundleFacts) -> _Operation:
        name = self._operation(bundle).name
        return next(one for one in bundle.operations if one.name == name)

    def facts(self) -> BundleFacts:
        """What bundle.json says. Raises StageFailed if it cannot be read."""
        file = self.folder / BUNDLE
        try:
            if why := regular_files.problem(file):
                raise OSError(f"it {why}")
            if file.stat().st_size > _MOST_JSON_BYTES:
                raise OSError(f"it has more than {_MOST_JSON_BYTES:,} bytes")
            return BundleFacts.model_validate_json(file.read_bytes())
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            why = str(error) if isinstance(error, OSError) else "it was changed, or is of another version"
            raise StageFailed(f"{file} cannot be read", why=why) from None

    def _target(self, bundle: BundleFacts) -> AnyTarget:
        """What built the engine.

        Raises ConfigInvalid for one of another runtime than ONNX Runtime's: opening its engine can run code
        of the bundle's.
        """
        target: AnyTarget = validate(AnyTarget, bundle.engine.target, where="the target of the engine")
        if not target.is_standalone:
            raise ConfigInvalid(
                f"the bundle {self.folder} has no engine of ONNX Runtime's",
                why=f"its engine is {bundle.file} of target {target.target}",
                fix="measure the engine of the run itself: RUN:VARIANT",
            )
        return target
