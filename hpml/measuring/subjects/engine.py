"""An engine of a run, as the stage `export` wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import open_artifact
from hpml.artifacts.measurements import EngineSettings
from hpml.artifacts.operation import Operation
from hpml.core.contract import validate
from hpml.core.errors import StageFailed
from hpml.measuring.subjects.base import Opened, Subject, of_each_variant
from hpml.targets import AnyTarget

if TYPE_CHECKING:
    from hpml.measuring.subjects.base import Arrays


def request_name(operation: str, name: str) -> str:
    """What an input of an operation is called among the requests of all operations."""
    return f"{operation}.{name}"


class EngineSubject(Subject):
    """One operation of the engine artifact in `folder`, checked against its golden samples.

    variant: which of its builds, a folder in `folder`. arrays: the array among the requests of each of its
    inputs; empty: by `request_name`.
    """

    subject: Literal["engine"] = "engine"
    folder: Path
    arrays: dict[str, str] = Field(default_factory=dict)
    operation: str = "predict"
    variant: str = ""
    golden_tolerance: float = Field(default=0.02, gt=0, le=1)  # of an output, as a share of its largest

    def open(self, *, threads: int, spinning: bool | None = None) -> Opened:
        """Load it with the code of its target; the stage has verified its files."""
        spec = self._spec().of_variant(self.variant)
        session = self._target(spec).load(
            self.folder / self.variant, spec, threads=threads, spinning=spinning
        )
        device = spec.identity.get("device", "cpu").partition(" ")[0]
        names = {
            one.name: self.arrays.get(one.name, request_name(self.operation, one.name))
            for one in self._operation(spec).inputs
        }

        def request(arrays: Arrays) -> Any:
            return {name: arrays[array] for name, array in names.items()}

        return Opened(
            lambda feeds: session.run(feeds, self.operation),
            request,
            device,
            stream=getattr(session, "stream", None),
            thread_safe=getattr(session, "thread_safe", True),
            outputs=lambda arrays: session.run(request(arrays), self.operation),
        )

    def candidates(self, threads: int) -> tuple[EngineSettings, ...]:
        """Those of its target, for each of its builds."""
        spec = self._spec()
        return of_each_variant(self._target(spec).candidates(spec, threads), spec.variants)

    def of_variant(self, name: str) -> EngineSubject:
        """The build in the folder `name`."""
        return self.model_copy(update={"variant": name})

    def check(self, opened: Opened) -> None:
        """Raise StageFailed if the golden outputs are not reproduced."""
        from hpml.tasks import golden

        spec = self._spec()
        operation = self._operation(spec)
        inputs = golden.load(self.folder, spec.operations, operation, [one.name for one in operation.inputs])
        judged = operation.outputs[0].name
        expected = golden.load(self.folder / self.variant, spec.operations, operation, [judged])[judged]
        answer = opened.predict(inputs)[judged]
        if answer.shape != expected.shape:
            raise StageFailed(
                "it does not reproduce its golden outputs",
                why=f"{judged} of shape {answer.shape} instead of {expected.shape}",
            )
        error = golden.relative_error(answer, expected)
        if error > self.golden_tolerance:
            raise StageFailed(
                "it does not reproduce its golden outputs",
                why=f"{judged} is off by {error:.2%} of the largest, {self.golden_tolerance:.2%} is allowed",
                fix="build the engine again on this machine",
            )

    def _operation(self, spec: EngineSpec) -> Operation:
        return next(one for one in spec.operations if one.name == self.operation)

    def _target(self, spec: EngineSpec) -> AnyTarget:
        target: AnyTarget = validate(AnyTarget, spec.target, where="the target of the engine")
        return target

    def _spec(self) -> EngineSpec:
        spec: EngineSpec = open_artifact(self.folder, kind="engine", verify=False).spec
        return spec
