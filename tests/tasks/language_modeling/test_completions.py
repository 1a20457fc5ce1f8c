"""Texts by way of the server, as OpenAI's client asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.core.errors import StageFailed
from hpml.serving.apis import completions
from hpml.serving.apis.completions import _Stream, _until
from hpml.serving.application import Application
from hpml.serving.config import ServerConfig
from hpml.serving.model import ServedModel, open_engine
from hpml.serving.prometheus import Metrics
from hpml.serving.recording import Recorder, read_requests
from hpml.serving.trial import try_open
from hpml.tasks.generation import Generation, Piece, as_pieces, sampler

TURNS = [{"role": "user", "content": "how are you?"}]


@pytest.fixture(scope="module")
def model(engine: Artifact[EngineSpec]) -> ServedModel:
    return open_engine(engine, name="talker", version="1", threads=1)


def test_an_engine_is_tried_in_a_process_of_its_own(engine: Artifact[EngineSpec], tmp_path: Path) -> None:
    try_open("engine", engine.path, threads=1)
    with pytest.raises(StageFailed, match="is not an artifact"):
        try_open("engine", tmp_path, threads=1)


def asking(
    model: ServedModel,
    use: Callable[[openai.AsyncOpenAI], Awaitable[None]],
    recorder: Recorder | None = None,
) -> None:
    """`use` gets a client of a server of this process."""

    async def main() -> None:
        application = Application(ServerConfig(), Metrics(), recorder=recorder)
        await application.serve(model)
        transport = httpx2.ASGITransport(app=application)
        async with httpx2.AsyncClient(transport=transport) as http:
            await use(openai.AsyncOpenAI(base_url="http://server/v1", api_key="-", http_client=http))

    asyncio.run(asyncio.wait_for(main(), 120))


def reply(model: ServedModel, max_tokens: int) -> str:
    """What `hpml chat` says."""
    assert model.texts
    said = [TURNS[0]["content"]]
    return model.texts.task.reply(model.runs, model.texts.files, said, beams=1, max_tokens=max_tokens)


def test_a_chat_is_what_hpml_chat_says_whole_and_in_pieces(model: ServedModel) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        asked: dict[str, Any] = {"model": "talker", "messages": TURNS, "temperature": 0, "max_tokens": 9}
        whole = await client.chat.completions.create(**asked)
        assert (whole.choices[0].message.content or "").strip() == reply(model, 9)
        assert whole.usage
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
        pieces = [part async for part in await client.chat.completions.create(**asked, stream=True)]
        assert (
            "".join(part.choices[0].delta.content or "" for part in pieces)
            == whole.choices[0].message.content
        )
        assert [part.choices[0].finish_reason for part in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason

    asking(model, use)


def test_a_text_goes_on_with_as_many_tokens_as_are_asked_for(model: ServedModel) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        assert [one.id for one in (await client.models.list()).data] == ["talker"]
        told = await client.completions.create(model="talker", prompt="how", max_tokens=4, temperature=0)
        assert told.usage
        assert told.usage.completion_tokens == 4
        assert told.choices[0].finish_reason == "length"
        again = await client.completions.create(
            model="talker", prompt="how", max_tokens=4, temperature=1, top_p=1e-9
        )
        assert again.choices[0].text == told.choices[0].text  # of the likeliest alone

    asking(model, use)


def test_prompts_are_recorded_and_decide_on_the_likeliest_ids(model: ServedModel, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "file", most_requests=9, most_bytes=10**6, tell=print)

    async def use(client: openai.AsyncOpenAI) -> None:
        await client.completions.create(model="talker", prompt="what do you", max_tokens=4)

    asking(model, use, recorder)
    recorder.close()
    (feeds,) = read_requests(tmp_path / "file", model.spec, max_rows=1, tell=print)
    assert model.texts
    decided = model.texts.task.served_decisions(model.runs.run(feeds, model.spec.operations[0].name))
    assert decided is not None and decided.shape == feeds["input_ids"].shape


def test_several_at_once_get_what_each_gets_alone(model: ServedModel) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        prompts = ["how", "what do you", "i like", "how", "the weather is"]

        async def ask(prompt: str) -> str:
            told = await client.completions.create(
                model="talker", prompt=prompt, max_tokens=8, temperature=1, seed=5
            )
            return told.choices[0].text

        alone = [await ask(prompt) for prompt in prompts]
        assert await asyncio.gather(*map(ask, prompts)) == alone
        assert len(set(alone)) > 2

    asking(model, use)


def test_what_is_not_there_is_refused_by_name(model: ServedModel) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        for wrong in ({"n": 2}, {"logit_bias": {"5": 1}}, {"frequency_penalty": 0.5}, {"temperature": 3}):
            with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
                await client.completions.create(model="talker", prompt="a", **wrong)  # type: ignore[call-overload]
        with pytest.raises(openai.NotFoundError, match="there is talker"):
            await client.completions.create(model="other", prompt="a")
        with pytest.raises(openai.BadRequestError, match="messages"):
            await client.chat.completions.create(model="talker", messages=[])

    asking(model, use)


def test_what_is_null_counts_as_left_out_and_usage_comes_where_it_is_asked_for(model: ServedModel) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        told = await client.completions.create(
            model="talker", prompt="a", n=None, presence_penalty=None, max_tokens=3
        )
        assert told.usage
        stream = await client.completions.create(
            model="talker", prompt="a", max_tokens=3, stream=True, stream_options={"include_usage": True}
        )
        *_, last = [part async for part in stream]
        assert last.usage
        assert last.usage.completion_tokens == 3

    asking(model, use)


def test_a_text_that_does_not_fit_is_refused_and_a_long_talk_is_not(model: ServedModel) -> None:
    async def use(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="fit into the context of 32"):
            await client.completions.create(model="talker", prompt="how " * 50, max_tokens=4)
        turns: Any = TURNS * 50
        assert (await client.chat.completions.create(model="talker", messages=turns)).usage

    asking(model, use)


def test_one_text_too_many_is_told_to_come_again(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "MOST_AT_ONCE", 1)

    async def use(client: openai.AsyncOpenAI) -> None:
        impatient = client.with_options(max_retries=0).completions
        asked = (impatient.create(model="talker", prompt="a", max_tokens=16) for _ in range(3))
        told = await asyncio.gather(*asked, return_exceptions=True)
        assert sorted(type(one).__name__ for one in told) == [
            "Completion",
            "RateLimitError",
            "RateLimitError",
        ]
        await impatient.create(model="talker", prompt="a")  # and then there is room again

    asking(model, use)


def test_there_is_room_for_the_next_text_when_the_last_word_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    only = Piece("a", 1, "stop")

    async def generate() -> None:
        note = lambda _, *what: told.append(what[0] if what else "there is room")  # noqa: E731
        monkeypatch.setattr(asyncio.get_running_loop(), "call_soon_threadsafe", note)
        with ThreadPoolExecutor(1) as threads:
            _Stream(threads, lambda: Generation(2, iter([only])), (), lambda: None)

    asyncio.run(generate())
    assert told == [2, only, "there is room", None]


def test_a_stop_is_not_told_wherever_pieces_part() -> None:
    for pieces in (["ab", "cST", "OPd"], ["abcS", "T", "O", "P"], ["abcSTOP"], ["abc", "STOP d STOP"]):
        told = [*_until((Piece(text, 1) for text in pieces), ["STOP"])]
        assert "".join(piece.text for piece in told) == "abc"
        assert told[-1].finish == "stop"
    ended = [Piece("abcST", 1), Piece("x", 1, "length")]
    assert "".join(piece.text for piece in _until(iter(ended), ["STOP"])) == "abcSTx"


def test_letters_of_several_tokens_are_told_whole() -> None:
    letters = "aé中".encode()

    def decode(tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    told = [*as_pieces(iter([*letters, 0]), decode, end_id=0, room=99)]
    assert [piece.text for piece in told] == ["a", "é", "中", ""]
    assert sum(piece.tokens for piece in told) == len(letters)
    assert told[-1].finish == "stop"


def test_sampling_draws_by_probability_and_within_top_p() -> None:
    import numpy as np

    logits = {"logits": np.log(np.array([[[0.6, 0.3, 0.1]]]))}
    drawn = np.array([sampler(1.0, 1.0, seed)(logits)[0, 0] for seed in range(2000)])
    assert np.bincount(drawn, minlength=3) / 2000 == pytest.approx([0.6, 0.3, 0.1], abs=0.04)
    assert {int(sampler(1.0, 0.8, seed)(logits)[0, 0]) for seed in range(200)} == {0, 1}
    assert {int(sampler(0.0, 1.0, seed)(logits)[0, 0]) for seed in range(20)} == {0}
