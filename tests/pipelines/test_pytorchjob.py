"""The PyTorchJob of a training, and its launcher against a small API server with scripted pods."""

from __future__ import annotations

import copy
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml

from hpml.artifacts.folder import open_artifact, seal_artifact
from hpml.artifacts.report import ReportSpec
from hpml.components.__main__ import Job
from hpml.core.contract import Events
from hpml.core.errors import ExitCode, HpmlError, StageFailed, Terminated, Unavailable, UsageError
from hpml.io import storage
from hpml.pipelines.cluster import causes, follower, pods
from hpml.pipelines.cluster import client as kube
from hpml.pipelines.cluster.client import Namespace, connect
from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.operators import follow as launch
from hpml.pipelines.operators import launcher
from hpml.pipelines.operators.base import Training
from hpml.pipelines.operators.follow import Launch
from hpml.pipelines.operators.pytorchjob import PyTorchJobs
from tests.conftest import LINEAGE
from tests.pipelines.fake_cluster import FakeCluster
from tests.pipelines.training_jobs import check_against, definition, training

Json = dict[str, Any]
FASTER = 10
OPERATOR = "github.com/kubeflow/training-operator@v1.8.1"


# ------------------------------------------------------------------------------------------------- the job


@pytest.mark.parametrize(
    "subject",
    [
        training(),
        training({"queue": "gpus"}, nproc_per_node=2, min_nodes=1, nodes=4, batch_size=48),
        training(
            {
                "stages": {
                    "train": {
                        "gpus": 1,
                        "cpus": 0.5,
                        "node_selector": {"gpu": "a100"},
                        "tolerations": [{"key": "nvidia.com/gpu"}],
                    }
                },
                "image_pull_secrets": ["registry"],
            }
        ),
    ],
    ids=["plain", "elastic", "on GPUs"],
)
def test_the_job_is_what_the_operator_defines(subject: Training) -> None:
    kind = definition(OPERATOR, "pytorchjobs")
    job = PyTorchJobs().job(subject)
    check_against(kind, job)
    job["spec"]["elasticPolicy"]["minReplica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="minReplica"):
        check_against(kind, job)


def test_its_workers_meet_without_an_init_container() -> None:
    spec = PyTorchJobs().job(training(nproc_per_node=2))["spec"]
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"]
    assert spec["elasticPolicy"]["rdzvBackend"] == "c10d"
    assert (spec["elasticPolicy"]["minReplicas"], spec["elasticPolicy"]["maxReplicas"]) == (2, 2)
    assert spec["pytorchReplicaSpecs"]["Worker"]["replicas"] == 2
    assert spec["nprocPerNode"] == "2"


def test_an_elastic_training_may_go_on_with_fewer() -> None:
    spec = PyTorchJobs().job(training(nodes=4, min_nodes=2, batch_size=48))["spec"]
    assert (spec["elasticPolicy"]["minReplicas"], spec["elasticPolicy"]["maxReplicas"]) == (2, 4)


def test_only_what_another_try_could_mend_is_started_again() -> None:
    spec = PyTorchJobs().job(training())["spec"]
    assert spec["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] == "ExitCode"
    assert spec["elasticPolicy"]["maxRestarts"] == 0
    [container] = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["command"][:4] == ["python", "-m", "hpml.components.train.node", "-m"]
    assert container["command"][4:6] == ["hpml.components", "train"]
    assert "--events" in container["command"] and "s3://hpml/scratch" in container["command"]


def test_it_is_bounded_and_cleaned_up() -> None:
    cluster = {"timeout_s": 100, "keep_failed_s": 7, "stages": {"train": {"timeout_s": 50}}}
    policy = PyTorchJobs().job(training(cluster))["spec"]["runPolicy"]
    assert policy == {"cleanPodPolicy": "Running", "activeDeadlineSeconds": 50, "ttlSecondsAfterFinished": 7}


def test_its_pods_are_like_those_of_every_step_and_report_to_no_one() -> None:
    cluster = ClusterConfig()
    template = PyTorchJobs().job(training())["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    like = pods.pod_template(cluster, cluster.needs("train"), [], labels={}, env={}, name="pytorch")
    assert template["spec"]["securityContext"] == like["spec"]["securityContext"]
    assert template["spec"]["serviceAccountName"] == cluster.stage_account
    assert template["spec"]["automountServiceAccountToken"] is False
    [container], [plain] = template["spec"]["containers"], like["spec"]["containers"]
    assert container["securityContext"] == plain["securityContext"]
    told = {variable["name"] for variable in container["env"]}
    assert not told & {"HPML_RUN", "MLFLOW_TRACKING_URI"}  # the launcher reports, once, whatever restarts


def test_its_name_is_the_same_for_the_same_step_only() -> None:
    def name(run: str) -> str:
        return str(PyTorchJobs().job(training(run=run))["metadata"]["name"])

    names = [name("20260101-run"), name("another"), name("x" * 80), name("X" * 80)]
    assert len(set(names)) == 4 and names == [
        name(run) for run in ("20260101-run", "another", "x" * 80, "X" * 80)
    ]
    assert all(len(one) <= 52 and one[0].isalpha() for one in names)  # of a Service too: RFC 1035


def test_the_queue_takes_the_job_and_not_its_pods() -> None:
    job = PyTorchJobs().job(training({"queue": "gpus"}))
    queue = "kueue.x-k8s.io/queue-name"
    assert job["metadata"]["labels"][queue] == "gpus"
    assert queue not in job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"]["labels"]


@pytest.mark.parametrize("place", ["data", "out", "scratch"])
def test_artifacts_out_of_reach_of_the_workers_are_refused(place: str) -> None:
    places = {"data": "s3://b/data", "out": "s3://b/out", "scratch": "s3://b/scratch", place: "/here"}
    job = Job(
        run="hpml.components.train.stage:run",
        config={"nodes": 2},
        inputs={"data": places["data"]},
        out=places["out"],
        scratch=places["scratch"],
    )
    with pytest.raises(UsageError, match=f"--{place} '/here' is out of reach"):
        launcher.training_of(job, ClusterConfig(), "run", "train")


# ------------------------------------------------------------------------------------------- its launcher


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short pauses, and a clock by which a pod that waits has soon waited for `pending_s`."""
    monkeypatch.setattr(launch, "POLL_S", 0.03)
    monkeypatch.setattr(follower, "LAST_LINES_S", 2.0)
    monkeypatch.setattr(kube, "RETRY_EVERY_S", 0.05)
    monkeypatch.setattr(kube, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(causes, "time", SimpleNamespace(monotonic=lambda: FASTER * time.monotonic()))
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)  # a launcher that was stopped hears no second one


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    with FakeCluster().serving() as serving:
        monkeypatch.setenv("KUBECONFIG", str(serving.kubeconfig(tmp_path / "kubeconfig")))
        yield serving


class Operator:
    """Plays the training operator and the kubelet: makes the pods of a job, and what a test has them do.

    start: what they do before the launcher knows that there is a job. script: what they do from then on.
    """

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.start: Callable[[Operator], None] = lambda operator: None
        self.script: Callable[[Operator], None] = lambda operator: None
        self.jobs_at_once = 0
        self.job: Json = {}
        self.pods: dict[int, Json] = {}
        self.made: list[Json] = []  # every job that ever was
        cluster.at_once, cluster.on_create = self._at_once, self._on_create

    def _at_once(self, item: Json) -> None:
        if item["kind"] == "PyTorchJob":
            self.job = item
            self.made.append(item)
            self.start(self)

    def _on_create(self, item: Json) -> None:
        if item["kind"] == "PyTorchJob":
            self.script(self)

    def start_pods(self, phase: str = "Running", **state: Json) -> None:
        for index in range(self.job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"]):
            self.start_pod(index, phase, **state)

    def start_pod(self, index: int, phase: str = "Running", **state: Json) -> None:
        name = self.job["metadata"]["name"]
        labels = {
            "training.kubeflow.org/job-name": name,
            "training.kubeflow.org/replica-index": str(index),
        }
        self.pods[index] = self.cluster.add_pod(f"{name}-worker-{index}", labels)
        told: Json = state or {"running": {}}
        self.cluster.set_state(self.pods[index], phase, **told)

    def say(self, index: int, *lines: str) -> None:
        self.cluster.log(self.pods[index], *lines)

    def tell(self, node: int, event: str, **fields: Any) -> None:
        self.say(node, "#hpml " + json.dumps({"event": event, "time_s": 1767225600.5, **fields}))

    def progress(self, done: int) -> None:
        self.tell(0, "progress", done=done, total=100, unit="steps", note="")

    def end_pod(self, index: int, exit_code: int, reason: str = "Error") -> None:
        phase = "Failed" if exit_code else "Succeeded"
        ended = {"exitCode": exit_code, "reason": reason}
        self.cluster.set_state(self.pods[index], phase, terminated=ended)

    def condition(self, kind: str, message: str = "") -> None:
        """Once a job has failed, pods of it that still run are removed, as its cleanPodPolicy says."""
        running = [pod for pod in self.pods.values() if pod["status"]["phase"] == "Running"]
        for pod in running if kind == "Failed" else ():
            self.cluster.remove("pods", pod["metadata"]["name"])
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        status = self.job.get("status") or {"conditions": [], "startTime": now}
        conditions = [*status["conditions"], {"type": kind, "status": "True", "message": message}]
        self.job["status"] = {**status, "conditions": conditions}

    def succeed(self) -> None:
        for index in self.pods:
            self.end_pod(index, 0)
        self.condition("Succeeded")


@pytest.fixture
def operator(cluster: FakeCluster) -> Operator:
    return Operator(cluster)


class Launched:
    """What surrounds a launcher: what it said, and the events that it passed on."""

    def __init__(self, events: Path) -> None:
        self.said: list[str] = []
        self._events = events
        events.touch()
        self.kube: Namespace = connect("hpml", patience_s=5, say=self.said.append)

    def launch(self, subject: Training | None = None, owner: Json | None = None) -> Launch:
        subject = subject or training()
        events = Events(self._events)
        return Launch(PyTorchJobs(), subject, self.kube, events, owner, say=self.said.append)

    def in_a_thread(self, *arguments: Any, **more: Any) -> threading.Thread:
        def run() -> None:
            with suppress(HpmlError):
                self.launch(*arguments, **more).run()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def events(self, kind: str) -> list[Json]:
        found = [json.loads(line) for line in self._events.read_text().splitlines()]
        return [event for event in found if event["event"] == kind]

    def passed_on(self, kind: str) -> bool:
        return bool(self.events(kind))

    def heard(self, words: str) -> bool:
        return any(words in text for text in self.said)

    def wait_until_heard(self, words: str) -> None:
        while not self.heard(words):
            time.sleep(0.01)

    def when_heard(self, words: str, act: Callable[[], object]) -> None:
        def wait() -> None:
            self.wait_until_heard(words)
            act()

        threading.Thread(target=wait, daemon=True).start()


@pytest.fixture
def launched(cluster: FakeCluster, tmp_path: Path) -> Launched:
    return Launched(tmp_path / "events.jsonl")


def jobs(cluster: FakeCluster) -> list[Json]:
    return cluster.all("pytorchjobs")


def test_a_training_that_succeeds(
    operator: Operator, launched: Launched, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(operator: Operator) -> None:
        operator.start_pods("Pending", waiting={"reason": "ContainerCreating"})
        for pod in operator.pods.values():
            cluster.set_state(pod, "Running", running={})
        operator.condition("Running")
        operator.say(0, "epoch 1/3")
        operator.say(1, "fetched s3://hpml/data")
        operator.progress(50)
        operator.tell(0, "metric", name="loss", value=0.5, index=1)
        operator.say(0, "the last line")
        operator.succeed()

    operator.script = script
    launched.launch().run()
    printed = capsys.readouterr().out.splitlines()
    assert printed.count("node 0 | epoch 1/3") == 1
    assert printed.count("node 1 | fetched s3://hpml/data") == 1
    assert printed.count("node 0 | the last line") == 1
    assert not any("#hpml" in line for line in printed)  # events go where the launcher's own go
    [progress], [metric] = launched.events("progress"), launched.events("metric")
    assert (progress["done"], progress["total"], progress["unit"]) == (50, 100, "steps")
    assert (metric["name"], metric["value"], metric["index"], metric["time_s"]) == (
        "loss",
        0.5,
        1,
        1767225600.5,
    )
    assert len(operator.made) == 1 and not jobs(cluster)


def failure(launched: Launched, subject: Training | None = None) -> HpmlError:
    with pytest.raises(HpmlError) as caught:
        launched.launch(subject).run()
    return caught.value


def test_what_rank_0_failed_of_is_what_the_step_fails_of(
    operator: Operator, launched: Launched, cluster: FakeCluster
) -> None:
    def script(operator: Operator) -> None:
        operator.start_pods()
        operator.tell(0, "failed", message="train was refused by its gate: top-1 is 50 %", exit_code=5)
        operator.say(0, "error: train was refused by its gate: top-1 is 50 %")
        operator.end_pod(0, 5)
        operator.condition("Failed", "job is failing")

    operator.script = script
    error = failure(launched)
    assert error.exit_code == ExitCode.GATE_FAILED
    assert str(error) == "train was refused by its gate: top-1 is 50 %"
    assert len(jobs(cluster)) == 1  # kept for its logs
    assert launched.heard("kubectl -n hpml get pytorchjobs")


def test_what_another_worker_failed_of_comes_before_what_rank_0_made_of_it(
    operator: Operator, launched: Launched
) -> None:
    def script(operator: Operator) -> None:
        operator.start_pods()
        operator.say(1, "error: worker 1 has no GPU of its own")
        operator.tell(0, "failed", message="another worker of this training is gone", exit_code=6)
        operator.end_pod(0, 143)
        operator.end_pod(1, 3)
        operator.condition("Failed")

    operator.script = script
    error = failure(launched)
    assert str(error) == "worker 1 has no GPU of its own"
    assert error.exit_code == ExitCode.CONFIG_INVALID


def test_a_worker_that_says_nothing_is_named(operator: Operator, launched: Launched) -> None:
    def script(operator: Operator) -> None:
        operator.start_pods()
        operator.end_pod(1, 127)
        operator.condition("Failed")

    operator.script = script
    error = failure(launched)
    assert str(error) == "node 1 ended with exit code 127"
    assert error.exit_code == ExitCode.STAGE_FAILED


def test_a_failure_that_the_training_has_got_over_is_not_the_cause(
    operator: Operator, launched: Launched
) -> None:
    def script(operator: Operator) -> None:
        operator.start_pods()
        operator.tell(0, "failed", message="an old story", exit_code=4)
        operator.progress(10)
        operator.condition("Failed", "the operator's own words")

    operator.script = script
    assert str(failure(launched)).startswith("the training failed: the operator's own words")


WAITING = {
    "ImagePullBackOff": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}},
    "ErrImagePull": {"waiting": {"reason": "ErrImagePull", "message": "no such host"}},
    "CreateContainerConfigError": {
        "waiting": {"reason": "CreateContainerConfigError", "message": 'secret "hpml-store" not found'}
    },
}


@pytest.mark.parametrize("reason", WAITING)
def test_pods_that_cannot_start_are_given_up(
    reason: str, operator: Operator, launched: Launched, cluster: FakeCluster
) -> None:
    operator.start = lambda operator: operator.start_pods("Pending", **WAITING[reason])
    error = failure(launched, training({"pending_s": 1}))
    assert isinstance(error, Unavailable) and error.exit_code == ExitCode.UNAVAILABLE
    message = WAITING[reason]["waiting"]["message"]
    assert message in str(error)
    assert launched.heard("waiting, for 1 s at most") and launched.heard(message)
    assert not jobs(cluster)


def test_pods_without_room_are_given_up_with_the_words_of_the_scheduler(
    operator: Operator, launched: Launched, cluster: FakeCluster
) -> None:
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."

    def start(operator: Operator) -> None:
        operator.start_pods("Pending")
        unschedulable = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": message,
        }
        for pod in operator.pods.values():
            pod["status"] = {"phase": "Pending", "conditions": [unschedulable]}

    operator.start = start
    error = failure(launched, training({"pending_s": 1}))
    assert isinstance(error, Unavailable) and message in str(error)
    assert "cluster.stages" in error.fix
    assert not jobs(cluster)


def test_an_elastic_training_does_not_wait_for_a_node_that_it_can_do_without(
    operator: Operator, launched: Launched
) -> None:
    def start(operator: Operator) -> None:
        operator.start_pods()
        operator.start_pod(1, "Pending", **WAITING["ErrImagePull"])

    def script(operator: Operator) -> None:
        time.sleep(1.5 / FASTER)
        operator.succeed()

    operator.start, operator.script = start, script
    launched.launch(training({"pending_s": 1}, min_nodes=1)).run()
    assert not launched.heard("waiting, for")


def test_without_an_operator_there_are_no_pods(launched: Launched, cluster: FakeCluster) -> None:
    error = failure(launched, training({"pending_s": 1}))
    assert isinstance(error, Unavailable)
    assert "no pod of PyTorchJob hpml/hpml-20260101-run-train has been created" in str(error)
    assert "is the training operator running?" in error.fix
    assert not jobs(cluster)


def test_why_the_cluster_refuses_to_create_pods(
    operator: Operator, launched: Launched, cluster: FakeCluster
) -> None:
    message = 'Error creating: pods "x" is forbidden: exceeded quota: hpml'
    operator.start = lambda operator: cluster.add_event(operator.job, "FailedCreatePod", message)
    error = failure(launched, training({"pending_s": 1}))
    assert isinstance(error, Unavailable) and message in str(error) and "quota" in error.fix.lower()


def test_a_training_over_its_limit_is_ended(
    operator: Operator, launched: Launched, cluster: FakeCluster
) -> None:
    def script(operator: Operator) -> None:
        operator.start_pods()
        operator.progress(40)
        while not launched.passed_on("progress"):
            time.sleep(0.01)
        operator.condition("Running")  # with the time when it started

    operator.script = script
    error = failure(launched, training({"stages": {"train": {"timeout_s": 1}}}))
    assert isinstance(error, StageFailed)
    assert "longer than its limit of 1 s: it got to 40 of 100 steps" in str(error)
    assert "timeout_s" in error.fix and "last checkpoint" in error.fix
    assert not jobs(cluster)


def test_a_limit_that_the_operator_has_noticed_is_told_the_same_way(
    operator: Operator, launched: Launched
) -> None:
    def script(operator: Operator) -> None:
        operator.start_pods()
        operator.condition("Failed", "Job x has failed because it was active longer than specified deadline")

    operator.script = script
    assert "longer than its limit" in str(failure(launched))


def test_a_training_that_only_restarts_is_given_up(
    operator: Operator, launched: Launched, cluster: FakeCluster
) -> None:
    def script(operator: Operator) -> None:
        operator.start_pods()
        operator.progress(10)
        while jobs(cluster):
            operator.end_pod(0, 137, "OOMKilled")
            time.sleep(0.1)
            operator.start_pod(0)
            operator.progress(10)  # again, and no further
            time.sleep(0.1)

    operator.script = script
    error = failure(launched)
    assert isinstance(error, StageFailed) and "the training got no further" in str(error)
    assert "more memory than its limit of 1Gi" in error.why and "memory" in error.fix
    assert launched.heard("node 0 is started again")


def test_a_training_that_restarts_and_gets_on_is_not(operator: Operator, launched: Launched) -> None:
    restarts = 2 * launch.RESTARTS_PER_NODE * 2

    def script(operator: Operator) -> None:
        operator.start_pods()
        for number in range(restarts):
            operator.progress(number + 1)
            while len(launched.events("progress")) <= number:
                time.sleep(0.01)
            operator.end_pod(0, 143)
            operator.start_pod(0)
        operator.succeed()

    operator.script = script
    launched.launch().run()
    assert (
        len([text for text in launched.said if "node 0 is started again" in text])
        > launch.RESTARTS_PER_NODE * 2
    )


def test_a_job_that_waits_in_a_queue_is_waited_for(operator: Operator, launched: Launched) -> None:
    def script(operator: Operator) -> None:
        launched.wait_until_heard("waits for its turn")
        time.sleep(4.5 / FASTER)
        operator.start_pods()
        operator.job["status"] = {}
        operator.succeed()

    operator.start = lambda operator: operator.condition("Suspended", "waiting for quota")
    operator.script = script
    launched.launch(training({"queue": "gpus", "pending_s": 3})).run()
    assert launched.heard("waits for its turn: waiting for quota")


def test_a_second_launcher_goes_on_with_the_job_of_the_first(
    operator: Operator,
    launched: Launched,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    operator.start = lambda operator: operator.start_pods()
    first = launched.launch(owner=reference("first"))
    monkeypatch.setattr(first, "_pass_on", _crash)
    with pytest.raises(OSError, match="a defect"):
        first.run()

    def finish() -> None:
        operator.say(0, "a line of its end")
        operator.succeed()

    launched.when_heard("going on with it", finish)
    launched.launch(owner=reference("second")).run()
    assert len(operator.made) == 1
    assert operator.job["metadata"]["ownerReferences"] == [reference("second")]
    assert launched.heard("is there already: going on with it")
    assert "node 0 | a line of its end" in capsys.readouterr().out


def _crash(lines: object) -> None:
    raise OSError("a defect")


def reference(name: str) -> Json:
    return {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": name}


def test_another_training_of_the_same_name_is_left_alone(
    operator: Operator, launched: Launched, cluster: FakeCluster
) -> None:
    operator.script = lambda operator: operator.start_pods()
    first = launched.in_a_thread(training(epochs=4))
    while not operator.pods:
        time.sleep(0.02)
    error = failure(launched, training(epochs=5))
    assert isinstance(error, StageFailed) and "not the training that was asked for" in str(error)
    assert "kubectl -n hpml delete pytorchjobs" in error.fix
    assert jobs(cluster) == [operator.job]
    operator.succeed()
    first.join()


def test_what_an_earlier_attempt_left_is_replaced(
    operator: Operator, launched: Launched, cluster: FakeCluster
) -> None:
    def fail(operator: Operator) -> None:
        operator.start_pods()
        operator.end_pod(0, 4)
        operator.condition("Failed")

    def succeed(operator: Operator) -> None:
        operator.pods.clear()
        operator.start_pods()
        operator.succeed()

    operator.script = fail
    failure(launched)
    operator.script = succeed
    launched.launch().run()
    assert len(operator.made) == 2
    assert launched.heard("failed, in an earlier attempt: replacing it")


def test_a_job_that_is_being_deleted_is_waited_for(
    operator: Operator, launched: Launched, cluster: FakeCluster
) -> None:
    subject = training()
    old = copy.deepcopy(PyTorchJobs().job(subject))
    old["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.add("pytorchjobs", old)
    launched.when_heard("waiting for its end", lambda: cluster.remove("pytorchjobs", subject.name))

    def script(operator: Operator) -> None:
        operator.start_pods()
        operator.succeed()

    operator.script = script
    launched.launch(subject).run()
    assert len(operator.made) == 1
    assert launched.heard("is being deleted: waiting for its end")


def test_a_job_that_someone_deletes(operator: Operator, launched: Launched, cluster: FakeCluster) -> None:
    def script(operator: Operator) -> None:
        operator.start_pods()
        time.sleep(0.1)
        cluster.remove("pytorchjobs", operator.job["metadata"]["name"])

    operator.script = script
    assert "was deleted, and not by us" in str(failure(launched))


def test_the_api_server_may_go_away_for_a_while(
    operator: Operator, launched: Launched, cluster: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(operator: Operator) -> None:
        operator.start_pods()
        operator.say(0, "before")
        cluster.outage.set()
        operator.say(0, "during")
        launched.wait_until_heard("does not answer")
        cluster.outage.clear()
        operator.say(0, "after")
        launched.wait_until_heard("answers again")
        operator.succeed()

    operator.script = script
    launched.launch().run()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("node 0")]
    assert lines == ["node 0 | before", "node 0 | during", "node 0 | after"]
    assert launched.heard("does not answer") and launched.heard("answers again")


def test_what_the_launcher_may_not_do_is_named(
    operator: Operator, launched: Launched, cluster: FakeCluster
) -> None:
    cluster.refuse = lambda verb, plural: (
        (403, 'User "hpml-stage" cannot create resource "pytorchjobs"') if verb == "create" else None
    )
    error = failure(launched)
    assert isinstance(error, Unavailable)
    assert error.what == "not allowed to create pytorchjobs in the namespace hpml"


def test_a_training_goes_on_if_only_its_log_may_not_be_read(
    operator: Operator, launched: Launched, cluster: FakeCluster
) -> None:
    cluster.refuse = lambda verb, plural: (403, "you cannot get pods/log") if plural == "pods/log" else None

    def script(operator: Operator) -> None:
        operator.start_pods()
        time.sleep(0.3)
        operator.succeed()

    operator.script = script
    launched.launch().run()
    assert launched.heard("cannot be followed: not allowed to get pods/log")


def test_a_launcher_asks_for_no_more_than_its_role_grants(
    operator: Operator, launched: Launched, cluster: FakeCluster
) -> None:
    role = yaml.safe_load(Path("k8s/base/launcher-role/role.yaml").read_text())
    granted = {
        f"{verb} {resource}"
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    for end in ("fail", "succeed"):

        def script(operator: Operator, end: str = end) -> None:
            operator.pods.clear()
            operator.start_pods("Pending", **WAITING["ErrImagePull"])
            while not any(request.startswith("list events") for request in cluster.requests):
                time.sleep(0.01)
            operator.start_pods()
            operator.end_pod(0, 4)
            operator.condition("Failed") if end == "fail" else operator.succeed()

        operator.script = script
        if end == "fail":
            failure(launched)
        else:
            launched.launch().run()
    asked = {
        request.replace("/log/", "/log ").split("/hpml-")[0].split(" hpml-")[0]
        for request in cluster.requests
    }
    assert asked <= granted
    assert {
        "create pytorchjobs",
        "delete pytorchjobs",
        "get pytorchjobs",
        "list pods",
        "list events",
    } <= asked


def test_lines_of_pods_cannot_pass_for_events_nor_steer_a_terminal(
    operator: Operator, launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = [
        "#hpml",
        "#hpml not json",
        "#hpml []",
        '#hpml {"event": "progress"}',
        '#hpml {"event": "metric", "name": "loss", "value": "high", "index": 1, "time_s": 0}',
        '#hpml {"event": "run"}',
    ]

    def script(operator: Operator) -> None:
        operator.start_pods()
        operator.say(0, "\x1b]0;owned\x07\x1b[2J", *forged)
        operator.succeed()

    operator.script = script
    launched.launch().run()
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\x07" not in printed
    assert [line for line in printed.splitlines() if "#hpml" in line] == [
        f"node 0 | {line}" for line in forged
    ]
    assert not launched.passed_on("progress") and not launched.passed_on("metric")


# ------------------------------------------------------------------------------------------------- owners


def test_the_job_goes_with_what_made_the_pod_of_its_launcher(
    cluster: FakeCluster, launched: Launched
) -> None:
    pod = cluster.add_pod("launcher-abc")

    def owner(name: str = "launcher-abc") -> Json | None:
        return launcher.owner_of_launcher(launched.kube, name, launched.said.append)

    itself = owner()
    assert itself and (itself["kind"], itself["uid"]) == ("Pod", pod["metadata"]["uid"])
    other = {**reference("a-config"), "kind": "ConfigMap"}
    pod["metadata"]["ownerReferences"] = [other, {**reference("the-job"), "controller": True}]
    assert owner() == reference("the-job")
    assert not launched.said
    assert owner("of-another-namespace") is None
    assert launched.heard("will not go with the run")
    assert owner("") is None


def test_executors_and_kubeflow_say_which_pod_it_is() -> None:
    assert launcher.pod_of_launcher({"KFP_POD_NAME": "a"}) == "a"
    assert launcher.pod_of_launcher({"HPML_POD_NAME": "b"}) == "b"
    assert launcher.pod_of_launcher({}) == ""


def test_a_launcher_whose_pod_makes_room_leaves_the_job_to_the_next(
    operator: Operator, launched: Launched, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    operator.script = lambda operator: operator.start_pods()
    for conditions, left in (([], 0), ([mark], 1)):
        cluster.add_pod("launcher", conditions=conditions)
        launching = launched.launch()
        launching.pod = "launcher"
        monkeypatch.setattr(launching, "_pass_on", _stop)
        with pytest.raises(Terminated):
            launching.run()
        assert len(jobs(cluster)) == left


def _stop(lines: object) -> None:
    raise Terminated("stopped by SIGTERM")


# ------------------------------------------------------------------------------------------- command line


@pytest.fixture
def published(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The digest of an artifact at s3://hpml/out, such as workers leave, in a store that we are told of."""
    import boto3

    for name, value in {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket="hpml")
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "report.html").write_text("<p>")
    metrics = {"test_accuracy": 0.5}
    manifest = seal_artifact(folder, spec=ReportSpec(title="a"), metrics=metrics, lineage=LINEAGE)
    storage.upload(folder, "s3://hpml/out")
    return manifest.digest


def command(*more: str) -> list[str]:
    places = ["--data", "s3://hpml/data", "--out", "s3://hpml/out", "--scratch", "s3://hpml/scratch"]
    config = ["--config", json.dumps({"nodes": 2, "epochs": 3})]
    module = [sys.executable, "-m", "hpml.pipelines.operators.pytorchjob", "--cluster", "{}", "--run", "run"]
    return [*module, "train", *config, *places, *more]


def run(*more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*more), capture_output=True, text=True, check=False)


def succeed(operator: Operator) -> None:
    operator.start_pods()
    operator.progress(50)
    operator.succeed()


def test_the_command_prints_what_every_entrypoint_prints(operator: Operator, published: str) -> None:
    operator.script = succeed
    answer = run("--events", "-")
    assert answer.returncode == 0, answer.stderr
    result = {"digest": published, "metrics": {"test_accuracy": 0.5}}
    assert json.dumps(result) in answer.stdout.splitlines()
    told = [json.loads(line[6:]) for line in answer.stdout.splitlines() if line.startswith("#hpml ")]
    note, progress, finished = told
    assert note["event"] == "note" and "created PyTorchJob" in note["text"], (
        "who watches the run sees it, too"
    )
    assert (progress["event"], progress["done"], progress["time_s"]) == ("progress", 50, 1767225600.5)
    assert finished["event"] == "finished"


def test_as_a_step_of_kubeflow_it_hands_over_what_its_pod_has(
    published: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data is on the disk of its pod, in Kubeflow's namespace; there its workers are, and read it by URI."""
    with FakeCluster("kubeflow").serving() as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path / "kubeconfig")))
        monkeypatch.setattr(launcher, "own_namespace", lambda: "kubeflow")
        monkeypatch.setenv("KFP_POD_NAME", "quickstart-1")
        cluster.add_pod("quickstart-1")["spec"]["serviceAccountName"] = "pipeline-runner"
        operator = Operator(cluster)
        operator.script = lambda operator: (
            storage.upload(tmp_path / "artifact", f"{HANDOVER}/out"),
            succeed(operator),
        )
        named = {name: tmp_path / "kfp" / name for name in ("prepare", "out")}
        shutil.copytree(tmp_path / "artifact", named["prepare"])
        given = {name: {"artifacts": [{"uri": str(place)}]} for name, place in named.items()}
        answer = tmp_path / "kfp" / "executor_output.json"
        executor_input = {
            "inputs": {"artifacts": {"prepare": given["prepare"]}},
            "outputs": {"artifacts": {"out": given["out"]}, "outputFile": str(answer)},
        }
        config = ["--config", '{"nodes": 2, "epochs": 3}', "--set", "epochs=7"]
        names = ["--names", '{"data": "prepare"}', "--scratch", "s3://hpml/scratch/run/train"]
        launcher.main(
            PyTorchJobs(),
            ["--run", "run", "train", *config, *names, "--executor-input", json.dumps(executor_input)],
        )
    [delivered] = json.loads(answer.read_text())["artifacts"]["out"]["artifacts"]
    assert delivered["metadata"] == {"digest": published}
    assert open_artifact(named["out"], kind="report").digest == published
    [job] = operator.made
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert (job["metadata"]["namespace"], pod["serviceAccountName"]) == ("kubeflow", "pipeline-runner")
    assert pod["automountServiceAccountToken"] is False
    [container] = pod["containers"]
    arguments = container["command"]
    assert json.loads(arguments[arguments.index("--config") + 1])["epochs"] == 7
    assert "--executor-input" not in arguments and "--names" not in arguments
    assert arguments[arguments.index("--data") + 1] == f"{HANDOVER}/data"
    assert arguments[arguments.index("--out") + 1] == f"{HANDOVER}/out"
    assert storage.list_names(HANDOVER) == []  # nobody reads it again


