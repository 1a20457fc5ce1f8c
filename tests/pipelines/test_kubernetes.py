"""Steps as Jobs, against a small API server with scripted pods and moto's S3."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Listener

from hpml.components.export import stage as export
from hpml.core.errors import ConfigInvalid, ExitCode, StageFailed, Unavailable
from hpml.io import storage
from hpml.measuring.subjects import EngineSubject
from hpml.pipelines import graph, recipe
from hpml.pipelines.bench import measurable
from hpml.pipelines.cluster import causes
from hpml.pipelines.cluster import client as kube
from hpml.pipelines.cluster import doctor as cluster_doctor
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.cache_keys import CacheKeyInputs
from hpml.pipelines.engine.execution import Execution, Settings, forecast
from hpml.pipelines.engine.run_record import RunRecord, StepRecord
from hpml.pipelines.executors import cluster_job
from hpml.pipelines.executors.base import Executor, StepExit
from hpml.pipelines.executors.cluster_job import JobOutcome, JobRunner
from hpml.pipelines.executors.kubernetes import Jobs
from hpml.pipelines.plan import Plan, trace
from hpml.targets import Onnx
from tests.pipelines.fake_jobs import DIGEST, FakeJobs, Program, Write, ends

Json = dict[str, Any]
FASTER = 10
RUN = "small-20260101-000000-abcd"
RECIPE = """
name: small
data: digits
train: {model: {architecture: cnn, arguments: {width: 4}}, epochs: 1}
cluster: {pending_s: 1}
"""
ENTRYPOINT = ["python", "-m", "hpml.components"]


@pytest.fixture
def cluster(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeJobs]:
    """A cluster with all that k8s/base sets up, and an empty bucket."""
    import requests

    for module, name in (
        (kube, "RETRY_EVERY_S"),
        (kube, "LOOK_EVERY_S"),
        (cluster_job, "_LOOK_EVERY_S"),
        (causes, "SAY_AFTER_S"),
    ):
        monkeypatch.setattr(module, name, 0.05)
    # By this clock, a pod that waits has soon waited for `pending_s`.
    monkeypatch.setattr(causes, "time", SimpleNamespace(monotonic=lambda: FASTER * time.monotonic()))
    secret = {"AWS_ACCESS_KEY_ID": "theirs", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
    for name in (*secret, "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "")  # so that what `use_store` sets does not outlive the test
        monkeypatch.delenv(name)
    requests.post(f"{s3_endpoint}/moto-api/reset", timeout=10)
    requests.put(f"{s3_endpoint}/hpml", timeout=10)  # a bucket
    fake = FakeJobs()
    fake.add_secret("hpml-store", AWS_ENDPOINT_URL=s3_endpoint, **secret)
    for account in ("hpml-stage", "hpml-launcher"):
        fake.add("serviceaccounts", {"metadata": {"name": account}})
    with fake.serving() as serving:
        monkeypatch.setenv("KUBECONFIG", str(serving.kubeconfig(tmp_path / "kubeconfig")))
        yield serving


@pytest.fixture
def listener() -> Listener:
    return Listener()


@dataclass
class Bench:
    """A place, and what a test does with it."""

    jobs: Jobs
    plan: Plan
    home: Path

    def start(self, step: str, **config: Any) -> int:
        node = self.plan.nodes[step]
        logs = self.home / RUN / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        job = {
            "run": node.run_path,
            "config": {**node.config.model_dump(mode="json"), **config},
            "inputs": {name: f"s3://hpml/artifacts/{name}" for name in node.inputs},
            "out": "s3://hpml/artifacts/new",
            "scratch": "s3://hpml/scratch/key",
            "events": str(logs / f"{step}.events.jsonl"),
            "threads": 1,
            "import_paths": ("/home/of/the/user",),
            "code_digest": "digest",
            "libraries": {},
        }
        return self.jobs.start(node, job, logs / f"{step}.log")

    def end(self, timeout_s: float = 20) -> StepExit:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for ended in self.jobs.ended(0.1):
                return ended
        raise AssertionError("no step ended")

    def log(self, step: str) -> str:
        return (self.home / RUN / "logs" / f"{step}.log").read_text()

    def events(self, step: str) -> list[Json]:
        lines = (self.home / RUN / "logs" / f"{step}.events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def open_jobs(cluster: FakeJobs, tmp_path: Path, listener: Listener) -> Callable[..., Bench]:
    """A place for the recipe above, with overrides."""

    def make(*overrides: str, tracking: bool = True) -> Bench:
        file = tmp_path / "small.yaml"
        file.write_text(RECIPE)
        loaded = recipe.load(file, overrides)
        settings = Settings(home=tmp_path / "runs", tracking_uri="http://mlflow:5000" if tracking else "")
        jobs = Jobs(loaded, settings, RUN, listener)
        return Bench(jobs, trace(graph.graph, loaded.recipe), tmp_path / "runs")

    return make


def environment(pod: Json) -> dict[str, str]:
    return {item["name"]: item.get("value", "") for item in pod["spec"]["containers"][0]["env"]}


# ----------------------------------------------------------------------------------------- a step and its Job


def test_it_is_a_place(open_jobs: Callable[..., Bench]) -> None:
    place: Executor = open_jobs().jobs
    assert place.cpus is None
    assert place.tracks


def test_the_output_of_a_step_is_parted_into_log_and_events(
    open_jobs: Callable[..., Bench], cluster: FakeJobs
) -> None:
    progress = {"event": "progress", "time_s": 1.0, "done": 1, "total": 2, "unit": "steps", "note": ""}
    cluster.program = ends("hello", f"#hpml {json.dumps(progress)}", '#hpml {"event": "nonsense"}', "bye")
    bench = open_jobs()
    number = bench.start("prepare")
    ended = bench.end()
    assert (ended.job, ended.exit_code) == (number, 0)
    assert bench.log("prepare") == 'hello\n#hpml {"event": "nonsense"}\nbye\n'
    assert bench.events("prepare") == [progress]


def test_what_a_pod_is_told(open_jobs: Callable[..., Bench], cluster: FakeJobs) -> None:
    bench = open_jobs("cluster.queue=gpus", "cluster.stages.prepare.timeout_s=77")
    cluster.runs_pods = False
    bench.jobs._runtime_environment = _Everywhere()  # type: ignore[assignment]
    bench.start("prepare", licence="costs $(AWS_SECRET_ACCESS_KEY)")
    job = _wait_for(lambda: next(iter(cluster.jobs.values()), None))
    assert job["spec"]["activeDeadlineSeconds"] == 77
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert job["metadata"]["labels"]["hpml.dev/run"] == RUN
    [owner] = job["metadata"]["ownerReferences"]
    assert owner["uid"] == cluster.all("configmaps")[0]["metadata"]["uid"]
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:4] == [*ENTRYPOINT, "prepare"]
    assert command[command.index("--events") + 1] == "-"
    assert "costs $$(AWS_SECRET_ACCESS_KEY)" in command[command.index("--config") + 1]
    assert "/home/of/the/user" not in json.dumps(job)
    assert environment(job["spec"]["template"])["HPML_RUN"] == RUN


def test_a_training_on_nodes_is_launched(open_jobs: Callable[..., Bench], cluster: FakeJobs) -> None:
    bench = open_jobs("train.nodes=2", "train.batch_size=64")
    cluster.program = ends()
    bench.start("train")
    bench.end()
    job = cluster.jobs[f"train-{RUN}"]
    pod = job["spec"]["template"]
    command = pod["spec"]["containers"][0]["command"]
    assert command[:3] == ["python", "-m", "hpml.pipelines.operators.pytorchjob"]
    assert command[command.index("--run") + 1 : command.index("--run") + 5] == [
        RUN,
        "--step",
        "train",
        "train",
    ]
    assert pod["spec"]["serviceAccountName"] == "hpml-launcher"
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "launcher"
    assert pod["spec"]["containers"][0]["image"].startswith("hpml-client:")
    [name] = [item for item in pod["spec"]["containers"][0]["env"] if item["name"] == "HPML_POD_NAME"]
    assert name["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


def test_only_the_last_step_ends_the_run_in_mlflow(
    open_jobs: Callable[..., Bench], cluster: FakeJobs
) -> None:
    bench = open_jobs()
    bench.jobs.prepare(tuple(bench.plan.nodes[name] for name in ("report", "bundle")))
    for step in ("report", "bundle"):
        bench.start(step)
        bench.end()
    last = {
        name: environment(job["spec"]["template"]).get("HPML_LAST")
        for name, job in cluster.jobs.items()
        if "about" not in name
    }
    assert last == {f"report-{RUN}": None, f"bundle-{RUN}": "1"}


def test_a_run_that_is_not_tracked_tells_its_pods_no_run(
    open_jobs: Callable[..., Bench], cluster: FakeJobs
) -> None:
    bench = open_jobs(tracking=False)
    bench.start("prepare")
    bench.end()
    told = environment(cluster.jobs[f"prepare-{RUN}"]["spec"]["template"])
    assert "HPML_RUN" not in told
    assert told["MLFLOW_TRACKING_URI"]  # the registry is there all the same


class _Everywhere(dict[str, Any]):
    """RuntimeEnvironment that need not be asked for."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> Any:
        from hpml.pipelines.engine.cache_keys import here

        return here()


