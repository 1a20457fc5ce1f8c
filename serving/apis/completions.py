"""Texts in the shapes that OpenAI's clients speak: completions and chat, whole or as a stream of events.

https://platform.openai.com/docs/api-reference/completions and .../chat
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, JsonValue
from starlette.responses import Response, StreamingResponse

from hpml.artifacts.operation import Operation
from hpml.core.errors import ConfigInvalid
from hpml.serving.batching import Batcher
from hpml.serving.bodies import checked, read_json
from hpml.serving.errors import RequestRefused, overloaded
from hpml.serving.model import Texts
from hpml.tasks.generation import Generation, Piece, sampler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]

MOST_AT_ONCE = 16  # texts that are generated side by side; who comes then gets 429
_NEUTRAL: dict[str, tuple[JsonValue, ...]] = {  # what is not there, and the values that ask for nothing
    "n": (1,),
    "best_of": (1,),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "echo": (False,),
    "suffix": (None, ""),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
}
_NO_LIMIT = 65_536  # but that of the context
_LEFT_ALONE = {"user", "metadata", "store", "safety_identifier", "service_tier"}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False


class _Asked(BaseModel):
    """What both kinds of requests have."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    max_tokens: int | None = Field(default=None, ge=1, le=_NO_LIMIT)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_NO_LIMIT)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    stop: str | list[str] | None = Field(default=None, max_length=1000)
    stream: bool = False
    stream_options: _StreamOptions = Field(default_factory=lambda: _StreamOptions())

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts before which an answer ends."""
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or ()))


class Completion(_Asked):
    """A text to go on with."""

    prompt: str = Field(max_length=1_000_000)


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(one.text for one in self.content)


class Chat(_Asked):
    """A conversation, whose next turn is asked for."""

    messages: list[_Message] = Field(min_length=1, max_length=10_000)


class _Queued:
    """An engine asked from a thread of a generation, by way of the queue before it."""

    def __init__(
        self, batcher: Batcher, operations: Sequence[Operation], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.operations = {one.name: one for one in operations}
        self._batcher, self._loop = batcher, loop

    def run(self, feeds: Arrays, operation: str = "predict") -> Any:
        """The outputs by name."""

        async def ask() -> Arrays:
            return await self._batcher.ask(operation, feeds, is_accepted=True)

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result()


@dataclass(frozen=True)
class _Shape:
    """How the answers of one kind are told."""

    prefix: str
    whole: str
    part: str

    def choice(self, text: str, finish: str | None, *, is_part: bool) -> dict[str, Any]:
        """An entry of `choices`."""
        told: dict[str, Any] = {"index": 0, "finish_reason": finish or None}
        if self is _OF_TEXT:
            return told | {"text": text, "logprobs": None}
        return told | {"delta" if is_part else "message": {"role": "assistant", "content": text}}


_OF_TEXT = _Shape("cmpl", "text_completion", "text_completion")
_OF_CHAT = _Shape("chatcmpl", "chat.completion", "chat.completion.chunk")


class Completions:
    """Generates texts side by side: their steps meet in the queue, where those of one shape are a batch."""

    def __init__(self, texts: Texts, name: str, batcher: Batcher, operations: Sequence[Operation]) -> None:
        self._texts, self._name = texts, name
        self._runs = _Queued(batcher, operations, asyncio.get_running_loop())
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="text")
        self.running = 0  # texts

    async def answer(self, body: bytes, *, is_chat: bool) -> Response:
        """Of `POST /v1/chat/completions`, or else `/v1/completions`.

        Raises RequestRefused for what is malformed or not there (400), and one too many (429).
        """
        asked = _parsed(Chat if is_chat else Completion, body)
        if asked.model != self._name:
            raise RequestRefused(404, f"there is no model {asked.model[:40]!r}; there is {self._name}")
        if self.running >= MOST_AT_ONCE:
            raise overloaded(f"{self.running} texts are generated already", 1)
        self.running += 1
        stream = _Stream(self._threads, partial(self._generation, asked), asked.stops, self._ended)
        prompt_tokens = await stream.begin()
        shape = _OF_CHAT if is_chat else _OF_TEXT
        head = {
            "id": f"{shape.prefix}-{uuid.uuid4().hex}",
            "object": shape.part if asked.stream else shape.whole,
            "created": int(time.time()),
            "model": self._name,
        }
        if asked.stream:
            counted = prompt_tokens if asked.stream_options.include_usage else None
            events = self._events(stream, head, shape, counted)
            return StreamingResponse(
                events, media_type="text/event-stream", headers={"cache-control": "no-store"}
            )
        pieces = [piece async for piece in stream]
        told = head | {
            "choices": [
                shape.choice("".join(piece.text for piece in pieces), pieces[-1].finish, is_part=False)
            ],
            "usage": _usage(prompt_tokens, sum(piece.tokens for piece in pieces)),
        }
        return Response(orjson.dumps(told), media_type="application/json")

    def close(self) -> None:
        """No more texts."""
        self._threads.shutdown(wait=False)

    def _ended(self) -> None:
        self.running -= 1

    def _generation(self, asked: Completion | Chat) -> Generation:
        choose = sampler(asked.temperature, asked.top_p, asked.seed)
        task, files = self._texts.task, self._texts.files
        if isinstance(asked, Completion):
            most = asked.max_completion_tokens or asked.max_tokens or 16  # OpenAI's default
            made = task.continuation(self._runs, files, asked.prompt, choose, max_tokens=most)
        else:
            said = [message.text for message in asked.messages]
            most = asked.max_completion_tokens or asked.max_tokens or _NO_LIMIT
            made = task.next_turn(self._runs, files, said, choose, max_tokens=most)
        if made is None:
            raise RequestRefused(
                400, f"a model of the task {task.task} does not go on with texts: chat with it"
            )
        return made

    async def _events(
        self, stream: _Stream, head: dict[str, Any], shape: _Shape, prompt_tokens: int | None
    ) -> AsyncIterator[bytes]:
        """prompt_tokens: where an event at the end tells what was used."""
        tokens = 0
        try:
            async for piece in stream:
                tokens += piece.tokens
                choice = shape.choice(piece.text, piece.finish, is_part=True)
                yield b"data: " + orjson.dumps(head | {"choices": [choice]}) + b"\n\n"
            if prompt_tokens is not None:
                told = head | {"choices": [], "usage": _usage(prompt_tokens, tokens)}
                yield b"data: " + orjson.dumps(told) + b"\n\n"
            yield b"data: [DONE]\n\n"
        except RequestRefused as refused:  # its status has been sent
            yield b"data: " + orjson.dumps({"error": {"message": refused.why}}) + b"\n\n"
        finally:
            stream.stop()


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class _Stream:
    """A generation in a thread, whose pieces come out here; `stop` ends it before its next step.

    ended: called on the loop when the thread is free again, whether or not somebody read the pieces.
    """

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        make: Callable[[], Generation],
        stops: Sequence[str],
        ended: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | int | RequestRefused | None] = asyncio.Queue()
        self._make, self._stops, self._ended, self._is_stopped = make, stops, ended, False
        threads.submit(self._work)

    async def begin(self) -> int:
        """How many tokens the prompt has. Raises RequestRefused if there will be no text."""
        first = await self._next()
        assert isinstance(first, int)
        return first

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """The pieces, the last of them with a reason. Raises RequestRefused where it breaks off."""
        while (piece := await self._next()) is not None:
            assert isinstance(piece, Piece)
            yield piece

    def stop(self) -> None:
        """Nobody reads on."""
        self._is_stopped = True

    async def _next(self) -> Piece | int | None:
        told = await self._pieces.get()
        if isinstance(told, RequestRefused):
            raise told
        return told

    def _work(self) -> None:
        last: RequestRefused | None = None
        try:
            made = self._make()
            self._tell(made.prompt_tokens)
            for piece in _until(made.pieces, self._stops):
                self._tell(piece)
                if self._is_stopped:
                    break
        except RequestRefused as refused:
            last = refused
        except ConfigInvalid as error:
            last = RequestRefused(400, f"{error.what}: {error.why}")
        except Exception as error:  # whatever the engine or the tokenizer makes of a text
            last = RequestRefused(400, f"no text follows ({type(error).__name__})")
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ended)
        self._tell(last)  # after that: who has the whole text may ask for the next one at once

    def _tell(self, told: Piece | int | RequestRefused | None) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, told)


def _until(pieces: Iterator[Piece], stops: Sequence[str]) -> Iterator[Piece]:
    """Up to the first of `stops`, which is not told; letters that may begin one are held back."""
    held = ""
    for piece in pieces:
        text = held + piece.text
        ends = [place for stop in stops if (place := text.find(stop)) >= 0]
        if ends:
            yield Piece(text[: min(ends)], piece.tokens, "stop")
            return
        keep = 0 if piece.finish else max((_overlap(text, stop) for stop in stops), default=0)
        held = text[len(text) - keep :]
        yield piece._replace(text=text[: len(text) - keep])


def _overlap(text: str, stop: str) -> int:
    """How many letters at the end of `text` are the beginning of `stop`."""
    return next(
        (size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0
    )


def _parsed(kind: type[Completion] | type[Chat], body: bytes) -> Completion | Chat:
    asked = checked(kind, _without_nulls(read_json(body)))
    for name, value in (asked.model_extra or {}).items():
        neutral = [(type(one), one) for one in _NEUTRAL.get(name, ())]
        if name not in _LEFT_ALONE and (type(value), value) not in neutral:
            raise RequestRefused(400, f"the parameter {name[:40]} is not supported")
    return asked


def _without_nulls(request: Any) -> Any:
    """What is null counts as left out, as clients send it; the content of a message as empty."""
    if not isinstance(request, dict):
        return request
    given = {name: value for name, value in request.items() if value is not None}
    if isinstance(messages := given.get("messages"), list):
        given["messages"] = [
            {**one, "content": ""} if isinstance(one, dict) and one.get("content", "") is None else one
            for one in messages
        ]
    return given
