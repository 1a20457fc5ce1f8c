"""Any ONNX file, run by ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hpml.artifacts.measurements import EngineSettings
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.measuring.subjects.base import Opened, of_each_variant
from hpml.measuring.subjects.tensors import Declared, FromOutside, Signature, tensor_of
from hpml.targets.onnx import cpu_candidates


class OnnxSubject(FromOutside):
    """The file `file`, with any number of inputs. variants: the same model built otherwise, by name."""

    subject: Literal["onnx"] = "onnx"
    file: Path
    variants: dict[str, Path] = Field(default_factory=dict)
    device: Literal["cpu", "cuda"] = "cpu"

    def signature(self, sizes: Mapping[str, int]) -> Signature:
        """What the graph says it takes; the weights are not read.

        Raises ConfigInvalid if it is not an ONNX file that can be run, or takes what cannot be made: no
        tensor, no batch, an open size that is not given.
        """
        from hpml.measuring.subjects.onnx_fills import fills
        from hpml.targets.onnx_file import read_graph

        found = [
            tensor_of(str(self.file), name, position, dtype, dimensions, sizes)
            for position, (name, dtype, dimensions) in enumerate(self.declared_inputs())
        ]
        told = fills(read_graph(self.file))
        batches = {batch for _, batch in found if batch is not None}
        if len(batches) > 1:
            raise ConfigInvalid(
                f"the inputs of {self.file} have no batch in common",
                why=f"their first dimensions are {', '.join(map(str, sorted(batches)))}",
            )
        inputs = tuple(tensor.model_copy(update={"fill": told.get(tensor.name)}) for tensor, _ in found)
        return Signature(inputs, next(iter(batches), None))

    def declared_inputs(self) -> Sequence[Declared]:
        """Those of the graph.

        Raises ConfigInvalid if it is not an ONNX file that can be run, or has no inputs.
        """
        from hpml.targets.onnx_file import read_runnable

        graph = read_runnable(self.file).graph
        constants = {tensor.name for tensor in graph.initializer}
        inputs = [value for value in graph.input if value.name not in constants]
        if not inputs:
            raise ConfigInvalid(
                f"{self.file} is not an ONNX file that can be measured", why="it has no inputs"
            )
        return [(value.name, _data_type(value), _dimensions(value)) for value in inputs]

    def known(self) -> dict[str, Any]:
        """Its size on disk, weights in files beside it included, their precision, and how many there are."""
        from hpml.targets.onnx_file import precision_of, read_graph

        model = read_graph(self.file)
        weights = model.graph.initializer
        beside = {
            entry.value for weight in weights for entry in weight.external_data if entry.key == "location"
        }
        files = [self.file, *(self.file.parent / name for name in beside)]
        size_bytes = sum(file.stat().st_size for file in files if file.is_file())
        parameters = sum(math.prod(weight.dims) for weight in weights)
        sizes = {"size_bytes": size_bytes, "parameters": parameters}
        return {**super().known(), **sizes, "precision": precision_of(model)}

    def open(self, *, threads: int, spinning: bool | None = None) -> Opened:
        """A session; ONNX Runtime itself refuses weights that lie outside the file's folder.

        Raises StageFailed if it cannot load the file, or not on the device.
        """
        from hpml.targets.onnx_session import OnnxSession, has_cuda

        if self.device == "cuda" and not has_cuda():
            raise StageFailed(
                f"{self.file} cannot run on a GPU",
                why="this ONNX Runtime runs on CPUs only",
                fix="install onnxruntime-gpu in place of onnxruntime, or leave --device out",
            )
        session = OnnxSession(self.file, device=self.device, threads=threads, spinning=spinning)
        return Opened(
            session.run,
            self.feeds,
            self.device,
            outputs=lambda arrays: dict(zip(session.outputs, session.run(self.feeds(arrays)), strict=True)),
        )

    def candidates(self, threads: int) -> tuple[EngineSettings, ...]:
        """See `hpml.targets.onnx.cpu_candidates`, on a GPU one; for each of its builds."""
        alone = cpu_candidates(threads) if self.device == "cpu" else super().candidates(threads)
        return of_each_variant(alone, self.variants)

    def of_variant(self, name: str) -> OnnxSubject:
        """The file of that build."""
        return self.model_copy(update={"file": self.variants[name]}) if name else self


def _data_type(value: Any) -> str:
    """The type of a graph's input as numpy calls it, or how ONNX calls it."""
    import onnx

    if value.type.WhichOneof("value") != "tensor_type":
        return f"a {value.type.WhichOneof('value')}"
    if value.type.tensor_type.elem_type == onnx.TensorProto.STRING:
        return "strings"
    try:
        return str(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
    except KeyError:
        return f"tensors of type {value.type.tensor_type.elem_type}"


def _dimensions(value: Any) -> list[int | str | None]:
    return [
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None
        for dim in value.type.tensor_type.shape.dim
    ]
