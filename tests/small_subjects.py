"""Small real things to measure: ONNX files, a torch module, and a server of the Open Inference Protocol."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MODEL_OF_THE_USER = """
import torch

class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(48, 5)

    def forward(self, x):
        assert not torch.is_grad_enabled() and not self.training
        return self.layer(x.flatten(1))

def small():
    return Small()

def wide(in_channels, num_classes, width=1):
    assert width == 3, "the recipe says 3"
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(in_channels * 16, num_classes))

def of_width(width):
    return torch.nn.Linear(48, width)

SEEN = []

def two_inputs():
    class Two(torch.nn.Module):
        def forward(self, x, ids):
            SEEN.append([(tuple(given.shape), str(given.dtype)) for given in (x, ids)])
            return x.sum() + ids.sum()
    return Two()

def not_a_module():
    return 7

def broken():
    raise RuntimeError("no such weights")
"""


def write_image_model(file: Path, *, batch: int | str = "n", size: int = 4, name: str = "x") -> Path:
    """A linear layer over images (batch, 3, size, size): five logits."""
    file.parent.mkdir(parents=True, exist_ok=True)
    weights = np.random.default_rng(0).standard_normal((3 * size * size, 5)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Flatten", [name], ["flat"]),
            helper.make_node("MatMul", ["flat", "w"], ["logits"]),
        ],
        "linear",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 3, size, size])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 5])],
        [numpy_helper.from_array(weights, "w")],
    )
    return _save(graph, file)


def write_text_model(file: Path, *, sequence: int | str | None = "seq") -> Path:
    """Embeds `ids` (n, seq) int64 and averages where `mask` (n, seq) float32 allows it: two inputs."""
    file.parent.mkdir(parents=True, exist_ok=True)
    table = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "ids"], ["embedded"]),
            helper.make_node("Unsqueeze", ["mask", "last"], ["weights"]),
            helper.make_node("Mul", ["embedded", "weights"], ["weighted"]),
            helper.make_node("ReduceMean", ["weighted", "middle"], ["pooled"], keepdims=0),
        ],
        "text",
        [
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", sequence]),
            helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["n", sequence]),
        ],
        [helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["n", 8])],
        [
            numpy_helper.from_array(table, "table"),
            numpy_helper.from_array(np.array([-1], np.int64), "last"),
            numpy_helper.from_array(np.array([1], np.int64), "middle"),
        ],
    )
    return _save(graph, file)


def write_transformer(
    file: Path,
    *,
    vocabulary: int = 20,
    inputs: tuple[str, ...] = ("input_ids", "attention_mask", "position_ids"),
    ids: int = TensorProto.INT64,
    scale: float = 1.0,
) -> Path:
    """A layer of attention over embeddings of 8 numbers, 16 positions at most; scale: of its logits.

    Inputs (n, seq) in the order of `inputs`; outputs: logits (n, 3), their classes (n,), hidden (n, seq, 8).
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    weights = {
        "tokens": rng.standard_normal((vocabulary, 8)).astype(np.float32),
        "positions": rng.standard_normal((16, 8)).astype(np.float32),
        "qkv": rng.standard_normal((8, 24)).astype(np.float32),
        "head": (scale * rng.standard_normal((8, 3))).astype(np.float32),
        "one": np.float32([1]),
        "hidden_score": np.float32([-1e9]),
        "middle": np.array([1], np.int64),
    }
    make = helper.make_node
    nodes = [
        make("Gather", ["tokens", "input_ids"], ["embedded"]),
        make("Gather", ["positions", "position_ids"], ["placed"]),
        make("Add", ["embedded", "placed"], ["x"]),
        make("MatMul", ["x", "qkv"], ["packed"]),
        make("Split", ["packed"], ["q", "k", "v"], axis=2, num_outputs=3),
        make("Transpose", ["k"], ["k_t"], perm=[0, 2, 1]),
        make("MatMul", ["q", "k_t"], ["scores"]),
        make("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        make("Sub", ["one", "mask"], ["padding"]),
        make("Mul", ["padding", "hidden_score"], ["flat_bias"]),
        make("Unsqueeze", ["flat_bias", "middle"], ["bias"]),
        make("Add", ["scores", "bias"], ["biased"]),
        make("Softmax", ["biased"], ["attention"]),
        make("MatMul", ["attention", "v"], ["hidden"]),
        make("ReduceMean", ["hidden", "middle"], ["pooled"], keepdims=0),
        make("MatMul", ["pooled", "head"], ["logits"]),
        make("ArgMax", ["logits"], ["class"], axis=1, keepdims=0),
    ]
    outputs = {"logits": ["n", 3], "class": ["n"], "hidden": ["n", "seq", 8]}
    graph = helper.make_graph(
        nodes,
        "transformer",
        [helper.make_tensor_value_info(name, ids, ["n", "seq"]) for name in inputs],
        [
            helper.make_tensor_value_info(
                name, TensorProto.INT64 if name == "class" else TensorProto.FLOAT, shape
            )
            for name, shape in outputs.items()
        ],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return _save(graph, file)


def transformer_samples(rows: int = 6, *, seq: int = 7) -> dict[str, np.ndarray[Any, Any]]:
    """Samples for `write_transformer` by the names of its inputs; the last two tokens are padding."""
    ids = np.random.default_rng(1).integers(0, 20, (rows, seq))
    mask = np.ones((rows, seq), np.int64)
    mask[:, -2:] = 0
    places = np.broadcast_to(np.arange(seq), (rows, seq))
    return {"input_ids": ids, "attention_mask": mask, "position_ids": places}


def write_endless(file: Path) -> Path:
    """A loop whose condition stays true: its first answer never comes."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["again"]),
            helper.make_node("Add", ["v", "v"], ["doubled"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, ["n", 4]),
        ],
        [
            helper.make_tensor_value_info("again", TensorProto.BOOL, []),
            helper.make_tensor_value_info("doubled", TensorProto.FLOAT, ["n", 4]),
        ],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["", "true", "x"], ["y"], body=body)],
        "endless",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(np.array(True), "true")],
    )
    return _save(graph, file)


def write_glutton(file: Path, *, size_bytes: int) -> Path:
    """A model that asks for `size_bytes` of memory when it answers."""
    shape = np.array([size_bytes // 16, 1, 4], np.int64)
    graph = helper.make_graph(
        [helper.make_node("Expand", ["x", "shape"], ["all"]), helper.make_node("Neg", ["all"], ["y"])],
        "glutton",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, "n", 4])],
        [numpy_helper.from_array(shape, "shape")],
    )
    return _save(graph, file)


def write_thief(file: Path, *, location: str) -> Path:
    """A model whose weights are said to be in the file `location`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    weights = numpy_helper.from_array(np.zeros((4, 4), np.float32), "w")
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "64")):
        entry = weights.external_data.add()
        entry.key, entry.value = key, value
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "thief",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
        [weights],
    )
    file.write_bytes(_model(graph).SerializeToString())
    return file


