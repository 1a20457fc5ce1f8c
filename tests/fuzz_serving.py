"""Requests that no client should send, by the thousand: `make fuzz-serving`.

    .venv/bin/python -m tests.fuzz_serving BUNDLE [--requests 100000] [--seed 0]

Starts `hpml serve` on the bundle and sends it mutated inferences and pictures, paths and methods that are
made up, headers that lie about lengths, huge and endless bodies, half-closed connections and connections
that are dropped in the middle, over 8 connections at once; over gRPC mutated and huge messages, tensors that
are not what they say, and names that are made up. Fails if the server ends, answers with a 5xx, or its memory
grows beyond its bound; and between any two batches an honest request has to be answered rightly. Then
schemathesis asks every path for what the server's OpenAPI document allows, and for what it does not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as messages

from hpml.measuring.subjects import BundleSubject
from tests.serving.small_bundles import as_request

_CONNECTIONS = 8
_BATCH = 2_000  # requests between two looks at the server
_MAY_GROW_BYTES = 400 << 20  # of all bodies in memory, and what reading JSON takes
_TIMEOUT_S = 20.0

_SHARE_OF_GRPC = 0.25
_SERVICE = "/inference.GRPCInferenceService"
_LIKE_5XX = {"UNKNOWN", "INTERNAL", "DATA_LOSS", "UNAVAILABLE"}  # codes of gRPC

Make = Callable[[random.Random, "Target"], bytes]


@dataclass
class Target:
    """A server and an honest request to it. answers: how many there were of each status."""

    port: int
    grpc_port: int
    path: str
    message: messages.ModelInferRequest
    body: bytes
    headers: dict[str, str]
    answers: Counter[str] = field(default_factory=Counter)

    def request(self, body: bytes, *, method: str = "POST", path: str = "", **headers: str) -> bytes:
        """The bytes of a request; `headers` replace those of the honest one."""
        named = {"Content-Length": str(len(body)), **self.headers}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        return f"{method} {path or self.path} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode() + body

    def send(
        self, content: bytes, *, half_close: bool = False, drop: bool = False, timeout_s: float = _TIMEOUT_S
    ) -> str:
        """Send it over a connection of its own; the status, or what happened instead of an answer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s) as connection:
            try:
                connection.sendall(content)
                if drop:
                    return "dropped"
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(1 << 16)
            except TimeoutError:
                return "no answer"
            except OSError:  # such as a reset, or a server that has closed it before the half of ours
                return "closed"
        return answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.1 ") else "closed"

    def send_message(self, channel: grpc.Channel, content: bytes, method: str = "ModelInfer") -> str:
        """Send the bytes of a message over gRPC; the code."""
        try:
            channel.unary_unary(f"{_SERVICE}/{method}")(content, timeout=_TIMEOUT_S)
        except grpc.RpcError as refused:
            code: str = refused.code().name
            return code
        return "OK"


