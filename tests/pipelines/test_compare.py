"""`hpml compare`: ratios of figures that were not measured together, and what is said of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml.artifacts.folder import Lineage, seal_artifact
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec, Throughput
from hpml.core.errors import UsageError
from hpml.measuring.config import BenchmarkConfig
from hpml.pipelines.__main__ import main
from hpml.pipelines.bench import compare
from hpml.pipelines.bench.compare import MARGIN, ratio, verdict
from hpml.pipelines.bench.record import BenchRecord, SubjectRecord
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.run_record import RunRecord, StepRecord
from hpml.pipelines.engine.store import Store
from tests import measured_specs


def around(value: float, share: float = 0.01) -> Interval:
    return Interval(value=value, low=value / (1 + share), high=value * (1 + share))


def engine(p50_ms: float, *, top1: float | None = None, share: float = 0.01) -> EngineFigures:
    accuracy = None if top1 is None else Interval(value=top1, low=top1 - 0.01, high=top1 + 0.01)
    return EngineFigures(
        status="measured",
        target="onnx",
        precision="fp32",
        methods=(),
        size_bytes=1,
        parameters=1,
        macs=1,
        quality={} if accuracy is None else {"accuracy_top1": accuracy},
        latency_ms_p50=around(p50_ms, share),
        throughput=(Throughput(batch=8, rows_per_s=around(1000 / p50_ms, share)),),
    )


def spec(engines: dict[str, EngineFigures], **fields: Any) -> MeasurementsSpec:
    told: dict[str, Any] = {
        "reference": next(iter(engines), ""),
        "best_fp32": "",
        "engines": engines,
        "rounds": 20,
        "threads": 2,
        "seed": 0,
        "environment": {"cpu": "a CPU", "kernel": "6.1"},
    }
    return MeasurementsSpec(**told | fields)


def bench_folder(place: Path, measurements: MeasurementsSpec, **libraries: str) -> Path:
    place.mkdir(parents=True)
    record = BenchRecord(
        id=place.name,
        created_at="",
        command=(),
        config=BenchmarkConfig(reference=measurements.reference or "none"),
        libraries={"onnxruntime": "1.31.1"} | libraries,
        subjects={name: SubjectRecord(kind="onnx", known={}) for name in measurements.engines},
        measurements=measurements,
    )
    (place / "bench.json").write_text(record.model_dump_json())
    return place


def run_of(home: Path, run: str, measurements: MeasurementsSpec, started_at_s: float) -> None:
    """A run whose one step is a benchmark with these measurements."""
    folder = home / "tmp" / run
    folder.mkdir(parents=True)
    lineage = Lineage(
        stage="benchmark",
        code_digest="",
        config=None,
        parents={},
        libraries={"onnxruntime": "1.30.0"},
        started_at_s=0,
        seconds=0,
        peak_rss_bytes=0,
    )
    manifest = seal_artifact(folder, spec=measurements, metrics={}, lineage=lineage)
    folder.rename(Store(home).object_path(manifest.digest))
    (home / run).mkdir()
    step = StepRecord(stage="benchmark", status="done", digest=manifest.digest)
    record = RunRecord(
        id=run,
        recipe="r",
        recipe_file="",
        status="done",
        started_at_s=started_at_s,
        steps={"benchmark": step},
    )
    run_record.save(home, record)


# ------------------------------------------------------------------------------------------------- ratios

intervals = st.builds(
    lambda value, low, high: Interval(value=value, low=value / (1 + low), high=value * (1 + high)),
    st.floats(1e-3, 1e3),
    st.floats(0, 2),
    st.floats(0, 2),
)


@given(intervals, intervals)
def test_a_ratio_turned_over_has_its_interval_turned_over(one: Interval, other: Interval) -> None:
    found, turned = ratio(one, other), ratio(other, one)
    assert found.low <= found.value <= found.high
    assert found.low == pytest.approx(1 / turned.high) and found.high == pytest.approx(1 / turned.low)


def test_the_interval_of_a_ratio_holds_the_truth_95_times_in_100() -> None:
    """Two independent lognormal estimates, whose own 95 % intervals are exact."""
    rng = np.random.default_rng(0)
    errors = rng.normal(0, (0.03, 0.05), (4000, 2))
    held = 0
    for first, second in np.exp(errors):
        one = Interval(
            value=3 * first, low=3 * first * np.exp(-1.96 * 0.03), high=3 * first * np.exp(1.96 * 0.03)
        )
        other = Interval(value=second, low=second * np.exp(-1.96 * 0.05), high=second * np.exp(1.96 * 0.05))
        found = ratio(one, other)
        held += found.low <= 3 <= found.high
    assert 0.94 < held / 4000 < 0.96


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (1.10, 1.30, "faster"),
        (1.005, 1.05, "faster"),
        (0.70, 0.90, "slower"),
        (0.95, 0.999, "slower"),
        (0.99, 1.01, "tied"),
        (1.005, 1.015, "tied"),
        (0.90, 1.10, "undecided"),
        (0.999, 1.05, "undecided"),
    ],
)
def test_verdicts(low: float, high: float, said: str) -> None:
    assert MARGIN == 0.02
    assert verdict(Interval(value=(low * high) ** 0.5, low=low, high=high)) == said


# ------------------------------------------------------------------------------------------- two measurements


def test_two_benches(tmp_path: Path) -> None:
    before = {
        "same": engine(2.0, share=0.001),
        "better": engine(4.0),
        "worse": engine(1.0),
        "gone": engine(1.0),
    }
    after = {
        "same": engine(2.0, share=0.001),
        "better": engine(2.0),
        "worse": engine(2.0),
        "new": engine(1.0),
    }
    one, other = bench_folder(tmp_path / "a", spec(before)), bench_folder(tmp_path / "b", spec(after))
    found = compare.compare(tmp_path, str(one), str(other / "bench.json"))
    said = {(row.engine, row.figure): (row.verdict, round(row.ratio.value, 3)) for row in found.rows}
    assert said == {
        ("same", "p50, ms"): ("tied", 1.0),
        ("same", "samples/s at 8"): ("tied", 1.0),
        ("better", "p50, ms"): ("faster", 2.0),
        ("better", "samples/s at 8"): ("faster", 2.0),
        ("worse", "p50, ms"): ("slower", 0.5),
        ("worse", "samples/s at 8"): ("slower", 0.5),
    }
    assert found.unmatched == ("gone", "new") and found.differences == ()


def test_a_run_and_a_bench_and_what_differs_between_them(tmp_path: Path) -> None:
    home = tmp_path / "runs"
    run_of(home, "old", spec({"fp32": engine(2.0, top1=0.97)}), started_at_s=1)
    run_of(home, "new", spec({"fp32": engine(1.0, top1=0.95)}, threads=1), started_at_s=2)
    (home / "latest").symlink_to("new")
    found = compare.compare(home, "old", "latest")
    assert found.differences == ("threads: 2, then 1",)
    assert found.metric.name == "accuracy_top1" and found.qualities["fp32"].value == pytest.approx(-0.02)
    assert found.qualities["fp32"].low == pytest.approx(-0.02 - 0.01 * 2**0.5)
    other = spec({"fp32": engine(1.0)}, environment={"cpu": "another CPU", "kernel": "6.1"})
    folder = bench_folder(tmp_path / "b", other)
    found = compare.compare(home, "old", str(folder))
    assert found.differences == (
        "cpu: a CPU, then another CPU",
        "version of onnxruntime: 1.30.0, then 1.31.1",
    )
    assert found.qualities == {}
    assert compare.warnings(found)[0].startswith("WARNING")


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one = bench_folder(tmp_path / "a", spec({"x": engine(1.0)}))
    other = bench_folder(tmp_path / "b", spec({"y": engine(1.0)}))
    invalid = bench_folder(tmp_path / "c", spec({}, invalid="a hog"))  # of a version before
    with pytest.raises(UsageError, match="no engine in common"):
        compare.compare(tmp_path, str(one), str(other))
    with pytest.raises(UsageError, match=r"no engine in common.*the other has none \(a hog\)"):
        compare.compare(tmp_path, str(one), str(invalid))
    with pytest.raises(UsageError, match="there is no run"):
        compare.compare(tmp_path, str(one), "yesterday")


@pytest.mark.parametrize("output", ["table", "json", "markdown"])
def test_what_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str) -> None:
    hostile = "<b>\x1b[2J|x</b>"
    one = bench_folder(tmp_path / "a", spec({hostile: engine(2.0)}))
    other = bench_folder(tmp_path / "b", spec({hostile: engine(1.0)}, threads=1))
    page = tmp_path / "page.html"
    main(["compare", str(one), str(other), "-o", output, "--html", str(page)])
    printed = capsys.readouterr().out
    assert "\x1b[2J" not in printed and "faster" in printed
    assert "threads: 2, then 1" in printed and "faster" in page.read_text()
    assert "<b>" not in page.read_text() and not re.search(r"<script|(src|href)=", page.read_text())
    if output == "json":
        told = json.loads(printed)
        assert told["rows"][0]["ratio"]["value"] == pytest.approx(2.0) and told["margin"] == MARGIN
        assert told["differences"] == ["threads: 2, then 1"]
    elif output == "markdown":
        assert "\\|x" in printed
    else:
        table = printed[printed.index("engine ") : printed.index("Ratios of")]
        assert max(len(line) for line in table.splitlines()) <= 80


# ------------------------------------------------------------------------------------------------- the gate


@pytest.mark.parametrize(
    ("after_ms", "share", "code", "said"),
    [
        (1.2, 0.01, 5, "slower than"),
        (0.5, 0.01, 0, ""),
        (1.03, 0.005, 0, ""),  # slower, and by less than is allowed
        (1.2, 0.5, 0, "undecided: x p50 20.0 % slower ("),
    ],
)
def test_a_gate_for_ci_is_decided_on_the_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], after_ms: float, share: float, code: int, said: str
) -> None:
    one = bench_folder(tmp_path / "a", spec({"x": engine(1.0, share=share)}))
    other = bench_folder(tmp_path / "b", spec({"x": engine(after_ms, share=share)}))
    ended = 0
    try:
        main(["compare", str(one), str(other), "--fail-slower", "5%"])
    except SystemExit as ending:
        ended = int(ending.code or 0)
    printed = capsys.readouterr()
    assert ended == code and "x" in printed.out
    assert said in printed.err if said else printed.err == ""
    if code:
        (line,) = printed.err.splitlines()
        assert line.startswith("error: ") and "by more than 5 %: x p50 20.0 % slower (18." in line


def test_an_engine_that_is_gone_is_not_passed_over_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = bench_folder(tmp_path / "a", spec({"x": engine(1.0), "gone": engine(1.0)}))
    other = bench_folder(tmp_path / "b", spec({"x": engine(1.0)}))
    main(["compare", str(one), str(other), "--fail-slower", "0.5", "-o", "json"])
    printed = capsys.readouterr()
    assert printed.err == "undecided: in one of the two only: gone\n"
    assert json.loads(printed.out)["unmatched"] == ["gone"]


# -------------------------------------------------------------------------------------------- like with like

OTHER_SHARES = {"near": 0.9, "far": 0.1}


def benches(tmp_path: Path, before: MeasurementsSpec, after: MeasurementsSpec) -> list[str]:
    return [str(bench_folder(tmp_path / name, spec)) for name, spec in (("a", before), ("b", after))]


def ended(arguments: list[str]) -> int:
    try:
        main(["compare", *arguments])
    except SystemExit as ending:
        return int(ending.code or 0)
    return 0


def test_p50_is_compared_in_each_state_that_both_saw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing changed but how the host had placed the CPUs, which makes every mixture 1.2 times as slow."""
    sides = benches(tmp_path, measured_specs.two_states(OTHER_SHARES), measured_specs.two_states())
    found = compare.compare(tmp_path, *sides)
    of_int8 = [row for row in found.rows if row.engine == "int8/onnx"]
    assert [(row.figure, row.verdict) for row in of_int8[:2]] == [
        ("p50 near, ms", "tied"),
        ("p50 far, ms", "tied"),
    ]
    assert {row.verdict for row in of_int8[2:]} == {"not alike"}
    assert not any(row.is_like for row in of_int8[2:])
    (difference,) = found.differences
    assert difference == (
        "the cores were near 90 % (205 ns), far 10 % (490 ns), then near 35 % (205 ns), far 65 % (490 ns); "
        "p50 is compared in each state"
    )
    assert ended([*sides, "--fail-slower", "5%"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "undecided: fp32/eager samples/s at 1 and 11 more: over other mixtures of the cores' states"
    )


def test_a_state_is_the_same_by_its_round_trip_not_by_its_name(tmp_path: Path) -> None:
    """A run that saw one state only has no name for it."""
    far = measured_specs.states()[1].model_copy(update={"name": "", "share": 1.0})
    alone = measured_specs.one_state(states=(far,))
    rows = compare.compare(tmp_path, *benches(tmp_path, alone, measured_specs.two_states())).rows
    (row,) = [row for row in rows if row.engine == "int8/onnx" and row.figure.startswith("p50")]
    assert row.figure == "p50 far, ms" and row.after.value == pytest.approx(0.219)


def test_versions_before_and_machines_of_one_state_are_compared_as_they_are(tmp_path: Path) -> None:
    before = measured_specs.one_state()
    found = compare.compare(tmp_path, *benches(tmp_path, before, before))
    assert {row.figure for row in found.rows} >= {"p50, ms", "samples/s at 8"}
    assert all(row.is_like for row in found.rows) and not found.differences


def test_what_is_not_measured_on_a_side_is_said_and_stops_a_gate_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = benches(tmp_path, measured_specs.two_states(), measured_specs.too_busy())
    assert ended(sides) == 0
    told = capsys.readouterr().out
    assert f"int8/onnx in {sides[1]}: not measured: {measured_specs.BUSY}" in told.replace("\n", "")
    assert ended([*sides, "--fail-slower", "5%"]) == 5
    (line,) = capsys.readouterr().err.splitlines()
    assert "is not known: fp32/eager in " in line and "hpml bench RUN goes on measuring a run" in line


def test_other_settings_are_a_difference(tmp_path: Path) -> None:
    before, after = measured_specs.two_states(), measured_specs.two_states()
    slower = measured_specs.engine("int8/onnx", settings={"threads": 1, "spinning": False})
    after = after.model_copy(update={"engines": {**after.engines, "int8/onnx": slower}})
    found = compare.compare(tmp_path, *benches(tmp_path, before, after))
    assert found.differences == ("settings of int8/onnx: 2 threads, spinning, then 1 thread, not spinning",)


@pytest.mark.parametrize("text", ["5%%", "five", "-1%", "nan", "", "5 % more", "5", "101%"])
def test_a_share_is_a_share(text: str) -> None:
    assert compare.parse_share("5%") == compare.parse_share("0.05") == 0.05
    with pytest.raises(UsageError, match="not a share"):
        compare.parse_share(text)
