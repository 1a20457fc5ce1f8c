"""Training as a PyTorchJob of a real operator: what it makes, and what becomes of it when things go wrong.

Two workers over gloo, under Pod Security restricted, their launcher in a pod under its own service account.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kubernetes.utils import parse_quantity

from hpml.artifacts.folder import MANIFEST, read_manifest
from hpml.io import storage
from hpml.io.relay import read_event
from hpml.pipelines.cluster import pods
from hpml.pipelines.cluster.client import JOBS, PODS, connect
from hpml.pipelines.cluster.config import ClusterConfig, StageNeeds
from hpml.pipelines.operators.pytorchjob import PyTorchJobs
from tests.cluster.access import CLIENT_IMAGE, CPU_IMAGE, Workspace, kubectl, kubectl_json, wait_until

Json = dict[str, Any]

CONFIG = {"model": "cnn", "nodes": 2, "epochs": 25, "checkpoint_every_s": 0.5}
LONGER = {**CONFIG, "epochs": 60}
WORKER = {"cpus": 0.7, "memory": "1Gi"}  # with a launcher, the store and MLflow, two fit on two CPUs
KILLS = int(os.environ.get("HPML_TEST_KILLS", "4"))  # each takes half a minute; make test-cluster-kills: 20


# ---------------------------------------------------------------------------------- trainings, here and there


@pytest.fixture(scope="module")
def store(workspace: Workspace) -> Iterator[str]:
    """A place in the namespace's store with the dataset in it, which this process can reach too."""
    before = dict(os.environ)
    os.environ.update(workspace.environment)
    uri = f"s3://hpml/test-pytorchjob-{random.randrange(10**6)}"
    run_stage("prepare", "--config", '{"source": "digits"}', "--out", f"{uri}/data")
    yield uri
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def weights_of_local_run(store: str) -> str:
    """The digest of the weights that two processes of this machine train, undisturbed."""
    return weights(train_here(store, "local"))


def run_stage(*arguments: str) -> None:
    command = [sys.executable, "-m", "hpml.components", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def train_here(store: str, name: str, config: Json = CONFIG) -> str:
    out = f"{store}/{name}/out"
    places = ["--data", f"{store}/data", "--out", out, "--scratch", f"{store}/{name}/scratch"]
    run_stage("train", "--config", json.dumps(config), *places, "--threads", "2")  # one for each process
    return out


def weights(out: str) -> str:
    """The digest of the weights of the model at `out`."""
    manifest = json.loads(storage.read_text(f"{out}/{MANIFEST}"))
    return str(manifest["files"]["model.safetensors"]["sha256"])


@dataclass
class Training:
    """A training of the namespace, and whatever may be done to it."""

    namespace: str
    store: str
    name: str
    config: Json = field(default_factory=lambda: dict(CONFIG))
    train: Json = field(default_factory=dict)  # cluster.stages.train
    cluster: Json = field(default_factory=dict)
    most_at_once: int = 0  # PyTorchJobs of this training, at any moment that we looked
    uids: set[str] = field(default_factory=set)  # of all of them; a finished one is deleted at once

    def __post_init__(self) -> None:
        self.kube = connect(self.namespace)

    @property
    def job(self) -> str:
        """The name of its PyTorchJob."""
        return pods.object_name("hpml", self.name, "train")

    @property
    def out(self) -> str:
        return f"{self.store}/{self.name}/out"

    @property
    def scratch(self) -> str:
        return f"{self.store}/{self.name}/scratch"

    @property
    def settings(self) -> ClusterConfig:
        settings: Json = {
            "namespace": self.namespace,
            "images": {"cpu": CPU_IMAGE, "client": CLIENT_IMAGE},
            "image_pull_policy": "Never",
            "tracking_uri": "",
            "shared_memory": "64Mi",
            "stages": {"train": {**WORKER, **self.train}},
        }
        return ClusterConfig.model_validate({**settings, **self.cluster})

    @property
    def launcher(self) -> list[str]:
        """The command line of its launcher."""
        places = ["--data", f"{self.store}/data", "--out", self.out]
        own = ["--cluster", self.settings.model_dump_json(), "--run", self.name, "--step", "train"]
        rest = [
            "--config",
            json.dumps(self.config),
            *places,
            "--scratch",
            self.scratch,
        ]
        return [
            "python",
            "-m",
            "hpml.pipelines.operators.pytorchjob",
            *own,
            "train",
            *rest,
            "--events",
            "-",
            "--threads",
            "1",
        ]

    # ------------------------------------------------------------------------------- what there is of it

    def jobs(self) -> list[Json]:
        """Its PyTorchJobs; there may be one."""
        return self.kube.find(PyTorchJobs.resource, labels=f"{pods.RUN_LABEL}={self.name}")

    def workers(self) -> list[Json]:
        """Its pods that train, by number."""
        found = self.kube.find(PODS, labels=PyTorchJobs().pods_of(self.job))
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    # -------------------------------------------------------------------------------- what is done to it

    def delete_worker(self, number: int) -> None:
        kubectl("-n", self.namespace, "delete", "pod", f"{self.job}-worker-{number}", "--wait=false")

    def kill_worker(self, number: int) -> None:
        """SIGKILL, which leaves no time to save anything."""
        pod = f"{self.job}-worker-{number}"
        kubectl("-n", self.namespace, "exec", pod, "--", *killing("-u -m hpml.components train"))

    def evict(self, pod: str) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }
        kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(body))

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Meanwhile, look again and again how many PyTorchJobs it has."""
        over = threading.Event()

        def count() -> None:
            while not over.wait(0.1):
                found = self.jobs()
                self.most_at_once = max(self.most_at_once, len(found))
                self.uids |= {str(job["metadata"]["uid"]) for job in found}

        thread = threading.Thread(target=count)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


KILL = """
import os, pathlib, signal, sys