def _wait_for(look: Callable[[], Any], seconds: float = 20) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = look()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not come")


# ---------------------------------------------------------------------------------------------- how steps end


def failed_event(message: str, code: int) -> str:
    event = {"event": "failed", "time_s": 1.0, "message": message, "exit_code": code, "traceback": "..."}
    return f"#hpml {json.dumps(event)}"


def oom_killed(cluster: FakeJobs) -> Program:
    def program(pod: Json, write: Write, stop: threading.Event) -> int:
        write(failed_event("a worker died", ExitCode.STAGE_FAILED))
        cluster.end_pod(pod, 137, "OOMKilled")
        return -1

    return program


def evicted(cluster: FakeJobs) -> Program:
    def program(pod: Json, write: Write, stop: threading.Event) -> int:
        write(failed_event("stopped by SIGTERM -> run again to resume", ExitCode.TERMINATED))
        disrupted = {"type": "DisruptionTarget", "status": "True", "message": "the node is drained"}
        pod["status"]["conditions"] = [disrupted]
        cluster.end_pod(pod, 143)
        return -1

    return program


def past_its_deadline(cluster: FakeJobs) -> Program:
    def program(pod: Json, write: Write, stop: threading.Event) -> int:
        write(failed_event("stopped by SIGTERM -> run again to resume", ExitCode.TERMINATED))
        cluster.fail_job(pod["metadata"]["labels"]["job-name"], "DeadlineExceeded")
        cluster.end_pod(pod, 143)
        return -1

    return program


