"""The local executor, run for real on small stages: isolation, caching, resumption, interruption."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HERE, Listener, plan_of, processes
from noop_stages import Number

from hpml.core.errors import ExitCode
from hpml.io.tracking import Outbox
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.execution import Execution, Settings, first_failure, forecast
from hpml.pipelines.engine.run_record import RunRecord
from hpml.pipelines.engine.store import Store
from hpml.pipelines.executors.process import Processes
from hpml.pipelines.plan import Node
from hpml.steps.job import Job, execute

Run = Callable[..., RunRecord]


def statuses(record: RunRecord) -> dict[str, str]:
    return {re.sub("^(start|add)-", "", name)[-1]: step.status for name, step in record.steps.items()}


def total(home: Path, record: RunRecord) -> str:
    *_, last = record.steps.values()
    return Store(home).open(last.digest).file("number").read_text()


def test_the_steps_compute_what_they_should(run_five: Run, home: Path) -> None:
    record = run_five(a=Number(value=1), d=Number(value=10))
    assert set(statuses(record).values()) == {"done"}
    assert total(home, record) == "13"
    assert record.status == "done"
    assert json.loads((home / "latest" / "run.json").read_text())["id"] == record.id


YEAR_S = 365 * 86400.0


@pytest.fixture
def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock of this process goes back by a year between any two looks at it."""
    wall_s, looks = time.time(), iter(range(1_000_000))
    monkeypatch.setattr(time, "time", lambda: wall_s - next(looks) * YEAR_S)


@pytest.mark.usefixtures("jumping_clock")
def test_a_wall_clock_that_jumps_back_leaves_the_times_of_a_run_alone(run_five: Run) -> None:
    record = run_five()
    steps = list(record.steps.values())
    assert all(0 < step.seconds < YEAR_S for step in steps) and 0 < record.seconds < YEAR_S
    begun = [step.started_at_s for step in steps]
    assert begun == sorted(begun) and begun[0] >= record.started_at_s


@pytest.mark.usefixtures("jumping_clock")
def test_a_wall_clock_that_jumps_back_leaves_the_times_of_a_step_alone(tmp_path: Path) -> None:
    manifest = execute(Job("noop_stages:start", {}, {}, str(tmp_path / "out")))
    assert 0 < manifest.lineage.seconds < YEAR_S
    outbox = Outbox(tmp_path / "outbox.jsonl", "r1", "five")
    outbox.run_started({}, {})
    outbox.run_ended("FINISHED")
    told_s = [json.loads(line)["time_s"] for line in outbox.path.read_text().splitlines()]
    assert 0 <= told_s[1] - told_s[0] < YEAR_S


def test_a_second_run_takes_everything_from_the_store(run_five: Run, home: Path) -> None:
    first = run_five(a=Number(value=1))
    second = run_five(a=Number(value=1))
    assert set(statuses(second).values()) == {"cached"}
    assert [step.digest for step in first.steps.values()] == [step.digest for step in second.steps.values()]


def test_a_change_runs_only_what_depends_on_it(run_five: Run) -> None:
    run_five()
    record = run_five(d=Number(value=5))
    assert statuses(record) == {"a": "cached", "b": "cached", "c": "cached", "d": "done", "e": "done"}
    changed = next(step for name, step in record.steps.items() if name.endswith("d"))
    assert changed.reasons == ("config: value changed: 0 -> 5",)


def test_a_step_that_writes_the_same_bytes_spares_those_after_it(run_five: Run) -> None:
    run_five(b=Number(nap_s=0.01))
    record = run_five(b=Number(nap_s=0.02))
    assert statuses(record) == {"a": "cached", "b": "done", "c": "cached", "d": "cached", "e": "cached"}


def test_force_runs_a_cached_step(run_five: Run) -> None:
    first = run_five()
    name = next(name for name in first.steps if name.endswith("c"))
    record = run_five(force=frozenset({name}))
    assert statuses(record) == {"a": "cached", "b": "cached", "c": "done", "d": "cached", "e": "cached"}


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        ("segfault", ExitCode.STAGE_FAILED, "killed by SIGSEGV"),
        ("exit", ExitCode.STAGE_FAILED, "ended with status 7 without saying why"),
        ("killed", ExitCode.STAGE_FAILED, "killed by SIGKILL"),
        ("import", ExitCode.CONFIG_INVALID, "the package no_such_package is not installed"),
        ("bug", ExitCode.STAGE_FAILED, "ZeroDivisionError: of a bug"),
        ("stage", ExitCode.STAGE_FAILED, "it broke: a reason -> a remedy"),
        ("gate", ExitCode.GATE_FAILED, "too slow"),
        ("disk", ExitCode.STAGE_FAILED, "the disk is full: /"),
    ],
)
def test_a_step_that_dies_ends_alone_with_its_cause(
    run_five: Run, failure: str, code: ExitCode, message: str
) -> None:
    record = run_five(b=Number(failure=failure))
    assert statuses(record) == {"a": "done", "b": "failed", "c": "done", "d": "blocked", "e": "blocked"}
    found = first_failure(record)
    assert found is not None
    assert found[1].exit_code == code
    assert message in found[1].error
    assert record.exit_code == code


