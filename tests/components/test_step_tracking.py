"""Steps that report themselves, as pods do: each event arrives once, at once or by a later step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpml.io import patience
from hpml.io.tracking import are_events, client
from hpml.steps import step_tracking
from hpml.steps.step_tracking import Reported, StepTracking, reported
from tests.components.conftest import Bucket

NOWHERE = "http://user:hunter2@127.0.0.1:9"
Track = Callable[..., StepTracking]


@pytest.fixture
def track(tmp_path: Path, bucket: Bucket, uri: str) -> Track:
    """track("train", tracking_uri=...) is the tracking of a step, in a folder of its own."""
    count = 0

    def make(step: str, *, tracking_uri: str = uri, is_last: bool = False) -> StepTracking:
        nonlocal count
        count += 1
        what = Reported(tracking_uri, "r1", "quickstart", step, f"{bucket.uri}/hpml", is_last)
        return StepTracking(what, {"lr": 0.1}, tmp_path / f"step-{count}")

    return make


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_tracking, "_WAIT_S", 0.1)
    monkeypatch.setattr(step_tracking, "_LAST_ATTEMPT_S", 120.0)  # importing mlflow can be slow here


def do_some_work(tracking: StepTracking, *, ends: str = "finished") -> None:
    for index in range(3):
        tracking.hear(
            {"event": "metric", "name": "loss", "value": 1.0, "index": index, "time_s": 1000.0 + index}
        )
        tracking.hear({"event": "progress", "done": index, "total": 3, "unit": "steps", "note": ""})
    if ends == "finished":
        tracking.hear({"event": "finished", "digest": "d1", "metrics": {"accuracy": 0.9}})
    else:
        tracking.hear({"event": "failed", "message": "it broke", "exit_code": int(ends), "traceback": "..."})


def tracked(uri: str) -> dict[str, Any]:
    """The MLflow runs by their step, the pipeline's run under ""."""
    mlflow = client(uri)
    found = mlflow.get_experiment_by_name("quickstart")
    runs = mlflow.search_runs([found.experiment_id]) if found else []
    by_step = {run.data.tags.get("hpml.step", ""): run for run in runs}
    assert len(by_step) == len(runs), "a step was tracked twice"
    return by_step


def check_step(uri: str, step: str) -> None:
    run = tracked(uri)[step]
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1"}
    assert run.data.metrics.keys() == {"loss", "accuracy", "seconds"}
    assert run.data.tags["artifact"] == "d1"
    assert run.data.tags["mlflow.parentRunId"] == tracked(uri)[""].info.run_id
    points = client(uri).get_metric_history(run.info.run_id, "loss")
    assert [point.timestamp for point in points] == [1_000_000, 1_001_000, 1_002_000]


def statuses(uri: str) -> dict[str, str]:
    return {step: run.info.status for step, run in tracked(uri).items()}


def test_a_step_reports_itself_and_the_last_one_ends_the_run(uri: str, track: Track, bucket: Bucket) -> None:
    with track("train") as tracking:
        do_some_work(tracking)
    check_step(uri, "train")
    assert statuses(uri)[""] == "RUNNING"
    with track("bundle", is_last=True) as tracking:
        do_some_work(tracking)
    assert statuses(uri) == {"": "FINISHED", "train": "FINISHED", "bundle": "FINISHED"}
    assert bucket.listing() == []


@pytest.mark.slow  # imports mlflow in processes; test_tracking tries the same outbox
def test_a_failed_step_ends_the_run_and_a_repeated_one_mends_it(uri: str, track: Track) -> None:
    with track("train") as tracking:
        do_some_work(tracking, ends="4")
    assert statuses(uri) == {"": "FAILED", "train": "FAILED"}
    assert tracked(uri)["train"].data.tags["error"] == "it broke"
    with track("bundle", is_last=True) as tracking:  # does not need it
        do_some_work(tracking)
    assert statuses(uri)[""] == "FAILED"
    with track("train") as tracking:
        do_some_work(tracking)
    with track("bundle", is_last=True) as tracking:
        do_some_work(tracking)
    assert statuses(uri)[""] == "FINISHED"


@pytest.mark.slow  # likewise
@pytest.mark.usefixtures("impatient")
def test_what_an_outage_left_over_is_sent_by_the_next_step_once(
    uri: str, track: Track, bucket: Bucket, capfd: pytest.CaptureFixture[str]
) -> None:
    with track("train", tracking_uri=NOWHERE) as tracking:
        do_some_work(tracking)
        while not (tracking._folder / "outbox.jsonl.lock").exists():  # the sender is at work
            time.sleep(0.02)
    [key] = bucket.listing()
    assert key.startswith("hpml/tracking/r1/train.") and key.endswith(".jsonl")
    assert are_events(bucket.get(key).decode())
    said = capfd.readouterr().err
    assert f"MLflow did not take 6 events; they are kept at {bucket.uri}/{key}" in said
    assert "Connection refused" in said and "hunter2" not in said

    with track("export", tracking_uri=NOWHERE) as tracking:  # the outage goes on
        do_some_work(tracking)
    assert len(bucket.listing()) == 2

    step_tracking._WAIT_S = 60.0
    with track("select") as tracking:
        do_some_work(tracking)
    assert bucket.listing() == []
    for step in ("train", "export", "select"):
        check_step(uri, step)
    with track("bundle") as tracking:
        do_some_work(tracking)
    check_step(uri, "train")