def deleted(cluster: FakeJobs) -> Program:
    def program(pod: Json, write: Write, stop: threading.Event) -> int:
        cluster.remove("pods", pod["metadata"]["name"])
        cluster.fail_job(pod["metadata"]["labels"]["job-name"], "BackoffLimitExceeded")
        return -1

    return program


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [
        (lambda _: ends(failed_event("too slow", 5), code=5), ExitCode.GATE_FAILED, "too slow"),
        (lambda _: ends(code=7), ExitCode.STAGE_FAILED, "with exit code 7"),
        (lambda _: ends(code=139), ExitCode.STAGE_FAILED, "by signal 11"),
        (oom_killed, ExitCode.STAGE_FAILED, "more memory than its limit of 1Gi"),
        (evicted, ExitCode.UNAVAILABLE, "the node is drained -> run again: it resumes"),
        (past_its_deadline, ExitCode.STAGE_FAILED, "longer than its timeout of 14400 s"),
        (deleted, ExitCode.UNAVAILABLE, "its pod was deleted or evicted"),
    ],
)
def test_why_a_step_failed(
    open_jobs: Callable[..., Bench],
    cluster: FakeJobs,
    program: Callable[[FakeJobs], Program],
    code: ExitCode,
    message: str,
) -> None:
    cluster.program = program(cluster)
    bench = open_jobs()
    bench.start("prepare")
    assert bench.end().exit_code
    [failure] = [event for event in bench.events("prepare") if event["event"] == "failed"]
    assert failure["exit_code"] == code
    assert message in failure["message"]


