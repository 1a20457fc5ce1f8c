"""The Open Inference Protocol over gRPC: the messages are those of NVIDIA's client, which KServe's share."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc as services

from hpml.serving.apis.open_inference import metadata
from hpml.serving.apis.tensors import check_ids, check_sizes, from_bytes, from_numbers, listed, matched
from hpml.serving.application import SERVER, Application
from hpml.serving.config import ServerConfig
from hpml.serving.errors import RequestRefused
from hpml.serving.listening.secret_files import Certificate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpml.artifacts.operation import Operation

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}
_CONTENTS = {
    "FP32": "fp32_contents",
    "INT64": "int64_contents",
    "INT32": "int_contents",
    "BOOL": "bool_contents",
}
_OPEN = ("/inference.GRPCInferenceService/ServerLive", "/inference.GRPCInferenceService/ServerReady")


class InferenceService(services.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """What `Application` answers over HTTP, in messages. What it does not do is UNIMPLEMENTED."""

    def __init__(self, application: Application, max_rows: int) -> None:
        """max_rows: of a request."""
        self._application, self._max_rows = application, max_rows

    async def ServerLive(self, request: Any, context: Any) -> Any:
        """Whether the process runs."""
        return messages.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        """Whether requests are answered."""
        return messages.ServerReadyResponse(ready=self._application.is_ready)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        """The same of a model."""
        try:
            self._application.named(request.name, request.version)
        except RequestRefused:
            return messages.ModelReadyResponse(ready=False)
        return messages.ModelReadyResponse(ready=self._application.is_ready)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        """Name, version, extensions."""
        return messages.ServerMetadataResponse(**SERVER)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        """Inputs and outputs of a model."""
        serving, operation = self._application.named(request.name, request.version)
        told = metadata(operation, name=request.name, version=serving.model.version)
        return messages.ModelMetadataResponse(**told)

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        """The names that can be asked for."""
        return messages.RepositoryIndexResponse(models=self._application.index())

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        """Outputs, as bytes."""
        serving, operation = self._application.named(request.model_name, request.model_version)
        feeds = _feeds(request, operation, self._max_rows, serving.model.largest_sizes)
        wanted = _wanted(request, operation)
        with serving.held():
            outputs = await serving.batcher.ask(operation.name, feeds)
        answer = messages.ModelInferResponse(
            model_name=request.model_name, model_version=serving.model.version, id=request.id
        )
        for one in metadata(operation, name="", version="")["outputs"]:
            if one["name"] in wanted:
                array = np.ascontiguousarray(outputs[one["name"]])
                answer.outputs.add(name=one["name"], datatype=one["datatype"], shape=array.shape)
                answer.raw_output_contents.append(array.tobytes())
        return answer


def _feeds(
    request: Any, operation: Operation, max_rows: int, largest: Mapping[str, int]
) -> dict[str, NDArray[Any]]:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RequestRefused(400, f"there are {len(raw)} raw contents of {len(request.inputs)} inputs")
    found = {}
    for place, (one, told) in enumerate(zip(request.inputs, matched(request.inputs, operation), strict=True)):
        if raw:
            found[one.name] = from_bytes(one, told, raw[place])
        elif field := _CONTENTS.get(one.datatype):
            found[one.name] = from_numbers(one, told, list(getattr(one.contents, field)))
        else:
            raise RequestRefused(400, f"the input {one.name} of {one.datatype} has to be raw contents")
    feeds = {one.name: found[one.name] for one in operation.inputs}
    check_sizes(feeds, operation, max_rows, largest)
    check_ids(feeds, operation)
    return feeds


def _wanted(request: Any, operation: Operation) -> Sequence[str]:
    known = [one.name for one in operation.outputs]
    asked = [one.name for one in request.outputs] or known
    if unknown := set(asked) - set(known):
        raise RequestRefused(400, f"the model gives {listed(known)}, not {listed(sorted(unknown))}")
    return asked


class _Bounded(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Answers those only who bring the token, but for health; counts requests, and their bytes in memory."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None or handler.unary_unary is None:  # a stream: UNIMPLEMENTED
            return None
        given = str(dict(details.invocation_metadata).get("authorization", ""))
        is_known = details.method in _OPEN or self._application.token.allows(given)

        async def answer(_messages: Any, context: Any) -> Any:
            begun_s = time.perf_counter()
            code = grpc.StatusCode.CANCELLED  # by the client, unless there is an answer
            try:
                if not is_known:
                    raise RequestRefused(401, "a bearer token is needed")
                message = await context.read()
                if message is grpc.aio.EOF:  # gRPC has refused it by now, as too long
                    raise RequestRefused(429, "the message is too long, or there is none")
                with self._application.bodies.counted(len(message)):
                    told = await handler.unary_unary(_parsed(handler, message), context)
                code = grpc.StatusCode.OK
                return told
            except RequestRefused as refused:
                code = _CODES.get(refused.status, grpc.StatusCode.INVALID_ARGUMENT)
                await _abort(context, code, refused)
            except NotImplementedError:
                code = grpc.StatusCode.UNIMPLEMENTED
                await context.abort(code, "there is no such method here")
            except Exception as error:  # a defect of ours, which its operator has to hear of
                code = grpc.StatusCode.INTERNAL
                self._application.tell(f"error: {details.method}: {type(error).__name__}: {error}")
                await context.abort(code, "the server failed")
            finally:
                self._application.metrics.answered(details.method, code.name, time.perf_counter() - begun_s)

        # The message comes as bytes, so that it is counted before it is parsed, and refused as others are. It
        # comes as a stream, which is the same on the wire, so that we hear of those that gRPC itself refuses.
        return grpc.stream_unary_rpc_method_handler(answer, response_serializer=handler.response_serializer)


def _parsed(handler: Any, message: bytes) -> Any:
    try:
        return handler.request_deserializer(message)
    except DecodeError:
        raise RequestRefused(400, "the message is malformed") from None


async def _abort(context: Any, code: grpc.StatusCode, refused: RequestRefused) -> None:
    if "retry-after" in refused.headers:
        context.set_trailing_metadata((("retry-after", refused.headers["retry-after"]),))
    await context.abort(code, refused.why)


def _credentials(certificate: Certificate) -> grpc.ServerCredentials:
    """Those of the moment, for each connection."""

    def now() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([certificate.pair()])

    return grpc.dynamic_ssl_server_credentials(now(), now)


class GrpcServer:
    """A server that is not started yet; its bounds are those of HTTP. port: where it will listen."""

    def __init__(
        self, application: Application, config: ServerConfig, certificate: Certificate | None
    ) -> None:
        """Raises OSError if the port cannot be had."""
        self.server = grpc.aio.server(
            interceptors=[_Bounded(application)],
            # A message is in memory before anything of ours is asked.
            maximum_concurrent_rpcs=max(1, config.max_pending_bytes // config.max_body_bytes),
            options=[
                ("grpc.max_receive_message_length", config.max_body_bytes),
                ("grpc.max_metadata_size", config.max_header_bytes),
                ("grpc.so_reuseport", 0),
            ],
        )
        service = InferenceService(application, config.max_batch_rows)
        services.add_GRPCInferenceServiceServicer_to_server(service, self.server)
        host = f"[{config.host}]" if ":" in config.host else config.host
        address = f"{host}:{config.grpc_port}"
        try:
            if certificate:
                self.port = self.server.add_secure_port(address, _credentials(certificate))
            else:
                self.port = self.server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(str(error)) from None