def test_a_failed_run_resumes_from_what_is_done(run_five: Run) -> None:
    run_five(d=Number(failure="segfault"))
    record = run_five(d=Number(value=2))
    assert statuses(record) == {"a": "cached", "b": "cached", "c": "cached", "d": "done", "e": "done"}


def test_what_a_gate_rejects_is_kept_and_never_read(run_five: Run, home: Path) -> None:
    record = run_five(a=Number(failure="rejected"))
    assert statuses(record)["a"] == "failed"
    kept = list((home / record.id / "rejected").iterdir())
    assert json.loads((kept[0] / "manifest.json").read_text())["rejected"] == "no good"
    assert statuses(run_five(a=Number(failure="rejected")))["a"] == "failed"


def test_what_a_step_started_ends_with_it(run_five: Run) -> None:
    record = run_five(a=Number(failure="orphan"))
    assert statuses(record)["a"] == "done"
    assert not [arguments for _, _, arguments in processes() if "time.sleep(600)" in arguments]


def test_a_damaged_object_is_made_again(run_five: Run, home: Path) -> None:
    first = run_five(a=Number(value=4))
    digest = next(iter(first.steps.values())).digest
    (Store(home).object_path(digest) / "number").unlink()
    record = run_five(a=Number(value=4))
    assert statuses(record)["a"] == "done"
    assert Store(home).open(digest).file("number").read_text() == "4"


class _Noting(Processes):
    """Remembers what each step is told."""

    jobs: dict[str, dict[str, Any]]

    def start(self, node: Node, job: dict[str, Any], log: Path) -> int:
        self.jobs = {**getattr(self, "jobs", {}), node.name[-1]: job}
        return super().start(node, job, log)


def test_an_artifact_is_verified_once_a_run(run_five: Run, home: Path) -> None:
    numbers = {"b": Number(value=1), "c": Number(value=2)}
    first = run_five(**numbers)
    digests = {name[-1]: step.digest for name, step in first.steps.items()}
    place = _Noting(home)
    plan = plan_of(**numbers, d=Number(value=3))
    record = run_record.start(home, run_record.new_run_id("five"), "five", "", plan)
    Execution(plan, record, Settings(home=home, import_paths=(HERE,)), Listener(), place).execute()
    assert place.jobs["d"]["parents"] == {"first": digests["b"], "others/c": digests["c"]}
    assert place.jobs["d"]["verified"] == []  # from an earlier run: this one has not read them yet
    assert place.jobs["e"]["parents"]["others/a"] == digests["a"]
    assert place.jobs["e"]["verified"] == [place.jobs["e"]["parents"]["first"]]  # what d has just written


def test_what_a_record_says_is_finished_is_taken_as_it_is(run_five: Run, home: Path) -> None:
    """Though the step would make something else now."""
    first = run_five(b=Number(value=1))
    b = next(name for name in first.steps if name.endswith("b"))
    plan = plan_of(b=Number(value=7), d=Number(value=3))
    record = run_record.start(home, run_record.new_run_id("five"), "five", "", plan)
    record = record.model_copy(update={"steps": {**record.steps, b: first.steps[b]}})
    settings = Settings(home=home, import_paths=(HERE,))
    record = Execution(plan, record, settings, Listener(), Processes(home)).execute()
    assert record.status == "done" and record.steps[b] == first.steps[b]
    d = next(step.digest for name, step in record.steps.items() if name.endswith("d"))
    assert (Store(home).object_path(d) / "number").read_text() == "4"


def test_damage_between_two_runs_is_seen_by_the_step_that_reads_it(run_five: Run, home: Path) -> None:
    first = run_five()
    digest = next(step.digest for name, step in first.steps.items() if name.endswith("b"))
    file = Store(home).object_path(digest) / "number"
    file.chmod(0o644)
    file.write_text("9")  # of the same size
    record = run_five(d=Number(value=1))
    assert statuses(record)["d"] == "failed"
    assert "number is damaged" in next(step.error for name, step in record.steps.items() if name[-1] == "d")