for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    pid, arguments = int(file.parent.name), file.read_bytes().replace(b"\\0", b" ").decode()
    if sys.argv[1] in arguments and pid != os.getpid():
        os.kill(pid, signal.SIGKILL)
"""


def killing(arguments: str) -> list[str]:
    """A command that kills, in its pod, the program with these arguments."""
    return ["python", "-c", KILL, arguments]


@dataclass
class FromHere:
    """A launcher on this machine."""

    training: Training
    log: Path
    process: subprocess.Popen[bytes]

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def progress(self) -> int:
        """The furthest step that it has reported."""
        return furthest(self.text())

    def ended(self) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(timeout=300)


@contextmanager
def launched_from_here(training: Training, folder: Path) -> Iterator[FromHere]:
    log = folder / f"{training.name}.log"
    with log.open("wb") as file:
        command = [sys.executable, *training.launcher[1:]]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        with training.counted():
            yield FromHere(training, log, process)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=60)


@dataclass
class InCluster:
    """A launcher in a pod, which a Job starts again when it is lost."""

    training: Training

    @property
    def name(self) -> str:
        """Of its Job."""
        return pods.object_name(self.training.name, "train")

    def body(self) -> Json:
        """The Job, whose pods have a process namespace in which their program can be killed."""
        settings = self.training.settings
        template = pods.pod_template(
            settings,
            StageNeeds(cpus=0.2, memory="512Mi", image="client"),
            self.training.launcher,
            labels={**pods.labels(self.training.name, "train"), "app.kubernetes.io/component": "launcher"},
            env=pods.environment(settings, self.training.name, "test", "train"),
            account=settings.launcher_account,
        )
        [container] = template["spec"]["containers"]
        own_name = {"fieldRef": {"fieldPath": "metadata.name"}}
        container["env"].append({"name": "HPML_POD_NAME", "valueFrom": own_name})
        container["resources"] = {
            "requests": {"cpu": "100m", "memory": "512Mi"},
            "limits": {"cpu": "1", "memory": "512Mi"},
        }
        template["spec"]["shareProcessNamespace"] = True
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": self.name, "namespace": self.training.namespace},
            "spec": {"backoffLimit": 3, "template": template},
        }

    def pods(self) -> list[Json]:
        """Of all its launchers, oldest first."""
        found = self.training.kube.find(PODS, labels=f"job-name={self.name}")
        return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def pod(self) -> str:
        """The launcher that runs now."""
        running = [pod for pod in self.pods() if pod["status"].get("phase") == "Running"]
        running = [pod for pod in running if "deletionTimestamp" not in pod["metadata"]]
        return str(running[-1]["metadata"]["name"]) if running else ""

    def text(self, pod: str = "") -> str:
        return kubectl("-n", self.training.namespace, "logs", pod or f"job/{self.name}", check=False)

    def progress(self) -> int:
        pod = self.pod()
        return furthest(self.text(pod)) if pod else 0

    def ended(self) -> int:
        """The exit code of its last launcher, once that has ended."""

        def code() -> Any:
            states = [pod["status"].get("containerStatuses", [{}])[0].get("state", {}) for pod in self.pods()]
            over = states and states[-1].get("terminated")
            job = self.training.kube.get(JOBS, self.name)
            return over and job and not job["status"].get("active") and (over["exitCode"],)

        return int(wait_until(code, "the end of the launcher", seconds=300)[0])


@contextmanager
def launched_in_cluster(training: Training) -> Iterator[InCluster]:
    launcher = InCluster(training)
    kubectl("create", "-f", "-", stdin=json.dumps(launcher.body()))
    try:
        with training.counted():
            yield launcher
    finally:
        kubectl("-n", training.namespace, "delete", "job", launcher.name, "--ignore-not-found", check=False)


def furthest(log: str) -> int:
    """The last line of a log may still be being written."""
    events = filter(None, map(read_event, log.splitlines()))
    return max((event["done"] for event in events if event["event"] == "progress"), default=0)


@pytest.fixture
def training(workspace: Workspace, store: str) -> Iterator[Callable[..., Training]]:
    """Makes trainings; what is left of them is removed."""
    made: list[Training] = []

    def make(name: str, **more: Any) -> Training:
        made.append(Training(workspace.namespace, store, f"{name}-{random.randrange(10**6)}", **more))
        return made[-1]

    yield make
    for one in made:
        kubectl("-n", one.namespace, "delete", "pytorchjob", one.job, "--ignore-not-found", check=False)


Make = Callable[..., Training]


def training_begun(launcher: FromHere | InCluster) -> None:
    """Return once it has reported progress."""
    _wait(launcher, launcher.progress, "progress")


def checkpointed(launcher: FromHere | InCluster) -> None:
    """Return once there is a checkpoint in the store."""
    _wait(launcher, lambda: storage.list_names(launcher.training.scratch), "a checkpoint")


def _wait(launcher: FromHere | InCluster, condition: Callable[[], Any], what: str) -> None:
    try:
        wait_until(condition, what, seconds=180)
    except AssertionError as error:
        raise AssertionError(f"{error}; the launcher says: {launcher.text()}") from None


# ------------------------------------------------------------------------------------------------ undisturbed


def test_workers_in_pods_make_what_processes_of_one_machine_make(
    training: Make, weights_of_local_run: str
) -> None:
    subject = training("equal")
    with launched_in_cluster(subject) as launcher:
        assert launcher.ended() == 0, launcher.text()
        text = launcher.text()
    assert weights(subject.out) == weights_of_local_run
    assert "node 0 | epoch 25/25" in text or "node 1 | epoch 25/25" in text
    assert furthest(text) > 0
    assert '"digest"' in text
    assert subject.most_at_once == 1
    assert not subject.jobs()


def test_its_job_goes_with_the_job_of_its_launcher(training: Make) -> None:
    subject = training("owned")
    with launched_in_cluster(subject) as launcher:
        wait_until(subject.jobs, "the PyTorchJob is there")
        [owner] = subject.jobs()[0]["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("Job", launcher.name)
    wait_until(lambda: not subject.jobs(), "the PyTorchJob is gone")


# ------------------------------------------------------------------------------------------------- disturbed


@pytest.mark.timeout(120 * KILLS)
def test_as_many_finishes_as_kills(training: Make, weights_of_local_run: str, tmp_path: Path) -> None:
    """Of each training a worker is lost mid-epoch: killed, deleted or evicted, the first or the second."""
    ways: list[Callable[[Training, int], None]] = [
        Training.kill_worker,
        Training.delete_worker,
        lambda subject, number: subject.evict(f"{subject.job}-worker-{number}"),
    ]
    assert len(ways) <= KILLS
    for number in range(KILLS):
        subject = training(f"kill-{number}", train={"cpus": 0.8})
        with launched_from_here(subject, tmp_path) as launcher:
            checkpointed(launcher)
            assert launcher.process.poll() is None, "it was over before it could be disturbed"
            ways[number % len(ways)](subject, number % 2)
            assert launcher.ended() == 0, launcher.text()
            assert f"is started again, as the pod {subject.job}-worker-{number % 2}" in launcher.text()
            assert "resuming in epoch" in launcher.text()
        assert weights(subject.out) == weights_of_local_run
        assert subject.most_at_once == 1
        assert not subject.jobs()


@pytest.fixture(scope="module")
def weights_of_longer_run(store: str) -> str:
    return weights(train_here(store, "local-longer", LONGER))


def test_when_its_launcher_is_killed_the_next_one_goes_on_with_the_job(
    training: Make, weights_of_longer_run: str
) -> None:
    subject = training("launcher-killed", config=dict(LONGER))
    with launched_in_cluster(subject) as launcher:
        training_begun(launcher)
        [before] = subject.jobs()
        workers = {pod["metadata"]["uid"] for pod in subject.workers()}
        first = launcher.pod()
        kubectl(
            "-n", subject.namespace, "exec", first, "--", *killing("-m hpml.pipelines.operators.pytorchjob")
        )
        second = wait_until(lambda: launcher.pod() not in ("", first) and launcher.pod(), "another launcher")
        wait_until(lambda: "going on with it" in launcher.text(second), "the second has found the job")
        assert launcher.ended() == 0, launcher.text(second)
        assert "is started again" not in launcher.text(second)
    assert workers
    assert subject.uids == {before["metadata"]["uid"]}
    assert weights(subject.out) == weights_of_longer_run
    assert subject.most_at_once == 1


def test_when_its_launcher_is_evicted_the_training_is_not_disturbed(
    training: Make, weights_of_longer_run: str
) -> None:
    subject = training("launcher-evicted", config=dict(LONGER))
    with launched_in_cluster(subject) as launcher:
        training_begun(launcher)
        [before] = subject.jobs()
        first = launcher.pod()
        subject.evict(first)
        second = wait_until(lambda: launcher.pod() not in ("", first) and launcher.pod(), "another launcher")
        wait_until(lambda: "going on with it" in launcher.text(second), "the second has found the job")
        assert launcher.ended() == 0, launcher.text(second)
    assert subject.uids == {before["metadata"]["uid"]}
    assert weights(subject.out) == weights_of_longer_run
    assert subject.most_at_once == 1


def test_when_its_launcher_is_told_to_stop_the_next_one_resumes(
    training: Make, weights_of_longer_run: str
) -> None:
    subject = training("launcher-deleted", config=dict(LONGER))
    with launched_in_cluster(subject) as launcher:
        checkpointed(launcher)
        [before] = subject.jobs()
        first = launcher.pod()
        kubectl("-n", subject.namespace, "delete", "pod", first, "--wait=false")
        second = wait_until(lambda: launcher.pod() not in ("", first) and launcher.pod(), "another launcher")
        assert launcher.ended() == 0, launcher.text(second)
        assert "resuming in epoch" in launcher.text(second)
    assert subject.uids > {before["metadata"]["uid"]}, "another job resumed"
    assert weights(subject.out) == weights_of_longer_run
    assert subject.most_at_once == 1


def test_an_interrupted_launcher_takes_the_job_along(training: Make, tmp_path: Path) -> None:
    subject = training("interrupted")
    with launched_from_here(subject, tmp_path) as launcher:
        training_begun(launcher)
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.ended() == 130
    assert not [job for job in subject.jobs() if "deletionTimestamp" not in job["metadata"]]
    wait_until(lambda: not subject.workers(), "the pods are gone")


def test_an_elastic_training_goes_on_with_the_nodes_that_there_is_room_for(
    training: Make, tmp_path: Path
) -> None:
    too_big_for_two = {"cpus": 1.05}
    subject = training("elastic", config={**CONFIG, "min_nodes": 1}, train=too_big_for_two)
    with launched_from_here(subject, tmp_path) as launcher:
        assert launcher.ended() == 0, launcher.text()
    assert storage.exists(f"{subject.out}/{MANIFEST}")
    assert ("node 0 |" in launcher.text()) != ("node 1 |" in launcher.text())
    assert subject.most_at_once == 1


# --------------------------------------------------------------------------------------------------- failing


def failed(subject: Training, folder: Path) -> tuple[int, str]:
    """The exit code of its launcher, and its last words."""
    with launched_from_here(subject, folder) as launcher:
        code = launcher.ended()
    assert subject.most_at_once == 1
    lines = [line for line in launcher.text().splitlines() if not line.startswith("#hpml ")]
    assert not any("Traceback" in line for line in lines)
    [*_, last] = [line for line in lines if line.startswith("error: ")]
    return code, last


def test_a_bad_image(training: Make, tmp_path: Path) -> None:
    image = "localhost/hpml-nosuch:test"
    cluster = {"images": {"cpu": image}, "image_pull_policy": "IfNotPresent", "pending_s": 8}
    subject = training("bad-image", train={"cpus": 0.05}, cluster=cluster)
    code, last = failed(subject, tmp_path)
    assert code == 6
    assert "given up after 8 s" in last and image in last and "cluster.images" in last
    assert not subject.jobs()


def test_a_request_that_no_node_has_room_for(training: Make, tmp_path: Path) -> None:
    subject = training("no-room", train={"cpus": largest_node_cpus() + 1}, cluster={"pending_s": 5})
    code, last = failed(subject, tmp_path)
    assert code == 6
    assert "nodes are available" in last and "Insufficient cpu" in last
    assert not subject.jobs()


def largest_node_cpus() -> int:
    nodes = kubectl_json("get", "nodes")["items"]
    return max(math.floor(parse_quantity(node["status"]["allocatable"]["cpu"])) for node in nodes)


def test_a_request_beyond_the_quota_of_the_namespace(training: Make, tmp_path: Path) -> None:
    subject = training("beyond-quota", train={"cpus": 500}, cluster={"pending_s": 5})
    code, last = failed(subject, tmp_path)
    assert code == 6
    assert "exceeded quota" in last and "have the ResourceQuota raised" in last
    assert not subject.jobs()


def test_a_deadline(training: Make, tmp_path: Path) -> None:
    subject = training("deadline", config={**CONFIG, "epochs": 1000}, train={"timeout_s": 20})
    code, last = failed(subject, tmp_path)
    assert code == 4
    assert "longer than its limit of 20 s" in last and "resumes from the last checkpoint" in last
    assert not [job for job in subject.jobs() if "deletionTimestamp" not in job["metadata"]]


def test_too_little_memory(training: Make, tmp_path: Path) -> None:
    subject = training("memory", train={"memory": "80Mi"})
    code, last = failed(subject, tmp_path)
    assert code == 4
    assert "got no further" in last and "more memory than its limit of 80Mi" in last


def test_a_training_that_fails_for_good_fails_once_and_is_kept_for_a_look(
    training: Make, tmp_path: Path
) -> None:
    subject = training("fails", config={**CONFIG, "learning_rate": 1e9})
    code, last = failed(subject, tmp_path)
    assert code == 4
    assert "the loss is no longer finite" in last
    assert "is started again" not in (tmp_path / f"{subject.name}.log").read_text()
    assert len(subject.jobs()) == 1


def test_a_network_that_is_not_good_enough_is_refused_and_kept(training: Make, tmp_path: Path) -> None:
    subject = training("gate", config={**CONFIG, "epochs": 1, "min_accuracy": 0.999})
    code, last = failed(subject, tmp_path)
    assert code == 5
    assert "train.required asks for 99.90%" in last
    storage.fetch(subject.out, tmp_path / "out")
    assert read_manifest(tmp_path / "out").rejected
