"""Bodies of requests, read within bounds, of each and of all together; and what they say in JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from hpml.serving.config import ServerConfig
from hpml.serving.errors import RequestRefused, overloaded
from hpml.serving.prometheus import Metrics

_Model = TypeVar("_Model", bound=BaseModel)


def read_json(body: bytes) -> Any:
    """What `body` says. Raises RequestRefused (400) if it is no JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(400, f"the body is not JSON: {error.msg} at byte {error.pos}") from None


def checked(kind: type[_Model], given: Any) -> _Model:
    """`given` as `kind`. Raises RequestRefused (400) that names the first field that is wrong."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the request"
        raise RequestRefused(400, f"{where}: {first['msg']}") from None


class Bodies:
    """Counts what bodies, and messages over gRPC, take in memory until their requests are answered."""

    def __init__(self, config: ServerConfig, metrics: Metrics) -> None:
        self.most, self._most_pending, self.timeout_s = (
            config.max_body_bytes,
            config.max_pending_bytes,
            config.receive_timeout_s,
        )
        self.pending = 0
        metrics.pending_bytes.set_function(lambda: float(self.pending))

    def read(self, request: Request) -> _Body:
        """`async with` it: the body of `request`, which counts until this ends.

        Raises RequestRefused for one that is too long (413), compressed (415), too slow (408) or one too many
        (429), or whose client went away.
        """
        return _Body(self, request)

    @contextmanager
    def counted(self, size_bytes: int) -> Iterator[None]:
        """Count what was read elsewhere until this ends. Raises RequestRefused (429) if it is too much."""
        self.pending += size_bytes
        try:
            self.check_pending()
            yield
        finally:
            self.pending -= size_bytes

    def check_pending(self) -> None:
        if self.pending > self._most_pending:
            raise overloaded("too many bodies are in memory", 1)


class _Body:
    """What a request brings. A class, as contextlib's generators would take as long as all that it does."""

    def __init__(self, bodies: Bodies, request: Request) -> None:
        self._bodies, self._request = bodies, request
        self._counted = 0

    async def __aenter__(self) -> bytes:
        try:
            self._check_headers()
            async with asyncio.timeout(self._bodies.timeout_s):
                return await self._read()
        except BaseException as error:
            self._forget()
            if isinstance(error, TimeoutError):
                seconds = f"{self._bodies.timeout_s:g} s"
                raise RequestRefused(408, f"the body did not arrive within {seconds}") from None
            raise

    async def __aexit__(self, *_: object) -> None:
        self._forget()

    def _check_headers(self) -> None:
        if self._request.headers.get("content-encoding", "identity") != "identity":
            raise RequestRefused(415, "compressed bodies are not read")
        announced = self._request.headers.get("content-length", "0")
        if announced.isdigit() and int(announced[:20]) > self._bodies.most:
            raise self._too_long()

    async def _read(self) -> bytes:
        parts = []
        while True:
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                raise RequestRefused(400, "the client went away")
            part = message["body"]
            self._counted += len(part)
            self._bodies.pending += len(part)
            if self._counted > self._bodies.most:
                raise self._too_long()
            self._bodies.check_pending()
            parts.append(part)
            if not message["more_body"]:
                return part if len(parts) == 1 else b"".join(parts)

    def _forget(self) -> None:
        self._bodies.pending -= self._counted
        self._counted = 0

    def _too_long(self) -> RequestRefused:
        return RequestRefused(413, f"the body has more than {self._bodies.most} bytes")
