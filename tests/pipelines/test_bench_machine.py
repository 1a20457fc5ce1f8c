"""`hpml bench machine`, run for real once: its tables, JSON and page, and what it shares with a recipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpml.artifacts.core_state import CoreDistances
from hpml.artifacts.interval import Interval
from hpml.artifacts.peaks import GemmPoint, PeaksSpec
from hpml.components.peaks import stage as peaks
from hpml.pipelines.bench import machine as bench_machine
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.execution import Settings, forecast
from hpml.pipelines.executors.process import Processes
from hpml.pipelines.plan import Step, trace
from hpml.pipelines.recipe import Recipe

pytestmark = pytest.mark.slow  # measures all of the machine; test_peaks_stage measures a part of it

HPML = Path(sys.executable).with_name("hpml")


def hpml(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(HPML), *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "80", "HPML_HOME": str(folder / "runs")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the machine was measured, which takes some 20 s."""
    place = tmp_path_factory.mktemp("machine")
    first = hpml(place, "bench", "machine", "--seconds", "1")
    assert first.returncode == 0, first.stderr
    assert "done peaks" in first.stderr
    (place / "first.txt").write_text(first.stdout)
    for file in place.glob("runs/.store/keys/*.json"):
        _keep(file)
    return place


def _keep(file: Path) -> None:
    """As on a quiet machine: on another one all commands here would measure again, as test_incomplete
    shows of a benchmark."""
    record = json.loads(file.read_text())
    record.pop("incomplete", None)
    file.write_text(json.dumps(record))


def test_the_table_names_levels_and_precisions_in_80_columns(folder: Path) -> None:
    text = (folder / "first.txt").read_text()
    words = ("DRAM", "GB/s", "fp32", "bf16", "int8", "Gflop/s", "1 thread", "U8S8", "cuda: ", "CPU")
    for word in words:
        assert word in text, word
    assert all(len(line) <= 80 for line in text.splitlines() if not line.startswith("cpu"))


def test_the_latest_run_stays_that_of_a_recipe(folder: Path) -> None:
    assert not (folder / "runs" / "latest").exists()


def test_the_second_time_no_peak_is_measured_that_was_known(folder: Path) -> None:
    again = hpml(folder, "bench", "machine", "--seconds", "1", "-o", "json", "--html", "machine.html")
    assert again.returncode == 0, again.stderr
    assert "cached peaks" in again.stderr
    answer = json.loads(again.stdout)
    samples = json.loads(Path(answer.pop("samples")).read_text())
    cores = CoreDistances.model_validate(answer.pop("cores"))
    assert len(cores.round_trips_ns) == len(cores.cpus) and cores.states
    spec = PeaksSpec.model_validate(answer)
    assert len(samples) == len(spec.bandwidths) + len(spec.gemms)
    page = (folder / "machine.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and page.count("<svg") >= 2 and "<script" not in page
    assert not list(folder.glob(".machine.html*")), "no half-written page is left"


def test_the_run_of_a_recipe_finds_the_peaks_there(folder: Path) -> None:
    """Its step has the default config, and the recipe's folder on the path."""

    def graph(step: Step[str], recipe: Recipe) -> None:
        step(peaks.run, recipe.peaks)

    plan = trace(graph, Recipe(data="digits"))  # type: ignore[arg-type]  # a name, expanded
    settings = Settings(home=folder / "runs", import_paths=(str(folder),))
    (known,) = forecast(plan, settings, Processes(settings.home))
    assert known.outcome == "cached"
    changed = trace(graph, Recipe(data="digits", peaks={"rounds": 9}))  # type: ignore[arg-type]
    (other,) = forecast(changed, settings, Processes(settings.home))
    assert other.outcome == "would run" and "config: rounds changed: 7 -> 9" in other.reasons


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (["", ""], []),
        (["too slow: 3 s", ""], ["Not quoted: 1 of 2 points (1 too slow)."]),
        (
            ["not stable: rounds differ by 20 %", "not stable: rounds differ by 30 %"],
            [
                "Not quoted: 2 of 2 points (2 not stable).",
                "Peaks not known yet, as rounds disagree: 1 thread: fp32.",
                "So this is not kept as the machine's: hpml bench machine measures again.",
            ],
        ),
        (
            ["not stable: rounds differ by 20 %", "known"],
            [
                "Not quoted: 1 of 2 points (1 not stable).",
                "If something else was running, measure again: hpml bench machine --force",
            ],
        ),
    ],
)
def test_what_is_not_quoted_is_counted_with_what_helps(reasons: list[str], said: list[str]) -> None:
    points = tuple(
        GemmPoint(
            device="cpu",
            precision="fp32",
            library="x",
            threads=1,
            size=64,
            reason=reason.removeprefix("known"),
            gflop_per_s=Interval(value=9, low=9, high=9) if reason == "known" else None,
            fastest=9.0 if reason.startswith("not stable") else None,
        )
        for reason in reasons
    )
    assert bench_machine._not_quoted(PeaksSpec(hardware={}, bandwidths=(), gemms=points)) == said


def test_the_run_is_on_record_and_gc_keeps_what_it_found(folder: Path) -> None:
    record = run_record.list_runs(folder / "runs")[-1]
    (step,) = record.steps.values()
    assert (record.recipe, step.stage, record.status) == ("machine", "peaks", "done")
    assert hpml(folder, "gc").returncode == 0
    assert "cached peaks" in hpml(folder, "bench", "machine", "--seconds", "1").stderr


def test_force_measures_again(folder: Path) -> None:
    """As far as the forecast: to measure takes 20 s."""
    settings = Settings(home=folder / "runs", force=frozenset({"peaks"}))
    (item,) = forecast(bench_machine.plan_of_machine(), settings, Processes(settings.home))
    assert item.outcome == "would run" and item.reasons == ("it was forced",)


def test_a_page_that_cannot_be_written_is_one_line(folder: Path) -> None:
    answer = hpml(folder, "bench", "machine", "--seconds", "1", "--html", "nowhere/machine.html")
    assert answer.returncode == 4
    assert answer.stderr.splitlines()[-1].startswith("error: ") and "nowhere" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_what_bench_does_not_know_is_refused(tmp_path: Path) -> None:
    answer = hpml(tmp_path, "bench", "machine", "--frobnicate")
    assert answer.returncode == 2 and "--frobnicate" in answer.stderr
    listed = hpml(tmp_path, "bench", "--help").stdout
    assert "machine" in listed and all(len(line) <= 80 for line in listed.splitlines())
