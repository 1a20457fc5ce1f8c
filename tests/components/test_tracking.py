"""Events reach MLflow once each, whatever is killed, slow or down meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml.core.errors import Unavailable
from hpml.io import tracking
from hpml.io.tracking import (
    Outbox,
    client,
    drain,
    ensure_store,
    flatten,
    store_identity,
    unsent,
    without_credentials,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "outbox.jsonl"


def write_a_run(path: Path, *, steps: int = 3, points: int = 5, ends: bool = True) -> None:
    outbox = Outbox(path, "r1", "quickstart")
    outbox.run_started({"data": {"source": "digits"}}, {"hpml.version": "1"})
    for step in range(steps):
        outbox.step_started(f"step{step}", {"lr": 0.1})
        for index in range(points):
            outbox.metric(f"step{step}", "loss", 1 / (1 + index), index, 1000.0 + index)
        outbox.step_ended(f"step{step}", "FINISHED", {"accuracy": 0.9}, 2.5, {"hpml.digest": f"d{step}"})
    if ends:
        outbox.run_ended("FINISHED")


def tracked(uri: str, experiment: str = "quickstart") -> dict[str, Any]:
    """The MLflow runs of an experiment by the name of their step, the pipeline's run under ""."""
    mlflow = client(uri)
    found = mlflow.get_experiment_by_name(experiment)
    runs = mlflow.search_runs([found.experiment_id]) if found else []
    by_step = {run.data.tags.get("hpml.step", ""): run for run in runs}
    assert len(by_step) == len(runs), "a step was tracked twice"
    return by_step


def loss_points(uri: str, run: Any) -> list[tuple[int, float, int]]:
    history = client(uri).get_metric_history(run.info.run_id, "loss")
    return sorted((point.step, point.value, point.timestamp) for point in history)


EXPECTED_LOSS = [(index, 1 / (1 + index), (1000 + index) * 1000) for index in range(5)]


def check_the_run(uri: str, steps: int = 3) -> None:
    runs = tracked(uri)
    assert set(runs) == {"", *(f"step{step}" for step in range(steps))}
    parent = runs[""]
    assert parent.info.status == "FINISHED" and parent.info.end_time >= parent.info.start_time
    assert parent.data.params == {"data.source": "digits"}
    assert parent.data.tags["hpml.version"] == "1" and parent.data.tags["hpml.run"] == "r1"
    for step in range(steps):
        run = runs[f"step{step}"]
        assert run.info.status == "FINISHED"
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.data.tags["hpml.digest"] == f"d{step}"
        assert run.data.params == {"lr": "0.1"}
        assert run.data.metrics == {"loss": 0.2, "accuracy": 0.9, "seconds": 2.5}
        assert loss_points(uri, run) == EXPECTED_LOSS


def test_a_run_and_its_steps(path: Path, uri: str) -> None:
    write_a_run(path)
    drained = drain(path, uri)
    assert (drained.remaining, drained.ended, drained.refused, drained.problem) == (0, True, (), "")
    check_the_run(uri)
    assert drain(path, uri) == drained


def test_what_was_sent_but_not_acknowledged_is_sent_again_and_counts_once(path: Path, uri: str) -> None:
    write_a_run(path)
    drain(path, uri)
    path.with_name("outbox.jsonl.sent").unlink()
    drained = drain(path, uri)
    assert drained.ended and not drained.refused
    check_the_run(uri)


