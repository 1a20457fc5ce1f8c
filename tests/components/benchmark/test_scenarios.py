"""MLPerf's scenarios: early stopping, the search for a rate, arrivals, and real engines in all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml.artifacts.measurements import ScenarioFigures
from hpml.measuring import scenarios
from hpml.measuring.bench import Bench
from hpml.measuring.config import BenchmarkConfig, Quiet
from hpml.measuring.machine.watch import Slice
from hpml.measuring.scenarios import workload
from hpml.measuring.scenarios.base import ROUNDS
from hpml.measuring.scenarios.bisection import PRECISION, Bisection
from hpml.measuring.statistics import allowed_overlatencies, early_stopping_bound, samples_needed

MakeBench = Callable[..., Bench]
ANY_MACHINE = BenchmarkConfig(
    reference="fp32/onnx",
    batch_sizes=(1, 4),
    warmup_requests=2,
    concurrency=(),
    server_latency_bound_ms=40.0,  # more than a shared machine takes from an engine at once
    quiet=Quiet(
        max_waited=1e6, max_stolen=1e6
    ),  # the machine of the tests is shared; nothing here depends on its speed
)


# --------------------------------------------------------------------------------------------- early stopping


@pytest.mark.parametrize(
    ("queries", "level", "allowed"),
    [
        (43, 0.9, -1),
        (44, 0.9, 0),
        (64, 0.9, 1),
        (458, 0.99, -1),
        (459, 0.99, 0),
        (661, 0.99, 0),
        (662, 0.99, 1),
    ],
)
def test_the_overlatencies_that_loadgen_allows(queries: int, level: float, allowed: int) -> None:
    assert allowed_overlatencies(queries, level) == allowed


@given(queries=st.integers(1, 400), level=st.sampled_from((0.5, 0.9, 0.97, 0.99)))
def test_one_overlatency_more_would_not_show_it(queries: int, level: float) -> None:
    def at_most(count: int) -> float:
        return sum(comb(queries, k) * (1 - level) ** k * level ** (queries - k) for k in range(count + 1))

    allowed = allowed_overlatencies(queries, level)
    assert at_most(allowed) < 0.01 <= at_most(allowed + 1) + 1e-12


@pytest.mark.parametrize("level", [0.9, 0.99])
def test_there_is_a_bound_from_as_many_samples_on_as_a_percentile_needs(level: float) -> None:
    needed = samples_needed(level)
    assert early_stopping_bound(list(range(needed - 1)), level) is None
    assert early_stopping_bound(list(range(needed)), level) == needed - 1


def test_the_bound_holds_in_99_of_100_cases_and_is_not_far_off() -> None:
    rng = np.random.default_rng(1)
    truth = -np.log(0.1)  # p90 of the exponential distribution
    bounds = np.asarray([early_stopping_bound(rng.exponential(1.0, 300).tolist(), 0.9) for _ in range(1000)])
    assert (bounds >= truth).mean() >= 0.985
    assert np.median(bounds) < 1.4 * truth


# ------------------------------------------------------------------------------------------- the largest rate


def _searched(peak: float, largest: float) -> tuple[Bisection, int]:
    search, trials = Bisection(peak), 0
    while (rate := search.next_rate()) is not None:
        search.learn(rate, passes=rate <= largest)
        trials += 1
    return search, trials


@given(peak=st.floats(0.1, 1e5), share=st.floats(0.02, 20))
def test_the_search_brackets_the_largest_rate_to_its_precision(peak: float, share: float) -> None:
    search, trials = _searched(peak, share * peak)
    assert search.passed <= share * peak < search.failed <= PRECISION * search.passed * (1 + 1e-9)
    assert trials <= 12


@given(share=st.floats(0.83, 0.999))
def test_near_the_peak_few_trials_are_enough(share: float) -> None:
    assert _searched(1000.0, share * 1000.0)[1] <= 4


def test_a_search_ends_where_no_rate_passes() -> None:
    search, trials = _searched(1000.0, 0.0)
    assert not search.bracketed
    assert trials <= 7


# ------------------------------------------------------------------------------------------------- arrivals


def test_arrivals_are_a_poisson_process_that_a_rate_only_scales() -> None:
    slow, fast = (np.asarray(workload.poisson_ns(5000, rate, seed=3)) for rate in (100.0, 400.0))
    gaps_s = np.diff(slow) / 1e9
    assert gaps_s.mean() == pytest.approx(0.01, rel=0.05)
    assert gaps_s.std() == pytest.approx(gaps_s.mean(), rel=0.05)  # of an exponential distribution
    assert np.abs(slow - 4 * fast).max() <= 4
    assert workload.poisson_ns(9, 1.0, seed=1) != workload.poisson_ns(9, 1.0, seed=2)


def _take_1_ms(_: Any) -> None:
    until_s = time.perf_counter() + 1e-3
    while time.perf_counter() < until_s:
        pass


def test_latency_counts_from_the_arrival_not_from_the_start() -> None:
    reply = workload.by_arrival(_take_1_ms, [None] * 20, [0] * 20, bound_ns=10**12, allowed=0)
    assert all(took_ns >= (index + 1) * 10**6 for index, took_ns in enumerate(reply["latency_ns"]))
    assert all(later > earlier for earlier, later in pairwise(reply["latency_ns"]))


def test_no_request_is_begun_before_it_arrived() -> None:
    arrivals_ns = [3_000_000 * index for index in range(20)]
    reply = workload.by_arrival(_take_1_ms, [None] * 20, arrivals_ns, bound_ns=10**12, allowed=0)
    assert len(reply["latency_ns"]) == 20
    assert min(reply["latency_ns"]) >= 10**6  # it would be less, had the millisecond begun too early


def test_a_trial_ends_when_it_can_no_longer_pass() -> None:
    reply = workload.by_arrival(_take_1_ms, [None] * 500, [0] * 500, bound_ns=5_000_000, allowed=3)
    late = [took_ns > 5_000_000 for took_ns in reply["latency_ns"]]
    assert sum(late) == 4
    assert late[-1]
    assert len(late) <= 9


# --------------------------------------------------------------------------------------------- real engines


def _figures(bench: Bench) -> dict[str, dict[str, ScenarioFigures]]:
    """engine -> scenario -> figures"""
    measured = scenarios.run_all(bench)
    return {name: {of.scenario: of for of in figures} for name, (figures, _) in measured.items()}


def test_every_engine_has_figures_in_every_scenario(digits_bench: MakeBench) -> None:
    names = ("fp32/onnx", "int8/onnx")
    measured = _figures(digits_bench(ANY_MACHINE, *names))
    assert set(measured) == set(names)
    for of_engine in measured.values():
        assert list(of_engine) == list(ANY_MACHINE.scenarios)
        single, multi, offline, server = of_engine.values()
        for figure in (single, multi, offline):
            assert figure.backend == "ours"
            assert figure.reason == ""
            assert figure.value is not None
            assert 0 < figure.value.low <= figure.value.value <= figure.value.high
        assert single.metric == "latency_ms_p90"
        assert single.queries >= 64
        assert (multi.metric, multi.samples_per_query) == ("latency_ms_p99", 8)
        assert multi.queries >= 662
        for figure in (single, multi):
            assert figure.early_stopping_ms >= figure.value.value
        assert (offline.metric, offline.queries) == ("samples_per_s", ROUNDS)
        assert offline.batch in ANY_MACHINE.batch_sizes
        assert offline.samples_per_query % offline.batch == 0
        assert (server.metric, server.latency_bound_ms) == ("queries_per_s", 40.0)
        if (
            server.value is None
        ):  # a machine that stands still for 40 ms in one query of a hundred has no rate
            assert "queries per second" in server.reason
            continue
        assert server.reason == ""
        assert 0 < server.value.value == server.value.low
        assert server.value.high <= PRECISION * server.value.low * (1 + 1e-9)
        assert server.queries >= 662


def test_what_is_too_slow_for_its_time_says_how_many_queries_would_fit(digits_bench: MakeBench) -> None:
    config = ANY_MACHINE.model_copy(update={"scenario_seconds": 1e-4})
    of_engine = _figures(digits_bench(config, "fp32/onnx"))["fp32/onnx"]
    for scenario, needed in (("SingleStream", 64), ("MultiStream", 662), ("Server", 662)):
        assert of_engine[scenario].value is None
        assert of_engine[scenario].reason.startswith("not enough samples: ")
        assert f" of {needed} in 0.0001 s" in of_engine[scenario].reason
    assert of_engine["Offline"].value is not None


def test_a_bound_that_one_query_alone_exceeds_has_no_rate(digits_bench: MakeBench) -> None:
    config = ANY_MACHINE.model_copy(update={"scenarios": ("Server",), "server_latency_bound_ms": 1e-4})
    figure = _figures(digits_bench(config, "fp32/onnx"))["fp32/onnx"]["Server"]
    assert figure.value is None
    assert figure.reason.startswith("one query alone takes ")
    assert figure.latency_bound_ms == 1e-4


def test_queries_of_eight_samples_need_no_eight_images(digits_bench: MakeBench) -> None:
    config = ANY_MACHINE.model_copy(update={"scenarios": ("MultiStream",), "batch_sizes": (1,)})
    figure = _figures(digits_bench(config, "int8/onnx", rows=3))["int8/onnx"]["MultiStream"]
    assert figure.value is not None


# ------------------------------------------------------------------------------------- what the time allows


def test_after_the_time_budget_every_figure_has_its_reason(digits_bench: MakeBench) -> None:
    bench = digits_bench(ANY_MACHINE.model_copy(update={"concurrency": (1, 2)}), "fp32/onnx")
    bench.deadline_s = 0.0
    figures, loops = scenarios.run_all(bench)["fp32/onnx"]
    assert [figure.scenario for figure in figures] == list(ANY_MACHINE.scenarios)
    assert {figure.reason for figure in figures} == {"the time budget was over"}
    assert {(loop.clients, loop.reason) for loop in loops} == {
        (1, "the time budget was over"),
        (2, "the time budget was over"),
    }


def test_what_was_measured_before_a_disturbance_counts(digits_bench: MakeBench) -> None:
    config = ANY_MACHINE.model_copy(
        update={
            "scenarios": ("SingleStream", "MultiStream", "Server"),
            "concurrency": (1,),
        }
    )
    bench = digits_bench(config, "fp32/onnx")
    quiet_slices = 1 + ROUNDS + 3 + ROUNDS  # a trial, the closed loop, three trials, SingleStream

    def disturbances(_: Slice, *, oversubscribed: bool = False) -> list[str]:
        if bench.watch.slices <= quiet_slices:
            return []
        bench.deadline_s = 0.0  # the hog stays for as long as there is time
        return ["a hog"]

    bench.watch.disturbances = disturbances  # type: ignore[method-assign]
    figures, loops = scenarios.run_all(bench)["fp32/onnx"]
    single, *others = figures
    assert single.value is not None
    for figure in others:
        assert figure.value is None
    assert others[0].reason == "disturbed: the machine was disturbed while fp32/onnx was timed"
    assert others[1].reason == "the time budget was over"
    assert loops[0].requests_per_s is not None
