"""Each point once a round in a random order; the best of several goes; what cannot be measured says why."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from hpml.artifacts.peaks import GemmPoint
from hpml.components.peaks.config import PeaksConfig
from hpml.components.peaks.rounds import MIN_ROUNDS, NotMeasurable, Probe, Timed, prepare, rates_by_round
from hpml.core.errors import Terminated

POINT = GemmPoint(device="cpu", precision="fp32", library="none", threads=1, size=64)


def probe(prepared: Callable[[], Timed]) -> Probe:
    return Probe(POINT, prepared)


def raising(error: Exception) -> Callable[[], Timed]:
    def prepared() -> Timed:
        raise error

    return prepared


def rates(timed: dict[int, Timed], *, seconds: float = 60, seed: int = 0) -> dict[int, list[float]]:
    config = PeaksConfig(rounds=6, max_spread=0.1, seed=seed)
    deadline_s = time.monotonic() + seconds
    return rates_by_round(timed, config, deadline_s=deadline_s, progress=lambda done: None)


def test_what_cannot_be_measured_says_why_and_the_rest_is_measured() -> None:
    timed, reasons = prepare(
        [
            probe(lambda: Timed(lambda: 1.0, 1.0)),
            probe(raising(NotMeasurable("too slow: it would take 3 s"))),
            probe(raising(RuntimeError("no kernel\nfor int3"))),
        ]
    )
    assert list(timed) == [0]
    assert reasons == {1: "too slow: it would take 3 s", 2: "not supported: no kernel for int3"}


def test_a_signal_is_not_taken_for_a_library_that_lacks_something() -> None:
    with pytest.raises(Terminated):
        prepare([probe(raising(Terminated("stopped")))])


def test_a_rate_is_that_of_the_best_go() -> None:
    seconds = iter([0.004, 0.001, 0.002])
    assert Timed(lambda: next(seconds), 2e9).rate() == 2 / 0.001


def test_every_point_is_visited_once_a_round_in_another_order_each_time() -> None:
    visits: list[int] = []

    def visiting(index: int) -> Timed:
        def seconds() -> float:
            if visits[-1:] != [index]:  # the goes of a visit follow each other
                visits.append(index)
            return 0.01

        return Timed(seconds, 1.0)

    found = rates({index: visiting(index) for index in range(8)})
    assert all(len(of_point) == 6 for of_point in found.values())
    visited = visits.copy()
    visits.clear()
    rates({index: visiting(index) for index in range(8)})
    assert visits == visited, "the same seed gives the same order"
    visits.clear()
    rates({index: visiting(index) for index in range(8)}, seed=1)
    assert visits != visited


def scripted(*seconds: float) -> Timed:
    """Two goes a visit take as long as these say, the last for ever."""

    def goes() -> Iterator[float]:
        for value in seconds:
            yield from (value, value)
        while True:
            yield seconds[-1]

    script = goes()
    return Timed(lambda: next(script), 1e9)


def test_a_point_that_was_disturbed_is_measured_again_at_the_end_of_the_round() -> None:
    found = rates({0: scripted(0.01, 0.01, 0.03, 0.03, 0.01)})
    assert found[0] == pytest.approx([100.0] * 6)


def test_a_point_that_stays_slow_stays_slow() -> None:
    found = rates({0: scripted(0.01, 0.01, 0.03)})
    assert found[0] == pytest.approx([100, 100, 100 / 3, 100 / 3, 100 / 3, 100 / 3])


def test_when_the_time_is_over_five_rounds_are_finished_and_nothing_is_repeated() -> None:
    found = rates({0: scripted(0.01, 0.03, 0.01)}, seconds=-1)
    assert len(found[0]) == MIN_ROUNDS
    assert found[0][1] == pytest.approx(100 / 3)
