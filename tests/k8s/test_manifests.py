"""The manifests, without a cluster: valid, safe, and what they refer to exists."""

from __future__ import annotations

import copy
import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from hpml.pipelines.cluster import pods
from hpml.pipelines.cluster.config import ClusterConfig
from tests.k8s.network import Peer, allowed, matches
from tests.k8s.pod_security import PRIVILEGES, containers_of, violations

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).parent / "golden"
RIGHTS = yaml.safe_load((GOLDEN / "rights.yaml").read_text())

Object = dict[str, Any]
Render = Callable[[str], list[Object]]

SETUPS = (
    "base", "base+deployer", "base+downloads", "base+external-store", "base+kubeflow", "base+kubeflow-store",
    "base+kueue", "base+postgres", "base+trainer",
    "overlays/gpu", "overlays/gpu/check", "overlays/gpu/check-mig", "overlays/kind", "overlays/test",
)  # fmt: skip
WHOLE = tuple(name for name in SETUPS if "check" not in name)
KUEUE = {
    "ResourceFlavor",
    "ClusterQueue",
    "LocalQueue",
}  # of a CRD: Kubernetes' own schema does not know them

STEP = pods.labels("run", "train")
PREPARE = pods.labels("run", "prepare")
RANK = {**STEP, "training.kubeflow.org/job-name": "train"}  # the label that the training operator adds
TRAINER_RANK = {**STEP, "jobset.sigs.k8s.io/jobset-name": "train"}  # JobSet's, under Kubeflow Trainer
LAUNCHER = {**STEP, "app.kubernetes.io/component": "launcher"}
SUBMITTER = {"app.kubernetes.io/component": "submitter"}

every_setup = pytest.mark.parametrize("setup", SETUPS)
every_whole_setup = pytest.mark.parametrize("setup", WHOLE)


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def names(objects: list[Object], kind: str) -> set[str]:
    return {each["metadata"]["name"] for each in of_kind(objects, kind)}


def templates(objects: list[Object]) -> list[Object]:
    return [each["spec"]["template"] for each in of_kind(objects, "Deployment", "Job")]


# ---------------------------------------------------------------- valid


@every_setup
def test_every_object_is_valid_for_kubernetes(render: Render, setup: str) -> None:
    for each in render(setup):
        if each["kind"] not in KUEUE:
            kubernetes_validate.validate(each, "1.34", strict=True)


def test_a_field_that_kubernetes_does_not_know_is_noticed(render: Render) -> None:
    deployment = copy.deepcopy(of_kind(render("base"), "Deployment")[0])
    deployment["spec"]["template"]["spec"]["automountServiceAcountToken"] = False

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, "1.34", strict=True)


@every_setup
def test_every_object_says_whose_it_is(render: Render, setup: str) -> None:
    for each in render(setup):
        name = f"{each['kind']} {each['metadata']['name']}"
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "hpml", name
        if each["kind"] not in ("Namespace", "ResourceFlavor", "ClusterQueue"):
            assert each["metadata"]["namespace"] in ("hpml", "kubeflow"), name


# ---------------------------------------------------------------- rights


def rights(objects: list[Object]) -> dict[str, dict[str, list[str]]]:
    """resource -> verbs, by NAMESPACE/ACCOUNT, of what Roles and RoleBindings say."""
    found: dict[str, dict[str, list[str]]] = {
        f"{each['metadata']['namespace']}/{each['metadata']['name']}": {}
        for each in of_kind(objects, "ServiceAccount")
    }
    roles = {
        (each["metadata"]["namespace"], each["metadata"]["name"]): each for each in of_kind(objects, "Role")
    }
    for binding in of_kind(objects, "RoleBinding"):
        role = roles[binding["metadata"]["namespace"], binding["roleRef"]["name"]]
        for subject in binding["subjects"]:
            assert subject["namespace"] == binding["metadata"]["namespace"]
            account = found.setdefault(f"{subject['namespace']}/{subject['name']}", {})
            for rule in role["rules"]:
                for group in rule["apiGroups"]:
                    for resource in rule["resources"]:
                        verbs = account.setdefault(f"{resource}.{group}".rstrip("."), [])
                        verbs.extend(rule["verbs"])
    return {name: {key: sorted(verbs) for key, verbs in each.items()} for name, each in found.items()}


@every_whole_setup
def test_the_rights_are_the_golden_ones(render: Render, setup: str) -> None:
    objects = render(setup)

    assert not of_kind(objects, "ClusterRole", "ClusterRoleBinding")
    has_kubeflow = any(each["metadata"].get("namespace") == "kubeflow" for each in of_kind(objects, "Role"))
    golden = {name: dict(each) for name, each in RIGHTS.items() if has_kubeflow or name.startswith("hpml/")}
    if setup == "base+trainer":
        golden["hpml/hpml-launcher"] |= yaml.safe_load((GOLDEN / "rights_trainer.yaml").read_text())
    if setup == "base+deployer":
        golden["hpml/hpml-deployer"] = yaml.safe_load((GOLDEN / "rights_deployer.yaml").read_text())
    assert rights(objects) == golden


