"""The distance between the CPUs: watched for real for a moment, and shown for machines of all sizes."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from hpml.artifacts.core_state import CoreDistances
from hpml.artifacts.peaks import PeaksSpec
from hpml.pipelines.bench import core_distances
from hpml.pipelines.bench import machine as bench_machine
from hpml.pipelines.command_pages.machine import machine_page
from hpml.reporting.core_distances import in_words, state_rows
from tests.components.peaks.test_peaks_page import spec as spec  # a fixture

NEAR_FAR = (np.repeat([200.0, 480.0, 200.0], [70, 130, 100]) * np.resize([0.97, 1.0, 1.03], 300)).tolist()


def seen(cpus: int, usable: int | None = None) -> CoreDistances:
    """A machine with so many CPUs and two states, that changed twice."""
    states, changes = core_distances._states(np.array(NEAR_FAR), 30.0)
    names = tuple(range(100, 100 + cpus))
    return CoreDistances(
        cpus=names,
        usable_cpus=usable or cpus,
        round_trips_ns=tuple(tuple(200.0 + other for other in range(at)) for at in range(cpus)),
        states=states,
        changes=changes,
        seconds=30.0,
    )


def page_without_peaks(cores: CoreDistances) -> str:
    return machine_page(PeaksSpec(hardware={}, bandwidths=(), gemms=()), cores)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_this_machine_is_watched() -> None:
    allowed = os.sched_getaffinity(0)
    told: list[float] = []
    cores = core_distances.watch(0.2, told.append)
    assert os.sched_getaffinity(0) == allowed
    assert [len(row) for row in cores.round_trips_ns] == list(range(len(cores.cpus)))
    assert all(round_trip > 0 for row in cores.round_trips_ns for round_trip in row)
    assert sum(state.share for state in cores.states) == pytest.approx(1)
    assert told == sorted(told) and len(told) >= 1


def test_with_one_cpu_one_line_says_that_there_is_nothing_to_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    cores = core_distances.watch(30.0)
    assert cores == CoreDistances(cpus=(3,), usable_cpus=1)
    bench_machine._print_cores(cores)
    assert capsys.readouterr().out.splitlines() == [in_words(cores)]
    assert in_words(cores) in page_without_peaks(cores) and "<table" not in page_without_peaks(cores)


def test_a_large_machine_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Distance:
        def __init__(self, cpus: list[int]) -> None:
            self.cpus = cpus

        def __enter__(self) -> Distance:
            return self

        def __exit__(self, *_: object) -> None: ...

        def between(self, one: int, other: int) -> float:
            return float(one - other)

        def round_trip_ns(self) -> float:
            return 200.0

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))
    monkeypatch.setattr(core_distances, "CoreLatencyProbe", Distance)
    clock = itertools.count()
    monkeypatch.setattr(core_distances.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(core_distances.time, "sleep", lambda _: None)
    cores = core_distances.watch(30.0)
    assert len(cores.cpus) == core_distances.MOST_CPUS and cores.usable_cpus == 96
    assert cores.round_trips_ns[2] == (12.0, 6.0)
    assert [state.name for state in cores.states] == [""]
    assert "a sample of 16 of 96" in in_words(cores)


def test_states_have_their_share_of_the_time_and_changes_are_counted() -> None:
    cores = seen(2)
    assert [(state.name, round(state.seconds)) for state in cores.states] == [("near", 17), ("far", 13)]
    assert cores.changes == 2 and "changed 2 times in 30 s" in in_words(cores)
    assert [row[0] for row in state_rows(cores)] == ["near", "far"]
    assert state_rows(cores)[1][3] == "43.3 %"


@pytest.mark.parametrize("cpus", [2, 5, 16])
def test_the_matrix_fits_the_terminal_and_stands_on_the_page(
    cpus: int, capsys: pytest.CaptureFixture[str], spec: object
) -> None:
    cores = seen(cpus, usable=64)
    bench_machine._print_cores(cores)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    last = next(line for line in lines if line.split()[:1] == [str(99 + cpus)])
    assert len(last.split()) == cpus
    page = machine_page(spec, cores)  # type: ignore[arg-type]
    assert f"CPU {99 + cpus}" in page and "far" in page and f"a sample of {cpus} of 64" in page
