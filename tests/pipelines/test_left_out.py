"""What a run does without: a variant that could not be made, a step that only shows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import noop_stages
import pytest
from conftest import HERE, Listener
from noop_stages import Number

from hpml.components import STAGES
from hpml.components.__main__ import arguments_of, parse
from hpml.components.diagnose import stage as diagnose
from hpml.components.report import stage as report
from hpml.core.contract import signature
from hpml.core.errors import ExitCode
from hpml.core.needs import Needs
from hpml.pipelines.commands.run import end_of_run
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.execution import Execution, Settings, first_failure, not_shown
from hpml.pipelines.engine.run_record import RunRecord
from hpml.pipelines.engine.store import Store
from hpml.pipelines.executors.process import Processes
from hpml.pipelines.plan import Step, trace
from hpml.pipelines.stage_needs import needs_of
from hpml.steps.job import Job

Run = Callable[..., RunRecord]


def variants(step: Step[str], configs: dict[str, Number]) -> None:
    """base -> one, two -> engine1, engine2; all of these -> sum; a look at the machine; all of it -> page."""

    def config(name: str) -> Number:
        return configs.get(name, Number()).model_copy(update={"tag": name})

    base = step(noop_stages.start, config("base"))
    engines = {"base": step(noop_stages.add, config("reference"), first=base, others={})}
    for index, name in enumerate(("one", "two"), 1):
        model = step(noop_stages.add, config(name), first=base, others={})
        engines[name] = step(noop_stages.add, config(f"engine{index}"), first=model, others={})
    machine = step(noop_stages.show, config("machine"), others={}, wished=base)
    step(noop_stages.show, config("page"), others=engines, wished=machine)
    step(noop_stages.add, config("sum"), first=base, others=engines)


@pytest.fixture
def run_variants(home: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    of_show = SimpleNamespace(NEEDS=Needs(only_shows=True))
    monkeypatch.setitem(sys.modules, "hpml.components.show", of_show)
    monkeypatch.setitem(sys.modules, "hpml.components.show.needs", of_show)

    def run(only: str = "", **configs: Number) -> RunRecord:
        plan = trace(lambda step, _: variants(step, configs), None)
        plan = plan.needed_for(only) if only else plan
        record = run_record.start(home, run_record.new_run_id("variants"), "variants", "", plan)
        settings = Settings(home=home, import_paths=(HERE,))
        return Execution(plan, record, settings, Listener(), Processes(home)).execute()

    return run


def statuses(record: RunRecord) -> dict[str, str]:
    return {name.rpartition("-")[2]: step.status for name, step in record.steps.items()}


def shown(home: Path, record: RunRecord) -> dict[str, Any]:
    name = next(name for name in record.steps if name.endswith("page"))
    answer: dict[str, Any] = json.loads(
        Store(home).open(record.steps[name].digest).file("number").read_text()
    )
    return answer


def test_one_variant_that_fails_blocks_no_other_and_the_run_says_so_at_its_end(
    run_variants: Run, home: Path
) -> None:
    record = run_variants(one=Number(failure="bug"), sum=Number(value=5))
    found = statuses(record)
    assert (found["one"], found["engine1"]) == ("failed", "blocked")
    assert found["sum"] == found["page"] == found["engine2"] == "done"
    assert record.status == "failed" and record.exit_code == ExitCode.STAGE_FAILED
    page = shown(home, record)
    assert page["there"] == ["base", "two"]
    (why,) = page["left_out"].values()
    assert list(page["left_out"]) == ["others/one"]
    assert "failed: ZeroDivisionError: of a bug" in why


def test_without_what_the_others_are_held_against_there_is_nothing_to_do(run_variants: Run) -> None:
    found = statuses(run_variants(reference=Number(failure="bug")))
    assert found["sum"] == found["page"] == "blocked"
    assert found["engine2"] == "done"


def test_the_next_run_makes_only_what_was_missing(run_variants: Run) -> None:
    run_variants(one=Number(failure="bug"))
    found = statuses(run_variants())
    assert {name for name, status in found.items() if status == "done"} == {
        "one",
        "engine1",
        "page",
        "sum",
    }


def test_a_step_that_only_shows_fails_no_run_and_is_told_of(
    run_variants: Run, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run_variants(machine=Number(failure="segfault"))
    assert statuses(record)["machine"] == "failed" and statuses(record)["page"] == "done"
    assert (record.status, record.exit_code, first_failure(record)) == ("done", 0, None)
    assert not shown(home, record)["wished"]
    assert "killed by SIGSEGV" in shown(home, record)["left_out"]["wished"]
    (sentence,) = not_shown(record)
    end_of_run(record, "hpml run a.yaml", completed_by="hpml bench a")
    assert capsys.readouterr().err == f"warning: {sentence}\n"
    assert "only shows" in sentence and "SIGSEGV" in sentence


def test_who_asks_for_what_only_shows_is_told_that_it_failed(run_variants: Run) -> None:
    page = next(name for name in run_variants().steps if name.endswith("page"))
    record = run_variants(only=page, page=Number(failure="stage"))
    assert record.exit_code == ExitCode.STAGE_FAILED


def test_what_only_shows_is_a_fact_of_the_stage() -> None:
    assert {stage for stage in STAGES if needs_of(stage).only_shows} == {"peaks", "diagnose", "report"}
    assert signature(report.run).optional == {"peaks", "diagnosis", "evaluation"}
    assert signature(diagnose.run).optional == {"peaks"}


def test_a_container_is_told_what_is_left_out() -> None:
    job = Job(
        run="hpml.components.report.stage:run",
        config={},
        inputs={
            **{name: {"a": f"/{name}"} for name in ("engines", "models")},
            **{name: f"/{name}" for name in ("measured", "data", "diagnosis")},
        },
        out="/out",
        left_out={"peaks": "step peaks failed: it broke"},
    )
    assert parse(arguments_of(job)).job == job
