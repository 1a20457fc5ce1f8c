"""Put a bundle together and verify it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from components.artifacts import Artifact, BundleSpec, EngineSpec, RegistrationSpec, copy_files
from components.contract import GateFailed, Output, Result, StageFailed
from components.deploy.readme import readme
from components.deploy.stage import DeployConfig
from components.deploy.triton import PLATFORMS, config_pbtxt
from components.goals import DECISION_FILE, DecisionRecord
from components.images import to_x_nchw
from components.targets import TARGETS

SCRIPT = "bundle.py"
GOLDEN = {"images": "golden_images_nhwc.npy", "x": "golden_x_nchw.npy", "logits": "golden_logits.npy"}
_NOT_SERVED = (DECISION_FILE, "test_logits.npy")  # of the engine artifact: what led to its choice

# Runs the bundle's own script as if neither torch nor this project were installed.
_CLEAN = """\
import runpy, sys
for name in ("torch", "components", "mlflow"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Contents:
    """What a bundle is made of, and where its parts lie in it."""

    config: DeployConfig
    engine: Artifact[EngineSpec]
    decision: DecisionRecord
    version: RegistrationSpec

    @property
    def spec(self) -> EngineSpec:
        """The engine's description."""
        return self.engine.spec

    @property
    def target(self) -> str:
        """The name of the target that built the engine."""
        return str(self.spec.target["target"])

    @property
    def engine_folder(self) -> str:
        """Where the engine's files lie: version 1 of a model in a Triton model repository, if it serves it."""
        if self.target in PLATFORMS:
            return f"model_repository/{self.version.model_name}/1"
        return "engine"

    @property
    def file(self) -> str:
        """What the runtime opens."""
        return f"{self.engine_folder}/{self.spec.file}"

    @property
    def is_standalone(self) -> bool:
        """Whether the bundle's own script can run the engine, with numpy and ONNX Runtime only."""
        return self.target == "onnx"


def write_bundle(
    config: DeployConfig, engine: Artifact[EngineSpec], version: Artifact[RegistrationSpec], out: Output
) -> Result[BundleSpec]:
    """See `components.deploy.stage.run`."""
    decision = DecisionRecord.model_validate_json(engine.file(DECISION_FILE).read_text())
    if version.spec.engine_digest != decision.engine_digest:
        raise StageFailed(
            f"version {version.spec.version} of {version.spec.model_name} is another engine than the chosen one",
            why="the digests differ",
        )
    contents = Contents(config, engine, decision, version.spec)
    _place_engine(contents, out.path)
    _write_golden_images(contents, out.path)
    _write_json(out.path / "preprocessing.json", _preprocessing(contents.spec))
    (out.path / "README.md").write_text(readme(contents))
    _write_json(out.path / "bundle.json", _bundle_json(contents, out.path))
    verified = _verify_alone(contents, out) if contents.is_standalone else _verify_by_target(contents, out)
    spec = BundleSpec(
        model_name=version.spec.model_name,
        engine_name=decision.chosen,
        engine_digest=decision.engine_digest,
        file=contents.file,
        verified=verified,
    )
    return Result(spec, {"size_bytes": float(sum(f.stat().st_size for f in out.path.rglob("*") if f.is_file()))})


def _place_engine(contents: Contents, bundle: Path) -> None:
    folder = bundle / contents.engine_folder
    folder.mkdir(parents=True)
    copy_files(contents.engine, folder)
    for name in _NOT_SERVED:
        (folder / name).unlink(missing_ok=True)
    for name in (GOLDEN["x"], GOLDEN["logits"]):
        (folder / name).rename(bundle / name)
    if contents.target in PLATFORMS:
        (folder.parent / "config.pbtxt").write_text(config_pbtxt(contents))
    if contents.is_standalone:
        source = resources.files("components.deploy").joinpath("standalone.py")
        (bundle / SCRIPT).write_bytes(source.read_bytes())


def _write_golden_images(contents: Contents, bundle: Path) -> None:
    """The images that the golden inputs were made of, so that the check covers the preprocessing as well."""
    x_nchw = np.load(bundle / GOLDEN["x"], allow_pickle=False)
    mean, std = (np.asarray(values, np.float32) for values in (contents.spec.input.mean, contents.spec.input.std))
    pixels = np.rint((x_nchw.transpose(0, 2, 3, 1) * std + mean) * 255)
    images_nhwc = pixels.clip(0, 255).astype(np.uint8)
    if np.abs(to_x_nchw(images_nhwc, contents.spec.input) - x_nchw).max() > 1e-5:
        raise GateFailed(
            "the golden inputs of the engine are not normalised images",
            why="no pixels of 0 to 255 give them under the engine's mean and std",
        )
    np.save(bundle / GOLDEN["images"], images_nhwc)


def _preprocessing(spec: EngineSpec) -> dict[str, Any]:
    channels, height, width = spec.input.shape_chw
    return {
        "takes": "uint8 pixels, 0 to 255, (rows, height, width, channels)",
        "gives": f"{spec.input.name}: float32 (rows, channels, height, width)",
        "steps": [
            "x = pixel / 255",
            "x = (x - mean) / std, for each channel",
            "(rows, height, width, channels) -> (rows, channels, height, width)",
        ],
        "height": height,
        "width": width,
        "channels": channels,
        "mean": spec.input.mean,
        "std": spec.input.std,
        "units": "mean and std are of pixel / 255",
        "class_names": spec.class_names,
    }


def _bundle_json(contents: Contents, bundle: Path) -> dict[str, Any]:
    """What a server needs to know; shapes have -1 where the batch is free. Names no path of this machine."""
    spec = contents.spec
    return {
        "format": 1,
        "model_name": contents.version.model_name,
        "model_version": contents.version.version,
        "engine": {
            "name": contents.decision.chosen,
            "digest": contents.decision.engine_digest,
            "target": _without_paths(spec.target),
            "precision": spec.precision,
            "methods": spec.methods,
            "identity": spec.identity,
            "notes": spec.notes,
            "size_bytes": spec.size_bytes,
            "parameters": spec.parameters,
            "macs": spec.macs,
        },
        "file": contents.file,
        "providers": _providers(contents),
        "inputs": [{"name": spec.input.name, "datatype": "FP32", "shape": (-1, *spec.input.shape_chw)}],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": (-1, len(spec.class_names))}],
        "golden": {**GOLDEN, "tolerance": contents.config.tolerance},
        "measured": contents.decision.figures.model_dump(mode="json"),
        "files": {name: _sha256(bundle / name) for name in _names(bundle)},
    }
