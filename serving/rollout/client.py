"""A client of the servers of a rollout: one connection, tensors as bytes, and how long answers took."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from hpml.artifacts.operation import DATATYPES, TensorSpec
from hpml.core.errors import Unavailable
from hpml.serving.apis.open_inference import HEADER_LENGTH
from hpml.serving.rollout.figures import Latencies

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TIMEOUT_S, _RESOLVING_S = 10.0, 30.0


class NoAnswer(Exception):
    """A request without the answer that it should have."""


@dataclass(frozen=True)
class Request:
    """Inputs of an operation, as they are sent."""

    path: str
    body: bytes
    headers: Mapping[str, str]


def resolved(url: str) -> str:
    """With the address in place of the name: a name server that is away says nothing of the servers."""
    parts = urlsplit(url)
    if not url:
        return ""
    until = time.monotonic() + _RESOLVING_S
    while True:
        try:
            return f"http://{socket.gethostbyname(str(parts.hostname))}:{parts.port or 80}"
        except OSError as error:
            if time.monotonic() > until:
                raise Unavailable(f"the name {parts.hostname} is not known", why=str(error)) from None
            time.sleep(1)


class Client:
    """One connection. Its methods raise NoAnswer."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        self._address = f"{parts.hostname}:{parts.port or 80}"
        self._connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
        self._authorization = {"Authorization": f"Bearer {token}"} if token else {}

    def ask(self, request: Request) -> tuple[bytes, Mapping[str, str]]:
        """The body of the answer, and its headers in lower case."""
        return self._send("POST", request.path, request.body, request.headers)

    def get(self, path: str) -> bytes:
        """What is at `path`."""
        return self._send("GET", path, b"", {})[0]

    def _send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[bytes, Mapping[str, str]]:
        try:
            self._connection.request(method, path, body, {**headers, **self._authorization})
            response = self._connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise NoAnswer(f"{self._address} does not answer: {error or type(error).__name__}") from None
        if response.status != 200:
            raise NoAnswer(
                f"{self._address} answers {response.status}: {answer[:200].decode(errors='replace')}"
            )
        return answer, {name.lower(): value for name, value in response.getheaders()}

    def close(self) -> None:
        """Until the next request."""
        self._connection.close()


def as_request(model: str, arrays: Mapping[str, NDArray[Any]], inputs: Sequence[TensorSpec]) -> Request:
    """To `model`, by the name that clients use."""
    told = [
        {
            "name": one.name,
            "datatype": DATATYPES[one.dtype],
            "shape": arrays[one.name].shape,
            "parameters": {"binary_data_size": arrays[one.name].nbytes},
        }
        for one in inputs
    ]
    head = json.dumps({"inputs": told, "parameters": {"binary_data_output": True}}).encode()
    tail = b"".join(arrays[one.name].tobytes() for one in inputs)
    headers = {HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}
    return Request(f"/v2/models/{model}/infer", head + tail, headers)


def outputs(answer: bytes, headers: Mapping[str, str]) -> dict[str, NDArray[Any]]:
    """What an answer to such a request says, by name."""
    end = int(headers.get(HEADER_LENGTH) or len(answer))
    types = {told: np.dtype(dtype) for dtype, told in DATATYPES.items()}
    found = {}
    for one in json.loads(answer[:end])["outputs"]:
        size_bytes = one["parameters"]["binary_data_size"]
        data = np.frombuffer(answer[end : end + size_bytes], types[one["datatype"]])
        found[one["name"]], end = data.reshape(one["shape"]), end + size_bytes
    return found


def summed_up(latencies_ms: NDArray[np.float64]) -> Latencies:
    """Of one server, whatever the shape of the array."""
    return Latencies(
        requests=latencies_ms.size,
        latency_ms_p50=float(np.median(latencies_ms)),
        latency_ms_p99=float(np.quantile(latencies_ms, 0.99, method="inverted_cdf")),
    )
