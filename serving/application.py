"""What the server answers under which path, as an ASGI application."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hpml.artifacts.operation import Operation
from hpml.core.errors import ConfigInvalid
from hpml.serving.apis import open_inference
from hpml.serving.bodies import Bodies
from hpml.serving.config import ServerConfig
from hpml.serving.discovery import openapi
from hpml.serving.discovery.page import page
from hpml.serving.errors import RequestRefused, overloaded
from hpml.serving.listening.secret_files import Token
from hpml.serving.model import ServedModel
from hpml.serving.opened import Opened
from hpml.serving.prometheus import Metrics
from hpml.serving.recording import Recorder
from hpml.serving.rollout.figures import RELEASE_HEADER

SERVER = {
    "name": "hpml",
    "version": importlib.metadata.version("hpml-pipeline"),
    "extensions": open_inference.EXTENSIONS,
}
_PAGE = "/"
_OPEN = ("/v2/health/live", "/v2/health/ready", _PAGE)  # to all, without a token
_OPENAI = ("/v1/models", "/v1/completions", "/v1/chat/completions")  # whose errors are objects
_RELEASE = RELEASE_HEADER.encode()
_MOST_READ = 16  # bodies that wait for the one thread that reads them
_OTHER = "other"  # the path, in metrics, of what is no route

Handler = Callable[[Request], Awaitable[Response]]


class Application:
    """Answers requests to one model; before there is one, and while draining, it is not ready."""

    def __init__(
        self,
        config: ServerConfig,
        metrics: Metrics,
        tell: Callable[[str], None] = print,
        recorder: Recorder | None = None,
    ) -> None:
        """tell: where a line goes for whoever started it.

        Raises ConfigInvalid for a token that is refused.
        """
        self._config, self.metrics, self.tell = config, metrics, tell
        self._recorder = recorder
        self.token = Token(config.token_file, self.keeps_former)
        self.bodies = Bodies(config, metrics)
        self._serving: Opened | None = None
        # Decoding a picture takes longer than other requests may wait.
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="read")
        self._reading = 0  # bodies, by them
        self.is_draining = False

    # ---------------------------------------------------------------------------------------------- the model

    async def serve(self, model: ServedModel) -> None:
        """Answer with `model` from now on; requests that the one before has accepted are answered by it."""
        former, opened = self._serving, Opened(model, self._config, self.metrics, self._recorder)
        self._serving = opened
        self.metrics.rows_waiting.set_function(lambda: float(opened.batcher.rows_waiting))
        self.metrics.serves(model.name, model.version, model.digest, model.drift)
        if former:
            await former.close()

    def keeps_former(self, error: ConfigInvalid) -> None:
        """A token or a certificate has changed, and cannot be used: that of before still is."""
        self.metrics.failed_secrets.inc()
        self.tell(f"error: {error}; what was there before is still used")

    @property
    def is_ready(self) -> bool:
        """Whether requests are answered."""
        return self._serving is not None and not self.is_draining

    def named(self, name: str, version: str) -> tuple[Opened, Operation]:
        """What is served, and the operation that clients know by `name`; "" is any version.

        Raises RequestRefused, 404 if there is none, 503 before there is a model.
        """
        serving = self._ready_serving()
        if name not in serving.operations:
            raise RequestRefused(404, f"there is no such model; there is {', '.join(serving.operations)}")
        if version not in ("", serving.model.version):
            raise RequestRefused(404, f"there is no such version; there is {serving.model.version}")
        return serving, serving.operations[name]

    def index(self) -> list[dict[str, str]]:
        """What there is, and whether it can be asked."""
        if self._serving is None:
            return []
        state = "READY" if self.is_ready else "UNAVAILABLE"
        told = {"version": self._serving.model.version, "state": state, "reason": ""}
        return [{"name": name, **told} for name in self._serving.operations]

    # --------------------------------------------------------------------------------------------- a request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, by ASGI."""
        if scope["type"] != "http":
            return
        begun_s = time.perf_counter()
        request = Request(scope, receive)
        route, handler = self._route(request.method, scope["path"])
        try:
            if route not in _OPEN:
                self._check_token(request)
            response = await handler(request)
        except RequestRefused as refused:
            response = _error(route, refused)
        except Exception as error:  # a defect of ours, which its operator has to hear of
            self.tell(f"error: {request.method} {route}: {type(error).__name__}: {error}")
            response = _error(route, RequestRefused(500, "the server failed"))
        if self._serving and self._serving.model.release:
            response.raw_headers.append((_RELEASE, self._serving.model.release.encode()))
        self.metrics.answered(route, response.status_code, time.perf_counter() - begun_s)
        await response(scope, receive, send)

    def _route(self, method: str, path: str) -> tuple[str, Handler]:
        """The route that a path belongs to, by its pattern, and what answers it."""
        parts = path[1:].split("/")
        match parts:
            case ["v2", "health", "live"]:
                return path, _only(method, "GET", self._live)
            case ["v2", "health", "ready"]:
                return path, _only(method, "GET", self._ready)
            case ["v2"]:
                return path, _only(method, "GET", self._server)
            case ["v2", "repository", "index"]:
                return path, _only(method, "POST", self._index)
            case ["v2", "models", name, *rest]:
                version, rest = (
                    (rest[1], rest[2:]) if rest[:1] == ["versions"] and len(rest) > 1 else ("", rest)
                )
                return self._of_model(method, name, version, rest)
            case ["v1", "models"]:
                return path, _only(method, "GET", self._models)
            case ["v1", "completions"]:
                return path, _only(method, "POST", partial(self._completion, is_chat=False))
            case ["v1", "chat", "completions"]:
                return path, _only(method, "POST", partial(self._completion, is_chat=True))
            case ["metrics"]:
                return path, _only(method, "GET", self._told_metrics)
            case ["openapi.json"]:
                return path, _only(method, "GET", self._openapi)
            case [""] if self._config.page:
                return _PAGE, _only(method, "GET", self._page)
        if self._serving and (endpoint := self._serving.model.endpoint) and path == endpoint.path:
            return path, _only(method, "POST", self._task)
        return _OTHER, _refusing(404, "there is no such path")

    def _of_model(self, method: str, name: str, version: str, rest: list[str]) -> tuple[str, Handler]:
        async def ready(request: Request) -> Response:
            self.named(name, version)
            return _json({"name": name, "ready": self.is_ready}, 200 if self.is_ready else 503)

        async def metadata(request: Request) -> Response:
            serving, operation = self.named(name, version)
            return _json(open_inference.metadata(operation, name=name, version=serving.model.version))

        async def infer(request: Request) -> Response:
            return await self._infer(request, name, version)

        match rest:
            case []:
                return "/v2/models/{name}", _only(method, "GET", metadata)
            case ["ready"]:
                return "/v2/models/{name}/ready", _only(method, "GET", ready)
            case ["infer"]:
                return "/v2/models/{name}/infer", _only(method, "POST", infer)
        return _OTHER, _refusing(404, "there is no such path")

    def _check_token(self, request: Request) -> None:
        if not self.token.allows(request.headers.get("authorization", "")):
            raise RequestRefused(401, "a bearer token is needed", {"www-authenticate": "Bearer"})

    def _ready_serving(self) -> Opened:
        if self._serving is None:
            raise RequestRefused(503, "the model is not loaded yet", {"retry-after": "1"})
        return self._serving

    # -------------------------------------------------------------------------------------------- the answers

    async def _live(self, request: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, request: Request) -> Response:
        return _json({"ready": self.is_ready}, 200 if self.is_ready else 503)

    async def _server(self, request: Request) -> Response:
        return _json(SERVER)

    async def _index(self, request: Request) -> Response:
        return _json(self.index())

    async def _told_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def _openapi(self, request: Request) -> Response:
        return _json(openapi.document(self._ready_serving().model, needs_token=self.token.is_needed))

    async def _page(self, request: Request) -> Response:
        return page()

    async def _infer(self, request: Request, name: str, version: str) -> Response:
        serving, operation = self.named(name, version)
        serving.batcher.check_wait()
        with serving.held():
            async with self.bodies.read(request) as body:
                asked = open_inference.parse_request(
                    body,
                    request.headers.get(open_inference.HEADER_LENGTH),
                    operation,
                    self._config.max_batch_rows,
                    serving.model.largest_sizes,
                )
                outputs = await serving.batcher.ask(operation.name, asked.feeds)
        content, headers = open_inference.answer(
            asked, outputs, operation, name=name, version=serving.model.version
        )
        return Response(content, headers=headers)

    async def _models(self, request: Request) -> Response:
        serving = self._ready_serving()
        told = {"id": serving.model.name, "object": "model", "created": 0, "owned_by": "hpml"}
        return _json({"object": "list", "data": [told] if serving.completions else []})

    async def _completion(self, request: Request, *, is_chat: bool) -> Response:
        serving = self._ready_serving()
        if serving.completions is None:
            raise RequestRefused(404, "the model does not go on with texts")
        with serving.held():
            async with self.bodies.read(request) as body:
                return await serving.completions.answer(body, is_chat=is_chat)

    async def _task(self, request: Request) -> Response:
        serving = self._ready_serving()
        endpoint = serving.model.endpoint
        assert endpoint
        given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if given not in endpoint.content_types:
            raise RequestRefused(415, f"the body has to be one of {', '.join(endpoint.content_types)}")
        loop = asyncio.get_running_loop()
        if self._reading >= _MOST_READ:
            raise overloaded(f"{self._reading} bodies are being read already", 1)
        serving.batcher.check_wait()
        with serving.held():
            async with self.bodies.read(request) as body:
                self._reading += 1
                try:
                    feeds = await loop.run_in_executor(self._readers, endpoint.feeds, body)
                except ValueError as error:
                    raise RequestRefused(400, str(error)) from None
                finally:
                    self._reading -= 1
                outputs = await serving.batcher.ask(serving.model.spec.operations[0].name, feeds)
        return _json(endpoint.answer(outputs))


def _only(method: str, allowed: str, handler: Handler) -> Handler:
    if method == allowed or (method, allowed) == ("HEAD", "GET"):
        return handler
    return _refusing(405, f"only {allowed} is allowed", {"allow": allowed})


def _refusing(status: int, why: str, headers: Mapping[str, str] | None = None) -> Handler:
    async def refuse(request: Request) -> Response:
        raise RequestRefused(status, why, headers)

    return refuse


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type="application/json")


def _error(route: str, refused: RequestRefused) -> Response:
    told: Any = {"message": refused.why, "type": "invalid_request_error"} if route in _OPENAI else refused.why
    return Response(
        orjson.dumps({"error": told}), refused.status, refused.headers, media_type="application/json"
    )
