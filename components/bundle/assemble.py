"""Put a bundle together and verify it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hpml.artifacts.bundle import BundleSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact, copy_files
from hpml.artifacts.model_input import PictureSpec
from hpml.artifacts.registration import RegistrationSpec
from hpml.components.bundle import standalone, triton_repository
from hpml.components.bundle.config import BundleConfig
from hpml.components.bundle.inventory import (
    GOLDEN,
    GOLDEN_PICTURES,
    OUTPUT,
    PICTURES,
    REQUIREMENTS,
    SCRIPT,
    TRITON_SCRIPT,
    Contents,
)
from hpml.components.bundle.readme import readme
from hpml.components.bundle.triton import config_pbtxt
from hpml.core.contract import Output, Result
from hpml.core.errors import GateFailed, StageFailed
from hpml.measuring.goals import DECISION_FILE, DecisionRecord
from hpml.targets.base import Session
from hpml.tasks import pictures
from hpml.tasks.images import to_x_nchw

_NOT_SERVED = (DECISION_FILE, "test_logits.npy")  # of the engine artifact: what led to its choice

# Runs the bundle's own script as if neither torch nor this project were installed.
_CLEAN = """\
import runpy, sys
for name in ("torch", "hpml", "mlflow"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def write_bundle(
    config: BundleConfig, engine: Artifact[EngineSpec], version: Artifact[RegistrationSpec], out: Output
) -> Result[BundleSpec]:
    """See `hpml.components.bundle.stage.run`."""
    decision = DecisionRecord.model_validate_json(engine.file(DECISION_FILE).read_text())
    if version.spec.engine_digest != decision.engine_digest:
        raise StageFailed(
            f"version {version.spec.version} of {version.spec.model_name} is not the chosen engine",
            why="the digests differ",
        )
    contents = Contents(config, engine, decision, version.spec)
    _place_engine(contents, out.path)
    session = _open(contents, out.path, out.threads)
    _write_golden_images(contents, out.path)
    if contents.pictures:
        _write_golden_pictures(contents, contents.pictures, session, out.path)
    (out.path / REQUIREMENTS).write_text(_requirements(contents))
    _write_json(out.path / "preprocessing.json", _preprocessing(contents))
    (out.path / "README.md").write_text(readme(contents))
    _write_json(out.path / "bundle.json", _bundle_json(contents, out.path))
    if contents.target.is_standalone:
        verified = _verify_alone(contents, out.path)
    else:
        verified = _verify_by_target(contents, session, out.path)
    spec = BundleSpec(
        model_name=version.spec.model_name,
        engine_name=decision.chosen,
        engine_digest=decision.engine_digest,
        file=contents.file,
        verified=verified,
    )
    size_bytes = sum(file.stat().st_size for file in out.path.rglob("*") if file.is_file())
    return Result(spec, {"size_bytes": float(size_bytes)})


def _place_engine(contents: Contents, bundle: Path) -> None:
    folder = bundle / contents.engine_folder
    folder.mkdir(parents=True)
    copy_files(contents.engine, folder)
    for name in _NOT_SERVED:
        (folder / name).unlink(missing_ok=True)
    for name in (GOLDEN["x"], GOLDEN["logits"]):
        (folder / name).rename(bundle / name)
    if contents.target.triton_platform:
        (folder.parent / "config.pbtxt").write_text(config_pbtxt(contents))
        shutil.copyfile(triton_repository.__file__, bundle / TRITON_SCRIPT)
    if contents.target.is_standalone:
        shutil.copyfile(standalone.__file__, bundle / SCRIPT)


def _write_golden_images(contents: Contents, bundle: Path) -> None:
    """The images that the golden inputs were made of, so that the check covers the preprocessing as well."""
    x_nchw = np.load(bundle / GOLDEN["x"], allow_pickle=False)
    mean = np.asarray(contents.spec.input.mean, np.float32)
    std = np.asarray(contents.spec.input.std, np.float32)
    pixels_nhwc = (x_nchw.transpose(0, 2, 3, 1) * std + mean) * 255
    images_nhwc = np.rint(pixels_nhwc).clip(0, 255).astype(np.uint8)
    if np.abs(to_x_nchw(images_nhwc, contents.spec.input) - x_nchw).max() > 1e-5:
        raise GateFailed(
            "the golden inputs of the engine are not normalised images",
            why="no pixels of 0 to 255 give them under the engine's mean and std",
        )
    np.save(bundle / GOLDEN["images"], images_nhwc)


def _write_golden_pictures(contents: Contents, facts: PictureSpec, session: Session, bundle: Path) -> None:
    """The module that reads pictures, files to try it with, and what the engine says of them.

    Raises GateFailed if they have other pixels here than where the data were prepared.
    """
    shutil.copyfile(pictures.__file__, bundle / PICTURES)
    folder = bundle / GOLDEN_PICTURES["folder"]
    folder.mkdir()
    for file in pictures.golden_files():
        shutil.copyfile(file, folder / file.name)
    as_noted = facts.model_dump(mode="json")
    pixels = []
    for name, sha256 in facts.golden_sha256:
        pixels.append(pictures.read_golden(folder / name, as_noted))
        if pictures.pixels_sha256(pixels[-1]) != sha256:
            raise GateFailed(
                f"{name} has other pixels here than where the data were prepared",
                why=f"Pillow is {pictures.PILLOW_VERSION} here and was {facts.pillow} there",
                fix="run this step with what prepare ran with, or prepare again",
            )
    logits = session.predict(to_x_nchw(np.stack(pixels), contents.spec.input))
    np.save(bundle / GOLDEN_PICTURES["logits"], logits)


def _requirements(contents: Contents) -> str:
    """What the bundle's scripts need, in the versions that it was made with."""
    lines = ["numpy>=2,<3"]
    if contents.target.is_standalone:
        package = "onnxruntime-gpu" if contents.runs_on_gpu else "onnxruntime"
        lines.append(f"{package}=={contents.spec.identity['runtime'].split()[-1]}")
    if contents.pictures:
        lines.append(f"pillow=={contents.pictures.pillow}  # others may decode or resample otherwise")
    return "\n".join(lines) + "\n"


def _preprocessing(contents: Contents) -> dict[str, Any]:
    spec = contents.spec
    return _of_pixels(spec) | {"pictures": spec.input.model_dump(mode="json")["pictures"]}


def _of_pixels(spec: EngineSpec) -> dict[str, Any]:
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
        "engine_name": contents.decision.chosen,
        "engine_digest": contents.decision.engine_digest,
        "engine": spec.model_dump(mode="json") | {"target": contents.target_options},
        "file": contents.file,
        "providers": _providers(contents),
        "settings": contents.settings.model_dump(mode="json") if contents.settings else None,
        "inputs": [{"name": spec.input.name, "datatype": "FP32", "shape": (-1, *spec.input.shape_chw)}],
        "outputs": [{"name": OUTPUT, "datatype": "FP32", "shape": (-1, len(spec.class_names))}],
        "golden": {**GOLDEN, "tolerance": contents.config.tolerance},
        "golden_pictures": GOLDEN_PICTURES if contents.pictures else None,
        "measured": contents.decision.figures.model_dump(mode="json"),
        "unverified": contents.decision.unverified,
        "files": _digests(bundle),
    }


