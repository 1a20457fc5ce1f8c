"""An engine of a run, as the stage `export` wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import open_artifact
from hpml.artifacts.measurements import EngineSettings
from hpml.core.contract import validate
from hpml.core.errors import StageFailed
from hpml.measuring.subjects.base import Opened, Subject, of_each_variant
from hpml.targets import AnyTarget

if TYPE_CHECKING:
    from hpml.measuring.subjects.base import Arrays


class EngineSubject(Subject):
    """The engine artifact in `folder`, checked against its golden samples. Its one input is x_nchw.

    variant: which of its builds, a folder in `folder`.
    """

    subject: Literal["engine"] = "engine"
    folder: Path
    variant: str = ""
    golden_tolerance: float = Field(default=0.02, gt=0, le=1)  # of a logit, as a share of the largest

    def open(self, *, threads: int, spinning: bool | None = None) -> Opened:
        """Load it with the code of its target; the stage has verified its files."""
        import numpy as np

        spec = self._spec().of_variant(self.variant)
        session = self._target(spec).load(
            self.folder / self.variant, spec, threads=threads, spinning=spinning
        )
        device = spec.identity.get("device", "cpu").partition(" ")[0]
        return Opened(
            session.predict,
            _x_nchw,
            device,
            stream=getattr(session, "stream", None),
            thread_safe=getattr(session, "thread_safe", True),
            outputs=lambda arrays: {"logits": session.predict(np.asarray(arrays["x_nchw"], np.float32))},
        )

    def candidates(self, threads: int) -> tuple[EngineSettings, ...]:
        """Those of its target, for each of its builds."""
        spec = self._spec()
        return of_each_variant(self._target(spec).candidates(spec, threads), spec.variants)

    def of_variant(self, name: str) -> EngineSubject:
        """The build in the folder `name`."""
        return self.model_copy(update={"variant": name})

    def check(self, opened: Opened) -> None:
        """Raise StageFailed if the golden logits are not reproduced."""
        import numpy as np

        golden = np.load(self.folder / self.variant / "golden_logits.npy", allow_pickle=False)
        logits = opened.predict(np.load(self.folder / "golden_x_nchw.npy", allow_pickle=False))
        if logits.shape != golden.shape:
            raise StageFailed(
                "it does not reproduce its golden outputs",
                why=f"logits of shape {logits.shape} instead of {golden.shape}",
            )
        error = float(np.abs(logits - golden).max() / np.abs(golden).max())
        if not error <= self.golden_tolerance:  # NaN is an error too
            raise StageFailed(
                "it does not reproduce its golden outputs",
                why=f"a logit is off by {error:.2%} of the largest, {self.golden_tolerance:.2%} is allowed",
                fix="build the engine again on this machine",
            )

    def _target(self, spec: EngineSpec) -> AnyTarget:
        target: AnyTarget = validate(AnyTarget, spec.target, where="the target of the engine")
        return target

    def _spec(self) -> EngineSpec:
        spec: EngineSpec = open_artifact(self.folder, kind="engine", verify=False).spec
        return spec


def _x_nchw(arrays: Arrays) -> object:
    return arrays["x_nchw"]
