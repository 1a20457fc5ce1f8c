"""The report: what it says, that it is self-contained, and that nothing hostile gets out of its text."""

from __future__ import annotations

import csv
import html.parser
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml.artifacts.folder import Artifact, open_artifact, seal_artifact
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import Conditions, MeasurementsSpec
from hpml.artifacts.report import ReportSpec
from hpml.components.report.stage import run
from hpml.components.report.summary import markdown
from hpml.core.contract import Output
from hpml.core.errors import StageFailed
from hpml.measuring.goals import Goals
from hpml.reporting.costs import condition_facts
from tests import measured_specs
from tests.html_elements import compact

MakeRun = Callable[..., Any]
RunStage = Callable[..., Artifact[Any]]

HOSTILE = """"><script>alert(1)</script><img src=x onerror=alert(2)>'</style></svg>&amp;"""


class Page(html.parser.HTMLParser):
    """What a browser makes of a page: its elements, and the text that is shown."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source = compact(source)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.shown: list[str] = []
        self._open: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.shown.append(data)

    @property
    def text(self) -> str:
        return "".join(self.shown)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


@pytest.fixture
def write(run_stage: RunStage) -> Callable[..., tuple[Page, Artifact[ReportSpec]]]:
    """Run the stage on the artifacts of a run, and read the page."""

    def write_page(made: Any, goals: Goals | None = None) -> tuple[Page, Artifact[ReportSpec]]:
        artifact = run_stage(run, goals or Goals(), **made.inputs)
        return Page(artifact.file("report.html").read_text(encoding="utf-8")), artifact

    return write_page


def _check_self_contained(page: Page) -> None:
    """Nothing is fetched, nothing runs, and it is small."""
    allowed = {"html", "head", "meta", "title", "style", "body", "main", "header", "section", "footer", "div"}
    allowed |= {"h1", "h2", "h3", "p", "b", "span", "small", "wbr", "ul", "li", "dl", "dt", "dd", "figure"}
    allowed |= {"figcaption", "table", "thead", "tbody", "tr", "th", "td"}
    allowed |= {"code", "svg", "text", "line", "path", "circle", "rect"}
    assert {tag for tag, _ in page.elements} <= allowed
    names = {name for _, attributes in page.elements for name in attributes}
    assert not {name for name in names if name.startswith("on")} | (
        names & {"src", "href", "style", "action"}
    )
    assert not re.search(r"url\s*\(|@import|https?:|//\w", page.source)
    assert len(page.source.encode()) <= 256 * 1024


def test_the_page_says_what_was_chosen_and_why(make_run: MakeRun, write: Any) -> None:
    page, artifact = write(make_run())
    _check_self_contained(page)
    assert artifact.spec.title == "pruned+distilled+int8/onnx was chosen"
    text = page.text
    assert "Chosen enginepruned+distilled+int8/onnx" in text
    assert "the best of those that meet the goals" in text
    assert "at most 1.0 points of top-1 lost; then the least latency p50" in text
    assert "tensorrt is not installed and there is no GPU" in text
    assert "activations: uint8, measured 2.1x faster than int8" in text
    assert "mnist5k" in text
    assert page.count("svg") == 2 * 7  # each picture for a desktop and for a phone


def test_every_figure_of_the_table_is_that_of_the_measurements(make_run: MakeRun, write: Any) -> None:
    made = make_run()
    page, _ = write(made)
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", page.source)
    figures = made.measured.spec.engines["int8/onnx"]
    row = next(Page(row).text for row in rows if Page(row).text.startswith("int8/onnx"))
    assert f"{100 * figures.quality['accuracy_top1'].value:.1f}" in row
    assert f"{figures.latency_ms_p50.value:.3f}" in row
    assert f"{figures.latency_ms_p99.low:.3f}–{figures.latency_ms_p99.high:.3f}" in row  # noqa: RUF001
    assert f"{figures.speedup_vs_reference.value:.2f}" in row
    assert f"{figures.speedup_vs_best_fp32.value:.2f}" in row
    assert "0.760 MB" in row
    assert "qualified" in row


def test_the_score_on_the_test_split_is_told(make_run: MakeRun, write: Any) -> None:
    page, _ = write(make_run())
    told = (
        "On 500 test rows, which no choice was made by: top-1 96.80% (96.32% to 97.28%), the reference 97.60%"
    )
    assert told in page.text


def test_a_network_shared_by_two_variants_is_one_training_and_one_step(make_run: MakeRun, write: Any) -> None:
    made = make_run()
    assert made.models["base"].digest == made.models["fp32"].digest
    page, artifact = write(made)
    assert page.text.count("base, fp32") == 1
    steps = [
        (step["stage"], step["name"])
        for step in json.loads(artifact.file("figures.json").read_text())["steps"]
    ]
    assert len(steps) == len(set(steps))
    assert [stage for stage, _ in steps].count("train") == 1
    assert steps[0] == ("prepare", "")
    assert [stage for stage, _ in steps[-4:]] == ["benchmark", "peaks", "diagnose", "evaluate"]


def test_engines_keep_the_order_of_the_recipe(make_run: MakeRun, write: Any) -> None:
    made = make_run()
    page, _ = write(made)
    exported = page.source.partition("What was exported")[2]
    headings = [Page(found).text for found in re.findall(r"<h3>(.*?)</h3>", exported)]
    assert headings[: len(made.engines)] == list(made.engines)


def test_where_nothing_qualifies_the_page_says_so(make_run: MakeRun, write: Any) -> None:
    page, artifact = write(make_run(), Goals(max_size_mb=0.0001))
    _check_self_contained(page)
    assert artifact.spec.title == "No engine meets the goals"
    assert "The nearest is pruned+distilled+int8/onnx" in page.text
    assert "size at most 0.000100 MB" in page.text


def test_a_percentile_without_samples_is_not_shown(make_run: MakeRun, write: Any, tmp_path: Any) -> None:
    made = make_run()
    engines = {
        name: figures.model_copy(
            update={"latency_ms_p99": None, "unquoted": {"latency_ms_p99": "350 of 662 samples"}}
        )
        for name, figures in made.measured.spec.engines.items()
    }
    measured = _resealed(made.measured, tmp_path / "few", {"engines": engines})
    page, artifact = write(replace(made, measured=measured))
    built = [name for name, figures in engines.items() if figures.status != "not built"]
    assert page.text.count("not measured: 350 of 662 samples") == len(built)
    rows = list(csv.DictReader(artifact.file("figures.csv").open(newline="")))
    assert {row["latency_ms_p99"] for row in rows} == {""}


QUICK = ("fp32/eager", "fp32/onnx", "int8/onnx", "pruned+distilled+int8/onnx")


@pytest.fixture
def write_measured(make_run: MakeRun, variants: Any, write: Any, tmp_path: Path) -> Callable[..., Any]:
    """write_measured(measurements, samples): the report of a run of the quickstart that was measured so."""

    def make(
        measurements: MeasurementsSpec, samples: dict[str, np.ndarray], goals: Goals | None = None
    ) -> Any:
        made = make_run({name: variants[name] for name in QUICK})
        place = tmp_path / "measured-so"
        place.mkdir()
        np.savez(place / "samples.npz", **samples)
        seal_artifact(place, spec=measurements, metrics={}, lineage=made.measured.manifest.lineage)
        return write(replace(made, measured=open_artifact(place, kind="measurements")), goals)

    return make


def test_states_of_the_cores_stand_beside_what_stands_for_all(write_measured: Any) -> None:
    page, artifact = write_measured(measured_specs.two_states(), measured_specs.samples())
    _check_self_contained(page)
    assert "over the mixture seen: 35 % near, 65 % far" in page.text
    assert "cores near, 35 %: 16.0×cores far, 65 %: 12.9×" in page.text  # noqa: RUF001
    row = Page(re.findall(r"<tr[^>]*>(.*?)</tr>", page.source)[2]).text
    assert row.startswith("fp32/onnx2 threads, spinning")
    assert "near 0.199far 0.282" in row and "near 5.88far 7.16" in row
    assert "2,000 of 2,300; dropped for: its threads waited for a CPU (300)" in page.text
    assert "a cache line's round trip takes 205 ns" in page.text
    (row, *_) = [
        row
        for row in csv.DictReader(artifact.file("figures.csv").open(newline=""))
        if row["engine"] == "int8/onnx"
    ]
    assert (row["threads"], row["spinning"]) == ("2", "True")
    assert (row["latency_ms_p50_near"], row["latency_ms_p50_far"]) == ("0.124", "0.219")


def test_the_markdown_says_the_same(write_measured: Any) -> None:
    _, artifact = write_measured(measured_specs.two_states(), measured_specs.samples())
    told = markdown("A run", json.loads(artifact.file("figures.json").read_text()))
    (row,) = [line for line in told.splitlines() if line.startswith("| int8/onnx ")]
    assert "| 2 threads, spinning | qualified |" in row and "; near 9.44×; far 9.22×" in row  # noqa: RUF001
    assert "over the mixture seen: 35 % near, 65 % far" in told
    assert "2,000 of 2,300 slices were undisturbed" in told and "Not all is measured" not in told


def test_the_markdown_says_what_is_not_measured(write_measured: Any) -> None:
    _, artifact = write_measured(measured_specs.too_busy(), {}, Goals(max_latency_ms_p99=2.0))
    told = markdown("A run", json.loads(artifact.file("figures.json").read_text()))
    assert "**Not verified:** latency p99, allowed 2 ms, is not measured: machine busy" in told
    assert f"**Not all is measured:** latency: {measured_specs.BUSY}. `hpml bench RUN`" in told
    assert told.count(f"| not measured: {measured_specs.BUSY} |") == len(QUICK)


def test_a_further_operation_has_its_table(write_measured: Any) -> None:
    page, artifact = write_measured(measured_specs.two_operations(), measured_specs.samples())
    _check_self_contained(page)
    section = Page(page.source.partition("The operation prefill")[2].partition("</section>")[0])
    chosen = [attributes.get("class") for tag, attributes in section.elements if tag == "tr"]
    assert "tokens/s, batch 32" in section.text and "which holds 128 tokens" in section.text
    assert f"–not measured: {measured_specs.BUSY}" in section.text  # noqa: RUF001
    assert chosen.count("chosen") == 1 and section.count("tr") == 1 + len(QUICK)
    assert "Throughput, tokens per second" in page.text and "images per second" not in page.text
    rows = list(csv.DictReader(artifact.file("figures.csv").open(newline="")))
    assert [row["operation"] for row in rows] == ["decode"] * len(QUICK) + ["prefill"] * len(QUICK)
    assert {row["verdict"] for row in rows[len(QUICK) :]} == {""}
    told = markdown("A run", json.loads(artifact.file("figures.json").read_text()))
    assert "| operation prefill |" in told and "at batch 32 |" in told


def test_latency_over_time_is_drawn_in_the_colour_of_the_state(write_measured: Any) -> None:
    page, _ = write_measured(measured_specs.two_states(), measured_specs.samples(pause_s=3600))
    classes = [str(attributes.get("class")) for tag, attributes in page.elements if tag == "path"]
    assert classes.count("dots k1") == classes.count("dots k2") == 2 * len(QUICK)
    assert "cores near, 35 % of the time" in page.text
    assert "Dashed: measuring had stopped" in page.text and "time of measuring, s" in page.text


def test_samples_that_do_not_say_when_leave_the_picture_out_with_a_note(write_measured: Any) -> None:
    without = {name: of for name, of in measured_specs.samples().items() if name.split("@")[0] in QUICK}
    page, _ = write_measured(measured_specs.one_state(), without)
    assert "When each round was timed is not in these samples" in page.text
    assert "over the mixture" not in page.text and "dots" not in page.source.partition("<body>")[2]


def test_what_is_not_measured_is_said_with_the_reason_and_the_command(write_measured: Any) -> None:
    goals = Goals(max_latency_ms_p99=2.0)
    page, artifact = write_measured(measured_specs.too_busy(), {}, goals)
    _check_self_contained(page)
    assert artifact.spec.title == "pruned+distilled+int8/onnx was chosen"
    assert "Latency is not measured: the smallest of the candidates." in page.text
    assert f"Not all is measured. Latency: {measured_specs.BUSY}." in page.text
    assert "hpml bench RUN with the name of this run" in page.text
    assert page.text.count(f"–not measured: {measured_specs.BUSY}") == len(QUICK)  # noqa: RUF001
    assert "Not verified: latency p99, allowed 2 ms, is not measured" in page.text
    assert "26 of 645" in page.text and "could not be drawn" not in page.text
    assert "What happened to the accuracy" not in page.text  # no pairs in these
    figures = json.loads(artifact.file("figures.json").read_text())
    assert figures["undecided"] == "latency is not measured"


def _resealed(
    artifact: Artifact[Any], place: Any, update: dict[str, Any], *, samples: bool = True
) -> Artifact[Any]:
    place.mkdir()
    if samples:
        (place / "samples.npz").write_bytes(artifact.file("samples.npz").read_bytes())
    else:
        (place / "samples.npz").write_bytes(b"no archive")
    spec = artifact.spec.model_copy(update=update)
    seal_artifact(place, spec=spec, metrics={}, lineage=artifact.manifest.lineage)
    return open_artifact(place, kind="measurements")


def test_hostile_names_stay_text(make_run: MakeRun, variants: dict[str, Any], write: Any) -> None:
    one, unbuilt = variants["int8/onnx"], variants["fp32/tensorrt"]
    hostile = {
        "fp32/eager": variants["fp32/eager"],
        HOSTILE + "/onnx": replace(one, notes=(HOSTILE,)),
        HOSTILE + "/trt": replace(unbuilt, reason=HOSTILE),
        "=HYPERLINK(1)/onnx": replace(one, methods=("prune",)),
    }
    made = make_run(
        hostile, class_names=tuple(HOSTILE + str(i) for i in range(10)), environment={HOSTILE: HOSTILE}
    )
    page, artifact = write(made)
    _check_self_contained(page)
    assert page.text.count(HOSTILE) >= 4
    rows = list(csv.DictReader(artifact.file("figures.csv").open(newline="")))
    assert rows[1]["engine"] == HOSTILE + "/onnx"
    assert rows[3]["engine"] == "'=HYPERLINK(1)/onnx"


@pytest.mark.slow  # the other pages are smaller
def test_many_engines_with_close_values_still_make_a_small_page(
    make_run: MakeRun, variants: dict[str, Any], write: Any
) -> None:
    close = {
        f"a-variant-with-a-rather-long-name-{index}/onnx": replace(
            variants["int8/onnx"],
            methods=("prune",),
            latency_ms=0.3 + 0.0005 * index,
            accuracy_top1=0.978 + 0.0002 * index,
        )
        for index in range(12)
    }
    page, _ = write(make_run({"fp32/eager": variants["fp32/eager"], **close}))
    _check_self_contained(page)


def test_json_and_csv_agree_with_the_measurements(make_run: MakeRun, write: Any) -> None:
    made = make_run()
    _, artifact = write(made)
    figures = json.loads(artifact.file("figures.json").read_text())
    assert figures["measurements"] == made.measured.spec.model_dump(mode="json")
    assert figures["chosen"] == "pruned+distilled+int8/onnx"
    assert figures["verdicts"]["fp32/eager"]["outcome"] == "reference"
    assert figures["goals"] == Goals().model_dump(mode="json")

    rows = {row["engine"]: row for row in csv.DictReader(artifact.file("figures.csv").open(newline=""))}
    assert set(rows) == set(made.engines)
    for name, engine in made.measured.spec.engines.items():
        row = rows[name]
        assert (row["status"], int(row["size_bytes"])) == (engine.status, engine.size_bytes)
        _check_interval(row, "latency_ms_p99", engine.latency_ms_p99)
        _check_interval(row, "accuracy_top1", engine.quality.get("accuracy_top1"))
        _check_interval(row, "speedup_vs_best_fp32", engine.speedup_vs_best_fp32)
        at_32 = next((item.rows_per_s for item in engine.throughput if item.batch == 32), None)
        _check_interval(row, "rows_per_s_batch_32", at_32)


def _check_interval(row: dict[str, str], name: str, interval: Interval | None) -> None:
    shown = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
    if interval is None:
        assert shown == ["", "", ""]
    else:
        assert [float(text) for text in shown] == [interval.value, interval.low, interval.high]


def test_the_same_inputs_make_the_same_bytes(make_run: MakeRun, write: Any) -> None:
    made = make_run()
    assert write(made)[1].digest == write(made)[1].digest


def test_measurements_of_other_engines_are_refused(make_run: MakeRun, write: Any) -> None:
    made = make_run()
    fewer = {name: engine for name, engine in made.engines.items() if name != "int8/onnx"}
    with pytest.raises(StageFailed, match="not of these engines"):
        write(replace(made, engines=fewer))


def test_measurements_without_samples_are_refused(make_run: MakeRun, write: Any, tmp_path: Any) -> None:
    made = make_run()
    measured = _resealed(made.measured, tmp_path / "broken", {}, samples=False)
    with pytest.raises(StageFailed, match=r"samples\.npz does not hold the samples"):
        write(replace(made, measured=measured))


def test_what_cannot_be_drawn_is_left_out_with_a_note(make_run: MakeRun, write: Any) -> None:
    made = make_run()
    folder = made.measured.path
    with np.load(folder / "samples.npz") as arrays:
        samples = dict(arrays)
    samples |= {"at_s@1": np.zeros(3), "state@1": np.zeros(20, np.int64)}  # of other rounds
    np.savez(folder / "samples.npz", **samples)
    (folder / "manifest.json").unlink()
    seal_artifact(folder, spec=made.measured.spec, metrics={}, lineage=made.measured.manifest.lineage)
    page, artifact = write(replace(made, measured=open_artifact(folder, kind="measurements")))
    assert "This part could not be drawn and is left out: IndexError" in page.text
    assert "Chosen engine" in page.text and page.count("svg") == 2 * 7
    assert artifact.spec.title == "pruned+distilled+int8/onnx was chosen"


def test_a_run_without_peaks_and_diagnosis_has_its_report(make_run: MakeRun, tmp_path: Path) -> None:
    made = make_run()
    left_out = {
        "peaks": "step peaks failed: killed by SIGKILL",
        "engines/broken/onnx": "step export-broken failed: it broke",
    }
    out = Output(tmp_path / "out", tmp_path, left_out=left_out)
    out.path.mkdir()
    inputs = {
        name: value for name, value in made.inputs.items() if name not in ("peaks", "diagnosis", "evaluation")
    }
    run(Goals(), **inputs, out=out)
    page = Page((out.path / "report.html").read_text(encoding="utf-8"))
    _check_self_contained(page)
    assert "Not measured: step peaks failed: killed by SIGKILL" in page.text
    assert "Not measured: the run has no such step" in page.text
    assert "Test split: the run has no such step." in page.text
    row = next(row for row in re.findall(r"<tr[^>]*>(.*?)</tr>", page.source) if "broken" in row)
    assert "not built" in Page(row).text and "step export-broken failed: it broke" in Page(row).text
    figures = json.loads((out.path / "figures.json").read_text())
    assert figures["verdicts"]["broken/onnx"]["outcome"] == "not built"
    assert figures["chosen"] == "pruned+distilled+int8/onnx"


def test_a_choice_is_not_compared_with_itself(make_run: MakeRun, write: Any, variants: Any) -> None:
    two = {name: variants[name] for name in ("fp32/eager", "fp32/onnx")}
    page, artifact = write(make_run(two))
    assert artifact.spec.title == "fp32/onnx was chosen"
    tiles = page.text.partition("The engines")[0]
    assert "the speed of fp32/eager" in tiles and "the speed of fp32/onnx" not in tiles


def test_disturbances_that_cannot_be_seen_are_said_so() -> None:
    facts = condition_facts(Conditions(slices=300, unseen="the kernel keeps no schedstat"))
    assert facts["undisturbed slices"] == "300 of 300"
    assert facts["disturbances"] == "not seen here, so none was dropped: the kernel keeps no schedstat"
