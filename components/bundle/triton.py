"""The model repository of NVIDIA Triton, which KServe's `onnx` runtime is as well.

Layout and fields: https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/
(model_repository, model_configuration). The parameters of its ONNX Runtime backend, which has none for the
spinning of threads: https://github.com/triton-inference-server/onnxruntime_backend#model-config-options.
"""

from __future__ import annotations

from hpml.components.bundle.inventory import OUTPUT, Contents

_SERVED = {"all": "all { }", "latest": "latest { num_versions: 1 }"}


def config_pbtxt(contents: Contents) -> str:
    """`config.pbtxt`: shapes are without the batch, which Triton forms from requests up to a limit."""
    spec = contents.spec
    limits = [contents.config.max_batch, spec.target.get("max_batch")]  # TensorRT's engines have one
    max_batch = min(limit for limit in limits if isinstance(limit, int))
    dims = ", ".join(str(size) for size in spec.input.shape_chw)
    return f"""\
name: "{contents.version.model_name}"
platform: "{contents.target.triton_platform}"
default_model_filename: "{spec.file}"
max_batch_size: {max_batch}
input [
  {{ name: "{spec.input.name}" data_type: TYPE_FP32 dims: [ {dims} ] }}
]
output [
  {{ name: "{OUTPUT}" data_type: TYPE_FP32 dims: [ {len(spec.class_names)} ] }}
]
instance_group [
  {{ count: 1 kind: {"KIND_GPU" if contents.runs_on_gpu else "KIND_CPU"} }}
]
dynamic_batching {{ }}
{_threads(contents)}version_policy: {{ {_SERVED[contents.config.serve_versions]} }}
"""


def _threads(contents: Contents) -> str:
    """As many as the engine was measured with; without it ONNX Runtime takes one a core."""
    if contents.settings is None:
        return ""
    threads = contents.settings.threads
    return f'parameters {{ key: "intra_op_thread_count" value: {{ string_value: "{threads}" }} }}\n'