@pytest.mark.usefixtures("impatient")
def test_an_interrupted_step_keeps_its_events_before_it_waits(
    uri: str, track: Track, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be 0.6 s until it is killed."""
    kept: list[list[str]] = []
    end_sender = StepTracking._end_sender

    def note(self: StepTracking) -> None:
        kept.append(bucket.listing())
        monkeypatch.setattr(step_tracking, "_WAIT_S", 60.0)
        end_sender(self)

    monkeypatch.setattr(StepTracking, "_end_sender", note)
    with track("train") as tracking:
        do_some_work(tracking, ends="143")
    assert len(kept[0]) == 1
    assert bucket.listing() == []  # there was time to send them
    assert statuses(uri) == {"": "KILLED", "train": "KILLED"}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]\n",
        b"\xff\n",
        b'{"event": "metrics", "run": "r1", "name": "q", "step": "s", "time_s": 1}',
        b'{"event": "started", "run": "r1\' OR 1", "name": "q", "step": "s", "time_s": 1}\n',
        b'{"event": "started", "run": "r1", "name": "q", "step": null, "time_s": 1}\n',
        b'{"event": "import os", "run": "r1", "name": "q", "step": "s", "time_s": 1}\n',
    ],
)
def test_what_is_left_over_and_no_list_of_events_is_told_and_left(
    track: Track, bucket: Bucket, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    bucket.put("hpml/tracking/r0/evil.jsonl", content)
    with track("train", tracking_uri=NOWHERE) as tracking:
        assert not tracking._left_over
    assert bucket.get("hpml/tracking/r0/evil.jsonl") == content
    assert "evil.jsonl" in capfd.readouterr().err


@pytest.mark.usefixtures("impatient")
def test_without_a_store_it_is_said_what_is_lost_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(patience, "PAUSES_S", (0,))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    for store in ("", "s3://bucket"):
        what = Reported(NOWHERE, "r1", "quickstart", "train", store, is_last=False)
        with StepTracking(what, {}, tmp_path / f"of-{len(store)}") as tracking:
            do_some_work(tracking)
        said = capfd.readouterr().err
        assert "MLflow did not take 6 events; they are lost" in said
        assert ("events kept in the store are not reached" in said) == bool(store)


def test_the_environment_says_whether_a_step_reports_itself() -> None:
    told = {"MLFLOW_TRACKING_URI": "u", "HPML_RUN": "r", "HPML_STEP": "s"}
    assert reported(told) == Reported("u", "r", "hpml", "s", "", is_last=False)
    more = {"HPML_RECIPE": "q", "HPML_STORE": "s3://b/", "HPML_LAST": "1"}
    assert reported({**told, **more}) == Reported("u", "r", "q", "s", "s3://b", is_last=True)
    for name in told:
        assert reported({**told, name: ""}) is None


@pytest.mark.slow  # likewise
def test_the_entrypoint_tracks_its_stage(uri: str, bucket: Bucket, tmp_path: Path) -> None:
    environment = {
        "MLFLOW_TRACKING_URI": uri,
        "HPML_RUN": "r1",
        "HPML_RECIPE": "quickstart",
        "HPML_STEP": "prepare",
        "HPML_STORE": f"{bucket.uri}/hpml",
        "HPML_LAST": "1",
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hpml.components", "prepare", "--config", '{"source": "digits"}'),
            *("--out", str(tmp_path / "data")),
        ],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    digest = json.loads(done.stdout.splitlines()[-1])["digest"]
    runs = tracked(uri)
    assert statuses(uri) == {"": "FINISHED", "prepare": "FINISHED"}
    assert runs["prepare"].data.params["source"] == "digits"
    assert runs["prepare"].data.tags["artifact"] == digest
    assert bucket.listing() == []


@pytest.mark.slow  # six processes that import mlflow; test_tracking has a rival in its own process
def test_steps_that_start_at_the_same_moment_make_one_run(uri: str, tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from hpml.steps import step_tracking\n"
        "from hpml.steps.step_tracking import Reported, StepTracking\n"
        "step_tracking._WAIT_S = 120.0\n"  # importing mlflow six times at once can be slow here
        "_, uri, step, folder = sys.argv\n"
        "what = Reported(uri, 'r1', 'quickstart', step, '', False)\n"
        "with StepTracking(what, {'lr': 0.1}, Path(folder)) as it:\n"
        "    for index in range(3):\n"
        "        point = {'name': 'loss', 'value': 1.0, 'index': index, 'time_s': 1000.0 + index}\n"
        "        it.hear({'event': 'metric', **point})\n"
        "    it.hear({'event': 'finished', 'digest': 'd1', 'metrics': {'accuracy': 0.9}})\n"
    )
    steps = [f"step{number}" for number in range(3)]
    together = [
        subprocess.Popen(
            [sys.executable, "-c", code, uri, step, str(tmp_path / step)], stderr=subprocess.PIPE
        )
        for step in steps
    ]
    until = time.monotonic() + 200
    for process in together:
        assert process.communicate(timeout=until - time.monotonic())[1] == b""
    assert set(tracked(uri)) == {"", *steps}
    for step in steps:
        check_step(uri, step)
