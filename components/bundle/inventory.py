"""What a bundle is made of, and where its parts lie in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import JsonValue

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.evaluation import EvaluationSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import EngineSettings
from hpml.artifacts.operation import Operation
from hpml.artifacts.registration import RegistrationSpec
from hpml.components.bundle.config import BundleConfig
from hpml.measuring.goals import DecisionRecord
from hpml.targets import TARGETS, Target
from hpml.tasks import task_of
from hpml.tasks.golden import golden_file
from hpml.tasks.packaging.base import Packaging

SCRIPT = "bundle.py"
TRITON_SCRIPT = "triton_repository.py"
REQUIREMENTS = "requirements.txt"


@dataclass(frozen=True)
class Contents:
    """What a bundle is made of, and where its parts lie in it."""

    config: BundleConfig
    engine: Artifact[EngineSpec]
    decision: DecisionRecord
    version: RegistrationSpec
    evaluation: EvaluationSpec

    @property
    def spec(self) -> EngineSpec:
        """The engine's description."""
        return self.engine.spec

    @cached_property
    def packaging(self) -> Packaging:
        """What is shipped of its task."""
        return task_of(self.spec.task).packaging()

    @property
    def settings(self) -> EngineSettings | None:
        """What the engine was measured with; None if it was not, or runs on a GPU and not on threads."""
        return None if self.runs_on_gpu else self.decision.figures.settings

    @property
    def target_options(self) -> dict[str, JsonValue]:
        """The target's options without the files it used while it built the engine."""
        return {
            name: value
            for name, value in self.spec.target.items()
            if not (isinstance(value, str) and Path(value).is_absolute())
        }

    @property
    def target(self) -> Target:
        """The target that built the engine."""
        return TARGETS[str(self.spec.target["target"])].model_validate(self.target_options)

    @property
    def triton_platform(self) -> str:
        """What Triton calls such an engine; "" if it does not serve it: its models are of one graph."""
        return "" if self.spec.graphs else self.target.triton_platform

    @property
    def engine_folder(self) -> str:
        """Where the engine's files lie; for what Triton serves, a version in a model repository of its."""
        if self.triton_platform:
            return f"model_repository/{self.version.model_name}/{self.version.version}"
        return "engine"

    @property
    def file(self) -> str:
        """What the runtime opens, of several files that of the first operation."""
        return self.file_of(self.spec.operations[0])

    def file_of(self, operation: Operation) -> str:
        """The file of the operation's graph."""
        return f"{self.engine_folder}/{self.spec.graphs.get(operation.graph, self.spec.file)}"

    def golden_file(self, operation: Operation, name: str) -> str:
        """Where a golden input or output of an operation lies."""
        folder = self.packaging.golden_folder
        return f"{folder}/" * bool(folder) + golden_file(self.spec.operations, operation, name)

    @property
    def runs_on_gpu(self) -> bool:
        """Whether the engine was built for a GPU."""
        return self.spec.identity.get("device", "cpu").startswith("cuda")