def mutated(chance: random.Random, content: bytes) -> bytes:
    """With bytes changed, removed, doubled or put in at some places."""
    changed = bytearray(content)
    for _ in range(chance.randint(1, 8)):
        place = chance.randrange(len(changed) + 1)
        match chance.randrange(4):
            case 0:
                changed[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del changed[place : place + chance.randint(1, 40)]
            case 2:
                changed[place:place] = changed[place : place + chance.randint(1, 40)]
            case _:
                changed[place:place] = chance.choice(_FRAGMENTS)
    return bytes(changed)


_FRAGMENTS = (
    *(b"null", b"-1", b"1e999", b"[[[[", b'{"', b"\x00", b"\xff\xfe", b"9223372036854775808", b"NaN"),
    *(b"true", b'""', b"\\ud800", b"18446744073709551616", b"0.5", b"]", b"}", b"," * 9),
)
_PATHS = (
    "/",
    "/v2",
    "/v2/models",
    "/v2/models/%00",
    "/v2/../../etc/passwd",
    "/v1/classify",
    "/metrics",
    "/v2//infer",
)
_METHODS = ("GET", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "POST", "PATCH")


def _tensor(chance: random.Random, target: Target) -> bytes:
    return target.request(mutated(chance, target.body))


def _json(chance: random.Random, target: Target) -> bytes:
    told = json.loads(as_request(np.zeros((1, 1, 1, 1), np.float32))[0])
    one = told["inputs"][0]
    one[chance.choice([*one])] = chance.choice(
        [None, 1, -1, [], {}, "x", [10**30], [[1], [2, 3]], ["1"], 0.5, [0] * 70, {"binary_data_size": -5}]
    )
    return target.request(json.dumps(told).encode(), Inference_Header_Content_Length="")


def _deep(chance: random.Random, target: Target) -> bytes:
    depth = chance.randint(10, 50_000)
    return target.request(b'{"inputs":' + b"[" * depth, Inference_Header_Content_Length="")


def _lying_length(chance: random.Random, target: Target) -> bytes:
    length = chance.choice(["0", "5", "-1", "1e3", "999999999999999", "٣", "0x10", ""])
    name = chance.choice(["Content_Length", "Inference_Header_Content_Length"])
    return target.request(target.body, **{name: length})


def _elsewhere(chance: random.Random, target: Target) -> bytes:
    return target.request(b"", method=chance.choice(_METHODS), path=chance.choice(_PATHS))


def _picture(chance: random.Random, target: Target) -> bytes:
    heads = [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"BM", b"II*\x00"]
    body = chance.choice(heads) + chance.randbytes(chance.randint(0, 400))
    return target.request(
        body,
        path="/v1/classify",
        Content_Type=chance.choice(["image/png", "image/jpeg", "text/html", "image/png; x=" + "y" * 99]),
    )


def _headers(chance: random.Random, target: Target) -> bytes:
    return target.request(target.body, X_Long="x" * chance.choice([10, 10_000, 100_000]))


def _huge(chance: random.Random, target: Target) -> bytes:
    return target.request(b"x" * (1 << 20), Content_Length=str(1 << 40))


def _chunks(chance: random.Random, target: Target) -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (target.body[:50], target.body[50:]))
    end = chance.choice([b"0\r\n\r\n", b"zz\r\n", b"-1\r\n\r\n", b"ffffffffffffffffff\r\n"])
    head = target.request(b"", Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
    return head + chunks + end


def _noise(chance: random.Random, target: Target) -> bytes:
    return chance.randbytes(chance.randint(1, 3_000))


def _mutated_message(chance: random.Random, target: Target) -> bytes:
    return mutated(chance, target.message.SerializeToString())


def _wrong_tensor(chance: random.Random, target: Target) -> bytes:
    request = messages.ModelInferRequest()
    request.CopyFrom(target.message)
    one = request.inputs[0]
    match chance.randrange(6):
        case 0:
            one.shape[chance.randrange(len(one.shape))] = chance.choice([0, -1, 2**40, 2**63 - 1, 7])
        case 1:
            one.datatype = chance.choice(["", "INT64", "BYTES", "FP16", "x" * 5_000])
        case 2:
            request.raw_input_contents.append(chance.randbytes(chance.randint(0, 99)))
        case 3:
            request.raw_input_contents[0] = chance.randbytes(chance.randint(0, 9_999))
        case 4:
            del request.raw_input_contents[:]
            one.contents.fp32_contents.extend([float("nan"), 1e38] * chance.randint(0, 99))
        case _:
            request.inputs.extend([one] * chance.randint(1, 300))
    content: bytes = request.SerializeToString()
    return content


def _wrong_name(chance: random.Random, target: Target) -> bytes:
    request = messages.ModelInferRequest()
    request.CopyFrom(target.message)
    name = chance.choice(["", "../../etc", "x" * 9_000, "\0", "\U0001f600"])
    match chance.randrange(4):
        case 0:
            request.model_name = name
        case 1:
            request.model_version = name
        case 2:
            request.inputs[0].name = name
        case _:
            request.outputs.add(name=name)
    content: bytes = request.SerializeToString()
    return content


def _huge_message(chance: random.Random, target: Target) -> bytes:
    size_bytes = chance.choice([900_000, 1_100_000, 4_000_000])
    content: bytes = messages.ModelInferRequest(raw_input_contents=[bytes(size_bytes)]).SerializeToString()
    return content


_METHODS_OF_GRPC = ("ModelInfer", "ModelInfer", "ModelMetadata", "ModelReady", "ModelConfig", "Made/Up", "X")
_MESSAGES: tuple[Make, ...] = (_mutated_message, _wrong_tensor, _wrong_name, _huge_message)


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


_KINDS: tuple[Make, ...] = (
    *(_tensor, _tensor, _json, _deep, _lying_length, _elsewhere, _picture, _headers, _huge, _chunks, _noise),
)


def fuzz(target: Target, requests: int, seed: int) -> None:
    """Send so many, spread over the connections."""

    def send(number: int) -> Counter[str]:
        answers: Counter[str] = Counter()
        chance = random.Random(f"{seed}-{number}")
        with grpc.insecure_channel(f"127.0.0.1:{target.grpc_port}") as channel:
            for _ in range(requests // _CONNECTIONS):
                answers[_send_one(chance, target, channel)] += 1
        return answers

    with ThreadPoolExecutor(_CONNECTIONS) as threads:
        for answers in threads.map(send, range(_CONNECTIONS)):
            target.answers += answers


def _send_one(chance: random.Random, target: Target, channel: grpc.Channel) -> str:
    if chance.random() < _SHARE_OF_GRPC:
        message = chance.choice(_MESSAGES)(chance, target)
        return target.send_message(channel, message, chance.choice(_METHODS_OF_GRPC))
    kind = chance.choice(_KINDS)
    half_close, drop = chance.random() < 0.8, chance.random() < 0.05
    return target.send(kind(chance, target), half_close=half_close, drop=drop, timeout_s=0.5)


def fuzz_server(bundle: Path, requests: int, seed: int, examples: int) -> Counter[str]:
    """How many answers there were of each status. Raises AssertionError for what must not happen.

    examples: of requests that schemathesis makes up for each path, at most.
    """
    facts = BundleSubject(folder=bundle).facts()
    operation = facts.engine.operations[0]
    x = np.zeros(operation.inputs[0].sizes(batch=1), np.float32)
    body, headers = as_request(x, binary=True)
    message = messages.ModelInferRequest(model_name=facts.model_name, raw_input_contents=[x.tobytes()])
    message.inputs.add(name=operation.inputs[0].name, datatype="FP32", shape=x.shape)
    command = [str(Path(sys.executable).with_name("hpml")), "serve", str(bundle), "--port", "0"]
    command += ["--grpc-port", "0", "--max-body-mb", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    try:
        ports = [int(process.stderr.readline().rsplit(":", 1)[1]) for _ in range(2)]
        target = Target(*ports, f"/v2/models/{facts.model_name}/infer", message, body, headers)
        honest = target.request(body)
        assert target.send(honest) == "200"
        before_bytes = _resident_bytes(process.pid)
        for number in range(0, requests, _BATCH):
            fuzz(target, min(_BATCH, requests - number), seed + number)
            assert process.poll() is None, f"the server ended with {process.returncode}"
            assert target.send(honest) == "200"
            grown_bytes = _resident_bytes(process.pid) - before_bytes
            assert grown_bytes < _MAY_GROW_BYTES, f"it has grown by {grown_bytes:,} bytes"
        wrong = {
            status: count
            for status, count in target.answers.items()
            if status.startswith("5") or status in _LIKE_5XX
        }
        assert not wrong, wrong
        _ask_by_its_document(target.port, examples, seed)
        _check_metrics(target)
        return target.answers
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        process.kill()
        process.stderr.close()


def _ask_by_its_document(port: int, examples: int, seed: int) -> None:
    """Let schemathesis ask for what the document allows, and for what it does not."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    options = ["--checks", checks, "--mode", "all", "--max-examples", str(examples), "--seed", str(seed)]
    schemathesis = str(Path(sys.executable).with_name("schemathesis"))
    command = [schemathesis, "run", f"http://127.0.0.1:{port}/openapi.json", *options]
    with tempfile.TemporaryDirectory() as folder:  # for what it keeps of the requests
        done = subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    assert done.returncode == 0, done.stdout


def _check_metrics(target: Target) -> None:
    """All bodies were counted out again, and what came over gRPC was counted."""
    with closing(HTTPConnection("127.0.0.1", target.port, timeout=_TIMEOUT_S)) as connection:
        connection.request("GET", "/metrics")
        told = connection.getresponse().read().decode()
    assert "hpml_pending_bytes 0.0" in told, told
    assert f'hpml_requests_total{{path="{_SERVICE}/ModelInfer",status="INVALID_ARGUMENT"}}' in told, told


def main() -> None:
    """Fuzz, and print what was answered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=200, help="of schemathesis, for each path")
    given = parser.parse_args()
    for status, count in fuzz_server(given.bundle, given.requests, given.seed, given.examples).most_common():
        print(f"{count:>8,} {status}")


if __name__ == "__main__":
    main()
