"""The Open Inference Protocol, version 2: requests and answers as JSON, and tensors as plain bytes behind it.

https://github.com/kserve/open-inference-protocol and, for the bytes,
https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_binary_data.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from hpml.artifacts.operation import DATATYPES, Operation
from hpml.serving.apis.tensors import (
    check_ids,
    check_sizes,
    from_bytes,
    from_numbers,
    listed,
    matched,
    shape,
)
from hpml.serving.bodies import checked, read_json
from hpml.serving.errors import RequestRefused

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADER_LENGTH = "inference-header-content-length"
PLATFORM = "onnx_onnxruntime"
EXTENSIONS = ("binary_tensor_data", "model_repository")

_MOST_DIGITS = 20
_SHORT_BYTES = 1024
_MOST_RANK = 32  # numpy's


class _Lenient(BaseModel):
    """Clients send parameters of their own: what is not known is left alone."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Input(_Lenient):
    name: str
    datatype: str
    shape: list[int] = Field(max_length=_MOST_RANK)
    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    data: Any = None


class _Output(_Lenient):
    name: str
    parameters: dict[str, JsonValue] = Field(default_factory=dict)


class InferBody(_Lenient):
    """The JSON of a request."""

    id: str = ""
    parameters: dict[str, JsonValue] = Field(default_factory=dict)
    inputs: list[_Input]
    outputs: list[_Output] = []


@dataclass(frozen=True)
class InferRequest:
    """What a client asks: the inputs of an operation, and which outputs it wants, as bytes or in JSON."""

    id: str
    feeds: dict[str, NDArray[Any]]
    outputs: Mapping[str, bool]  # name -> whether as bytes


def parse_request(
    body: bytes,
    json_length: str | None,
    operation: Operation,
    max_rows: int,
    largest: Mapping[str, int] = MappingProxyType({}),
) -> InferRequest:
    """The request in `body`; json_length: the header that says where its JSON ends, if tensors follow.

    max_rows, largest: see `check_sizes`.

    Raises RequestRefused (400) that names what is malformed, and what is allowed.
    """
    end = _end_of_json(json_length, len(body))
    head = body[:end]
    request = _read_short_head(head) if end <= _SHORT_BYTES else _read_head(head)
    feeds = _feeds(request.inputs, body, end, operation)
    check_sizes(feeds, operation, max_rows, largest)
    check_ids(feeds, operation)
    return InferRequest(request.id, feeds, _wanted(request, operation))


def _read_head(head: bytes) -> InferBody:
    return checked(InferBody, read_json(head))


# Before tensors as bytes, clients send the same head again and again.
_read_short_head = lru_cache(maxsize=64)(_read_head)


def _end_of_json(json_length: str | None, body_length: int) -> int:
    if json_length is None:
        return body_length
    is_number = json_length.isascii() and json_length.isdigit() and len(json_length) < _MOST_DIGITS
    if not is_number or int(json_length) > body_length:
        raise RequestRefused(
            400, f"Inference-Header-Content-Length is no number of bytes up to {body_length}"
        )
    return int(json_length)


def _feeds(
    inputs: Sequence[_Input], body: bytes, begin: int, operation: Operation
) -> dict[str, NDArray[Any]]:
    found = {}
    for one, told in zip(inputs, matched(inputs, operation), strict=True):
        size_bytes = one.parameters.get("binary_data_size")
        if size_bytes is None:
            if not isinstance(one.data, list):
                raise RequestRefused(
                    400, f"the input {one.name} has neither a list as data nor binary_data_size"
                )
            found[one.name] = from_numbers(one, told, one.data)
            continue
        if not isinstance(size_bytes, int) or not 0 <= size_bytes <= len(body) - begin:
            raise RequestRefused(400, f"the body ends before the bytes of the input {one.name} do")
        found[one.name] = from_bytes(one, told, memoryview(body)[begin : begin + size_bytes])
        begin += size_bytes
    if begin < len(body):
        raise RequestRefused(400, f"{len(body) - begin} bytes after the tensors belong to none")
    return {one.name: found[one.name] for one in operation.inputs}


def _wanted(request: InferBody, operation: Operation) -> dict[str, bool]:
    known = [one.name for one in operation.outputs]
    by_default = request.parameters.get("binary_data_output", False)
    if not isinstance(by_default, bool):
        raise RequestRefused(400, "binary_data_output is neither true nor false")
    for one in request.outputs:
        if "classification" in one.parameters:
            raise RequestRefused(
                400, f"the output {one.name[:40]} asks for classification, which is not supported"
            )
    if not request.outputs:
        return dict.fromkeys(known, by_default)
    asked = {one.name: one.parameters.get("binary_data", by_default) is True for one in request.outputs}
    if unknown := asked.keys() - set(known):
        raise RequestRefused(400, f"the model gives {listed(known)}, not {listed(unknown)}")
    return asked


def answer(
    request: InferRequest,
    outputs: Mapping[str, NDArray[Any]],
    operation: Operation,
    *,
    name: str,
    version: str,
) -> tuple[bytes, dict[str, str]]:
    """The body that answers `request`, and its headers.

    Raises RequestRefused (400) for numbers that JSON cannot say; as bytes they can be had.
    """
    types = {one.name: DATATYPES[one.dtype] for one in operation.outputs}
    told: list[dict[str, Any]] = []
    tail = []
    for wanted, as_bytes in request.outputs.items():
        array = np.ascontiguousarray(outputs[wanted])
        one: dict[str, Any] = {"name": wanted, "datatype": types[wanted], "shape": array.shape}
        if as_bytes:
            one["parameters"] = {"binary_data_size": array.nbytes}
            tail.append(array.tobytes())
        else:
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise RequestRefused(
                    400, f"the output {wanted} is not finite, which JSON cannot say: ask for binary_data"
                )
            one["data"] = array.astype(np.float32).ravel() if array.dtype == np.float16 else array.ravel()
        told.append(one)
    head: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": told}
    if request.id:
        head["id"] = request.id
    text = orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY)
    if not tail:
        return text, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(text))}
    return b"".join([text, *tail]), headers


def metadata(operation: Operation, *, name: str, version: str) -> dict[str, Any]:
    """What a client has to know of a model to ask it; -1 is a size that is free."""
    tensors = {
        kind: [{"name": one.name, "datatype": DATATYPES[one.dtype], "shape": shape(one)} for one in given]
        for kind, given in (("inputs", operation.inputs), ("outputs", operation.outputs))
    }
    return {"name": name, "versions": [version], "platform": PLATFORM, **tensors}
