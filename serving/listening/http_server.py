"""uvicorn with the bounds it lacks: on slow requests and answers, headers and connections."""

from __future__ import annotations

import asyncio
import math
import signal
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hpml.serving.application import Application
from hpml.serving.config import ServerConfig
from hpml.serving.listening.secret_files import Certificate

_TOO_MANY = (
    b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)
_GRACE_S = 2.0
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class _OnePacket:
    """A transport that sends the head and the body of an answer together.

    uvicorn writes them one after the other, which are two packets: they take longer to send, and a client is
    woken twice.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._held:  # of what has no end, such as texts that are streamed
            self._loop.call_soon(self.flush)
        self._held.append(data)

    def flush(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self._transport.write(b"".join(held))

    def close(self) -> None:
        self.flush()
        self._transport.close()


def bounded_protocol(config: ServerConfig) -> type[HttpToolsProtocol]:
    """uvicorn's protocol, which closes connections that are one too many, too slow, or have long headers.

    uvicorn times nothing but the pause between two requests, and takes headers of any length: a client that
    sends a byte now and then keeps its connection, see https://github.com/Kludex/uvicorn/issues/157.
    """

    class Bounded(HttpToolsProtocol):
        _deadline_s = math.inf  # of the loop's time
        _timer: asyncio.TimerHandle | None = None  # one a connection, not one a request: it looks again
        _unread_header_bytes = 0  # since the last request, as long as its headers have no end
        _header_bytes = 0  # of names and values
        _is_reading_headers = False
        _is_refused = False
        _is_half_closed = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(_OnePacket(transport, self.loop))  # type: ignore[arg-type]
            if len(self.connections) > config.max_connections:
                self._refuse(_TOO_MANY)
                return
            self._expect_end()

        def connection_lost(self, exc: Exception | None) -> None:
            if self._timer:
                self._timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._is_refused:
                return
            super().data_received(data)
            self._unread_header_bytes = (
                self._unread_header_bytes + len(data) if self._is_reading_headers else 0
            )
            if self._unread_header_bytes > config.max_header_bytes:
                self._refuse(_TOO_LARGE)

        def eof_received(self) -> bool:  # type: ignore[override]
            """Whether the transport stays open: a client that sends no more may still wait for its answer."""
            self._is_half_closed = True
            is_answering = self.cycle is not None and not self.cycle.response_complete
            return is_answering and self.scheme == "http"  # TLS knows no half

        def on_response_complete(self) -> None:
            self.transport.flush()  # type: ignore[attr-defined]
            super().on_response_complete()
            if self._is_half_closed and self.cycle.response_complete:
                self.transport.close()

        def on_message_begin(self) -> None:
            self._is_reading_headers, self._header_bytes = True, 0
            self._expect_end()
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            self._header_bytes += len(url)
            super().on_url(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._header_bytes += len(name) + len(value)
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._is_reading_headers = False
            if self._header_bytes > config.max_header_bytes:
                self._refuse(_TOO_LARGE)
            else:
                self._expect_end(grace_s=_GRACE_S)  # the application says 408 before
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self._is_refused:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._expect_nothing()
            if not self._is_refused:
                super().on_message_complete()

        def pause_writing(self) -> None:
            self._expect_end()
            super().pause_writing()

        def resume_writing(self) -> None:
            self._expect_nothing()
            super().resume_writing()

        def _expect_end(self, grace_s: float = 0.0) -> None:
            self._deadline_s = self.loop.time() + config.receive_timeout_s + grace_s
            if self._timer is None:
                self._timer = self.loop.call_at(self._deadline_s, self._look)

        def _expect_nothing(self) -> None:
            self._deadline_s = math.inf

        def _look(self) -> None:
            self._timer = None
            if self._deadline_s <= self.loop.time():
                self.transport.abort()
            elif self._deadline_s < math.inf:
                self._timer = self.loop.call_at(self._deadline_s, self._look)

        def _refuse(self, answer: bytes) -> None:
            self._is_refused = True
            self.transport.write(answer)
            self.transport.close()

    return Bounded


class Server(uvicorn.Server):
    """Drains before it stops: on SIGTERM it is not ready, and still answers for a while."""

    def __init__(
        self, application: Application, config: ServerConfig, certificate: Certificate | None
    ) -> None:
        self._application, self._drain_s = application, config.drain_s
        tls = (
            {"ssl_certfile": config.tls_certificate, "ssl_keyfile": config.tls_key} if config.tls_key else {}
        )
        super().__init__(
            uvicorn.Config(
                application,
                host=config.host,
                port=config.port,
                loop="uvloop",
                http=bounded_protocol(config),
                ws="none",
                lifespan="off",
                log_level="critical",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=round(config.idle_timeout_s),
                timeout_graceful_shutdown=round(config.stop_s),
                **tls,  # type: ignore[arg-type]
            )
        )
        if certificate:
            self.config.load()
            assert self.config.ssl
            certificate.use_in(self.config.ssl)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first SIGTERM drains; the next one, and Ctrl-C, stop once what was accepted is answered."""
        if sig == signal.SIGTERM and not self._application.is_draining:
            self._application.is_draining = True
            asyncio.get_running_loop().call_later(self._drain_s, self._stop)
        else:
            self._stop()

    def _stop(self) -> None:
        self._application.is_draining = True
        self.force_exit = self.should_exit  # whoever asks twice does not want to wait
        self.should_exit = True