HANDOVER = "s3://hpml/handover/run/train"


def test_a_command_line_that_is_refused_is_an_event(
    published: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        given = ["train", "--events", "-", "--out", "s3://hpml/out", "--config", "{"]
        launcher.main(PyTorchJobs(), ["--run", "run", *given])
    assert ended.value.code == 3
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#hpml ")]
    event = json.loads(line[6:])
    assert (event["event"], event["exit_code"]) == ("failed", 3) and "--config is not JSON" in event[
        "message"
    ]


def test_the_namespace_of_a_pod_is_told_beside_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "TOKEN", tmp_path / "token")
    assert kube.own_namespace() == ""
    (tmp_path / "namespace").write_text("kubeflow")
    assert kube.own_namespace() == "kubeflow"


def test_the_exit_code_is_that_of_the_training(operator: Operator, published: str) -> None:
    def script(operator: Operator) -> None:
        operator.start_pods()
        operator.tell(0, "failed", message="top-1 is 50 %", exit_code=5)
        operator.end_pod(0, 5)
        operator.end_pod(1, 143)
        operator.condition("Failed")

    operator.script = script
    answer = run("--events", "-")
    assert answer.returncode == 5
    assert answer.stderr.splitlines()[-1] == "error: top-1 is 50 %"
    assert '"event": "failed"' in answer.stdout and "Traceback" not in answer.stderr


