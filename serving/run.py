"""A server from its start to its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvloop

from hpml.core.errors import ExitCode, HpmlError, Unavailable, UsageError
from hpml.serving.application import Application
from hpml.serving.config import ServerConfig
from hpml.serving.listening.http_server import Server
from hpml.serving.listening.secret_files import Certificate
from hpml.serving.log_file import LogFile
from hpml.serving.model import ServedModel
from hpml.serving.prometheus import Metrics
from hpml.serving.recording import Recorder

if TYPE_CHECKING:
    from hpml.serving.listening.grpc_service import GrpcServer

_OPENING_S = 300.0  # for a model to be opened and tried


def serve(open_model: Callable[[], ServedModel], config: ServerConfig, tell: Callable[[str], None]) -> None:
    """Serve the model that `open_model` gives, until SIGTERM or Ctrl-C; on SIGHUP open it anew.

    It is listened from the start, and answered once the model is open. A model that cannot be opened anew
    leaves the one before in its place. tell: where a line goes for whoever started it.
    Raises Unavailable if the port is taken, ConfigInvalid for a token or certificates that cannot be read or
    a log that cannot be written, UsageError for a file that requests cannot be recorded in, and what
    `open_model` raises.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(open_model, config, tell))


async def _serve(
    open_model: Callable[[], ServedModel], config: ServerConfig, tell: Callable[[str], None]
) -> None:
    log = LogFile(config.log_file, tell) if config.log_file else None
    metrics = Metrics()
    recorder = _recorder(config, tell)
    application = Application(config, metrics, tell, recorder)
    certificate = (
        Certificate(config.tls_certificate, config.tls_key, application.keeps_former)
        if config.tls_certificate and config.tls_key
        else None
    )
    server, listener = Server(application, config, certificate), _listener(config)
    over_grpc = await _start_grpc(application, config, certificate)
    listening = asyncio.create_task(server.serve([listener]))
    anew = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, anew.set)
    try:
        opening = asyncio.create_task(asyncio.to_thread(open_model))
        await asyncio.wait([opening, listening], timeout=_OPENING_S, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            _end_while_opening(listening.done(), tell)
        model = await opening
        await application.serve(model)
        scheme = "https" if config.tls_key else "http"
        tell(f"{model.name} version {model.version} at {scheme}://{config.host}:{listener.getsockname()[1]}")
        if model.unverified:
            tell(f"warning: not verified: {'; '.join(model.unverified)}")
        if recorder:
            tell(str(recorder))
        if over_grpc:
            tell(f"gRPC at {config.host}:{over_grpc.port}")
        beside = [asyncio.create_task(_swap(application, open_model, anew, metrics, tell))]
        beside += [asyncio.create_task(log.keep_bounded())] if log else []
        await listening
        for task in beside:
            task.cancel()
    finally:
        server.should_exit = True
        await listening
        if over_grpc:
            await over_grpc.server.stop(config.stop_s)
        if recorder:
            await asyncio.to_thread(recorder.close)


def _recorder(config: ServerConfig, tell: Callable[[str], None]) -> Recorder | None:
    if config.record is None:
        return None
    return Recorder(
        config.record, most_requests=config.record_requests, most_bytes=config.record_bytes, tell=tell
    )


def _end_while_opening(is_told_to: bool, tell: Callable[[str], None]) -> None:
    """End the process: a thread that opens a model cannot be stopped, and there is nothing to lose yet."""
    if not is_told_to:
        tell(f"error: the model was not open after {_OPENING_S:g} s")
    os._exit(ExitCode.TERMINATED if is_told_to else ExitCode.STAGE_FAILED)


async def _start_grpc(
    application: Application, config: ServerConfig, certificate: Certificate | None
) -> GrpcServer | None:
    if config.grpc_port is None:
        return None
    try:
        from hpml.serving.listening.grpc_service import GrpcServer
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is missing", fix="pip install 'hpml-pipeline[serving]'") from None
    try:
        made = GrpcServer(application, config, certificate)
    except OSError:
        raise _not_listening(config.host, config.grpc_port, "it is taken, or not of this machine") from None
    await made.server.start()
    return made


async def _swap(
    application: Application,
    open_model: Callable[[], ServedModel],
    anew: asyncio.Event,
    metrics: Metrics,
    tell: Callable[[str], None],
) -> None:
    while True:
        await anew.wait()
        anew.clear()
        try:
            model = await asyncio.wait_for(asyncio.to_thread(open_model), _OPENING_S)
        except Exception as error:  # whatever a hostile bundle makes of it
            metrics.failed_swaps.inc()
            why = error if isinstance(error, HpmlError) else f"{type(error).__name__}: {error}"
            tell(f"error: {' '.join(str(why).split())}; the model before is still served")
            continue
        await application.serve(model)
        tell(f"{model.name} version {model.version} from now on")


def _listener(config: ServerConfig) -> socket.socket:
    """A socket at the address, of either family. Raises Unavailable if it cannot be had."""
    try:
        return socket.create_server(
            (config.host, config.port),
            family=socket.AF_INET6 if ":" in config.host else socket.AF_INET,
            backlog=1024,
        )
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise _not_listening(config.host, config.port, why) from None


def _not_listening(host: str, port: int, why: str) -> Unavailable:
    return Unavailable(f"port {port} of {host} cannot be listened at", why=why, fix="give another one")
