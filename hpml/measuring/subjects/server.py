"""A running server that speaks the Open Inference Protocol, version 2, over HTTP (KServe, Triton, MLServer).

https://github.com/kserve/open-inference-protocol, and for tensors as plain bytes
https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/protocol/extension_binary_data.html
"""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from pydantic import Field

from hpml.core.errors import ConfigInvalid, Unavailable
from hpml.measuring.subjects.base import Opened
from hpml.measuring.subjects.tensors import Declared, FromOutside, Signature, tensor_of

if TYPE_CHECKING:
    from hpml.measuring.subjects.base import Arrays

_DATA_TYPES = {
    "FP32": "float32", "FP64": "float64", "FP16": "float16", "BOOL": "bool",
    **{f"INT{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}  # fmt: skip
_NAMES = {ours: theirs for theirs, ours in _DATA_TYPES.items()}
_PATH = re.compile(r"/v2/models/(?P<model>[^/]+)(/versions/(?P<version>[^/]+))?(/infer)?/?")
_LARGEST_ANSWER = 64 * 1024 * 1024
_BINARY = "binary_tensor_data"  # the extension's name in the server's metadata
_HEADER_LENGTH = "Inference-Header-Content-Length"


class Request(NamedTuple):
    """The body of one inference, made before anything is timed, and its headers."""

    body: bytes
    headers: dict[str, str]


class ServerSubject(FromOutside):
    """The model `model` on the server at `url`, "http://host:port".

    Its latency is that of a request over the network: sending it, the server's reading, predicting and
    writing, and receiving the answer. Making the request is not in it.
    """

    subject: Literal["server"] = "server"
    url: str
    model: str
    version: str = ""
    timeout_s: float = Field(default=30.0, gt=0)  # of any one wait for the server

    @property
    def path(self) -> str:
        """Where the model is on the server."""
        version = f"/versions/{quote(self.version, safe='')}" if self.version else ""
        return f"/v2/models/{quote(self.model, safe='')}{version}"

    def declared_inputs(self) -> Sequence[Declared]:
        """What the server says the model takes.

        Raises Unavailable if the server does not answer, or not by the protocol.
        """
        with closing(_Connection(self)) as connection:
            told = connection.get_json(self.path)
        where = f"{self.url}{self.path}"
        try:
            declared = [
                (
                    str(item["name"]),
                    _DATA_TYPES.get(str(item["datatype"]), str(item["datatype"])),
                    [*item["shape"]],
                )
                for item in told["inputs"]
            ]
        except (KeyError, TypeError) as error:
            raise Unavailable(
                f"{where} does not say what it takes", why=f"its metadata lacks {error}"
            ) from None
        if not declared:
            raise Unavailable(f"{where} does not say what it takes", why="its metadata has no inputs")
        return declared

    def signature(self, sizes: Mapping[str, int]) -> Signature:
        """See `declared_inputs`."""
        where = f"{self.url}{self.path}"
        named = [
            tensor_of(where, name, position, dtype, shape, sizes)
            for position, (name, dtype, shape) in enumerate(self.declared_inputs())
        ]
        batches = {batch for _, batch in named if batch is not None}
        return Signature(tuple(tensor for tensor, _ in named), min(batches, default=None))

    def open(self, *, threads: int, spinning: bool | None = None) -> Opened:
        """A connection for each thread that asks, kept for its requests. `threads` is the server's own."""
        connections = threading.local()

        def connection() -> _Connection:
            if not hasattr(connections, "own"):
                connections.own = _Connection(self)
            own: _Connection = connections.own
            return own

        extensions = connection().get_json("/v2").get("extensions")
        binary = isinstance(extensions, list) and _BINARY in extensions
        path = f"{self.path}/infer"

        def predict(request: Request) -> bytes:
            return connection().ask("POST", path, request.body, request.headers)

        def request(arrays: Arrays) -> Request:
            return (_binary if binary else _json)(self, arrays)

        def outputs(arrays: Arrays) -> dict[str, Any]:
            return self._outputs(predict(_json(self, arrays)))

        return Opened(predict, request, "remote", outputs=outputs)

    def _outputs(self, body: bytes) -> dict[str, Any]:
        """The arrays of an answer in JSON.

        Raises Unavailable if it is none of the protocol's.
        """
        import numpy as np

        try:
            found = {}
            for output in json.loads(body)["outputs"]:
                array = np.array(output["data"], _DATA_TYPES[output["datatype"]])
                found[str(output["name"])] = array.reshape(output["shape"])
            return found
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            raise Unavailable(
                f"{self.url}{self.path} does not answer by the protocol", why="its outputs are no arrays"
            ) from None

    def check(self, opened: Opened) -> None:
        """Raise Unavailable if the answer to a request is not one of the protocol's."""
        arrays = {tensor.array: tensor.draw(1, seed=0) for tensor in self.inputs}
        body: bytes = opened.predict(opened.request(arrays))
        try:
            outputs = json.JSONDecoder().raw_decode(body.decode("utf-8", errors="replace"))[0]["outputs"]
            names = [output["name"] for output in outputs]
        except (ValueError, KeyError, TypeError, RecursionError):
            names = []
        if not names:
            raise Unavailable(
                f"{self.url}{self.path} does not answer by the protocol", why="it names no outputs"
            )


def parse_url(url: str, model: str = "") -> ServerSubject:
    """The server and the model that "http://host:port/v2/models/NAME" names; `model` where the URL does not.

    Raises ConfigInvalid for any other URL. Its message does not repeat what may be a password.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigInvalid("the address of a server is not valid", why=str(error)) from None
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigInvalid(
            f"a server is measured over http or https, not {parts.scheme or 'nothing'}",
            fix="give http://HOST:PORT/v2/models/NAME",
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigInvalid(
            f"the address of the server {host} has more than a host, a port and a path",
            why="credentials in it would end up in results and logs",
            fix="give http://HOST:PORT/v2/models/NAME",
        )
    path = _PATH.fullmatch(parts.path)
    if not path and parts.path not in ("", "/"):
        raise ConfigInvalid(
            f"{parts.path!r} is no model's place on the server {host}",
            fix="give http://HOST:PORT/v2/models/NAME, or http://HOST:PORT and --model NAME",
        )
    name = unquote(path["model"]) if path else model
    if not name:
        raise ConfigInvalid(f"which model of the server {host}?", fix="add /v2/models/NAME, or --model NAME")
    address = f"[{host}]" if ":" in host else host
    place = f"{parts.scheme}://{address}{f':{port}' if port else ''}"
    return ServerSubject(url=place, model=name, version=unquote((path and path["version"]) or ""))


# ----------------------------------------------------------------------------------------------- the requests


def _json(server: ServerSubject, arrays: Arrays) -> Request:
    """All tensors as JSON, flat and in row-major order."""
    inputs = [
        {**_head(name, array), "data": array.ravel().tolist()} for name, array in server.feeds(arrays).items()
    ]
    body = json.dumps({"inputs": inputs}, separators=(",", ":")).encode()
    return Request(body, {"Content-Type": "application/json"})


def _binary(server: ServerSubject, arrays: Arrays) -> Request:
    """A JSON header, and after it all tensors as they lie in memory; the answer shall be so as well."""
    import numpy as np

    feeds = server.feeds(arrays)
    inputs = [
        {**_head(name, array), "parameters": {"binary_data_size": array.nbytes}}
        for name, array in feeds.items()
    ]
    wanted = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    header = json.dumps(wanted, separators=(",", ":")).encode()
    body = header + b"".join(np.ascontiguousarray(array).tobytes() for array in feeds.values())
    return Request(body, {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(len(header))})


def _head(name: str, array: Any) -> dict[str, Any]:
    return {"name": name, "datatype": _NAMES[str(array.dtype)], "shape": list(array.shape)}


# --------------------------------------------------------------------------------------------- the connection


class _Connection:
    """One connection, kept open. Never follows a redirect, never reads more than _LARGEST_ANSWER."""

    def __init__(self, server: ServerSubject) -> None:
        parts = urlsplit(server.url)
        assert parts.hostname is not None
        self._url = server.url
        secure = parts.scheme == "https"  # then it checks the server's certificate
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        self._http = kind(parts.hostname, parts.port, timeout=server.timeout_s)

    def close(self) -> None:
        """Let go of it."""
        self._http.close()

    def get_json(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`.

        Raises Unavailable if there is none.
        """
        try:
            told = json.loads(self.ask("GET", path))
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict):
            raise Unavailable(
                f"{self._url}{path} does not answer by the protocol", why="it is no JSON object"
            )
        return told

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> bytes:
        """The body of the answer to one request.

        A connection that the server closed since the last request is opened again, once.
        Raises Unavailable if the server cannot be reached, takes too long, or answers with a status but 200.
        """
        try:
            try:
                status, answer = self._exchange(method, path, body, headers or {})
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                self._http.close()
                status, answer = self._exchange(method, path, body, headers or {})
        except TimeoutError:
            self._http.close()
            raise Unavailable(f"{self._url}{path} did not answer for {self._http.timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise Unavailable(
                f"{self._url}{path} does not answer", why=f"{type(error).__name__}: {str(error)[:200]}"
            ) from None
        if status != http.client.OK:
            said = answer[:200].decode("utf-8", errors="replace")
            raise Unavailable(f"{self._url}{path} answers with status {status}", why=said)
        return answer

    def _exchange(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        self._http.request(method, path, body or None, dict(headers))
        response = self._http.getresponse()
        content = response.read(_LARGEST_ANSWER + 1)
        if len(content) > _LARGEST_ANSWER:
            self._http.close()
            raise Unavailable(
                f"{self._url}{path} answers with more than {_LARGEST_ANSWER // 1024**2} MiB",
                why="no more is read of it",
            )
        if response.length:
            raise http.client.IncompleteRead(content, response.length)
        return response.status, content
