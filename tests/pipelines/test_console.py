"""The tables of the terminal: what is measured with its states and settings, what is not with its reason."""

from __future__ import annotations

import pytest

from hpml.artifacts.measurements import Conditions, MeasurementsSpec
from hpml.measuring.goals import Goals, decide
from hpml.pipelines.engine.run_record import RunRecord, StepRecord
from hpml.pipelines.terminal import bench_tables, console, status_tables
from tests import measured_specs

SPECS = {
    "two states": measured_specs.two_states(),
    "one state": measured_specs.one_state(),
    "too busy": measured_specs.too_busy(),
    "two operations": measured_specs.two_operations(),
}


def variants(measured: MeasurementsSpec, capsys: pytest.CaptureFixture[str]) -> str:
    console.print_variants(measured, decide(Goals(), measured))
    return capsys.readouterr().out


@pytest.mark.parametrize("name", SPECS)
def test_the_table_of_the_variants_fits_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    table = variants(SPECS[name], capsys).splitlines()
    assert max(len(line) for line in table if "machine busy" not in line) <= 80


def test_states_and_settings_stand_beside_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    told = " ".join(variants(SPECS["two states"], capsys).split())
    markdown = console.variants_markdown(SPECS["two states"], decide(Goals(), SPECS["two states"]))
    assert "2 threads, spinning" in told and "near 0.124" in told and "far 9.22" in told
    assert "int8/onnx | 2 threads, spinning |" in markdown and "near 9.44; far 9.22)" in markdown
    for text in (told, markdown):
        assert "over the mixture seen: 35 % near, 65 % far" in text
        assert "2,000 of 2,300 slices were undisturbed" in text
    assert "mixture" not in variants(SPECS["one state"], capsys)


def test_what_is_not_measured_is_said_with_its_reason_once(capsys: pytest.CaptureFixture[str]) -> None:
    told = " ".join(variants(SPECS["too busy"], capsys).split())
    assert told.count(measured_specs.BUSY) == 1
    assert f"p50 not measured: {measured_specs.BUSY}: fp32/eager, fp32/onnx" in told
    assert "the best fp32" not in told  # there is none
    markdown = console.variants_markdown(SPECS["too busy"], decide(Goals(), SPECS["too busy"]))
    assert (
        "| not measured | not measured |" in markdown and f"not measured: {measured_specs.BUSY}" in markdown
    )


def test_a_further_operation_has_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    measured = SPECS["two operations"]
    told = variants(measured, capsys)
    of_prefill = told[told.index("prefill") :]
    [best] = [
        one for one in measured.operations["prefill"].engines["int8/onnx"].throughput if one.batch == 32
    ]
    assert f"{128 * best.rows_per_s.value:.0f}" in of_prefill and "batch 32" in of_prefill
    assert "tokens/s" in of_prefill and "pruned+distilled+int8/onnx\n" not in of_prefill.split("not")[0]
    assert of_prefill.split().count("measured") == 5  # of the last engine: p50, p99, two speeds, the rate
    assert "prefill: 128 tokens a request" in " ".join(told.split())
    markdown = console.variants_markdown(measured, decide(Goals(), measured))
    [row] = [line for line in markdown.splitlines() if line.startswith("| prefill |")]
    assert row.endswith("| tokens/s |")


def test_goals_that_were_not_checked_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    measured = SPECS["too busy"]
    console.print_variants(measured, decide(Goals(max_latency_ms_p99=2.0), measured))
    assert "not verified, latency p99, allowed 2 ms, is not measured" in capsys.readouterr().out


@pytest.mark.parametrize("name", SPECS)
def test_the_tables_of_a_bench_fit_80_columns(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console.out, "width", 80)
    bench_tables._latencies(SPECS[name])
    table = capsys.readouterr().out
    assert max(len(line) for line in table.splitlines()) <= 80
    assert ("near 0.124" in table) == (name == "two states")
    assert ("measured" in table) == (name == "too busy")


def test_disturbances_that_cannot_be_seen_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    blind = measured_specs.one_state(conditions=Conditions(slices=10, unseen="no schedstat"))
    assert "10 of 10 slices were undisturbed" in variants(blind, capsys)
    assert "could not be seen here: no schedstat" in bench_tables._conditions(blind)


def test_status_names_what_is_incomplete(capsys: pytest.CaptureFixture[str]) -> None:
    steps = {
        "benchmark": StepRecord(stage="benchmark", status="done", incomplete="latency: machine busy"),
        "select": StepRecord(stage="select", status="done"),
    }
    record = RunRecord(id="r", recipe="r", recipe_file="", status="done", started_at_s=0.0, steps=steps)
    status_tables.show_steps(record, "table")
    (benchmark,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("benchmark")]
    assert "incomplete" in benchmark and "latency: machine busy" in benchmark
