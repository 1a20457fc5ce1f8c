"""The entrypoint of the images: command line, artifacts by URI, events on stdout, repeated attempts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact, open_artifact, read_manifest
from hpml.artifacts.report import ReportSpec
from hpml.components import STAGES
from hpml.components.__main__ import Job, about, arguments_of, main, parse, source_digest
from hpml.components.train.config import TrainConfig
from hpml.core import hardware
from hpml.core.contract import Config, Output, Result, signature, validate
from hpml.core.errors import ConfigInvalid, GateFailed, StageFailed, Unavailable, UsageError
from hpml.io import patience
from hpml.io.relay import EVENT_PREFIX
from hpml.io.storage import fetch, upload
from hpml.steps import container
from hpml.steps.job import load_run
from tests.components.conftest import Bucket

CNN = {"architecture": "cnn", "arguments": {"width": 4}}
ENTRYPOINT = [sys.executable, "-m", "hpml.components"]


def entrypoint(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ENTRYPOINT, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def events_in(stdout: str) -> list[dict[str, Any]]:
    lines = stdout.splitlines()
    return [json.loads(line.removeprefix(EVENT_PREFIX)) for line in lines if line.startswith(EVENT_PREFIX)]


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


# ---------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("stage", STAGES)
def test_a_job_comes_back_from_its_command_line(stage: str) -> None:
    run = f"hpml.components.{stage}.stage:run"
    inputs = {
        name: {"fp32/onnx": "s3://b/1", "int8=x/onnx"[:4]: "/2"} if many else f"s3://b/{name}"
        for name, many in signature(load_run(run)).inputs.items()
    }
    job = Job(
        run=run,
        config={"a": {"b": ["ü", None, 1.5]}},
        inputs=inputs,
        out="s3://b/out",
        scratch="s3://b/scratch",
        events="-",
        threads=3,
        code_digest="c0de",
        libraries={"torch": "2.13.0"},
    )
    assert parse(arguments_of(job)).job == job
    bare = Job(run=run, config={}, inputs=inputs, out="o")
    assert parse(arguments_of(bare)).job == bare


def test_what_is_no_stage_has_no_command_line() -> None:
    with pytest.raises(UsageError, match="json:loads is no stage of an image"):
        arguments_of(Job(run="json:loads", config={}, inputs={}, out="o"))


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["train", "--data", "d"], UsageError, "required: --out"),
        (["train", "--out", "o"], UsageError, "required: --data"),
        (["select", "--measured", "m", "--engines", "e", "--out", "o"], UsageError, "'e' is not NAME=URI"),
        (["train", "--data", "d", "--out", "o", "--config", "{"], ConfigInvalid, "--config is not JSON"),
        (["train", "--data", "d", "--out", "o", "--lineage", '{"x": 1}'], ConfigInvalid, "x: no such key"),
        (["train", "--data", "d", "--out", "o", "--threads", "-1"], UsageError, "negative"),
        (["train", "--data", "d", "--out", "o", "--set", "epochs"], ConfigInvalid, "is not KEY=VALUE"),
        (["train", "--data", "d", "--out", "o", "--dat", "e"], UsageError, "unrecognized"),
        (["train", "--executor-input", "{}"], UsageError, "outputs: Field required"),
        (
            ["peaks", "--out", "o", "--check", "train.epochs=-1"],
            ConfigInvalid,
            "train.epochs is not valid",
        ),
        (
            ["peaks", "--out", "o", "--check", "select.objective=fast"],
            ConfigInvalid,
            "select.objective.*latency_ms_p50",
        ),
        (["peaks", "--out", "o", "--check", "select.max_size_mb=-1"], ConfigInvalid, "more than 0"),
        (["peaks", "--out", "o", "--check", "select.size=1"], UsageError, "it has metric"),
    ],
)
def test_a_wrong_command_line_is_told(arguments: list[str], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        parse(arguments)


def test_what_later_steps_take_is_checked_and_what_is_unset_is_not() -> None:
    given = ("train.epochs=3", "select.max_size_mb=", "select.max_latency_ms_p99=2.5")
    flags = [part for item in given for part in ("--check", item)]
    assert parse(["peaks", "--out", "o", *flags]).job.config == {}


def test_a_command_line_that_is_refused_is_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["peaks", "--out", "o", "--events", "-", "--check", "train.epochs=-1"])
    assert ended.value.code == 3
    told = capsys.readouterr()
    [event] = events_in(told.out)
    assert (event["event"], event["exit_code"]) == ("failed", 3)
    assert told.err == f"error: {event['message']}\n"


def test_overrides_reach_defaults_and_an_empty_one_changes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = parse(
        [
            *("train", "--data", "d", "--out", "o", "--config", '{"model": "cnn", "epochs": 3}'),
            *("--set", "model.arguments.width=4", "--set", "epochs=", "--set", "augment.flip=true"),
            *("--set", "min_accuracy=null"),
        ]
    ).job.config
    assert config["model"] == {"architecture": "cnn", "arguments": {"width": 4}}
    assert (config["epochs"], config["augment"]["flip"]) == (3, True)
    assert validate(TrainConfig, config, where="it").required == {}
    assert capsys.readouterr().out == "--set epochs= has no value: epochs stays as it is\n"


def test_about(tmp_path: Path) -> None:
    done = entrypoint("--about")
    said = json.loads(done.stdout)
    assert said == about()
    assert said["hardware"] == hardware.identity() and said["source"] == source_digest()
    assert said["libraries"]["pydantic"].startswith("2.")
    assert "scikit-learn" in said["libraries"]


# ---------------------------------------------------------------------------------------------------- by URI


@pytest.fixture
def data_uri(bucket: Bucket, digits_data: Artifact[DatasetSpec]) -> str:
    uri = f"{bucket.uri}/data"
    upload(digits_data.path, uri)
    return uri


@pytest.mark.slow  # test_storage tries what it stands on
def test_a_stage_by_uri_writes_what_it_writes_by_path(
    bucket: Bucket, data_uri: str, digits_data: Artifact[DatasetSpec], tmp_path: Path
) -> None:
    common = ["train", "--config", json.dumps({"model": CNN}), "--set", "epochs=1", "--threads", "1"]
    lineage = json.dumps({"code_digest": "c0de", "libraries": {"torch": "x"}})
    out = f"{bucket.uri}/model"
    remote = entrypoint(
        *(*common, "--data", data_uri, "--out", out, "--scratch", f"{bucket.uri}/scratch"),
        *("--events", "-", "--lineage", lineage),
    )
    assert remote.returncode == 0, remote.stderr
    events = tmp_path / "events.jsonl"
    local = entrypoint(
        *(*common, "--data", str(digits_data.path), "--out", str(tmp_path / "m"), "--events", str(events))
    )
    assert local.returncode == 0, local.stderr

    last = json.loads(remote.stdout.splitlines()[-1])
    assert last["digest"] == json.loads(local.stdout.splitlines()[-1])["digest"]
    fetched = open_artifact(fetch(out, tmp_path / "fetched"), kind="model")
    assert fetched.digest == last["digest"]
    assert fetched.manifest.lineage.code_digest == "c0de"
    assert fetched.manifest.lineage.parents == {"data": digits_data.digest}
    assert {key.partition("/")[0] for key in bucket.listing()} == {"data", "model"}  # no checkpoints left
    assert {file.name for file in tmp_path.iterdir()} == {"events.jsonl", "fetched", "m"}

    told = events_in(remote.stdout)
    assert {"metric", "finished"} <= {event["event"] for event in told} <= {"metric", "progress", "finished"}
    assert told[-1]["digest"] == last["digest"] and told[-1]["metrics"] == last["metrics"]
    written = [json.loads(line) for line in events.read_text().splitlines()]
    named = [(event["event"], event.get("name")) for event in written if event["event"] != "progress"]
    assert named == [(e["event"], e.get("name")) for e in told if e["event"] != "progress"]
    assert EVENT_PREFIX not in local.stdout


def test_inputs_that_are_mappings(bucket: Bucket, tmp_path: Path) -> None:
    given = {}
    for name in ("one/x", "two"):
        job = Job(run=f"{__name__}:start", config={"text": name}, inputs={}, out=str(tmp_path / name))
        container.run(job)
        given[name] = f"{bucket.uri}/{name}"
        upload(tmp_path / name, given[name])
    container.run(Job(run=f"{__name__}:join", config={}, inputs={"parts": given}, out=f"{bucket.uri}/all"))
    assert bucket.get("all/text") == b"one/x+two"
    parents = json.loads(bucket.get("all/manifest.json"))["lineage"]["parents"]
    assert parents == {f"parts/{name}": read_manifest(tmp_path / name).digest for name in given}


@pytest.mark.parametrize("place", ["nothing", "half"])
def test_an_input_that_is_not_whole_is_named(bucket: Bucket, place: str) -> None:
    bucket.put("half/file", b"x")
    done = entrypoint(
        *("train", "--config", "{}", "--data", f"{bucket.uri}/{place}", "--out", f"{bucket.uri}/model"),
        *("--events", "-"),
    )
    assert done.returncode == 4
    assert error_of(done).startswith(f"error: there is no whole artifact at {bucket.uri}/{place}: it has no")
    [failed] = events_in(done.stdout)
    assert failed["event"] == "failed" and failed["exit_code"] == 4 and bucket.uri in failed["message"]


def test_a_store_that_refuses_is_one_line_and_exit_code_6(bucket: Bucket) -> None:
    arguments = ["train", "--data", "s3://absent-bucket/d", "--out", f"{bucket.uri}/m"]
    done = entrypoint(*arguments)
    assert done.returncode == 6 and "there is no bucket 'absent-bucket'" in error_of(done)


# ----------------------------------------------------------------------------------- what one attempt leaves


class Text(Config):
    text: str = "a"
    rejected: str = ""
    outages: int = 0


COUNTER: list[str] = []


def start(config: Text, *, out: Output) -> Result[ReportSpec]:
    """Write a text; be unavailable at first."""
    COUNTER.append(config.text)
    if len(COUNTER) <= config.outages:
        raise Unavailable("the registry does not answer", why="connection refused")
    (out.path / "text").write_text(config.text)
    return Result(ReportSpec(title="text"), {"attempts": len(COUNTER)}, rejected=config.rejected)


def join(config: Text, *, parts: dict[str, Artifact[ReportSpec]], out: Output) -> Result[ReportSpec]:
    (out.path / "text").write_text("+".join(part.file("text").read_text() for part in parts.values()))
    return Result(ReportSpec(title="all"))


@pytest.fixture
def job(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(patience, "PAUSES_S", (0, 0, 0))
    COUNTER.clear()
    return Job(
        run=f"{__name__}:start", config={}, inputs={}, out=f"{bucket.uri}/out", threads=2, code_digest="c0de"
    )


def test_an_infrastructure_that_comes_back_is_waited_for(
    job: Job, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    container.run(replace(job, config={"outages": 2}))
    assert len(COUNTER) == 3 and "out/manifest.json" in bucket.listing()
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0].startswith("the registry does not answer: connection refused; attempt 1 of 4")


def test_an_infrastructure_that_stays_away_ends_it(job: Job, bucket: Bucket) -> None:
    with pytest.raises(Unavailable, match="the registry does not answer"):
        container.run(replace(job, config={"outages": 9}))
    assert len(COUNTER) == 4 and bucket.listing() == []


def test_what_an_earlier_attempt_finished_is_not_repeated(
    job: Job, bucket: Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    first = container.run(job)
    bucket.put("scratch/checkpoints-1/a")  # it was killed before it could tidy up
    assert container.run(replace(job, scratch=f"{bucket.uri}/scratch")) == first
    assert len(COUNTER) == 1 and "scratch/checkpoints-1/a" not in bucket.listing()
    assert "an earlier attempt at the same work" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changed", [{"config": {"text": "b"}}, {"code_digest": "other"}, {"code_digest": ""}]
)
def test_other_work_at_the_same_place_is_refused(job: Job, bucket: Bucket, changed: dict[str, Any]) -> None:
    container.run(job)
    before = bucket.get("out/manifest.json")
    with pytest.raises(UsageError, match="exists already"):
        container.run(replace(job, **changed))
    assert bucket.get("out/manifest.json") == before and len(COUNTER) == 1


def test_a_path_that_is_taken_is_refused_and_an_empty_folder_is_not(job: Job, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    container.run(replace(job, out=str(tmp_path / "empty")))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(UsageError, match="exists already"):
        container.run(replace(job, out=str(tmp_path / "taken")))


def test_what_a_gate_refused_is_kept_and_refused_again(job: Job, bucket: Bucket) -> None:
    refused = replace(job, config={"rejected": "too slow"})
    for _ in range(2):
        with pytest.raises(GateFailed, match="refused by its gate: too slow"):
            container.run(refused)
    assert len(COUNTER) == 1
    assert json.loads(bucket.get("out/manifest.json"))["rejected"] == "too slow"
    with pytest.raises(StageFailed, match="was rejected by a gate"):
        container.run(Job(f"{__name__}:join", {}, {"parts": {"a": job.out}}, f"{bucket.uri}/all"))


def test_only_the_first_of_a_group_publishes(
    job: Job, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with container.reporting(replace(job, events="-"), None) as quiet:
        assert quiet.events == ""
        container.run(replace(quiet, scratch=f"{bucket.uri}/scratch"))
    assert len(COUNTER) == 1 and bucket.listing() == []
    with pytest.raises(Unavailable):  # the launcher starts all of them again
        container.run(replace(job, config={"outages": 9}))
    assert len(COUNTER) == 2


# ---------------------------------------------------------------------------------------- stopped and killed


def wait_until(happened: Callable[[], object], process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.slow  # test_resume does it on a disk, and test_storage tries what brings checkpoints to a store
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_training_that_was_ended_goes_on_elsewhere(
    bucket: Bucket, data_uri: str, digits_data: Artifact[DatasetSpec], tmp_path: Path, number: signal.Signals
) -> None:
    """In a pod that is stopped or lost, nothing on its disk survives."""
    every_s = 3600 if number == signal.SIGTERM else 0.05
    config = {"model": CNN, "epochs": 16, "checkpoint_every_s": every_s}
    common = ["train", "--config", json.dumps(config), "--threads", "1", "--data", data_uri]
    scratch = ["--scratch", f"{bucket.uri}/scratch", "--events", "-"]
    command = [*ENTRYPOINT, *common, "--out", f"{bucket.uri}/disturbed", *scratch]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as attempt:
        assert attempt.stdout
        while not attempt.stdout.readline().startswith(f'{EVENT_PREFIX}{{"event": "progress"'):
            assert attempt.poll() is None
        if number == signal.SIGKILL:
            wait_until(lambda: [key for key in bucket.listing() if key.startswith("scratch/")], attempt)
        attempt.send_signal(number)
        out, err = attempt.communicate(timeout=60)
    assert attempt.returncode == (143 if number == signal.SIGTERM else -number), err
    kept = [key for key in bucket.listing() if key.startswith("scratch/")]
    assert kept and all(key.endswith(".safetensors") for key in kept)
    if number == signal.SIGTERM:
        assert events_in(out)[-1]["exit_code"] == 143

    resumed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming in epoch" in resumed.stdout
    whole = entrypoint(*common, "--out", f"{bucket.uri}/undisturbed")
    assert json.loads(whole.stdout.splitlines()[-1])["digest"] == events_in(resumed.stdout)[-1]["digest"]
    assert not [key for key in bucket.listing() if key.startswith("scratch/")]
