"""Requests of the Open Inference Protocol: right ones are read as they are, others refused by name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml.artifacts.operation import Operation, TensorSpec
from hpml.serving.apis.open_inference import answer, metadata, parse_request
from hpml.serving.errors import RequestRefused
from tests.serving.small_bundles import OPERATION, as_request

X = np.arange(32, dtype=np.float32).reshape(2, 1, 4, 4)
TOKENS = Operation(
    inputs=(
        TensorSpec(name="ids", dtype="int64", shape=("batch", "sequence"), below=50),
        TensorSpec(name="mask", dtype="int64", shape=("batch", "past + sequence")),
        TensorSpec(name="past", shape=("batch", 2, "past")),
        TensorSpec(name="flag", dtype="bool", shape=("batch",)),
    ),
    outputs=(TensorSpec(name="logits", shape=("batch", 4)),),
)


def tokens(**changes: Any) -> dict[str, Any]:
    """A request with three ids after two in the past; `changes` replace what an input says."""
    inputs = {
        "ids": {"datatype": "INT64", "shape": [1, 3], "data": [1, 2, 3]},
        "mask": {"datatype": "INT64", "shape": [1, 5], "data": [1, 1, 1, 1, 1]},
        "past": {"datatype": "FP32", "shape": [1, 2, 2], "data": [[[1, 2], [3, 4]]]},
        "flag": {"datatype": "BOOL", "shape": [1], "data": [True]},
    }
    return {"inputs": [{"name": name, **told, **changes.get(name, {})} for name, told in inputs.items()]}


@pytest.mark.parametrize("binary", [False, True])
def test_a_request_is_read_as_it_was_sent(binary: bool) -> None:
    body, headers = as_request(X, binary=binary)
    asked = parse_request(body, headers.get("Inference-Header-Content-Length"), OPERATION, 64)
    assert np.array_equal(asked.feeds["x_nchw"], X)
    assert asked.feeds["x_nchw"].dtype == np.float32
    assert asked.outputs == {"logits": binary}


def test_several_inputs_of_several_types_in_the_order_of_the_model() -> None:
    request = tokens()
    request["inputs"].reverse()
    feeds = parse_request(json.dumps(request).encode(), None, TOKENS, 8).feeds
    assert [*feeds] == ["ids", "mask", "past", "flag"]
    assert [str(array.dtype) for array in feeds.values()] == ["int64", "int64", "float32", "bool"]
    assert feeds["past"].tolist() == [[[1, 2], [3, 4]]]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ids": {"shape": [1, 2], "data": [1, 2]}}, "past + sequence is not 5"),
        ({"ids": {"shape": [2, 3], "data": [1] * 6}}, "batch is 2, and 1 in mask"),
        ({"ids": {"data": [1, -2, 3]}}, "the input ids holds -2 to 3, not 0 to 49"),
        ({"ids": {"data": [1, 50, 3]}}, "the input ids holds 1 to 50, not 0 to 49"),
        ({"ids": {"data": [1, 2]}}, "has 2 numbers, its shape is [1, 3]"),
        ({"ids": {"data": [1, 2.5, 3]}}, "not all of the datatype INT64"),
        ({"ids": {"data": [1, "2", 3]}}, "not all of the datatype INT64"),
        ({"ids": {"data": [1, 2**70, 3]}}, "not"),
        ({"ids": {"data": [[1], [2, 3]]}}, "ragged"),
        ({"ids": {"data": 1}}, "neither a list"),
        ({"ids": {"datatype": "INT32"}}, "datatype INT32, not INT64"),
        ({"ids": {"shape": [3]}}, "has the shape [3], the model takes [-1, -1]"),
        ({"ids": {"shape": [1, -3]}}, "has the shape [1, -3]"),
        ({"ids": {"name": "other"}}, "the model takes ids, mask, past, flag"),
        ({"flag": {"data": [1]}}, "not all of the datatype BOOL"),
        ({"past": {"shape": [1, 2, 2], "data": [1, 2, 3, True]}}, ""),
        ({"past": {"parameters": {"binary_data_size": 16}}}, "the body ends before"),
        ({"past": {"parameters": {"binary_data_size": 15}}}, "the body ends before"),
        ({"past": {"parameters": {"binary_data_size": -16}}}, "the body ends before"),
    ],
)
def test_what_is_malformed_is_named(changes: dict[str, Any], told: str) -> None:
    body = json.dumps(tokens(**changes)).encode()
    if not told:
        parse_request(body, None, TOKENS, 8)
        return
    with pytest.raises(RequestRefused) as refused:
        parse_request(body, None, TOKENS, 8)
    assert refused.value.status == 400
    assert told in refused.value.why
    assert "\n" not in refused.value.why
    assert len(refused.value.why) < 500


@pytest.mark.parametrize(
    ("body", "length", "told"),
    [
        (b"", None, "not JSON"),
        (b"[]", None, "valid"),
        (b"{", None, "not JSON"),
        (b'{"inputs": []}', None, "the inputs are none"),
        (b'{"inputs": [], "outputs": [1]}', None, "outputs.0"),
        (b'{"inputs": ' + b"[" * 100_000, None, "not JSON"),
        (b'{"inputs": [{"name": NaN}]}', None, "not JSON"),
        (b"{}", "3", "up to 2"),
        (b"{}", "-1", "up to 2"),
        (b"{}", "9" * 10_000, "up to 2"),
        (b"{}", "\u00b2", "up to 2"),
    ],
)
def test_what_is_no_request_is_refused(body: bytes, length: str | None, told: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        parse_request(body, length, OPERATION, 64)
    assert refused.value.status == 400
    assert told in refused.value.why


def test_bytes_are_as_many_as_the_shape_says() -> None:
    body, headers = as_request(X, binary=True)
    body = body.replace(b"[2, 1, 4, 4]", b"[1, 1, 4, 4]")
    with pytest.raises(RequestRefused, match="takes 64 bytes, not 128"):
        parse_request(body, headers["Inference-Header-Content-Length"], OPERATION, 64)


def test_numbers_that_are_not_finite_are_refused() -> None:
    body, headers = as_request(np.full((1, 1, 4, 4), np.nan, np.float32), binary=True)
    with pytest.raises(RequestRefused, match="not finite"):
        parse_request(body, headers["Inference-Header-Content-Length"], OPERATION, 64)
    huge = json.dumps(
        {"inputs": [{"name": "x_nchw", "datatype": "FP32", "shape": [1, 1, 4, 4], "data": [1e300] * 16}]}
    )
    with pytest.raises(RequestRefused, match="too large for FP32"):
        parse_request(huge.encode(), None, OPERATION, 64)


def test_bytes_that_belong_to_no_tensor_are_refused() -> None:
    body, headers = as_request(X, binary=True)
    with pytest.raises(RequestRefused, match="1 bytes after the tensors"):
        parse_request(body + b"x", headers["Inference-Header-Content-Length"], OPERATION, 64)


@pytest.mark.parametrize("rows", [0, 5])
def test_the_number_of_rows_is_bounded(rows: int) -> None:
    body, _ = as_request(np.zeros((rows, 1, 4, 4), np.float32))
    with pytest.raises(RequestRefused, match=f"{rows} rows, 1 to 4 are allowed"):
        parse_request(body, None, OPERATION, 4)


@given(st.data())
def test_no_mutation_of_a_request_is_more_than_refused(data: st.DataObject) -> None:
    body, headers = as_request(X, binary=data.draw(st.booleans()))
    mutated = bytearray(body)
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(mutated)))
        mutated[place : place + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    length = data.draw(st.sampled_from([headers.get("Inference-Header-Content-Length"), None, "0", "7"]))
    try:
        asked = parse_request(bytes(mutated), length, OPERATION, 64)
    except RequestRefused as refused:
        assert refused.status == 400
    else:
        assert asked.feeds["x_nchw"].shape[1:] == (1, 4, 4)


@pytest.mark.parametrize("binary", [False, True])
def test_an_answer_says_what_the_outputs_are(binary: bool) -> None:
    request, headers = as_request(X, binary=binary)
    asked = parse_request(request, headers.get("Inference-Header-Content-Length"), OPERATION, 64)
    logits = np.array([[1.5, 2.5, np.float32(0.1)], [4, 5, 6]], np.float32)
    body, told = answer(asked, {"logits": logits}, OPERATION, name="small", version="7")
    end = int(told.get("inference-header-content-length", len(body)))
    said = json.loads(body[:end])
    assert (said["model_name"], said["model_version"]) == ("small", "7")
    [output] = said["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("logits", "FP32", [2, 3])
    numbers = np.frombuffer(body[end:], "<f4") if binary else np.array(output["data"], np.float32)
    assert np.array_equal(numbers.reshape(2, 3), logits)


def test_what_json_cannot_say_can_be_had_as_bytes() -> None:
    logits = np.full((2, 3), np.nan, np.float32)
    for binary in (False, True):
        request, headers = as_request(X, binary=binary)
        asked = parse_request(request, headers.get("Inference-Header-Content-Length"), OPERATION, 64)
        if binary:
            body, _ = answer(asked, {"logits": logits}, OPERATION, name="small", version="1")
            assert body.endswith(logits.tobytes())
        else:
            with pytest.raises(RequestRefused, match="binary_data"):
                answer(asked, {"logits": logits}, OPERATION, name="small", version="1")


def test_metadata_tell_free_sizes() -> None:
    told = metadata(TOKENS, name="m", version="1")
    assert told["inputs"][2] == {"name": "past", "datatype": "FP32", "shape": [-1, 2, -1]}
    assert told["versions"] == ["1"]