def test_an_image_that_cannot_be_had_is_given_up_and_said_meanwhile(
    open_jobs: Callable[..., Bench], cluster: FakeJobs, listener: Listener
) -> None:
    bench = open_jobs()
    bench.jobs.runtime_environment("prepare")
    cluster.runs_pods = False
    bench.start("prepare")
    job = _wait_for(lambda: cluster.jobs.get(f"prepare-{RUN}"))
    pod = cluster.pod_of(job)
    cluster.set_state(pod, "Pending", "step", waiting={"reason": "ErrImagePull", "message": "no such image"})
    bench.end()
    [failure] = bench.events("prepare")
    assert failure["exit_code"] == ExitCode.UNAVAILABLE
    assert (
        "given up after 1 s: the node cannot get the image the/image:1: no such image" in failure["message"]
    )
    assert any(text.startswith("prepare: waiting, for 1 s") for text in listener.said)
    assert not cluster.all("jobs"), "it would start when nobody looks any more"


def test_room_is_waited_for_until_the_deadline(
    open_jobs: Callable[..., Bench], cluster: FakeJobs, listener: Listener
) -> None:
    bench = open_jobs()
    bench.jobs.runtime_environment("prepare")
    cluster.runs_pods = False
    bench.start("prepare")
    job = _wait_for(lambda: cluster.jobs.get(f"prepare-{RUN}"))
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "Insufficient gpu",
    }
    cluster.pod_of(job)["status"]["conditions"] = [condition]
    _wait_for(lambda: any("Insufficient gpu" in text for text in listener.said))
    time.sleep(1.2 / FASTER)  # more than pending_s
    assert bench.jobs.ended(0) == []
    cluster.fail_job(f"prepare-{RUN}", "DeadlineExceeded")  # in the order of the Job controller
    cluster.remove("pods", f"prepare-{RUN}-x")
    bench.end()
    [failure] = bench.events("prepare")
    assert failure["exit_code"] == ExitCode.UNAVAILABLE
    assert "did not start within 14400 s: no node has room" in failure["message"]


def test_another_image_of_the_same_name_is_refused(
    open_jobs: Callable[..., Bench], cluster: FakeJobs
) -> None:
    bench = open_jobs()
    assert bench.jobs.runtime_environment("prepare").image == DIGEST
    cluster.image = "cd" * 32
    bench.start("prepare")
    bench.end()
    [failure] = bench.events("prepare")
    assert failure["exit_code"] == ExitCode.CONFIG_INVALID
    assert "another image of the same name" in failure["message"]


def test_an_outage_of_the_api_loses_no_line(open_jobs: Callable[..., Bench], cluster: FakeJobs) -> None:
    bench = open_jobs()
    bench.jobs.runtime_environment("prepare")

    def program(pod: Json, write: Write, stop: threading.Event) -> int:
        for number in range(60):
            write(f"line {number}")
            if number == 20:
                cluster.outage.set()
            if number == 40:
                cluster.outage.clear()
            time.sleep(0.02)
        return 0

    cluster.program = program
    bench.start("prepare")
    assert bench.end().exit_code == 0
    assert bench.log("prepare").splitlines() == [f"line {number}" for number in range(60)]


