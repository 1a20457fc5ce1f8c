"""Put a bundle together and verify it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hpml.artifacts.bundle import BundleSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.evaluation import EvaluationSpec
from hpml.artifacts.folder import Artifact, copy_files
from hpml.artifacts.operation import DATATYPES, Operation, TensorSpec
from hpml.artifacts.registration import RegistrationSpec
from hpml.components.bundle import triton_repository
from hpml.components.bundle.config import BundleConfig
from hpml.components.bundle.inventory import REQUIREMENTS, SCRIPT, TRITON_SCRIPT, Contents
from hpml.components.bundle.readme import readme
from hpml.components.bundle.triton import config_pbtxt
from hpml.core.contract import Output, Result
from hpml.core.errors import GateFailed, StageFailed
from hpml.measuring.goals import DECISION_FILE, DecisionRecord
from hpml.tasks import task_of
from hpml.tasks.base import Runs
from hpml.tasks.drift.baseline import DRIFT_FILE
from hpml.tasks.judging import JUDGED
from hpml.tasks.packaging.base import script_of_bundle

_NOT_SERVED = (DECISION_FILE, JUDGED)  # of the engine artifact: what led to its choice

# Runs the bundle's own script as if neither torch nor this project were installed.
_CLEAN = """\
import runpy, sys
for name in ("torch", "hpml", "mlflow"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def write_bundle(
    config: BundleConfig,
    engine: Artifact[EngineSpec],
    version: Artifact[RegistrationSpec],
    evaluation: Artifact[EvaluationSpec],
    out: Output,
) -> Result[BundleSpec]:
    """See `hpml.components.bundle.stage.run`."""
    decision = DecisionRecord.model_validate_json(engine.file(DECISION_FILE).read_text())
    if version.spec.engine_digest != decision.engine_digest:
        raise StageFailed(
            f"version {version.spec.version} of {version.spec.model_name} is not the chosen engine",
            why="the digests differ",
        )
    if evaluation.spec.engine_digest != decision.engine_digest:
        raise StageFailed("another engine was scored on the test split", why="the digests differ")
    contents = Contents(config, engine, decision, version.spec, evaluation.spec)
    _place_engine(contents, out.path)
    session = _open(contents, out.path, out.threads)
    shipped = contents.packaging.write(out.path, session.run, config.tolerance)
    (out.path / REQUIREMENTS).write_text(_requirements(contents))
    _write_json(out.path / "preprocessing.json", contents.packaging.facts)
    (out.path / "README.md").write_text(readme(contents))
    _write_json(out.path / "bundle.json", _bundle_json(contents, out.path, shipped))
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
    for operation in contents.spec.operations:
        for one in (*operation.inputs, *operation.outputs):
            place = bundle / contents.golden_file(operation, one.name)
            place.parent.mkdir(exist_ok=True)
            (folder / place.name).rename(place)
    if (folder / DRIFT_FILE).exists():  # engines of before have none
        (folder / DRIFT_FILE).rename(bundle / DRIFT_FILE)
    if contents.triton_platform:
        (folder.parent / "config.pbtxt").write_text(config_pbtxt(contents))
        shutil.copyfile(triton_repository.__file__, bundle / TRITON_SCRIPT)
    if contents.target.is_standalone:
        (bundle / SCRIPT).write_text(script_of_bundle(contents.packaging.script))


def _requirements(contents: Contents) -> str:
    """What the bundle's scripts need, in the versions that it was made with."""
    lines = ["numpy>=2,<3"]
    if contents.target.is_standalone:
        package = "onnxruntime-gpu" if contents.runs_on_gpu else "onnxruntime"
        lines.append(f"{package}=={contents.spec.identity['runtime'].split()[-1]}")
    return "\n".join([*lines, *contents.packaging.requirements]) + "\n"


def _bundle_json(contents: Contents, bundle: Path, shipped: dict[str, Any]) -> dict[str, Any]:
    """What a server needs to know; shapes have -1 where a size is free. Names no path of this machine.

    shipped: what the task adds. `file`, `inputs` and `outputs` are those of the first operation.
    """
    operations = [_operation(contents, one, bundle) for one in contents.spec.operations]
    folder = contents.engine_folder
    return {
        "format": 2,
        "model_name": contents.version.model_name,
        "model_version": contents.version.version,
        "engine_name": contents.decision.chosen,
        "engine_digest": contents.decision.engine_digest,
        "engine": contents.spec.model_dump(mode="json") | {"target": contents.target_options},
        "providers": _providers(contents),
        "settings": contents.settings.model_dump(mode="json") if contents.settings else None,
        **{name: operations[0][name] for name in ("file", "inputs", "outputs")},
        "operations": operations,
        "task_files": [f"{folder}/{name}" for name in task_of(contents.spec.task).files],
        **shipped,
        "measured": contents.decision.figures.model_dump(mode="json"),
        "measured_on": contents.decision.cpu,
        "measured_operations": {
            name: operation.model_dump(mode="json")
            for name, operation in contents.decision.operations.items()
        },
        "tested": contents.evaluation.model_dump(mode="json"),
        "unverified": contents.decision.unverified,
        "files": _digests(bundle),
    }


def _operation(contents: Contents, operation: Operation, bundle: Path) -> dict[str, Any]:
    """What bundle.json says of an operation. tolerance: how far a number may be from the golden one."""
    files = {
        one.name: contents.golden_file(operation, one.name) for one in (*operation.inputs, *operation.outputs)
    }
    return {
        "name": operation.name,
        "file": contents.file_of(operation),
        "inputs": _tensors(operation.inputs),
        "outputs": _tensors(operation.outputs),
        "golden": files,
        "tolerance": {
            one.name: contents.packaging.allowed_error(
                np.load(bundle / files[one.name], allow_pickle=False), contents.config.tolerance
            )
            for one in operation.outputs
        },
    }


def _tensors(tensors: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    """In the words of the Open Inference Protocol."""
    return [
        {
            "name": one.name,
            "datatype": DATATYPES[one.dtype],
            "shape": [size if isinstance(size, int) else -1 for size in one.shape],
            **({} if one.below is None else {"below": one.below}),
        }
        for one in tensors
    ]


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
        *contents.packaging.verified(answer["max_abs_error"]),
        "all of it in a process without torch",
    )


def _open(contents: Contents, bundle: Path, threads: int) -> Runs:
    """The engine in the bundle, by its target's own loader, on the hardware it is bound to."""
    return contents.target.load(
        bundle / contents.engine_folder, contents.spec, threads=threads, spinning=False
    )


def _verify_by_target(contents: Contents, session: Runs, bundle: Path) -> tuple[str, ...]:
    told = json.loads((bundle / "bundle.json").read_text())["operations"]
    largest = 0.0
    for operation, said in zip(contents.spec.operations, told, strict=True):
        inputs, expected = (
            {one.name: np.load(bundle / said["golden"][one.name], allow_pickle=False) for one in tensors}
            for tensors in (operation.inputs, operation.outputs)
        )
        outputs = session.run(inputs, operation.name)
        for name, golden in expected.items():
            error = contents.packaging.compare(name, outputs[name], golden, said["tolerance"][name])
            largest = max(largest, error)
    return contents.packaging.verified(largest)
