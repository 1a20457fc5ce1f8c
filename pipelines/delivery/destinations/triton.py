"""NVIDIA Triton on one machine: a model repository of its, and the command that serves it.

How a repository is laid out: https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/
(model_repository, model_configuration).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from hpml.artifacts.operation import Operation, TensorSpec
from hpml.components.bundle.triton import TritonModel, largest_batch, model_config
from hpml.core.errors import ConfigInvalid, UsageError
from hpml.pipelines.delivery.deploy_options import DeployOptions
from hpml.pipelines.delivery.deployable import Deployable

# Of the release that docker/Dockerfile builds plans in: a plan loads in the TensorRT that compiled it.
_IMAGE, _TENSORRT = "nvcr.io/nvidia/tritonserver:26.07-py3", "11.1"
_REPOSITORY = "model_repository"
_WARMUP = "warmup"  # the folder that Triton reads such files from
_UID = 1000  # of the user triton-server in its image


def write(bundle: Deployable, options: DeployOptions, folder: Path) -> list[str]:
    """`model_repository/`: a model for each graph of the engine, named as `hpml serve` names operations."""
    if not bundle.target.triton_platform:
        raise ConfigInvalid(
            f"NVIDIA Triton does not serve the engine of {bundle.title}",
            why=f"it is of target {bundle.target.target}",
            fix="export it to onnx or tensorrt as well",
        )
    image = _image(bundle, options)
    for model in _models(bundle, options):
        place = folder / _REPOSITORY / model.name
        version = place / str(bundle.facts.model_version or 1)
        version.mkdir(parents=True)
        shutil.copyfile(bundle.subject.engine_folder / model.file, version / model.file)
        warmup = _write_warmup(bundle, model.operations[0], place / _WARMUP)
        (place / "config.pbtxt").write_text(model_config(replace(model, warmup=warmup)))
    return [_run(bundle, options, image)]


def _image(bundle: Deployable, options: DeployOptions) -> str:
    """Raises UsageError where the default's TensorRT is another than the one that the engine needs."""
    runtime = bundle.facts.engine.identity.get("runtime", "")
    if options.image or not runtime.startswith("tensorrt ") or runtime.startswith(f"tensorrt {_TENSORRT}."):
        return options.image or _IMAGE
    raise UsageError(
        f"the plan of {bundle.title} is of {runtime}, and --image is not given",
        why=f"it loads in that version alone, and {_IMAGE} has {_TENSORRT}",
        fix="give --image nvcr.io/nvidia/tritonserver:YY.MM-py3 of the release with that version",
    )


def _models(bundle: Deployable, options: DeployOptions) -> Iterator[TritonModel]:
    """One for each graph: operations that share one share its model, which is loaded once."""
    facts, engine = bundle.facts, bundle.facts.engine
    by_graph: dict[str, list[Operation]] = {}
    for operation in engine.operations:
        by_graph.setdefault(operation.graph, []).append(operation)
    optimal = engine.target.get("optimal_batch", 1)
    for index, (graph, operations) in enumerate(by_graph.items()):
        yield TritonModel(
            name=f"{facts.model_name}.{operations[0].name}" if index else facts.model_name,
            platform=bundle.target.triton_platform,
            file=engine.graphs.get(graph, PurePosixPath(facts.file).name),
            operations=operations,
            max_batch=largest_batch(engine, options.max_batch),
            on_gpu=bundle.runs_on_gpu,
            threads=bundle.threads,
            instances=options.replicas,
            max_queue_us=round(options.max_queue_ms * 1000),
            preferred_batch=optimal if isinstance(optimal, int) and optimal > 1 else 0,
        )


def _write_warmup(
    bundle: Deployable, operation: Operation, place: Path
) -> Sequence[tuple[TensorSpec, Sequence[int], str]]:
    """The first row of each golden input, as bytes; what config.pbtxt says of them."""
    golden = bundle.subject.golden(operation.name)
    place.mkdir()
    told = []
    for index, one in enumerate(operation.inputs):
        row = golden[one.name][0]
        (place / f"input-{index}").write_bytes(row.tobytes())
        told.append((one, row.shape, f"input-{index}"))
    return told


def _run(bundle: Deployable, options: DeployOptions, image: str) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    told = [f"docker run --rm --name {options.name} --publish {host}:{options.port}:8000"]
    told.append(f"--user {_UID}:{_UID} --cap-drop ALL --security-opt no-new-privileges")
    if bundle.runs_on_gpu:
        told.append("--gpus all")
    if options.cpus:
        told.append(f"--cpus {options.cpus:g}")
    if options.memory_mib:
        told.append(f"--memory {options.memory_mib}m")
    told.append(f'--volume "$PWD/{_REPOSITORY}:/models:ro" {image}')
    return " ".join([*told, "tritonserver --model-repository=/models"])