def test_a_damaged_database_of_mlflow_is_told_and_fails_no_run(home: Path) -> None:
    home.mkdir()
    database = home / "mlflow.db"
    database.write_text("not a database, " * 100)
    plan, listener = plan_of(), Listener()
    record = run_record.start(home, run_record.new_run_id("five"), "five", "", plan)
    settings = Settings(home=home, import_paths=(HERE,), tracking_uri=f"sqlite:///{database}")
    record = Execution(plan, record, settings, listener, Processes(home)).execute()
    assert (record.status, record.exit_code) == ("done", 0)
    (said,) = [line for line in listener.said if line.startswith("tracking:")]
    assert f"is damaged: file is not a database -> move {database} away" in said
    assert said.endswith("they are kept for the next run")


def test_independent_steps_run_side_by_side(run_five: Run) -> None:
    listener = Listener()
    run_five(listener, b=Number(nap_s=0.5), c=Number(nap_s=0.5))
    started = [name for name, status in listener.changes if status == "running"]
    ended = [name for name, status in listener.changes if status == "done"]
    if len(os.sched_getaffinity(0)) > 1:
        assert listener.changes.index((started[2], "running")) < listener.changes.index((ended[1], "done"))


def test_forecast_runs_nothing_and_says_why(run_five: Run, home: Path) -> None:
    run_five()
    settings = Settings(home=home, import_paths=(HERE,))
    before = sorted((home / ".store" / "objects").iterdir())
    outcomes = {
        item.step[-1]: item for item in forecast(plan_of(d=Number(value=9)), settings, Processes(home))
    }
    assert outcomes["c"].outcome == "cached"
    assert outcomes["d"].outcome == "would run"
    assert outcomes["d"].reasons == ("config: value changed: 0 -> 9",)
    assert outcomes["e"].outcome == "depends"
    assert sorted((home / ".store" / "objects").iterdir()) == before


_DRIVER = """
import sys
sys.path.append({here!r})
from conftest import Listener, plan_of, HERE
from noop_stages import Number
from pathlib import Path
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.execution import Execution, Settings
from hpml.pipelines.executors.process import Processes
plan = plan_of(b=Number(nap_s={nap}, failure={failure!r}), c=Number(nap_s={nap}))
record = run_record.start(Path({home!r}), run_record.new_run_id("five"), "five", "", plan)
print("started", flush=True)
settings = Settings(home=Path({home!r}), import_paths=(HERE,))
record = Execution(plan, record, settings, Listener(), Processes(settings.home)).execute()
print([step.status for step in record.steps.values()], flush=True)
sys.exit(record.exit_code)
"""


def drive(
    home: Path, nap_s: float, *, failure: str = "", inside: Path | None = None
) -> subprocess.Popen[str]:
    """A run of the five steps in a process of its own, in the control group `inside` if one is given."""
    code = _DRIVER.format(here=HERE, home=str(home), nap=nap_s, failure=failure)
    command = [sys.executable, "-c", code]
    if inside:
        command = ["sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(inside), *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group with 400 MB."""
    for parent, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = parent / f"hpml-test-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text("400000000")
        except OSError:
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("needs the right to make a control group with a memory limit")


def test_a_step_that_takes_all_memory_ends_alone_and_is_told_why(home: Path, small_memory: Path) -> None:
    process = drive(home, 0, failure="hungry", inside=small_memory)
    assert process.wait(timeout=100) == ExitCode.STAGE_FAILED
    record = run_record.load(home)
    assert statuses(record) == {"a": "done", "b": "failed", "c": "done", "d": "blocked", "e": "blocked"}
    failure = first_failure(record)
    assert failure is not None
    assert re.match(r"the kernel killed it for lack of memory at 0\.[34] GB", failure[1].error)


def wait_for_step(home: Path, run: int) -> list[int]:
    """The processes of the fork server and its jobs, once a step naps."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for file in home.glob("five-*/run.json"):
            states = [step["status"] for step in json.loads(file.read_text())["steps"].values()]
            if states[0] == "done" and "running" in states:
                return descendants(run)
        time.sleep(0.05)
    raise AssertionError("no step came to run")


def descendants(ancestor: int) -> list[int]:
    """The fork server of a run, and its jobs."""
    found = [ancestor]
    for known in found:
        found += [pid for pid, parent, _ in processes() if parent == known]
    return found[1:]


def gone(pids: list[int], within_s: float = 20) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_however_a_run_is_stopped_nothing_is_left_and_it_resumes(
    home: Path, run_five: Run, number: signal.Signals, code: int
) -> None:
    process = drive(home, nap_s=60)
    pids = wait_for_step(home, process.pid)
    assert len(pids) > 1
    process.send_signal(number)
    assert process.wait(timeout=30) == code
    assert gone(pids)
    record = run_five()
    assert statuses(record)["a"] == "cached"
    assert set(statuses(record).values()) <= {"cached", "done"}


def test_two_runs_at_once_compute_a_step_once(home: Path) -> None:
    processes = [drive(home, nap_s=0.7) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    done = "".join(outputs).count("'done'")
    assert done == 5
