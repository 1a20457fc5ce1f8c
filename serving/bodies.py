"""Bodies of requests, read within bounds, of each and of all together; and what they say in JSON."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

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
        self._most, self._most_pending, self._timeout_s = (
            config.max_body_bytes,
            config.max_pending_bytes,
            config.receive_timeout_s,
        )
        self._pending = 0
        metrics.pending_bytes.set_function(lambda: float(self._pending))

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body of `request`, which counts until this ends.

        Raises RequestRefused for one that is too long (413), compressed (415), too slow (408) or one too many
        (429), or whose client went away.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestRefused(415, "compressed bodies are not read")
        announced = request.headers.get("content-length", "0")
        if announced.isdigit() and int(announced[:20]) > self._most:
            raise self._too_long()
        counted = 0
        parts = []
        try:
            async with asyncio.timeout(self._timeout_s):
                async for part in request.stream():
                    counted += len(part)
                    self._pending += len(part)
                    if counted > self._most:
                        raise self._too_long()
                    self._check_pending()
                    parts.append(part)
            yield parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            raise RequestRefused(408, f"the body did not arrive within {self._timeout_s:g} s") from None
        except ClientDisconnect:
            raise RequestRefused(400, "the client went away") from None
        finally:
            self._pending -= counted

    @contextmanager
    def counted(self, size_bytes: int) -> Iterator[None]:
        """Count what was read elsewhere until this ends. Raises RequestRefused (429) if it is too much."""
        self._pending += size_bytes
        try:
            self._check_pending()
            yield
        finally:
            self._pending -= size_bytes

    def _check_pending(self) -> None:
        if self._pending > self._most_pending:
            raise overloaded("too many bodies are in memory", 1)

    def _too_long(self) -> RequestRefused:
        return RequestRefused(413, f"the body has more than {self._most} bytes")