def test_a_pod_gets_no_token_unless_it_asks(render: Render) -> None:
    for account in of_kind(render("overlays/kind"), "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    for template in templates(render("overlays/kind")):
        assert template["spec"]["automountServiceAccountToken"] is False


# ---------------------------------------------------------------- pods


@every_setup
def test_every_pod_is_restricted(render: Render, setup: str) -> None:
    for template in templates(render(setup)):
        assert violations(template["spec"]) == []


def test_so_are_the_pods_of_steps() -> None:
    assert violations(step_template()["spec"]) == []


def step_template() -> Object:
    cluster = ClusterConfig()
    return pods.pod_template(cluster, cluster.needs("train"), ["true"], labels=STEP, env={})


@pytest.mark.parametrize("privilege", PRIVILEGES)
def test_one_more_privilege_is_noticed(privilege: str) -> None:
    pod = step_template()["spec"]
    PRIVILEGES[privilege](pod)

    assert violations(pod)


def test_the_namespace_enforces_restricted(render: Render) -> None:
    (namespace,) = of_kind(render("base"), "Namespace")

    labels = namespace["metadata"]["labels"]
    for mode in ("enforce", "audit", "warn"):
        assert labels[f"pod-security.kubernetes.io/{mode}"] == "restricted"


@every_setup
def test_every_image_is_of_one_version(render: Render, setup: str) -> None:
    version = importlib.metadata.version("hpml-pipeline")
    for template in templates(render(setup)):
        for container in containers_of(template["spec"]):
            image = container["image"]
            assert re.fullmatch(r"\S+:(?!latest)[\w.-]+(@sha256:[0-9a-f]{64})?", image)
            if "hpml-" in image:
                assert image.endswith(":test" if setup == "overlays/test" else f":{version}"), image
            else:
                assert "@sha256:" in image, f"{image} is somebody else's, and may change"


def test_requests_are_limits_in_memory(render: Render) -> None:
    for setup in SETUPS:
        for template in templates(render(setup)):
            for container in containers_of(template["spec"]):
                amounts = container["resources"]
                assert amounts["requests"]["memory"] == amounts["limits"]["memory"], container["name"]


def test_mlflow_has_the_memory_it_was_measured_with(render: Render) -> None:
    (mlflow,) = [
        each for each in of_kind(render("base"), "Deployment") if each["metadata"]["name"] == "mlflow"
    ]
    (server,) = mlflow["spec"]["template"]["spec"]["containers"]

    assert server["resources"]["limits"]["memory"] == "600Mi"
    patience_s = server["startupProbe"]["periodSeconds"] * server["startupProbe"]["failureThreshold"]
    assert patience_s >= 60  # it starts in 12 to 18 s, if the node has nothing else to do


# ---------------------------------------------------------------- references


@every_setup
def test_no_secret_is_in_the_manifests(render: Render, setup: str) -> None:
    assert not of_kind(render(setup), "Secret")


@every_whole_setup
def test_what_is_referred_to_exists(render: Render, setup: str) -> None:
    objects = render(setup)
    for template in templates(objects):
        spec = template["spec"]
        assert spec["serviceAccountName"] in names(objects, "ServiceAccount")
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in names(objects, "PersistentVolumeClaim")
            if "configMap" in volume:
                assert volume["configMap"]["name"] in names(objects, "ConfigMap")
        for container in containers_of(spec):
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= volumes.keys()


@every_setup
def test_variables_are_defined_before_they_are_used(render: Render, setup: str) -> None:
    for template in templates(render(setup)):
        for container in containers_of(template["spec"]):
            known: set[str] = set()
            for variable in container.get("env", []):
                assert set(re.findall(r"\$\((\w+)\)", variable.get("value", ""))) <= known
                known.add(variable["name"])
            if container["name"] == "seaweedfs":
                continue  # a shell, which has its own $( )
            for word in [*container.get("command", []), *container.get("args", [])]:
                assert set(re.findall(r"\$\((\w+)\)", word)) <= known


@every_whole_setup
def test_every_claim_is_mounted(render: Render, setup: str) -> None:
    objects = render(setup)
    mounted = {
        volume["persistentVolumeClaim"]["claimName"]
        for template in templates(objects)
        for volume in template["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert names(objects, "PersistentVolumeClaim") == mounted


@every_whole_setup
def test_every_service_has_pods_that_listen(render: Render, setup: str) -> None:
    objects = render(setup)
    for service in of_kind(objects, "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        chosen = [each for each in templates(objects) if matches(selector, each["metadata"]["labels"])]
        assert len(chosen) == 1, service["metadata"]["name"]
        ports = {
            port["name"]
            for container in chosen[0]["spec"]["containers"]
            for port in container.get("ports", [])
        }
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_accounts_and_services_are_those_that_recipes_name(render: Render) -> None:
    objects, cluster = render("base"), ClusterConfig()

    assert names(objects, "Namespace") == {cluster.namespace}
    assert {cluster.stage_account, cluster.launcher_account} <= names(objects, "ServiceAccount")
    host = cluster.tracking_uri.removeprefix("http://").partition(":")[0].partition(".")[0]
    assert host in names(objects, "Service")
    assert cluster.store == "s3://hpml"  # the bucket that MLflow's pod makes


# ---------------------------------------------------------------- network


def servers(objects: list[Object]) -> dict[str, Peer]:
    return {
        template["metadata"]["labels"]["app.kubernetes.io/name"]: Peer(template["metadata"]["labels"])
        for template in templates(objects)
    }


@every_whole_setup
def test_every_policy_is_about_pods_that_exist(render: Render, setup: str) -> None:
    objects = render(setup)
    ours = [
        STEP,
        PREPARE,
        RANK,
        TRAINER_RANK,
        LAUNCHER,
        SUBMITTER,
        *(peer.labels for peer in servers(objects).values()),
    ]
    absent = {"app.kubernetes.io/name": "seaweedfs"}  # an external store has no pod
    for policy in of_kind(objects, "NetworkPolicy"):
        spec = policy["spec"]
        peers = [
            *(peer for rule in spec.get("ingress", []) for peer in rule.get("from", [])),
            *(peer for rule in spec.get("egress", []) for peer in rule.get("to", [])),
        ]
        for selector in [spec["podSelector"], *(peer.get("podSelector", {}) for peer in peers)]:
            if setup == "base+external-store" and selector == {"matchLabels": absent}:
                continue
            assert any(matches(selector, labels) for labels in ours), (
                f"{policy['metadata']['name']}: {selector}"
            )


@every_whole_setup
def test_who_talks_to_whom(render: Render, setup: str) -> None:
    policies = of_kind(render(setup), "NetworkPolicy")
    pods_of = servers(render(setup))
    step, rank, launcher, submitter = Peer(STEP), Peer(RANK), Peer(LAUNCHER), Peer(SUBMITTER)
    mlflow, dns = pods_of["mlflow"], Peer({"k8s-app": "kube-dns"}, "kube-system")
    stranger, api_server = Peer({}, "default"), Peer(address="10.0.0.7")

    for source in (step, rank, launcher, submitter):
        assert allowed(policies, source, mlflow, 5000)
        assert not allowed(policies, source, mlflow, 8333)
    for source in (step, rank, launcher, submitter, mlflow):
        assert allowed(policies, source, dns, 53, "UDP")
        assert not allowed(policies, stranger, source, 5000)
        assert not allowed(policies, source, stranger, 80)
    assert allowed(policies, rank, rank, 29500)
    assert not allowed(policies, step, rank, 29500)
    assert not allowed(policies, rank, step, 29500)
    assert not allowed(policies, step, step, 29500)
    assert allowed(policies, launcher, api_server, 6443)
    assert allowed(policies, submitter, api_server, 443)
    assert not allowed(policies, step, api_server, 6443)
    assert not allowed(policies, mlflow, api_server, 6443)


@pytest.mark.parametrize("setup", [name for name in WHOLE if name != "base+external-store"])
def test_the_store_is_reached_by_s3_only(render: Render, setup: str) -> None:
    policies = of_kind(render(setup), "NetworkPolicy")
    store, mlflow = servers(render(setup))["seaweedfs"], servers(render(setup))["mlflow"]

    for source in (Peer(STEP), Peer(RANK), Peer(LAUNCHER), Peer(SUBMITTER), mlflow):
        assert allowed(policies, source, store, 8333)
        for port in (18333, 8888, 9333, 8080, 9327):  # its gateway's gRPC, filer, master, volumes, metrics
            assert not allowed(policies, source, store, port)
    assert not allowed(policies, store, mlflow, 5000)
    assert not allowed(policies, Peer({}, "default"), store, 8333)


def test_an_external_store_is_reached_by_https(render: Render) -> None:
    policies = of_kind(render("base+external-store"), "NetworkPolicy")

    assert allowed(policies, Peer(STEP), Peer(address="52.216.0.1"), 443)
    assert not allowed(policies, Peer(STEP), Peer(address="52.216.0.1"), 80)


def test_only_prepare_downloads_and_only_from_public_addresses(render: Render) -> None:
    policies = of_kind(render("base+downloads"), "NetworkPolicy")
    public, private = Peer(address="128.100.3.30"), Peer(address="10.0.0.7")

    assert allowed(policies, Peer(PREPARE), public, 443)
    assert not allowed(policies, Peer(PREPARE), public, 80)
    assert not allowed(policies, Peer(PREPARE), private, 443)
    assert not allowed(policies, Peer(STEP), public, 443)
    assert not allowed(of_kind(render("base"), "NetworkPolicy"), Peer(PREPARE), public, 443)


def test_ranks_of_a_train_job_meet_with_the_component(render: Render) -> None:
    rank = Peer(TRAINER_RANK)
    assert allowed(of_kind(render("base+trainer"), "NetworkPolicy"), rank, rank, 29500)
    assert not allowed(of_kind(render("base"), "NetworkPolicy"), rank, rank, 29500)


def test_kubeflow_s_steps_reach_store_and_mlflow(render: Render) -> None:
    kubeflow = Peer({}, "kubeflow")
    for setup, reached in {"base": False, "base+kubeflow": True, "overlays/kind": True}.items():
        policies, pods_of = of_kind(render(setup), "NetworkPolicy"), servers(render(setup))
        assert allowed(policies, kubeflow, pods_of["mlflow"], 5000) is reached
        assert allowed(policies, kubeflow, pods_of["seaweedfs"], 8333) is reached
        assert allowed(policies, Peer(SUBMITTER), kubeflow, 8888) is reached
        assert allowed(policies, Peer(SUBMITTER), kubeflow, 3000) is reached  # a pod of the user interface
        assert not allowed(policies, Peer(STEP), kubeflow, 8888)


def test_kubeflow_s_launcher_is_told_of_the_store_that_our_steps_use(render: Render) -> None:
    [config] = [each for each in of_kind(render("base+kubeflow-store"), "ConfigMap") if "kfp" in str(each)]
    assert config["data"]["defaultPipelineRoot"].startswith(f"{ClusterConfig().store}/")
    store = yaml.safe_load(config["data"]["providers"])["s3"]["default"]
    assert store["endpoint"] == "http://seaweedfs.hpml:8333" and store["forcePathStyle"] is True
    assert store["credentials"]["secretRef"] == {
        "secretName": ClusterConfig().store_secret,
        "accessKeyKey": "AWS_ACCESS_KEY_ID",
        "secretKeyKey": "AWS_SECRET_ACCESS_KEY",
    }


def test_postgres_is_mlflow_s_alone(render: Render) -> None:
    policies, pods_of = of_kind(render("base+postgres"), "NetworkPolicy"), servers(render("base+postgres"))

    assert allowed(policies, pods_of["mlflow"], pods_of["postgres"], 5432)
    for source in (Peer(STEP), Peer(LAUNCHER), Peer(SUBMITTER), pods_of["seaweedfs"]):
        assert not allowed(policies, source, pods_of["postgres"], 5432)


def test_prometheus_reads_metrics_from_a_namespace_that_was_named(render: Render) -> None:
    store = servers(render("base"))["seaweedfs"]
    (template,) = [each for each in templates(render("base")) if each["metadata"]["labels"] == store.labels]
    annotations = template["metadata"]["annotations"]

    assert annotations["prometheus.io/scrape"] == "true"
    ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    assert str(ports["metrics"]) == annotations["prometheus.io/port"]


# ---------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("setup", "resource"),
    [("overlays/gpu/check", "nvidia.com/gpu"), ("overlays/gpu/check-mig", "nvidia.com/mig-1g.10gb")],
)
def test_the_check_asks_for_one_gpu_and_the_quota_has_it(render: Render, setup: str, resource: str) -> None:
    (template,) = templates(render(setup))
    amounts = template["spec"]["containers"][0]["resources"]
    gpus = {name: count for name, count in amounts["limits"].items() if name.startswith("nvidia.com/")}
    (quota,) = of_kind(render("overlays/gpu"), "ResourceQuota")

    assert gpus == {resource: "1"}
    assert amounts["requests"] == amounts["limits"]
    assert int(quota["spec"]["hard"][f"requests.{resource}"]) >= 1
    assert quota["spec"]["hard"]["pods"], "the patch adds to the quota of the base"


def test_the_check_s_pod_is_that_of_a_step_on_a_gpu(render: Render) -> None:
    (template,) = templates(render("overlays/gpu/check"))
    cluster = ClusterConfig.model_validate({"stages": {"train": {"gpus": 1}}})
    step = pods.pod_template(cluster, cluster.needs("train"), ["true"], labels={}, env={})["spec"]
    mine = template["spec"]

    for field in ("serviceAccountName", "automountServiceAccountToken", "securityContext", "volumes"):
        assert mine[field] == step[field], field
    for field in ("securityContext", "volumeMounts"):
        assert mine["containers"][0][field] == step["containers"][0][field], field