def _providers(contents: Contents) -> list[Any]:
    """How ONNX Runtime has to run the engine; empty where another runtime does."""
    if not contents.target.is_standalone:
        return []
    from hpml.targets.onnx_session import PROVIDERS

    providers: Any = PROVIDERS[contents.spec.identity["device"]]
    return list(providers)


def _digests(bundle: Path) -> dict[str, str]:
    files = sorted(file for file in bundle.rglob("*") if file.is_file())
    return {
        file.relative_to(bundle).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files
    }


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


# -------------------------------------------------------------------------------------------------- verifying


def _verify_alone(contents: Contents, bundle: Path) -> tuple[str, ...]:
    """Let the bundle check itself in a process where neither torch nor this project can be imported."""
    script = [sys.executable, "-I", "-B", "-c", _CLEAN, str(bundle / SCRIPT)]
    done = subprocess.run(script, cwd=bundle, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise GateFailed("the bundle does not work on its own", why=said[-1].removeprefix("error: "))
    answer = json.loads(done.stdout)
    return (
        "the SHA-256 of every file",
        "the preprocessing of the golden images",
        f"the golden logits, to {answer['max_abs_error']:.1g}, and every class",
        *_of_pictures(contents),
        "all of it in a process without torch",
    )


def _of_pictures(contents: Contents) -> tuple[str, ...]:
    if not contents.pictures:
        return ()
    return (f"the pixels of {len(contents.pictures.golden_sha256)} golden pictures, bit for bit",)


def _open(contents: Contents, bundle: Path, threads: int) -> Session:
    """The engine in the bundle, by its target's own loader, on the hardware it is bound to."""
    return contents.target.load(
        bundle / contents.engine_folder, contents.spec, threads=threads, spinning=False
    )


def _verify_by_target(contents: Contents, session: Session, bundle: Path) -> tuple[str, ...]:
    images_nhwc, expected = (
        np.load(bundle / GOLDEN[name], allow_pickle=False) for name in ("images", "logits")
    )
    logits = session.predict(to_x_nchw(images_nhwc, contents.spec.input))
    error = float(np.abs(logits - expected).max())
    same = bool((logits.argmax(axis=1) == expected.argmax(axis=1)).all())
    if not error <= contents.config.tolerance or not same:
        raise GateFailed(
            "the bundle answers otherwise than the exported engine",
            why=f"a logit differs by {error:.3g}, allowed {contents.config.tolerance:g}",
        )
    return (
        "the preprocessing of the golden images",
        f"the golden logits, to {error:.1g}, and every class",
        *_of_pictures(contents),
    )
