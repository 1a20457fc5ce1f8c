"""Any ONNX file, run by ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from components.benchmark.subjects.base import Opened
from components.benchmark.subjects.tensors import FromOutside, Signature, tensor_of
from components.errors import ConfigInvalid, StageFailed


class OnnxSubject(FromOutside):
    """The file `file`, with any number of inputs."""

    subject: Literal["onnx"] = "onnx"
    file: Path
    device: Literal["cpu", "cuda"] = "cpu"

    def signature(self, sizes: Mapping[str, int]) -> Signature:
        """What the graph says it takes; the weights are not read.

        Raises ConfigInvalid if it is no ONNX file, or takes what cannot be made: no tensor, no batch, an open
        size that is not given.
        """
        import onnx
        from google.protobuf.message import DecodeError

        try:
            graph = onnx.load_model(self.file, load_external_data=False).graph
        except (DecodeError, OSError, UnicodeDecodeError) as error:
            raise ConfigInvalid(f"{self.file} is no ONNX file", why=str(error)) from None
        constants = {tensor.name for tensor in graph.initializer}
        inputs = [value for value in graph.input if value.name not in constants]
        if not inputs:
            raise ConfigInvalid(f"{self.file} is no ONNX file that can be measured", why="it has no inputs")
        found = [
            tensor_of(str(self.file), value.name, position, _data_type(value), _dimensions(value), sizes)
            for position, value in enumerate(inputs)
        ]
        batches = {batch for _, batch in found if batch is not None}
        if len(batches) > 1:
            raise ConfigInvalid(
                f"the inputs of {self.file} have no batch in common",
                why=f"their first dimensions are {', '.join(map(str, sorted(batches)))}",
            )
        return Signature(tuple(tensor for tensor, _ in found), next(iter(batches), None))

    def known(self) -> dict[str, Any]:
        """Its size on disk, weights in files beside it included, and how many numbers the weights are."""
        import onnx

        weights = onnx.load_model(self.file, load_external_data=False).graph.initializer
        beside = {
            entry.value for weight in weights for entry in weight.external_data if entry.key == "location"
        }
        files = [self.file, *(self.file.parent / name for name in beside)]
        size_bytes = sum(file.stat().st_size for file in files if file.is_file())
        parameters = sum(math.prod(weight.dims) for weight in weights)
        return {**super().known(), "size_bytes": size_bytes, "parameters": parameters}

    def open(self, *, threads: int) -> Opened:
        """A session; ONNX Runtime itself refuses weights that lie outside the file's folder.

        Raises StageFailed if it cannot load the file, or not on the device.
        """
        from components.targets.onnx_session import OnnxSession, has_cuda

        class Session(OnnxSession):
            def run(self, feeds: Mapping[str, Any]) -> list[Any]:
                """All outputs."""
                outputs: list[Any] = self._session.run(None, feeds)
                return outputs

            def providers(self) -> list[str]:
                """Where it runs, the first choice first."""
                named: list[str] = self._session.get_providers()
                return named

        if self.device == "cuda" and not has_cuda():
            raise StageFailed(
                f"{self.file} cannot run on a GPU",
                why="this ONNX Runtime runs on CPUs only",
                fix="install onnxruntime-gpu in place of onnxruntime, or leave --device out",
            )
        session = Session(self.file, device=self.device, threads=threads)
        if self.device == "cuda" and session.providers()[0] != "CUDAExecutionProvider":
            raise StageFailed(f"{self.file} cannot run on a GPU", why="ONNX Runtime could not use CUDA")
        return Opened(session.run, self.feeds, self.device)


def _data_type(value: Any) -> str:
    """The type of a graph's input as numpy calls it, or how ONNX calls it."""
    import onnx

    if value.type.WhichOneof("value") != "tensor_type":
        return f"a {value.type.WhichOneof('value')}"
    try:
        return str(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
    except KeyError:
        return f"tensors of type {value.type.tensor_type.elem_type}"


def _dimensions(value: Any) -> list[int | str | None]:
    return [
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in value.type.tensor_type.shape.dim
    ]