def _save(graph: onnx.GraphProto, file: Path) -> Path:
    model = _model(graph)
    onnx.checker.check_model(model)
    file.write_bytes(model.SerializeToString())
    return file


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@dataclass
class InferenceServer:
    """A server that adds up each sample of its one input. `seen` are its requests, `answer` its misbehaviour.

    answer: (path) -> (status, body), None to answer properly.
    """

    port: int = 0
    extensions: tuple[str, ...] = ()
    shape: tuple[int, ...] = (-1, 3, 4, 4)
    answer: Callable[[str], tuple[int, bytes] | None] = lambda _: None
    delay_s: float = 0.0
    close_after_each: bool = False
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def respond(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        self.seen.append((path, headers, body))
        time.sleep(self.delay_s)
        told = self.answer(path)
        if told is not None:
            return told
        if path == "/v2":
            return 200, _json({"name": "small", "version": "1", "extensions": self.extensions})
        if path == "/v2/models/sum":
            tensor = {"name": "x", "datatype": "FP32", "shape": self.shape}
            return 200, _json({"name": "sum", "inputs": [tensor], "outputs": []})
        if path == "/v2/models/sum/infer":
            return self._infer(headers, body)
        return 404, _json({"error": "unknown model"})

    def _infer(self, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        length = int(headers.get("Inference-Header-Content-Length", len(body)))
        request = json.loads(body[:length])
        [tensor] = request["inputs"]
        if tensor["shape"][1:] != list(self.shape[1:]):
            return 400, _json({"error": "unexpected shape for input 'x'"})
        if length < len(body):
            assert tensor["parameters"] == {"binary_data_size": len(body) - length}
            x = np.frombuffer(body[length:], np.float32)
        else:
            x = np.asarray(tensor["data"], np.float32)
        sums = x.reshape(tensor["shape"][0], -1).sum(axis=1)
        output = {"name": "sum", "datatype": "FP32", "shape": [len(sums)], "data": sums.tolist()}
        return 200, _json({"model_name": "sum", "outputs": [output]})


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@contextmanager
def inference_server(**options: Any) -> Iterator[InferenceServer]:
    """A running server; see InferenceServer for the options."""
    told = InferenceServer(**options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1

        def setup(self) -> None:
            super().setup()
            told.connections += 1

        def do_GET(self) -> None:
            self._do(b"")

        def do_POST(self) -> None:
            self._do(self.rfile.read(int(self.headers["Content-Length"])))

        def _do(self, body: bytes) -> None:
            status, answer = told.respond(self.path, dict(self.headers), body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            if status in (301, 302, 307):
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(answer)
            self.close_connection = self.close_connection or told.close_after_each

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    told.port = server.server_port
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield told
    finally:
        server.shutdown()
        server.server_close()
