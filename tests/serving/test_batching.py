"""The queue before the engine: what is answered together, what is refused, and that nothing is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from hpml.serving.batching import Batcher
from hpml.serving.errors import RequestRefused
from hpml.serving.prometheus import Metrics


class Doubling:
    """An engine that doubles, and waits where it is told to; it refuses 13."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()

    def run(self, feeds: Any, operation: str = "predict") -> dict[str, np.ndarray]:
        self.began.set()
        assert self.gate.wait(30)
        self.ran.append(len(feeds["x"]))
        if (feeds["x"] == 13).any():
            raise IndexError("/a/path/of/this/machine")
        return {"y": feeds["x"] * 2}


def rows(*numbers: float) -> dict[str, np.ndarray]:
    return {"x": np.array(numbers, np.float32)[:, None]}


def with_batcher(use: Any, *, max_rows: int = 8, max_queue_s: float = 60.0) -> Doubling:
    engine = Doubling()

    async def main() -> None:
        batcher = Batcher(engine, max_rows=max_rows, max_queue_s=max_queue_s, metrics=Metrics())  # type: ignore[arg-type]
        try:
            await asyncio.wait_for(use(batcher, engine), 30)
        finally:
            engine.gate.set()
            await asyncio.to_thread(batcher.close)

    asyncio.run(main())
    return engine


async def busy(batcher: Batcher, engine: Doubling) -> asyncio.Future[Any]:
    """A first request, with which the engine is busy until its gate is opened."""
    engine.gate.clear()
    first = batcher.ask("predict", rows(0))
    assert await asyncio.to_thread(engine.began.wait, 10)
    return first


def test_what_waits_is_one_batch_and_each_gets_its_own_rows() -> None:
    async def use(batcher: Batcher, engine: Doubling) -> None:
        first = await busy(batcher, engine)
        waiting = [batcher.ask("predict", rows(*numbers)) for numbers in ((1, 2), (3,), (4, 5, 6))]
        assert batcher.rows_waiting == 6
        engine.gate.set()
        answers = [(await one)["y"].ravel().tolist() for one in (first, *waiting)]
        assert answers == [[0], [2, 4], [6], [8, 10, 12]]

    assert with_batcher(use).ran == [1, 6]


def test_a_batch_has_no_more_rows_than_allowed_and_one_kind() -> None:
    async def use(batcher: Batcher, engine: Doubling) -> None:
        first = await busy(batcher, engine)
        others = [batcher.ask("predict", rows(*range(5))), batcher.ask("predict", rows(*range(4)))]
        others.append(batcher.ask("predict", {"x": np.ones((1, 2), np.float32)}))  # of another shape
        engine.gate.set()
        for one in (first, *others):
            await one

    assert with_batcher(use).ran == [1, 5, 4, 1]


def test_a_request_that_the_engine_refuses_spoils_no_other() -> None:
    async def use(batcher: Batcher, engine: Doubling) -> None:
        first = await busy(batcher, engine)
        good, bad, other = (batcher.ask("predict", rows(number)) for number in (1, 13, 3))
        engine.gate.set()
        await first
        assert (await good)["y"] == 2
        assert (await other)["y"] == 6
        with pytest.raises(RequestRefused) as refused:
            await bad
        assert refused.value.status == 400
        assert "path" not in refused.value.why

    with_batcher(use)


def test_who_would_wait_too_long_is_refused_at_once_and_who_was_accepted_is_answered() -> None:
    async def use(batcher: Batcher, engine: Doubling) -> None:
        await batcher.ask("predict", rows(0))  # so that it knows how fast the engine is
        engine.began.clear()
        first = await busy(batcher, engine)
        accepted = []
        with pytest.raises(RequestRefused) as refused:
            while len(accepted) < 1_000_000:
                accepted.append(batcher.ask("predict", rows(1)))
        assert refused.value.status == 429
        assert int(refused.value.headers["retry-after"]) >= 1
        engine.gate.set()
        await first
        assert all([(await one)["y"] == 2 for one in accepted])

    with_batcher(use, max_queue_s=1e-3)


def test_who_went_away_is_not_computed() -> None:
    async def use(batcher: Batcher, engine: Doubling) -> None:
        first = await busy(batcher, engine)
        gone, stays = batcher.ask("predict", rows(1, 2)), batcher.ask("predict", rows(3))
        gone.cancel()
        engine.gate.set()
        await first
        assert (await stays)["y"] == 6

    assert with_batcher(use).ran == [1, 1]


def test_closing_answers_what_waits() -> None:
    async def use(batcher: Batcher, engine: Doubling) -> None:
        first = await busy(batcher, engine)
        waiting = batcher.ask("predict", rows(4))
        closing: Coroutine[Any, Any, None] = asyncio.to_thread(batcher.close)
        task = asyncio.create_task(closing)
        engine.gate.set()
        await task
        assert (await first)["y"] == 0
        assert (await waiting)["y"] == 8

    with_batcher(use)
