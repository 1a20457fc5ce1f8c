"""The report on the run page of Kubeflow Pipelines: the page itself if it fits, and a summary in Markdown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpml.artifacts.folder import Artifact, read_manifest
from hpml.components import executor_input
from hpml.components.executor_input import read_executor_input
from hpml.components.report import stage
from hpml.components.report.summary import markdown
from hpml.measuring.goals import Goals

Report = Artifact[Any]


@pytest.fixture
def report(make_run: Callable[..., Any], run_stage: Callable[..., Report]) -> Report:
    return run_stage(stage.run, Goals(), **make_run().inputs)


def deliver(report: Report, folder: Path, *outputs: str) -> None:
    places = {"out": str(report.path), **{name: str(folder / "new" / name) for name in outputs}}
    artifacts = {name: {"artifacts": [{"uri": uri}]} for name, uri in places.items()}
    text = json.dumps({"outputs": {"artifacts": artifacts, "outputFile": str(folder / "answer.json")}})
    read_executor_input(text).deliver("report", read_manifest(report.path))


def test_the_page_and_a_summary(report: Report, tmp_path: Path) -> None:
    deliver(report, tmp_path, "html", "summary")
    page = (tmp_path / "new" / "html").read_bytes()
    assert page == report.file("report.html").read_bytes() and len(page) <= 256_000
    summary = (tmp_path / "new" / "summary").read_text()
    figures = json.loads(report.file("figures.json").read_text())
    assert f"# {report.spec.title}" in summary
    for name in figures["measurements"]["engines"]:
        assert summary.count(f"| {name} |") == 1
    assert f"Chosen: **{figures['chosen']}**" in summary
    rows = [line for line in summary.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1


def test_a_page_that_is_too_large_is_replaced_by_one_that_says_so(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_input, "MAX_HTML_BYTES", 10_000)
    deliver(report, tmp_path, "html")
    page = (tmp_path / "new" / "html").read_text()
    assert len(page.encode()) <= 10_000
    assert "shows 10 KB at most" in page and "report.html" in page and report.spec.title in page


def test_a_step_that_shows_nothing_writes_nothing(report: Report, tmp_path: Path) -> None:
    deliver(report, tmp_path)
    assert [file.name for file in tmp_path.iterdir() if file.name == "new"] == []


def test_names_from_outside_do_not_mark_up_the_summary(report: Report) -> None:
    figures = json.loads(report.file("figures.json").read_text())
    figures["chosen"], figures["nearest"] = None, "a<b>|*c*"
    text = markdown("<script>\n# x", figures)
    assert "<" not in text and "a&#60;b&#62;&#124;\\*c\\*" in text
    assert "\n# x" not in text and "No engine chosen" in text
