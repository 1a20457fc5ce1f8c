"""The queue before the engine: what is answered together, what is refused, and that nothing is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml.serving import batching
from hpml.serving.application import Application
from hpml.serving.batching import Batcher
from hpml.serving.config import ServerConfig
from hpml.serving.errors import RequestRefused
from hpml.serving.model import open_bundle
from hpml.serving.prometheus import Metrics
from tests.serving.small_bundles import write_bundle

SLOW_S = 0.3  # too long for the event loop


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, too, a run that does nothing is a short one."""
    monkeypatch.setattr(batching, "_IN_PLACE_S", SLOW_S / 2)


class Doubling:
    """An engine that doubles, and waits where it is told to; it refuses 13."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.threads: list[str] = []
        self.seconds = 0.0  # of each run
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Event()

    def run(self, feeds: Any, operation: str = "predict") -> dict[str, np.ndarray]:
        self.began.set()
        assert self.gate.wait(30)
        time.sleep(self.seconds)
        self.ran.append(len(feeds["x"]))
        self.threads.append(threading.current_thread().name)
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
        await known(batcher, engine, SLOW_S)
        first = await busy(batcher, engine)
        accepted = []
        with pytest.raises(RequestRefused) as refused:
            while len(accepted) < 100:
                accepted.append(batcher.ask("predict", rows(1)))
        assert refused.value.status == 429
        assert int(refused.value.headers["retry-after"]) >= 1
        engine.gate.set()
        await first
        assert all([(await one)["y"] == 2 for one in accepted])

    with_batcher(use, max_queue_s=1e-3)


async def known(batcher: Batcher, engine: Doubling, seconds: float) -> None:
    """A first request, from which the batcher knows how long a run takes."""
    engine.seconds = seconds
    await batcher.ask("predict", rows(0))
    engine.began.clear()


def test_short_runs_of_an_idle_engine_are_run_in_the_event_loop_as_one_batch() -> None:
    async def use(batcher: Batcher, engine: Doubling) -> None:
        await known(batcher, engine, 0.0)
        answers = await asyncio.gather(*(batcher.ask("predict", rows(number)) for number in (1, 2)))
        assert [one["y"].item() for one in answers] == [2, 4]
        await batcher.ask("predict", {"x": np.ones((1, 2), np.float32)})  # of another shape: not known yet

    engine = with_batcher(use)
    assert engine.ran == [1, 2, 1]
    assert engine.threads == ["engine", threading.main_thread().name, "engine"]


def test_what_is_refused_in_the_event_loop_is_refused_alone() -> None:
    async def use(batcher: Batcher, engine: Doubling) -> None:
        await known(batcher, engine, 0.0)
        good, bad = batcher.ask("predict", rows(1)), batcher.ask("predict", rows(13))
        with pytest.raises(RequestRefused):
            await bad
        assert (await good)["y"] == 2

    assert set(with_batcher(use).threads[1:]) == {threading.main_thread().name}


def test_a_run_that_took_longer_than_known_is_the_last_one_in_the_event_loop() -> None:
    async def use(batcher: Batcher, engine: Doubling) -> None:
        await known(batcher, engine, 0.0)
        engine.seconds = SLOW_S
        for number in range(3):
            await batcher.ask("predict", rows(number))

    assert with_batcher(use).threads == ["engine", threading.main_thread().name, "engine", "engine"]


def test_what_comes_with_a_short_run_and_is_not_of_its_kind_is_run_by_the_thread() -> None:
    async def use(batcher: Batcher, engine: Doubling) -> None:
        await known(batcher, engine, 0.0)
        short = batcher.ask("predict", rows(1))
        other = batcher.ask("predict", {"x": np.ones((1, 2), np.float32)})
        assert (await short)["y"] == 2
        assert (await other)["y"].tolist() == [[2, 2]]

    assert sorted(with_batcher(use).ran) == [1, 1, 1]


def test_closing_answers_what_is_about_to_run_in_the_event_loop() -> None:
    async def use(batcher: Batcher, engine: Doubling) -> None:
        await known(batcher, engine, 0.0)
        waiting = batcher.ask("predict", rows(4))
        await asyncio.to_thread(batcher.close)
        assert (await waiting)["y"] == 8

    with_batcher(use)


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


def test_who_would_wait_too_long_is_refused_before_the_body_is_read(tmp_path: Path) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body was read")

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        application = Application(ServerConfig(max_queue_ms=1), Metrics())
        await application.serve(open_bundle(write_bundle(tmp_path / "bundle")))
        engine = Doubling()
        batcher = Batcher(engine, max_rows=8, max_queue_s=1e-3, metrics=application.metrics)  # type: ignore[arg-type]
        application.named("small", "")[0].batcher = batcher
        await known(batcher, engine, SLOW_S)
        await busy(batcher, engine)
        batcher.ask("predict", rows(1))
        path = "/v2/models/small/infer"
        await application({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
        engine.gate.set()
        await asyncio.to_thread(batcher.close)

    asyncio.run(main())
    assert sent[0]["status"] == 429
