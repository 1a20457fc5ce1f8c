"""The distance between the CPUs, and the states that many probes show."""

from __future__ import annotations

import os

import numpy as np
import pytest

from hpml.measuring.machine.core_latency_probe import CoreLatencyProbe
from hpml.measuring.machine.state_clusters import find_states

RANDOM = np.random.default_rng(0)


def probes(centre_ns: float, count: int, spread: float = 0.06) -> np.ndarray:
    return centre_ns * np.exp(RANDOM.normal(0, spread, count))


@pytest.mark.parametrize("count", [20, 100, 1000])
def test_two_distances_are_two_states_without_a_threshold(count: int) -> None:
    for near_ns in (90.0, 190.0, 2000.0):  # C, Python, a slow machine
        found = find_states(np.concatenate([probes(near_ns, count), probes(2.5 * near_ns, 2 * count)]))
        assert found.names == ("near", "far")
        assert 1.2 * near_ns < found.edges_ns[0] < 2.1 * near_ns
        assert list(found.of(np.array([near_ns, 2.5 * near_ns]))) == [0, 1]
        near, far = (state.round_trip_ns for state in found.described([1.0, 2.0]))
        assert near.high < found.edges_ns[0] < far.low


@pytest.mark.parametrize("count", [1, 5, 50, 1000])
def test_one_distance_is_one_state_however_it_scatters(count: int) -> None:
    for spread in (0.0, 0.03, 0.1):
        assert find_states(probes(300, count, spread)).names == ("",)


def test_more_distances_have_names_of_their_own() -> None:
    found = find_states(np.concatenate([probes(centre, 100) for centre in (100, 200, 400, 800)]))
    assert found.names == ("near", "middle", "middle 2", "far")


def test_a_few_disturbed_probes_are_no_state() -> None:
    found = find_states(np.concatenate([probes(190, 200), probes(480, 200), [5000.0, 7000.0, 20000.0]]))
    assert found.names == ("near", "far")
    assert found.of(np.array([20000.0])) == [1]


def test_the_probe_measures_a_positive_time_and_keeps_the_affinity() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    with CoreLatencyProbe(cpus) as distance:
        assert len(distance.pairs) == min(3, len(cpus) * (len(cpus) - 1) // 2)
        assert os.sched_getaffinity(0) == set(cpus)
        took_ns = distance.round_trip_ns()
    assert (took_ns is None) == (len(cpus) == 1)
    assert took_ns is None or 10 < took_ns < 1e8
    assert os.sched_getaffinity(0) == set(cpus)


def test_with_one_cpu_there_is_no_distance() -> None:
    with CoreLatencyProbe([0]) as distance:
        assert distance.pairs == ()
        assert distance.round_trip_ns() is None


def test_of_many_cpus_a_few_pairs_are_a_sample() -> None:
    pairs = CoreLatencyProbe(range(64)).pairs
    assert len(pairs) == 3
    assert len({cpu for pair in pairs for cpu in pair}) >= 4
