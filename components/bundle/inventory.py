"""What a bundle is made of, and where its parts lie in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import EngineSettings
from hpml.artifacts.model_input import PictureSpec
from hpml.artifacts.registration import RegistrationSpec
from hpml.components.bundle.config import BundleConfig
from hpml.measuring.goals import DecisionRecord
from hpml.targets import TARGETS, Target

SCRIPT = "bundle.py"
GOLDEN = {"images": "golden_images_nhwc.npy", "x": "golden_x_nchw.npy", "logits": "golden_logits.npy"}
PICTURES = "pictures.py"  # a copy of hpml/tasks/pictures.py
GOLDEN_PICTURES = {"folder": "golden_pictures", "logits": "golden_picture_logits.npy"}
TRITON_SCRIPT = "triton_repository.py"
REQUIREMENTS = "requirements.txt"
OUTPUT = "logits"


@dataclass(frozen=True)
class Contents:
    """What a bundle is made of, and where its parts lie in it."""

    config: BundleConfig
    engine: Artifact[EngineSpec]
    decision: DecisionRecord
    version: RegistrationSpec

    @property
    def spec(self) -> EngineSpec:
        """The engine's description."""
        return self.engine.spec

    @property
    def settings(self) -> EngineSettings | None:
        """What the engine was measured with; None if it was not, or runs on a GPU and not on threads."""
        return None if self.runs_on_gpu else self.decision.figures.settings

    @property
    def pictures(self) -> PictureSpec | None:
        """How a picture's file becomes pixels; None if the data were prepared before that was noted."""
        return self.spec.input.pictures

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
    def engine_folder(self) -> str:
        """Where the engine's files lie; for what Triton serves, a version in a model repository of its."""
        if self.target.triton_platform:
            return f"model_repository/{self.version.model_name}/{self.version.version}"
        return "engine"

    @property
    def file(self) -> str:
        """What the runtime opens."""
        return f"{self.engine_folder}/{self.spec.file}"

    @property
    def runs_on_gpu(self) -> bool:
        """Whether the engine was built for a GPU."""
        return self.spec.identity.get("device", "cpu").startswith("cuda")
