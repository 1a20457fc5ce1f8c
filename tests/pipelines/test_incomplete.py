"""What a busy machine left out: the run goes on, and the next attempt goes on where this one stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import noop_stages
import pytest
from conftest import HERE, Listener
from noop_stages import Number, Rounds, Timed

from hpml.io.relay import EVENT_PREFIX, read_event
from hpml.pipelines import graph, plan, recipe
from hpml.pipelines.__main__ import main
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.cache_keys import CacheKeyInputs, cache_key_inputs, here
from hpml.pipelines.engine.execution import Execution, Settings, forecast, incomplete_steps
from hpml.pipelines.engine.run_record import RunRecord, StepRecord
from hpml.pipelines.engine.store import Store
from hpml.pipelines.executors.process import Processes
from hpml.pipelines.kubeflow.remote_runs import RemoteRun
from hpml.pipelines.plan import Plan, Step, trace
from hpml.pipelines.terminal import results
from hpml.pipelines.workspace.gc import collect_workspace
from hpml.steps.job import Job, execute

STEPS = ("start-a", "benchmark-a-m", "add-a-m-z")


def measured_by_and_by(step: Step[str], rounds: Rounds) -> None:
    """a -> m, which needs some attempts -> z."""
    a = step(noop_stages.start, Number(tag="a"))
    m = step(noop_stages.benchmark, rounds, first=a)
    step(noop_stages.add, Number(tag="z"), first=m, others={})


def plan_of(needed: int = 2, *, strict: bool = False) -> Plan:
    rounds = Rounds(tag="m", needed=needed, require_quiet=strict)
    return trace(lambda step, _: measured_by_and_by(step, rounds), None)


@pytest.fixture
def attempt(home: Path) -> Callable[..., RunRecord]:
    """Run the three steps: attempt(Listener(), needed=3)."""

    def run(listener: Listener | None = None, **given: Any) -> RunRecord:
        steps = plan_of(**given)
        settings = Settings(home=home, import_paths=(HERE,))
        record = run_record.start(home, run_record.new_run_id("r"), "r", "", steps)
        return Execution(steps, record, settings, listener or Listener(), Processes(home)).execute()

    return run


def statuses(record: RunRecord) -> tuple[str, ...]:
    assert tuple(record.steps) == STEPS
    return tuple(step.status for step in record.steps.values())


def rounds_of(home: Path, record: RunRecord) -> str:
    """As the step after the measurement read it."""
    return Store(home).open(record.steps["add-a-m-z"].digest).file("number").read_text()


# ----------------------------------------------------------------------------------------------- the executor


def test_a_run_goes_on_with_what_is_incomplete_and_the_next_adds_to_it(
    attempt: Callable[..., RunRecord], home: Path
) -> None:
    listener = Listener()
    first = attempt(listener, needed=3)
    assert (first.status, first.exit_code) == ("done", 0)
    assert statuses(first) == ("done", "done", "done") and rounds_of(home, first) == "1"
    step = first.steps["benchmark-a-m"]
    assert step.incomplete == "1 of 3 rounds"
    assert listener.said == ["benchmark-a-m is incomplete; what is missing is told when the run ends"]
    assert run_record.load(home) == first

    second = attempt(needed=3)
    assert statuses(second) == ("cached", "done", "done") and rounds_of(home, second) == "2"
    assert second.steps["benchmark-a-m"].reasons == ("it was incomplete: 1 of 3 rounds",)

    third = attempt(needed=3)
    assert statuses(third) == ("cached", "done", "done") and rounds_of(home, third) == "3"
    assert third.steps["benchmark-a-m"].incomplete == ""
    assert not Path(Store(home).scratch(step.key)).exists()

    assert statuses(attempt(needed=3)) == ("cached", "cached", "cached")


def test_a_forecast_says_that_it_was_incomplete(attempt: Callable[..., RunRecord], home: Path) -> None:
    attempt()
    found = {item.step: item for item in forecast(plan_of(), Settings(home, (HERE,)), Processes(home))}
    assert found["benchmark-a-m"].outcome == "would run"
    assert found["benchmark-a-m"].reasons == ("it was incomplete: 1 of 2 rounds",)
    assert found["add-a-m-z"].outcome == "depends"


def test_the_same_content_may_be_complete_elsewhere(home: Path, tmp_path: Path) -> None:
    """Whether it is incomplete is said by the key that led to it: of equal artifacts the first is kept."""
    execute(Job("noop_stages:start", {}, {}, str(tmp_path / "a")))
    store = Store(home)
    for key, needed in (("lacking", 2), ("whole", 1)):
        place, config = store.incoming("m"), {"needed": needed}
        execute(Job("noop_stages:benchmark", config, {"first": str(tmp_path / "a")}, place))
        store.accept(place, key, CacheKeyInputs({}), "m")
    assert len(list((store.root / "objects").iterdir())) == 1
    assert store.lookup("lacking") is None and store.incomplete("lacking") == "1 of 2 rounds"
    assert store.lookup("whole") and store.incomplete("whole") == ""


def test_gc_keeps_what_an_incomplete_step_goes_on_from(attempt: Callable[..., RunRecord], home: Path) -> None:
    key = attempt().steps["benchmark-a-m"].key
    collect_workspace(home, 1, keep_registered=False, dry_run=False)
    assert statuses(attempt()) == ("cached", "done", "done")
    attempt(needed=9)
    scratch = Path(Store(home).scratch(key))
    assert not scratch.exists()  # it was completed
    [other] = (home / ".store" / "scratch").iterdir()
    collect_workspace(home, 1, keep_registered=False, dry_run=False)
    assert other.exists()
    collect_workspace(home, 0, keep_registered=False, dry_run=False)
    assert not other.exists()


def test_a_gate_that_refuses_what_is_incomplete_neither_loses_rounds_nor_asks_for_new_ones(
    attempt: Callable[..., RunRecord], home: Path
) -> None:
    first = attempt(strict=True)
    assert statuses(first) == ("done", "failed", "blocked") and first.exit_code == 5
    assert statuses(attempt()) == ("cached", "done", "done")  # adds the round that was missing
    assert statuses(attempt(strict=True)) == ("cached", "cached", "cached")


def test_whether_the_benchmark_is_a_gate_is_no_part_of_its_key(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: digits\n")

    def key(*overrides: str) -> str:
        steps = trace(graph.graph, recipe.load(tmp_path / "mine.yaml", overrides).recipe)
        node = next(node for node in steps.nodes.values() if node.stage == "benchmark")
        given: dict[str, Any] = {"ancestors": (), "import_paths": (), "registry": "", "threads": 1}
        return cache_key_inputs(node, {}, runtime_environment=here(), **given).key

    assert key() == key("benchmark.require_quiet=true") != key("benchmark.rounds=50")


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def file(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose pipeline is that of the three steps, with code of the user's beside it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("HPML_HOME", str(home))
    (tmp_path / "recipe").mkdir()
    shutil.copy(noop_stages.__file__, tmp_path / "recipe")

    def pipeline(step: Step[str], given: recipe.Recipe) -> None:
        quiet = given.benchmark.require_quiet
        measured_by_and_by(step, Rounds(tag="m", needed=given.benchmark.rounds, require_quiet=quiet))

    monkeypatch.setattr(graph, "graph", pipeline)
    monkeypatch.setattr(results, "show", lambda *_: True)
    monkeypatch.setattr(Execution, "_start_tracking", lambda _: None)
    place = tmp_path / "recipe" / "mine.yaml"
    place.write_text("data: digits\nbenchmark: {rounds: 5}\n")
    return place


@pytest.fixture
def hpml(home: Path) -> Callable[..., tuple[int, RunRecord]]:
    """Run the command; returns its exit code and the record of the newest run."""

    def call(*arguments: str) -> tuple[int, RunRecord]:
        code = 0
        try:
            main([*arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, run_record.load(home)

    return call


Command = Callable[..., tuple[int, RunRecord]]


def test_what_is_missing_is_told_shortened() -> None:
    step = StepRecord(stage="benchmark", incomplete="latency; " * 200)
    [told] = incomplete_steps(RunRecord.model_construct(steps={"benchmark": step}))
    assert len(told) < 400 and told.startswith("benchmark is incomplete: latency; ")


def test_a_run_says_what_is_missing_and_what_completes_it(
    file: Path, home: Path, hpml: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = hpml("run", str(file))
    assert code == 0
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "warning: benchmark-a-m is incomplete: 1 of 5 rounds",
        f"to complete it: hpml bench {record.id}",
    ]
    file.unlink()  # what is completed is what was run, whatever has become of its recipe
    for number in (2, 3, 4, 5):
        code, record = hpml("bench", record.id if number % 2 else "latest")
        assert code == 0 and statuses(record) == ("cached", "done", "done")
        assert rounds_of(home, record) == str(number)
    assert "incomplete" not in capsys.readouterr().err.splitlines()[-1]
    code, record = hpml("bench", "latest")
    assert code == 0 and statuses(record) == ("cached", "cached", "cached")


def test_explain_says_that_it_was_incomplete(
    file: Path, hpml: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        hpml("run", str(file))
    capsys.readouterr()
    hpml("explain", "benchmark-a-m")
    told = capsys.readouterr().out.splitlines()
    assert told == ["benchmark-a-m had to be run:", "  it was incomplete: 1 of 5 rounds"]


def test_strict_ends_with_5_and_keeps_the_rounds(
    file: Path, hpml: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = hpml("run", str(file), "--strict")
    assert code == 5 and statuses(record) == ("done", "failed", "blocked")
    assert "1 of 5 rounds" in capsys.readouterr().err.splitlines()[-1]
    for number in (2, 3, 4):
        code, _ = hpml("bench", record.id)  # the gate is in its recipe
        assert code == 5 and f"{number} of 5 rounds" in capsys.readouterr().err.splitlines()[-1]
    assert hpml("bench", record.id, "--strict")[0] == 0


def test_without_a_run_there_is_nothing_to_complete(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "latest"])
    assert ended.value.code == 2 and "there is no run 'latest'" in capsys.readouterr().err


def test_what_cannot_be_completed_is_said(
    file: Path, home: Path, hpml: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(*arguments: str) -> str:
        assert hpml("bench", "latest", *arguments)[0] == 2
        return capsys.readouterr().err.splitlines()[-1]

    _, record = hpml("run", str(file))
    assert "--batch, --rounds cannot be given" in refusal("--batch", "1", "--rounds", "9")
    remote = RemoteRun(host="http://h", in_cluster=False, namespace="", run_id="1", page="p", tasks={})
    (home / record.id / "remote.json").write_text(remote.model_dump_json())
    assert refusal().endswith(f"-> hpml submit {home / record.id / 'recipe.yaml'}")
    (home / record.id / "remote.json").unlink()
    steps = {"start-a": record.steps["start-a"]}
    run_record.save(home, record.model_copy(update={"steps": steps}))
    assert "measures nothing: it has start-a" in refusal()


# ---------------------------------------------------------------------------------------------------- events


def test_an_event_of_a_version_before_lacks_nothing() -> None:
    told = {"event": "finished", "digest": "d", "metrics": {}}
    assert read_event(EVENT_PREFIX + json.dumps(told)) == {**told, "incomplete": ""}
    assert read_event(EVENT_PREFIX + json.dumps({**told, "incomplete": 1})) is None


# -------------------------------------------------------------------------------------------------- exclusive


def test_a_config_that_decides_by_timing_has_the_machine_alone(home: Path) -> None:
    def pipeline(step: Step[str], _: None) -> None:
        a = step(noop_stages.start, Number(tag="a"))
        for tag, config in (("b", Number), ("c", Timed), ("d", Number)):
            step(noop_stages.alone, config(tag=tag, nap_s=0.2), first=a)

    steps = plan.trace(pipeline, None)
    record = run_record.start(home, "r", "r", "", steps)
    settings = Settings(home=home, import_paths=(HERE,), max_parallel=3)
    record = Execution(steps, record, settings, Listener(), Processes(home)).execute()
    times = {
        name[-1]: json.loads(Store(home).open(step.digest).file("number").read_text())
        for name, step in record.steps.items()
        if name.startswith("alone")
    }
    begun_s, ended_s = times.pop("c")
    assert all(end <= begun_s or begin >= ended_s for begin, end in times.values())