@contextmanager
def sending(path: Path, uri: str, *earlier: Path) -> Iterator[subprocess.Popen[str]]:
    """A sender in a process of its own."""
    sender = subprocess.Popen(
        [sys.executable, "-m", "hpml.io.tracking", str(path), *map(str, earlier)],
        env=os.environ | {"MLFLOW_TRACKING_URI": uri},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield sender
    finally:
        sender.kill()
        sender.communicate()


def test_a_sender_killed_at_work_loses_and_doubles_nothing(path: Path, uri: str) -> None:
    write_a_run(path, steps=60, ends=False)  # so that no sender is done before it is killed
    database = uri.removeprefix("sqlite:///")
    with sending(path, uri) as sender:
        while sqlite3.connect(database).execute("SELECT count(*) FROM runs").fetchone()[0] <= 5:
            assert sender.poll() is None
            time.sleep(0.01)
        sender.kill()
        sender.wait()
    Outbox(path, "r1", "quickstart").run_ended("FINISHED")
    assert drain(path, uri).ended
    check_the_run(uri, steps=60)


def test_events_arrive_as_they_are_written(path: Path, uri: str, tmp_path: Path) -> None:
    write_a_run(tmp_path / "earlier.jsonl")
    outbox = Outbox(path, "r2", "second")
    outbox.run_started({}, {})
    with sending(path, uri, tmp_path / "earlier.jsonl") as sender:
        outbox.step_started("train", {})
        outbox.metric("train", "loss", 0.5, 0, 1000.0)
        while "train" not in (runs := tracked(uri, "second")) or "loss" not in runs["train"].data.metrics:
            assert sender.poll() is None
            time.sleep(0.05)
        assert runs["train"].info.status == "RUNNING"
        outbox.step_ended("train", "FAILED", {}, 1.0, {})
        outbox.run_ended("FAILED")
        assert sender.communicate(timeout=60) == ("", "")
        assert sender.returncode == 0
    runs = tracked(uri, "second")
    assert runs["train"].info.status == runs[""].info.status == "FAILED"
    check_the_run(uri)  # the earlier one
    assert not unsent(path, uri) and not unsent(tmp_path / "earlier.jsonl", uri)


def test_an_end_that_comes_while_others_are_sent_is_not_taken_for_sent(
    path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(path, "r1", "quickstart")
    outbox.run_started({}, {})
    send = tracking._Sink.send

    def send_and_end(self: tracking._Sink, events: list[dict[str, Any]]) -> list[str]:
        if len(events) == 1 and events[0]["event"] == "started":
            outbox.run_ended("FINISHED")
        return send(self, events)

    monkeypatch.setattr(tracking._Sink, "send", send_and_end)
    assert not drain(path, uri).ended
    assert drain(path, uri).ended
    assert tracked(uri)[""].info.status == "FINISHED"


def test_an_outage_delays_and_loses_nothing(path: Path, tmp_path: Path, new_store: Path) -> None:
    write_a_run(path)
    place = tmp_path / "place"
    place.write_text("a file where the store's folder should be")
    uri = f"sqlite:///{place / 'mlflow.db'}"
    drained = drain(path, uri)
    assert drained.remaining == 23 and not drained.ended
    assert "MLflow store" in drained.problem and "\n" not in drained.problem

    place.unlink()
    place.mkdir()
    shutil.copy(new_store, place / "mlflow.db")
    assert drain(path, uri).ended
    check_the_run(uri)


def test_sigterm_and_an_outage_end_the_sender_with_the_events_kept(path: Path) -> None:
    write_a_run(path)
    with sending(path, "http://user:hunter2@127.0.0.1:9") as sender:
        while not path.with_name("outbox.jsonl.lock").exists():  # it is at work
            assert sender.poll() is None
            time.sleep(0.01)
        sender.terminate()
        out, err = sender.communicate(timeout=60)
    assert sender.returncode == 6
    assert out == "" and err.startswith("23 tracking events not sent: the MLflow store at http://127.0.0.1:9")
    assert "Connection refused" in err and "hunter2" not in err and len(err.splitlines()) == 1
    assert unsent(path, "http://user:hunter2@127.0.0.1:9")


def test_two_senders_of_one_outbox_take_turns(path: Path, uri: str) -> None:
    import fcntl

    write_a_run(path)
    with path.with_name("outbox.jsonl.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        drained = drain(path, uri)
    assert drained.remaining == 23 and "another process" in drained.problem
    assert tracked(uri) == {}


def test_a_resumed_run_is_the_same_run(path: Path, uri: str) -> None:
    first = Outbox(path, "r1", "quickstart")
    first.run_started({"a": 1}, {})
    first.step_started("train", {})
    first.metric("train", "loss", 1.0, 0, 1000.0)
    first.step_ended("train", "KILLED", {}, 1.0, {})
    first.run_ended("KILLED")
    assert drain(path, uri).ended
    with path.open("ab") as file:
        file.write(b'{"event": "ended", "run": "r1", "st')  # cut short by a crash
    again = Outbox(path, "r1", "quickstart")
    again.run_started({"a": 1}, {})
    again.step_started("train", {})
    assert not drain(path, uri).ended
    assert tracked(uri)[""].info.status == tracked(uri)["train"].info.status == "RUNNING"
    again.metric("train", "loss", 0.5, 1, 1001.0)
    again.step_ended("train", "FINISHED", {}, 1.0, {})
    again.run_ended("FINISHED")
    assert drain(path, uri).ended
    runs = tracked(uri)
    assert set(runs) == {"", "train"} and runs["train"].info.status == "FINISHED"
    assert [point[:2] for point in loss_points(uri, runs["train"])] == [(0, 1.0), (1, 0.5)]


class Rival:
    """Another sender that makes the same run at the same moment: its run is there when ours is."""

    def __init__(self, sink: tracking._Sink, *, older: bool) -> None:
        self._mlflow, self._create, self._older = sink._client, sink._client.create_run, older
        self.runs: list[str] = []

    def create_run(self, experiment: str, start_time: int, tags: dict[str, str]) -> Any:
        before = start_time - 1000 if self._older else start_time + 1000
        self.runs.append(self._create(experiment, start_time=before, tags=tags).info.run_id)
        return self._create(experiment, start_time=start_time, tags=tags)


def sink_with_a_rival(
    uri: str, monkeypatch: pytest.MonkeyPatch, *, older: bool
) -> tuple[tracking._Sink, Rival]:
    monkeypatch.setattr(tracking, "_SETTLE_S", 0.5)
    sink = tracking._Sink(uri)
    rival = Rival(sink, older=older)
    monkeypatch.setattr(sink._client, "create_run", rival.create_run)
    return sink, rival


def some_events(path: Path) -> list[dict[str, Any]]:
    outbox = Outbox(path, "r1", "quickstart")
    outbox.step_started("train", {"lr": 0.1})
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("older", [True, False])
def test_of_several_that_make_a_run_all_but_one_withdraw(
    path: Path, uri: str, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    """An older rival is kept. A younger one that stays had looked before ours was there, and is kept too."""
    sink, rival = sink_with_a_rival(uri, monkeypatch, older=older)
    assert sink.send(some_events(path)) == []
    runs = tracked(uri)  # none twice
    assert [runs[step].info.run_id for step in ("", "train")] == rival.runs
    assert runs["train"].data.params == {"lr": "0.1"}
    assert runs["train"].data.tags["mlflow.parentRunId"] == rival.runs[0]


def test_a_younger_rival_that_withdraws_leaves_ours(
    path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, rival = sink_with_a_rival(uri, monkeypatch, older=False)
    search = sink._search

    def after_withdrawing(run: str) -> list[Any]:
        found = search(run)
        for withdrawn in rival.runs:
            sink._client.delete_run(withdrawn)
        rival.runs.clear()
        return found

    monkeypatch.setattr(sink, "_search", after_withdrawing)
    assert sink.send(some_events(path)) == []
    assert set(tracked(uri)) == {"", "train"}


def test_a_run_that_was_withdrawn_after_it_was_found_is_replaced(
    path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(path, "r1", "quickstart")
    outbox.step_started("train", {})
    assert drain(path, uri).remaining == 0
    find = tracking._Sink._find

    def find_and_lose(self: tracking._Sink, update: Any) -> None:
        find(self, update)
        client(uri).delete_run(tracked(uri)["train"].info.run_id)

    outbox.metric("train", "loss", 0.5, 0, 1000.0)
    monkeypatch.setattr(tracking._Sink, "_find", find_and_lose)
    drained = drain(path, uri)
    assert drained.remaining == 1 and not drained.refused and "was deleted meanwhile" in drained.problem
    monkeypatch.undo()
    assert drain(path, uri).remaining == 0
    assert tracked(uri)["train"].data.metrics == {"loss": 0.5}


def test_a_run_of_someone_else_is_adopted_and_left_open(
    path: Path, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = client(uri)
    experiment = mlflow.create_experiment("ci")
    adopted = mlflow.create_run(experiment).info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", adopted)
    write_a_run(path)
    assert drain(path, uri).ended
    path.with_name("outbox.jsonl.sent").unlink()
    assert drain(path, uri).ended
    assert tracked(uri) == {}  # nothing in an experiment of our own
    runs = tracked(uri, "ci")
    assert runs[""].info.run_id == adopted and runs[""].info.status == "RUNNING"
    assert runs[""].data.params == {"data.source": "digits"}
    assert runs["step2"].data.tags["mlflow.parentRunId"] == adopted


def test_what_mlflow_refuses_is_told_and_holds_up_nothing(path: Path, uri: str) -> None:
    outbox = Outbox(path, "r1", "quickstart")
    outbox.run_started({"a": 1}, {})
    outbox.run_started({"a": 1}, {})
    assert not drain(path, uri).refused
    outbox.run_started({"a": 2}, {"later": "yes"})
    outbox.run_ended("FINISHED")
    drained = drain(path, uri)
    assert drained.ended and len(drained.refused) == 1
    assert drained.refused[0].startswith("the run: ") and "Changing param values" in drained.refused[0]
    assert tracked(uri)[""].data.tags["later"] == "yes"


def test_names_and_lengths_that_mlflow_does_not_allow_are_made_to_fit(path: Path, uri: str) -> None:
    outbox = Outbox(path, "r1", "quickstart")
    outbox.run_started({"variants": {"pruned+int8": "x" * 7000}}, {})
    outbox.step_started("a", {})
    outbox.step_ended("a", "FINISHED", {"top@1": float("nan"), "p99": float("inf")}, 1.0, {})
    drained = drain(path, uri)
    assert drained.remaining == 0 and not drained.refused
    runs = tracked(uri)
    value = runs[""].data.params["variants.pruned-int8"]
    assert len(value) == 6000 and value.endswith("... (7000 characters)")
    assert set(runs["a"].data.metrics) == {"top-1", "p99", "seconds"}


# ---------------------------------------------------------------------------------------------------- stores


@pytest.mark.slow  # imports mlflow twice more
def test_two_processes_may_be_the_first_to_use_a_store(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'new' / 'mlflow.db'}"
    code = (
        "import sys; from hpml.io.tracking import client, ensure_store\n"
        "ensure_store(sys.argv[1]); client(sys.argv[1]).create_experiment(sys.argv[2])"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code, uri, name], stderr=subprocess.PIPE, text=True)
        for name in ("first", "second")
    ]
    assert [process.communicate(timeout=120)[1] for process in both] == ["", ""]
    assert [process.returncode for process in both] == [0, 0]
    assert store_identity(uri)
    assert client(uri).get_experiment_by_name("first") and client(uri).get_experiment_by_name("second")
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == [".mlflow.db.lock", "mlflow.db"]


def test_an_outbox_without_events_is_nothing_to_send(path: Path, uri: str) -> None:
    Outbox(path, "r1", "quickstart")
    drained = drain(path, uri)
    assert (drained.remaining, drained.ended, drained.problem) == (0, False, "")


@pytest.mark.slow  # makes two stores of mlflow's
def test_a_deleted_store_is_another_store_and_gets_everything(path: Path, tmp_path: Path) -> None:
    place = tmp_path / "deleted"
    uri = f"sqlite:///{place / 'mlflow.db'}"
    write_a_run(path)
    assert store_identity(uri) == ""
    assert drain(path, uri).ended
    first = store_identity(uri)
    place.rename(tmp_path / "moved")
    uri = f"sqlite:///{place / 'mlflow.db'}"
    assert store_identity(uri) == ""
    # A process that has the deleted file open cannot see the new one: SQLAlchemy keeps its connections.
    again = [sys.executable, "-m", "hpml.io.tracking", str(path)]
    subprocess.run(again, check=True, timeout=120, env=os.environ | {"MLFLOW_TRACKING_URI": uri})
    assert store_identity(uri) not in ("", first)
    with sqlite3.connect(place / "mlflow.db") as store:
        assert store.execute("SELECT count(*) FROM runs").fetchone() == (4,)


def test_a_store_made_by_mlflow_itself_gets_an_identity(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'theirs.db'}"
    client(uri).create_experiment("theirs")
    assert store_identity(uri) == ""
    ensure_store(uri)
    identity = store_identity(uri)
    ensure_store(uri)
    assert identity and store_identity(uri) == identity
    assert client(uri).get_experiment_by_name("theirs")


def test_a_file_that_is_no_database_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "mlflow.db"
    file.write_text("not a database, " * 100)
    with pytest.raises(Unavailable, match="file is not a database"):
        ensure_store(f"sqlite:///{file}")
    assert file.read_text() == "not a database, " * 100


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    changed = {
        "no database": b"not a database, " * 100,
        "cut short": content[: len(content) // 2],
        "pages overwritten": content[:4096] + b"\xa5" * (len(content) - 4096),
    }
    path.write_bytes(changed[how])


@pytest.mark.parametrize("how", ["no database", "cut short", "pages overwritten"])
def test_a_damaged_database_is_named_with_what_to_do_and_not_waited_for(
    path: Path, uri: str, tmp_path: Path, how: str
) -> None:
    write_a_run(path)
    file = tmp_path / "mlflow.db"
    whole = file.read_bytes()
    damage(file, how)

    class Unwaited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            raise AssertionError("it waits for a file to mend itself")

    drained = tracking._keep_sending(path, uri, Unwaited())
    assert drained.remaining and not drained.ended
    assert "is damaged" in drained.problem and f"move {file} away" in drained.problem
    file.write_bytes(whole)
    assert drain(path, uri).ended
    assert len(tracked(uri)) == 4


def test_a_damaged_note_of_what_was_sent_only_sends_it_again(path: Path, uri: str) -> None:
    write_a_run(path)
    assert drain(path, uri).ended
    path.with_name("outbox.jsonl.sent").write_text('{"off')
    assert unsent(path, uri)
    assert drain(path, uri).ended
    assert loss_points(uri, tracked(uri)["step0"]) == EXPECTED_LOSS


def test_the_identity_of_a_server_has_no_credentials_and_needs_no_mlflow() -> None:
    code = (
        "import sys; from hpml.io.tracking import store_identity\n"
        "print(store_identity('https://user:hunter2@mlflow.example:5000/a'))\n"
        "assert 'mlflow' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "https://mlflow.example:5000/a"


# --------------------------------------------------------------------------------------------------- secrets


def test_secrets_never_reach_the_disk(path: Path) -> None:
    outbox = Outbox(path, "r1", "quickstart")
    params = {
        "db": {"password": "hunter2", "aws_secret_access_key": "hunter2", "api-key": "hunter2"},
        "source": {"url": "https://user:hunter2@host/data?X-Amz-Signature=hunter2&part=1&token=hunter2"},
        "list": ["ftp://hunter2@host/a", {"authToken": "hunter2", "max_tokens": 5}],
        "credentials": {"a": "hunter2"},
        "empty": {"password": ""},
    }
    outbox.run_started(params, {"where": "postgresql://me:hunter2@host/db"})
    text = path.read_text()
    assert "hunter2" not in text
    event = json.loads(text)
    assert event["params"] == {
        "db.password": "***",
        "db.aws_secret_access_key": "***",
        "db.api-key": "***",
        "source.url": "https://host/data?X-Amz-Signature=***&part=1&token=***",
        "list.0": "ftp://host/a",
        "list.1.authToken": "***",
        "list.1.max_tokens": "5",
        "credentials": "***",
        "empty.password": "",
    }
    assert event["tags"] == {"where": "postgresql://host/db"}


def test_what_is_no_secret_stays() -> None:
    for text in ("sqlite:////home/a@b/mlflow.db", "s3://bucket/a@2x.png", "mail me@example.org", "a:b@c"):
        assert without_credentials(text) == text
    assert flatten({"a": None, "b": [], "c": {}, "d": (1, 2), "e": True}) == {
        "a": "null",
        "b": "[]",
        "c": "{}",
        "d": "[1,2]",
        "e": "true",
    }


word = st.text("abcdefghij0123456789%:@!$&*+=", min_size=1, max_size=12)


@given(user=word, password=word.map(lambda text: f"Qz{text}zQ"), host=st.sampled_from(["h", "h.example:80"]))
def test_no_user_information_survives_in_a_uri(user: str, password: str, host: str) -> None:
    shown = without_credentials(f"cannot reach http://{user}:{password}@{host}/path at all")
    assert shown == f"cannot reach http://{host}/path at all"


def test_a_workspace_may_be_called_anything(tmp_path: Path, new_store: Path) -> None:
    home = tmp_path / "50%20 of a?b"
    home.mkdir()
    shutil.copy(new_store, home / "mlflow.db")
    uri = tracking.store_of(home)
    tracking.ensure_store(uri)
    client = tracking.client(uri)
    run = client.create_run(tracking.experiment_id(client, uri, "digits"))
    client.log_text(run.info.run_id, "kept", "file")
    assert {file.parents[-len(tmp_path.parts) - 1] for file in tmp_path.rglob("*") if file.is_file()} == {
        home
    }
    assert next((home / "mlartifacts").rglob("file")).read_text() == "kept"
