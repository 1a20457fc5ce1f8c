"""The TrainJob of a training, and the runtime that it brings: what Trainer's definitions make of them."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import jsonschema
import pytest

from hpml.core.contract import Events
from hpml.core.errors import ConfigInvalid
from hpml.pipelines.cluster import pods
from hpml.pipelines.cluster.client import connect
from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.operators import follow as launch
from hpml.pipelines.operators.follow import Launch
from hpml.pipelines.operators.trainjob import RUNTIMES, TrainJobs
from tests.pipelines.fake_cluster import FakeCluster
from tests.pipelines.training_jobs import check_against, definition, training

TRAINER = "github.com/kubeflow/trainer/v2@v2.0.0"


def test_both_are_what_trainer_defines() -> None:
    subject = training({"queue": "gpus", "stages": {"train": {"gpus": 2}}}, nproc_per_node=2)
    job = TrainJobs().job(subject)
    [(kind, runtime)] = TrainJobs().companions(subject)
    check_against(definition(TRAINER, "trainjobs"), job)
    check_against(definition(TRAINER, kind.plural), runtime)
    runtime["spec"]["mlPolicy"]["torch"]["nprocPerNode"] = 2
    with pytest.raises(jsonschema.ValidationError, match="nprocPerNode"):
        check_against(definition(TRAINER, kind.plural), runtime)


def test_the_job_refers_to_its_runtime_whose_pods_are_like_those_of_every_step() -> None:
    subject = training()
    job = TrainJobs().job(subject)
    [(_, runtime)] = TrainJobs().companions(subject)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == job["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    assert job["spec"]["trainer"] == {"numNodes": 2, "numProcPerNode": 1}
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    cluster = ClusterConfig()
    like = pods.pod_template(cluster, cluster.needs("train"), [], labels={}, env={}, name="node")["spec"]
    assert pod["securityContext"] == like["securityContext"]
    assert pod["containers"][0]["securityContext"] == like["containers"][0]["securityContext"]
    assert pod["containers"][0]["command"] == list(subject.command)


def test_only_codes_that_another_try_could_not_mend_fail_the_job() -> None:
    [(_, runtime)] = TrainJobs().companions(training())
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    lost, final = node["template"]["spec"]["podFailurePolicy"]["rules"]
    assert lost["action"] == "Ignore" and final["action"] == "FailJob"
    assert final["onExitCodes"]["values"] == [1, 2, 3, 4, 5, 6]


def test_an_elastic_training_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="no elastic training"):
        TrainJobs().job(training(min_nodes=1))


@pytest.mark.parametrize(
    ("condition", "phase"),
    [(None, "running"), ("Complete", "succeeded"), ("Failed", "failed"), ("Suspended", "queued")],
)
def test_how_far_it_is(condition: str | None, phase: str) -> None:
    job = TrainJobs().job(training())
    job["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    conditions = [{"type": "Suspended", "status": "False"}, {"type": condition, "status": "True"}]
    job["status"] = {"conditions": conditions[: 2 if condition else 1]}
    assert TrainJobs().state(job).phase == phase


def test_its_time_begins_when_it_leaves_the_queue() -> None:
    job = TrainJobs().job(training())
    job["metadata"]["creationTimestamp"] = "1970-01-01T00:00:10Z"
    assert TrainJobs().state(job).started_at_s == 10
    left = {"type": "Suspended", "status": "False", "lastTransitionTime": "1970-01-01T00:00:30Z"}
    job["status"] = {"conditions": [left]}
    assert TrainJobs().state(job).started_at_s == 30


def test_the_launcher_makes_both_and_the_runtime_goes_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "POLL_S", 0.03)
    subject = training()
    cluster = FakeCluster(plurals=("pods", "events", "trainjobs", "trainingruntimes"))

    def play_trainer(job: dict[str, object]) -> None:
        if job["kind"] != "TrainJob":
            return
        labels = {"jobset.sigs.k8s.io/jobset-name": subject.name, TrainJobs.index_label: "1"}
        pod = cluster.add_pod("node-1", labels, "node")
        cluster.set_state(pod, "Running", "node", running={})
        cluster.log(pod, "hello")
        time.sleep(0.2)
        cluster.set_state(pod, "Succeeded", "node", terminated={"exitCode": 0})
        job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}

    cluster.on_create = play_trainer
    with cluster.serving():
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path / "kubeconfig")))
        kube = connect("hpml")
        thread = threading.Thread(target=Launch(TrainJobs(), subject, kube, Events(None)).run)
        thread.start()
        while (
            not (runtime := kube.get(RUNTIMES, subject.name)) or "ownerReferences" not in runtime["metadata"]
        ):
            time.sleep(0.01)
        [owner] = runtime["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("TrainJob", subject.name)
        thread.join()
        assert "node 1 | hello" in capsys.readouterr().out
        assert cluster.requests.index("create trainingruntimes") < cluster.requests.index("create trainjobs")
        assert not cluster.all("trainjobs")