def test_a_cluster_that_is_lost_fails_the_step(
    open_jobs: Callable[..., Bench],
    cluster: FakeJobs,
    listener: Listener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hpml.pipelines.executors.kubernetes._PATIENCE_S", 0.3)
    bench = open_jobs()
    bench.jobs.runtime_environment("prepare")

    def program(pod: Json, write: Write, stop: threading.Event) -> int:
        cluster.outage.set()
        return 0

    cluster.program = program
    bench.start("prepare")
    assert bench.end().exit_code == ExitCode.UNAVAILABLE
    assert "does not answer" in bench.events("prepare")[-1]["message"]
    bench.jobs.close("failed")
    assert any("was not cleared away" in text and "delete configmap" in text for text in listener.said)


# ------------------------------------------------------------------------------------------ stopping, closing


def saves_on_sigterm(pod: Json, write: Write, stop: threading.Event) -> int:
    write("working")
    stop.wait(20)
    write("saved")
    write(failed_event("stopped by SIGTERM -> run again to resume", ExitCode.TERMINATED))
    return ExitCode.TERMINATED


def test_sigterm_deletes_the_job_and_hears_what_it_still_says(
    open_jobs: Callable[..., Bench], cluster: FakeJobs
) -> None:
    cluster.program = saves_on_sigterm
    bench = open_jobs()
    number = bench.start("prepare")
    _wait_for(lambda: "working" in bench.log("prepare"))
    bench.jobs.signal(number, signal.SIGTERM)
    assert bench.end().exit_code == ExitCode.TERMINATED
    assert bench.log("prepare").splitlines()[-1] == "saved"
    assert bench.events("prepare")[-1]["exit_code"] == ExitCode.TERMINATED
    assert not [job for job in cluster.all("jobs") if job["metadata"]["name"] == f"prepare-{RUN}"]


def test_sigkill_waits_for_nothing(open_jobs: Callable[..., Bench], cluster: FakeJobs) -> None:
    def stubborn(pod: Json, write: Write, stop: threading.Event) -> int:
        threading.Event().wait(20)
        return 0

    cluster.program = stubborn
    bench = open_jobs()
    number = bench.start("prepare")
    _wait_for(lambda: cluster.jobs.get(f"prepare-{RUN}"))
    cluster.outage.set()
    bench.jobs.signal(number, signal.SIGKILL)
    assert bench.end(timeout_s=15).exit_code == ExitCode.TERMINATED
    assert bench.jobs.ended(0) == []
    cluster.outage.clear()


def test_nothing_is_left_of_a_run_that_is_done(open_jobs: Callable[..., Bench], cluster: FakeJobs) -> None:
    bench = open_jobs()
    for step in ("prepare", "report"):
        bench.start(step)
        bench.end()
    assert cluster.all("jobs")
    bench.jobs.close("done")
    assert not cluster.all("configmaps")
    _wait_for(lambda: not cluster.all("jobs"))  # by the garbage collector, which comes after


def test_of_a_run_that_failed_what_failed_is_kept(
    open_jobs: Callable[..., Bench], cluster: FakeJobs, listener: Listener
) -> None:
    bench = open_jobs()
    bench.start("prepare")
    bench.end()
    cluster.program = ends(code=7)
    bench.start("report")
    bench.end()
    bench.jobs.close("failed")
    [kept] = cluster.all("jobs")
    assert kept["metadata"]["name"] == f"report-{RUN}"
    assert kept["spec"]["ttlSecondsAfterFinished"] == 3600
    assert not cluster.all("configmaps")
    assert any(f"describe job report-{RUN}" in text for text in listener.said)


def test_what_a_step_could_not_tell_mlflow_is_left_for_the_next(
    open_jobs: Callable[..., Bench], cluster: FakeJobs
) -> None:
    cluster.program = oom_killed(cluster)
    bench = open_jobs()

    def mute(pod: Json, write: Write, stop: threading.Event) -> int:
        cluster.end_pod(pod, 137, "OOMKilled")
        return -1

    cluster.program = mute
    bench.start("prepare")
    bench.end()
    bench.jobs.close("failed")
    [name] = storage.list_names(f"s3://hpml/tracking/{RUN}")
    told = [json.loads(line) for line in storage.read_text(f"s3://hpml/tracking/{RUN}/{name}").splitlines()]
    assert [(event["step"], event["status"]) for event in told] == [("prepare", "FAILED"), ("", "FAILED")]
    assert "more memory than" in told[0]["tags"]["error"]


# ----------------------------------------------------------------------------------------------- before a run


def test_an_image_is_asked_once_for_all_alike(open_jobs: Callable[..., Bench], cluster: FakeJobs) -> None:
    bench = open_jobs()
    for stage in ("prepare", "report", "train", "select", "compress"):
        assert bench.jobs.runtime_environment(stage).hardware == cluster.about["hardware"]
    assert len(cluster.jobs) == 2  # one CPU, and two
    assert not cluster.all("jobs")
    assert bench.jobs.runtime_environment("prepare").version("Torch_Pruning")


def test_an_image_with_other_code_is_refused(open_jobs: Callable[..., Bench], cluster: FakeJobs) -> None:
    cluster.about = {**cluster.about, "source": "another"}
    with pytest.raises(ConfigInvalid, match="other code than this installation"):
        open_jobs().jobs.runtime_environment("prepare")


def test_an_image_without_what_the_network_needs_is_refused(
    open_jobs: Callable[..., Bench], cluster: FakeJobs
) -> None:
    bench = open_jobs("data=chitchat", "train.model={architecture: transformers}")
    cluster.about = {**cluster.about, "libraries": {"torch": "2"}}
    with pytest.raises(
        ConfigInvalid, match=r"hpml-cpu:.* cannot run train: .* transformers.*docker/README.md"
    ):
        bench.jobs.check(bench.plan)
    assert not any("train" in name for name in cluster.jobs)


@pytest.mark.parametrize("said", [{"hello": "world"}, ["no", "mapping"], 3])
def test_an_image_that_is_not_ours_is_named(
    open_jobs: Callable[..., Bench], cluster: FakeJobs, said: Any
) -> None:
    cluster.about = said
    with pytest.raises(Unavailable, match=r"hpml-cpu:.* does not say what it holds"):
        open_jobs().jobs.runtime_environment("prepare")


@pytest.mark.parametrize(
    ("lack", "message"),
    [
        (lambda fake: fake.remove("namespaces", "hpml"), "no namespace hpml at http.*kubectl apply -k"),
        (lambda fake: fake.remove("serviceaccounts", "hpml-stage"), "no serviceaccount hpml-stage"),
        (lambda fake: fake.remove("secrets", "hpml-store"), "no secret hpml-store.*make-secrets"),
        (lambda fake: fake.denied.update({("create", "jobs")}), "may not create jobs -> .*hpml-submitter"),
        (lambda fake: fake.denied.update({("get", "pods/log")}), "may not get pods/log"),
    ],
)
def test_what_the_cluster_lacks_is_said_before_anything_starts(
    open_jobs: Callable[..., Bench], cluster: FakeJobs, lack: Callable[[FakeJobs], Any], message: str
) -> None:
    bench = open_jobs()
    lack(cluster)
    with pytest.raises(Unavailable, match=message) as raised:
        bench.jobs.check(bench.plan)
    assert raised.value.exit_code == ExitCode.UNAVAILABLE
    assert not cluster.jobs


def test_everything_that_is_lacking_is_said(
    open_jobs: Callable[..., Bench], cluster: FakeJobs, listener: Listener
) -> None:
    bench = open_jobs()
    cluster.remove("serviceaccounts", "hpml-stage")
    cluster.remove("secrets", "hpml-store")
    with pytest.raises(Unavailable, match="serviceaccount hpml-stage"):
        bench.jobs.check(bench.plan)
    assert any("no secret hpml-store" in text for text in listener.said)


def test_a_registry_needs_mlflow(open_jobs: Callable[..., Bench]) -> None:
    bench = open_jobs("cluster.tracking_uri=''")
    with pytest.raises(ConfigInvalid, match="register has no registry -> set cluster"):
        bench.jobs.check(bench.plan)


def test_files_of_this_machine_are_named(
    open_jobs: Callable[..., Bench], tmp_path: Path, listener: Listener
) -> None:
    (tmp_path / "images").mkdir()
    bench = open_jobs("data={source: folder, path: images}")
    bench.jobs.check(bench.plan)
    assert any(f"prepare reads {tmp_path / 'images'}" in text for text in listener.said)


# ------------------------------------------------------------------------------------------------- the store


def test_the_store_is_used_as_its_secret_says(
    open_jobs: Callable[..., Bench], s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of the account that this shell is used with")
    open_jobs()
    assert os.environ["AWS_ACCESS_KEY_ID"] == "theirs"
    assert os.environ["AWS_ENDPOINT_URL"] == s3_endpoint


def test_the_endpoint_of_the_environment_counts_more(
    open_jobs: Callable[..., Bench], cluster: FakeJobs, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.add_secret(
        "hpml-store",
        AWS_ENDPOINT_URL="http://seaweedfs:8333",
        AWS_ACCESS_KEY_ID="a",
        AWS_SECRET_ACCESS_KEY="b",
    )
    with pytest.raises(Unavailable, match="port-forward service/seaweedfs 8333, and export AWS_ENDPOINT_URL"):
        open_jobs()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    open_jobs()


def test_without_the_right_to_read_the_secret_the_environment_counts(
    open_jobs: Callable[..., Bench],
    cluster: FakeJobs,
    listener: Listener,
    s3_endpoint: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster.denied.add(("get", "secrets"))
    with pytest.raises(Unavailable, match="no credentials for the store s3://hpml: you may not read"):
        open_jobs()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "mine")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "mine")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    open_jobs()
    assert any("AWS_ACCESS_KEY_ID of the environment" in text for text in listener.said)


def test_a_cluster_that_does_not_answer_is_one_line(
    open_jobs: Callable[..., Bench], cluster: FakeJobs
) -> None:
    cluster.outage.set()
    with pytest.raises(Unavailable, match=r"the cluster at http://127.0.0.1:.* does not answer"):
        open_jobs()


# ------------------------------------------------------------------------------------------------ a whole run


def as_a_process(pod: Json, write: Write, stop: threading.Event) -> int:
    """What a node does: run the command of a pod in its environment."""
    command = [part.replace("$$", "$") for part in pod["spec"]["containers"][0]["command"]]
    told = {key: value for key, value in environment(pod).items() if key.startswith("HPML")}
    answer = subprocess.run(
        [sys.executable, *command[1:]],
        env={**os.environ, **told},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    for line in answer.stdout.splitlines():
        write(line)
    return answer.returncode


def test_a_plan_runs_and_is_found_again(
    open_jobs: Callable[..., Bench], cluster: FakeJobs, listener: Listener
) -> None:
    """With the real entrypoint, as processes of this machine that hand over through S3."""

    def waits_and_works(pod: Json, write: Write, stop: threading.Event) -> int:
        write('#hpml {"event": "note", "time_s": 1.0, "text": "waits for room"}')
        return as_a_process(pod, write, stop)

    cluster.program = waits_and_works

    def run() -> RunRecord:
        bench = open_jobs("cluster.tracking_uri=''", tracking=False)
        plan = bench.plan.needed_for("train")
        bench.jobs.check(plan)
        settings = Settings(home=bench.home)
        record = run_record.start(bench.home, run_record.new_run_id("small"), "small", "", plan)
        return Execution(plan, record, settings, listener, bench.jobs).execute()

    first = run()
    assert first.status == "done", [step.error for step in first.steps.values()]
    assert first.steps["train"].peak_rss_bytes > 0
    assert "train: waits for room" in listener.said
    bench = open_jobs("cluster.tracking_uri=''")
    plan = bench.plan.needed_for("train")
    foreseen = forecast(plan, Settings(home=bench.home), bench.jobs)
    assert [item.outcome for item in foreseen] == ["cached", "cached"]
    second = run()
    assert {step.status for step in second.steps.values()} == {"cached"}
    assert second.steps["train"].digest == first.steps["train"].digest


def test_an_engine_of_a_run_is_brought_here_to_be_measured(
    open_jobs: Callable[..., Bench],
    cluster: FakeJobs,
    digits_data: Any,
    small_model: Any,
    run_stage_once: Any,
) -> None:
    bench = open_jobs()
    engine = run_stage_once(export.run, Onnx(), model=small_model, data=digits_data)
    delivered = bench.jobs.store.incoming("export-onnx")
    storage.upload(engine.path, delivered)
    digest = bench.jobs.store.accept(delivered, "the-key", CacheKeyInputs({}), "export-onnx")
    step = StepRecord(stage="export", status="done", key="the-key", digest=digest)
    record = RunRecord(
        id=RUN,
        recipe="small",
        recipe_file="/there/small.yaml",
        store="s3://hpml",
        status="done",
        started_at_s=1.0,
        steps={"export-onnx": step},
    )
    (bench.home / RUN).mkdir(parents=True)
    run_record.save(bench.home, record)
    (bench.home / RUN / "recipe.yaml").write_text(RECIPE)
    wanted, here = f"{RUN}:fp32/onnx", bench.home / ".store" / "objects" / digest

    assert not here.exists()
    found = measurable.measurable(wanted, measurable.Hints(bench.home))
    assert isinstance(found.subject, EngineSubject) and found.subject.folder == here.resolve()
    assert (here / "model.onnx").exists()

    shutil.move(here, here.with_name("elsewhere"))
    storage.delete(delivered)
    with pytest.raises(StageFailed, match=r"no longer in s3://hpml: .*--executor kubernetes"):
        measurable.measurable(wanted, measurable.Hints(bench.home))

    shutil.move(here.with_name("elsewhere"), here)
    cluster.outage.set()
    assert measurable.measurable(wanted, measurable.Hints(bench.home)) == found, (
        "it is here: no cluster needed"
    )


# --------------------------------------------------------------------------------------- what the Role grants


def test_what_we_do_is_what_the_role_of_the_manifests_grants() -> None:
    import yaml

    file = Path(__file__).parents[2] / "k8s" / "base" / "access.yaml"
    [role] = [
        item
        for item in yaml.safe_load_all(file.read_text())
        if item["kind"] == "Role" and item["metadata"]["name"] == "hpml-submitter"
    ]
    granted = {
        (f"{group}/v1".lstrip("/"), plural, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for plural in rule["resources"]
        for verb in rule["verbs"]
    }
    wanted = {
        (resource.api, resource.plural, verb) for resource, verbs in cluster_doctor.RIGHTS for verb in verbs
    }
    assert wanted <= granted


def test_an_attendant_that_is_stopped_before_its_job_exists_deletes_it(cluster: FakeJobs) -> None:
    template = {"metadata": {"labels": {}}, "spec": {"containers": [{"name": "step", "command": ["x"]}]}}
    body = {"kind": "Job", "metadata": {"name": "early"}, "spec": {"suspend": False, "template": template}}
    job_runner = JobRunner(kube.connect("hpml"), body, 10, 1, print, print)
    cluster.runs_pods = False
    job_runner.stop()
    assert job_runner.attend() == JobOutcome(ExitCode.TERMINATED, "it was stopped")
    assert not cluster.all("jobs")
