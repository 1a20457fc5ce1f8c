"""The model repository of NVIDIA Triton, which KServe's `onnx` runtime is as well.

Layout and fields: https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/
(model_repository, model_configuration). The parameters of its ONNX Runtime backend, which has none for the
spinning of threads: https://github.com/triton-inference-server/onnxruntime_backend#model-config-options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.operation import DATATYPES, Operation, TensorSpec

if TYPE_CHECKING:
    from hpml.components.bundle.inventory import Contents

_SERVED = {"all": "all { }", "latest": "latest { num_versions: 1 }"}


@dataclass(frozen=True)
class TritonModel:
    """A model of a repository: a graph, and the operations that run it.

    threads: of an instance; None: as many as the runtime takes. serve_versions: as in `BundleConfig`.
    max_queue_us: a request that waits longer is refused; None: none is. preferred_batch: what the engine is
    fastest with; 0: nothing is preferred. warmup: a row of each input, its sizes without the batch and the
    name of its file, which a server runs before it is ready.
    """

    name: str
    platform: str
    file: str
    operations: Sequence[Operation]
    max_batch: int
    on_gpu: bool
    threads: int | None
    serve_versions: str = "all"
    instances: int = 1
    max_queue_us: int | None = None
    preferred_batch: int = 0
    warmup: Sequence[tuple[TensorSpec, Sequence[int], str]] = ()


def config_pbtxt(contents: Contents) -> str:
    """`config.pbtxt` of the engine of a bundle."""
    spec = contents.spec
    return model_config(
        TritonModel(
            name=contents.version.model_name,
            platform=contents.triton_platform,
            file=spec.file,
            operations=spec.operations,
            max_batch=largest_batch(spec, contents.config.max_batch),
            on_gpu=contents.runs_on_gpu,
            threads=contents.settings.threads if contents.settings else None,
            serve_versions=contents.config.serve_versions,
        )
    )


def largest_batch(engine: EngineSpec, limit: int) -> int:
    """`limit`, or the engine's own, which TensorRT's have."""
    own = engine.target.get("max_batch")
    return min(limit, own) if isinstance(own, int) else limit


def model_config(model: TritonModel) -> str:
    """`config.pbtxt`: shapes are without the batch, which Triton forms from requests up to a limit."""
    inputs, outputs = (
        ",\n".join(map(_tensor, zip(*tensors, strict=True)))
        for tensors in (
            [operation.inputs for operation in model.operations],
            [operation.outputs for operation in model.operations],
        )
    )
    return f"""\
name: "{model.name}"
platform: "{model.platform}"
default_model_filename: "{model.file}"
max_batch_size: {model.max_batch}
input [
{inputs}
]
output [
{outputs}
]
instance_group [
  {{ count: {model.instances} kind: {"KIND_GPU" if model.on_gpu else "KIND_CPU"} }}
]
dynamic_batching {{ {_batching(model)}}}
{_threads(model)}{_warmup(model)}version_policy: {{ {_SERVED[model.serve_versions]} }}
"""


def _tensor(of_operations: Sequence[TensorSpec]) -> str:
    """One input or output, as all operations of the graph have it: a size that differs is free."""
    one = of_operations[0]
    sizes = zip(*(tensor.shape[1:] for tensor in of_operations), strict=True)
    dims = [found.pop() if len(found := set(of_axis)) == 1 else -1 for of_axis in sizes]
    told = ", ".join(str(size) if isinstance(size, int) else "-1" for size in dims)
    # Of rows that are single numbers: Triton has no tensors without dimensions.
    told = f"[ {told} ]" if told else "[ 1 ] reshape: { shape: [ ] }"
    return f'  {{ name: "{one.name}" data_type: TYPE_{DATATYPES[one.dtype]} dims: {told} }}'


def _batching(model: TritonModel) -> str:
    """Batches are what waits when the engine is free: nothing is held back to fill one."""
    told = ""
    if model.preferred_batch:
        told += f"preferred_batch_size: [ {model.preferred_batch} ] "
    if model.max_queue_us is not None:
        bound = f"timeout_action: REJECT default_timeout_microseconds: {model.max_queue_us}"
        told += f"default_queue_policy {{ {bound} }} "
    return told


def _threads(model: TritonModel) -> str:
    """As many as the engine was measured with; without it ONNX Runtime takes one a core."""
    if model.threads is None:
        return ""
    return f'parameters {{ key: "intra_op_thread_count" value: {{ string_value: "{model.threads}" }} }}\n'


def _warmup(model: TritonModel) -> str:
    if not model.warmup:
        return ""
    inputs = [
        f'  inputs {{ key: "{one.name}" value: {{ data_type: TYPE_{DATATYPES[one.dtype]}'
        f' dims: [ {", ".join(map(str, sizes or (1,)))} ] input_data_file: "{file}" }} }}'
        for one, sizes, file in model.warmup
    ]
    return "\n".join(["model_warmup [ {", '  name: "golden" batch_size: 1', *inputs, "} ]", ""])
