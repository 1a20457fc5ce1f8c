"""A deployable bundle, as the stage `bundle` wrote it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, ValidationError

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.measurements import EngineSettings
from hpml.core.contract import Config, validate
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.measuring.subjects.base import Opened
from hpml.measuring.subjects.tensors import FromOutside, Signature, Tensor, known_of_engine
from hpml.targets import AnyTarget

if TYPE_CHECKING:
    from hpml.measuring.subjects.base import Arrays

BUNDLE = "bundle.json"
_MANIFESTS = {BUNDLE, "manifest.json"}


class _Golden(Config):
    images: str
    x: str
    logits: str
    tolerance: float  # of a logit, absolute


class _Bundle(Config):
    """What is read of bundle.json."""

    model_config = ConfigDict(extra="ignore")

    engine: EngineSpec
    file: str
    settings: EngineSettings | None = None  # it was measured with; None also of versions before
    golden: _Golden
    files: dict[str, str]  # name -> SHA-256


class BundleSubject(FromOutside):
    """The bundle in `folder`, checked against its digests and its golden samples."""

    subject: Literal["bundle"] = "bundle"
    folder: Path

    def signature(self, sizes: Mapping[str, int]) -> Signature:
        """x_nchw, with a free batch.

        Raises ConfigInvalid as `_target` does.
        """
        bundle = self._bundle()
        self._target(bundle)
        taken = bundle.engine.input
        return Signature((Tensor(name=taken.name, position=0, dtype="float32", shape=taken.shape_chw),))

    def known(self) -> dict[str, Any]:
        """What bundle.json says of the engine that is in it."""
        return known_of_engine(self._bundle().engine)

    def open(self, *, threads: int, spinning: bool | None = None) -> Opened:
        """Check every file, then load the engine.

        Raises StageFailed naming the file that is missing, changed, or not of the bundle; ConfigInvalid as
        `_target` does.
        """
        bundle = self._bundle()
        _check_files(self.folder, bundle.files)
        unlisted = {bundle.file, bundle.golden.x, bundle.golden.logits} - bundle.files.keys()
        if unlisted:
            raise StageFailed(f"the bundle {self.folder} was changed", why=f"{min(unlisted)} has no digest")
        file = self.folder / bundle.file
        engine = bundle.engine.model_copy(update={"file": file.name})
        session = self._target(bundle).load(file.parent, engine, threads=threads, spinning=spinning)
        return Opened(
            session.predict,
            self._x_nchw,
            engine.identity.get("device", "cpu"),
            outputs=lambda arrays: {"logits": session.predict(self._x_nchw(arrays))},
        )

    def candidates(self, threads: int) -> tuple[EngineSettings, ...]:
        """What the bundle says, as its own script runs it; where that is more than `threads`, or nothing, one
        with so many."""
        said = self._bundle().settings
        return (said,) if said and said.threads <= threads else super().candidates(threads)

    def check(self, opened: Opened) -> None:
        """Raise StageFailed if the golden logits are not reproduced within the bundle's own tolerance."""
        import numpy as np

        golden = self._bundle().golden
        x_nchw, expected = (
            np.load(self.folder / name, allow_pickle=False) for name in (golden.x, golden.logits)
        )
        logits = opened.predict(x_nchw)
        error = float(np.abs(logits - expected).max()) if logits.shape == expected.shape else float("inf")
        if not error <= golden.tolerance:  # NaN is an error too
            raise StageFailed(
                "the bundle does not reproduce its golden outputs",
                why=f"a logit differs by {error:.3g}, {golden.tolerance:g} is allowed",
            )

    def _bundle(self) -> _Bundle:
        try:
            return _Bundle.model_validate(json.loads((self.folder / BUNDLE).read_text()))
        except (OSError, ValueError, ValidationError) as error:
            why = error if isinstance(error, OSError) else "it was changed, or is of another version"
            raise StageFailed(f"{self.folder / BUNDLE} cannot be read", why=str(why)) from None

    def _target(self, bundle: _Bundle) -> AnyTarget:
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

    def _x_nchw(self, arrays: Arrays) -> Any:
        return arrays[self.inputs[0].array]


def _check_files(folder: Path, digests: Mapping[str, str]) -> None:
    """Compare the files in `folder` with their SHA-256, as the bundle's own script does.

    Raises StageFailed naming the file that is missing, changed, or that nobody listed.
    """
    for name, digest in digests.items():
        path, file = PurePosixPath(name), folder / name
        if path.is_absolute() or ".." in path.parts or file.is_symlink() or not file.is_file():
            raise StageFailed(f"the bundle {folder} is damaged", why=f"{name} is missing")
        if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise StageFailed(
                f"the bundle {folder} was changed", why=f"the SHA-256 of {name} is not that of {BUNDLE}"
            )
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if not file.is_dir() and name not in {*digests, *_MANIFESTS} and "__pycache__" not in file.parts:
            raise StageFailed(f"the bundle {folder} was changed", why=f"{name} does not belong to it")
