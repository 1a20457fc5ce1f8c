"""Costs beside the time of a request, and whether the figures of a run may be quoted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import Throughput
from hpml.core import hardware
from hpml.measuring.bench import Launches, Unmeasured
from hpml.measuring.machine import energy, gpu
from hpml.measuring.machine.energy import measure_energy, rapl_counter
from hpml.measuring.resources import LaunchRecord, resource_figures


def cold_start(values: list[float]) -> Interval | None:
    return resource_figures(LaunchRecord(cold_start_ms=tuple(values)), (), None).cold_start_ms


def test_the_interval_over_launches_is_students_on_the_logarithm() -> None:
    found = cold_start([100.0, 105.0, 110.25, 115.7625, 121.550625])
    assert found is not None
    assert found.value == pytest.approx(110.25)
    half = 2.776 * math.log(1.05) * math.sqrt(2.5) / math.sqrt(5)  # t with 4 degrees of freedom
    assert math.log(found.high / found.value) == pytest.approx(half, rel=0.01)
    assert math.log(found.value / found.low) == pytest.approx(half, rel=0.01)
    assert cold_start([5.0]) is None


def test_the_price_is_that_of_the_best_batch_and_its_interval_is_turned_over() -> None:
    rates = [Interval(value=v, low=v / 2, high=v * 2) for v in (1000.0, 4000.0)]
    throughput = [Throughput(batch=1, rows_per_s=rates[0]), Throughput(batch=8, rows_per_s=rates[1])]
    price = resource_figures(LaunchRecord(), throughput, 3.6).price_per_million
    assert price is not None
    assert (price.low, price.value, price.high) == pytest.approx((0.125, 0.25, 0.5))
    assert resource_figures(LaunchRecord(), throughput, None).price_per_million is None


def test_what_was_not_measured_is_none() -> None:
    figures = resource_figures(
        LaunchRecord(cold_start_ms=(9.0,), energy_source="not measured: no counter"), (), 1.0
    )
    assert figures.cold_start_ms is None
    assert figures.peak_rss_bytes is None
    assert figures.price_per_million is None
    assert (figures.energy_mj_per_request, figures.energy_source) == (None, "not measured: no counter")


# ---------------------------------------------------------------------------------------------------- energy


def _zone(folder: Path, name: str, label: str, energy_uj: int) -> Path:
    zone = folder / name
    zone.mkdir()
    (zone / "name").write_text(f"{label}\n")
    (zone / "energy_uj").write_text(f"{energy_uj}\n")
    return zone


def test_the_counter_adds_the_packages_and_leaves_out_what_is_inside_them(tmp_path: Path) -> None:
    _zone(tmp_path, "intel-rapl:0", "package-0", 5_000)
    _zone(tmp_path, "intel-rapl:1", "package-1", 7_000)
    _zone(tmp_path, "intel-rapl:0:0", "core", 3_000)
    counter, source = rapl_counter(tmp_path)
    assert counter is not None
    assert counter() == pytest.approx(12.0)  # millijoules
    assert "RAPL" in source


def test_without_a_counter_the_reason_is_given(tmp_path: Path) -> None:
    assert rapl_counter(tmp_path) == (None, "this machine has no energy counter (RAPL) that can be seen")


class FakeBench:
    """Answers as the bench does: 50 requests a slice; the counter's zone moves meanwhile."""

    names = ("one",)

    def __init__(self, zone: Path, used_uj: Iterator[int], *, device: str = "cpu") -> None:
        self._zone, self._used_uj = zone, used_uj
        self.launches = {"one": Launches(device=device)}
        self.watch = type("Watch", (), {"dropped": 0})()

    @contextmanager
    def launched(self) -> Iterator[None]:
        yield

    def run_until_undisturbed(self, name: str, do: str, doing: str, **arguments: Any) -> dict[str, Any]:
        used = next(self._used_uj, None)
        if used is None:
            raise Unmeasured("the budget is over")
        if used < 0:
            self.watch.dropped += 1
        counter = self._zone / "energy_uj"
        counter.write_text(str(int(counter.read_text()) + abs(used)))
        return {"requests": 50}


def energy_of(bench: FakeBench) -> Launches:
    measure_energy(bench)  # type: ignore[arg-type]
    return bench.launches["one"]


@pytest.fixture
def zone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(energy, "RAPL", tmp_path)
    return _zone(tmp_path, "intel-rapl:0", "package-0", 1)


def test_energy_is_what_the_counter_moved_by_a_request(zone: Path) -> None:
    measured = energy_of(FakeBench(zone, iter([100_000, 105_000, 95_000, 100_000, 100_000])))
    assert measured.energy_mj_per_request == pytest.approx((2.0, 2.1, 1.9, 2.0, 2.0))
    assert measured.energy_source == "RAPL, all CPU packages"


def test_a_repeated_slice_tells_nothing_and_the_end_of_the_budget_ends_it(zone: Path) -> None:
    measured = energy_of(FakeBench(zone, iter([100_000, -900_000, 100_000])))
    assert measured.energy_mj_per_request == pytest.approx((2.0, 2.0))


def test_a_server_is_another_process(zone: Path) -> None:
    measured = energy_of(FakeBench(zone, iter([]), device="remote"))
    assert measured.energy_source == "not measured: the server is another process"


def test_without_a_gpu_nothing_is_said_of_one() -> None:
    if hardware.gpu_names():
        pytest.skip("this machine has a GPU")
    assert gpu.read() == ()
    assert gpu.energy_mj() is None
    assert gpu.describe((), ()) == {}
    assert gpu.memory_bytes(1) is None


def test_clocks_and_power_in_words() -> None:
    calm = gpu.GpuState(1980, 1980, 120.4, 41, False)
    hot = gpu.GpuState(1410, 1980, 699.6, 86, True)
    assert gpu.describe((calm,), (hot,)) == {
        "gpu 0": "SM clock 1980 to 1410 of 1980 MHz, power 120 to 700 W, 41 to 86 °C, throttled"
    }