@pytest.mark.alone  # it looks at the clock
@pytest.mark.parametrize("moment", ["waiting", "training"])
def test_sigterm_deletes_the_job_at_once(
    moment: str, operator: Operator, cluster: FakeCluster, published: str
) -> None:
    operator.script = lambda operator: operator.start_pods() if moment == "training" else None
    process = subprocess.Popen(command(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while not operator.made or (
            moment == "training" and not any("log" in text for text in cluster.requests)
        ):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        while jobs(cluster):
            time.sleep(0.005)
        took_s = time.monotonic() - asked
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 143
    assert took_s < 0.6, "Kubeflow gives a step no longer"
    assert "stopped by SIGTERM" in said.splitlines()[-1]


def test_without_a_cluster_one_line_says_so(
    published: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    answer = run()
    assert answer.returncode == 6
    assert answer.stderr.splitlines()[-1].startswith("error: no cluster is configured")
    assert "Traceback" not in answer.stderr


def test_only_a_training_has_workers(published: str) -> None:
    module = [sys.executable, "-m", "hpml.pipelines.operators.pytorchjob", "--run", "run"]
    stage = ["prepare", "--config", "{}", "--out", "s3://hpml/out"]
    answer = subprocess.run([*module, *stage], capture_output=True, text=True, check=False)
    assert answer.returncode == 2 and "prepare cannot be launched" in answer.stderr
