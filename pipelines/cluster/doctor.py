"""What `hpml doctor` finds in a cluster, and what has to be there before a run creates its first Job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hpml.components import STAGES
from hpml.core.errors import HpmlError, Unavailable
from hpml.pipelines.cluster import client as kube
from hpml.pipelines.cluster.client import CONFIGMAPS, EVENTS, JOBS, PODS, PODS_LOG, Namespace, Resource
from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.cluster.finding import Finding
from hpml.pipelines.cluster.store import SECRETS, use_store

_NAMESPACES = Resource("v1", "namespaces", namespaced=False)
_NODES = Resource("v1", "nodes", namespaced=False)
_ALL_SERVICES = Resource("v1", "services", namespaced=False)
_ALL_DEPLOYMENTS = Resource("apps/v1", "deployments", namespaced=False)
_STORAGE_CLASSES = Resource("storage.k8s.io/v1", "storageclasses", namespaced=False)
_ACCOUNTS = Resource("v1", "serviceaccounts")
_SERVICES = Resource("v1", "services")
_BINDINGS = Resource("rbac.authorization.k8s.io/v1", "rolebindings")

# What `--executor kubernetes` does itself; k8s/base grants it to the Role hpml-submitter.
RIGHTS: tuple[tuple[Resource, tuple[str, ...]], ...] = (
    (JOBS, ("create", "get", "delete")),
    (CONFIGMAPS, ("create", "get", "delete")),
    (PODS, ("get", "list")),
    (PODS_LOG, ("get",)),
    (EVENTS, ("list",)),
)
_BASE = "kubectl apply -k k8s/base"
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"  # an annotation


def needed(cluster: Namespace, config: ClusterConfig, *, launches: bool) -> list[Finding]:
    """Without which no run can start: namespace, rights, accounts, the store's Secret.

    launches: whether a step launches a training job of several nodes. Raises Unavailable if the cluster does
    not answer, or does not know us.
    """
    advice = f"{_BASE} makes it; or set cluster.namespace in the recipe"
    namespace = _there(cluster, _NAMESPACES, cluster.name, advice)
    if namespace.state == "missing":
        return [namespace]
    found = [
        namespace,
        _rights(cluster),
        _there(cluster, _ACCOUNTS, config.stage_account, f"{_BASE} makes it; or set cluster.stage_account"),
        _there(
            cluster, SECRETS, config.store_secret, "k8s/make-secrets makes it; or set cluster.store_secret"
        ),
    ]
    if launches:
        account = config.launcher_account
        advice = f"{_BASE} makes it; or set cluster.launcher_account"
        found += [_there(cluster, _ACCOUNTS, account, advice), _training(cluster, config)]
    return found


def examine(config: ClusterConfig) -> list[Finding]:
    """All that hpml can use in the cluster that KUBECONFIG, or the pod we are in, leads to."""
    try:
        cluster = kube.connect(config.namespace, patience_s=0)
        version = cluster.raw("/version").get("gitVersion", "of an unknown version")
        found = needed(cluster, config, launches=False)
    except HpmlError as error:
        return [Finding("cluster", "missing", _one_line(error), error.fix)]
    looks: list[tuple[str, Callable[[], Finding]]] = [
        ("training", lambda: _training(cluster, config)),
        ("images", lambda: _images(cluster, config)),
        ("cluster gpus", lambda: _gpus(cluster, config)),
        ("volumes", lambda: _volumes(cluster)),
    ]
    if found[0].state != "missing":  # the namespace
        advice = f"for train.nodes > 1: {_BASE} makes it"
        looks += [
            ("launcher", lambda: _there(cluster, _ACCOUNTS, config.launcher_account, advice)),
            ("store", lambda: _store(cluster, config)),
            ("mlflow server", lambda: _mlflow(cluster, config)),
        ]
    reached = Finding("cluster", "ok", f"Kubernetes {version} at {cluster.host}")
    findings = [reached, *found, *(_look(name, look) for name, look in looks)]
    return [*findings, *_kubeflow(cluster, config)]


def _look(name: str, look: Callable[[], Finding]) -> Finding:
    """A part of the cluster that we may not see is no reason not to look at the others."""
    try:
        return look()
    except HpmlError as error:
        return _unseen(name, error)


def _unseen(name: str, error: HpmlError) -> Finding:
    return Finding(name, "optional", f"cannot be looked at: {_one_line(error)}", error.fix)


def _one_line(error: HpmlError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what


# ------------------------------------------------------------------------------------------- what is needed


def _there(cluster: Namespace, resource: Resource, name: str, advice: str) -> Finding:
    """Whether an object is there; without the right to look it may be."""
    thing = f"{resource.plural.removesuffix('s')} {name}"
    if not cluster.may("get", resource, name):
        return Finding(thing, "optional", "you may not look whether it is there")
    try:
        found = cluster.get(resource, name)
    except Unavailable:
        if resource != _NAMESPACES:
            raise
        found = None  # it is what the client finds missing in every other answer
    if found is None:
        where = f" in the namespace {cluster.name}" if resource.namespaced else f" at {cluster.host}"
        return Finding(thing, "missing", f"there is no {thing}{where}", advice)
    return Finding(thing, "ok", "is there")


def _rights(cluster: Namespace) -> Finding:
    asked = [(verb, resource) for resource, verbs in RIGHTS for verb in verbs]
    denied = [f"{verb} {resource.plural}" for verb, resource in asked if not cluster.may(verb, resource)]
    if not denied:
        return Finding("rights", "ok", f"you may run Jobs in the namespace {cluster.name}")
    found = f"in the namespace {cluster.name} you may not {', '.join(denied)}"
    advice = (
        f"an administrator grants it: kubectl -n {cluster.name} create rolebinding NAME --role=hpml-submitter"
        " --user=YOU"
    )
    return Finding("rights", "missing", found, advice)


# --------------------------------------------------------------------------------------------- what is of use


def _serves(cluster: Namespace, version: str, plural: str) -> bool:
    """Whether the API of the cluster has this kind of objects."""
    groups = cluster.raw("/apis").get("groups", ())
    if not any(served["groupVersion"] == version for group in groups for served in group["versions"]):
        return False
    return any(item["name"] == plural for item in cluster.raw(f"/apis/{version}").get("resources", ()))


def _training(cluster: Namespace, config: ClusterConfig) -> Finding:
    """Whether training on several nodes finds what it asks for."""
    if config.trainer == "trainjob":
        if _serves(cluster, "trainer.kubeflow.org/v1alpha1", "trainjobs"):
            return Finding("training", "ok", "TrainJobs are known")
        advice = "install Kubeflow Trainer 2 and k8s/components/trainer, or set cluster.trainer: pytorchjob"
        return Finding("training", "missing", "the cluster does not know TrainJobs", advice)
    advice = (
        "for train.nodes > 1, install the Kubeflow training operator v1: kubectl apply --server-side -k"
        " 'github.com/kubeflow/training-operator/manifests/overlays/standalone?ref=v1.8.1'"
    )
    if not _serves(cluster, "kubeflow.org/v1", "pytorchjobs"):
        return Finding("training", "missing", "the cluster does not know PyTorchJobs", advice)
    if not cluster.may("list", _ALL_DEPLOYMENTS):
        return Finding(
            "training", "ok", "PyTorchJobs are known; you may not look whether their operator runs"
        )
    operators = cluster.find(_ALL_DEPLOYMENTS, fields="metadata.name=training-operator")
    if not any(item.get("status", {}).get("availableReplicas") for item in operators):
        return Finding("training", "missing", "PyTorchJobs are known, but no training-operator runs", advice)
    return Finding("training", "ok", f"the training operator runs in {operators[0]['metadata']['namespace']}")


def _images(cluster: Namespace, config: ClusterConfig) -> Finding:
    """Which of our images a node has; the others are pulled, if their names lead to a registry."""
    listed = [image for node in cluster.find(_NODES) for image in node["status"].get("images", ())]
    present = {name for image in listed for name in image.get("names") or ()}
    families = [*(config.needs(stage).image for stage in STAGES), "client"]
    wanted = dict.fromkeys(config.image(family) for family in families if family)
    absent = [image for image in wanted if not _full_names(image) & present]
    if not absent:
        return Finding("images", "ok", f"on a node: {', '.join(wanted)}")
    found = f"on no node: {', '.join(absent)}"
    if any("/" not in image for image in absent):
        advice = (
            "make images, push them to your registry, and name them under cluster.images; or load them into"
            " the nodes, as make kind-up does"
        )
        return Finding("images", "missing", found, advice)
    return Finding("images", "optional", found, "they are pulled when the first step needs them")


def _full_names(image: str) -> set[str]:
    """The names by which a node may list `image`."""
    return {image, f"docker.io/{image}", f"docker.io/library/{image}", f"localhost/{image}"}


def _gpus(cluster: Namespace, config: ClusterConfig) -> Finding:
    resource = config.gpu_resource
    count = sum(int(node["status"].get("allocatable", {}).get(resource, 0)) for node in cluster.find(_NODES))
    if count:
        return Finding("cluster gpus", "ok", f"{count} of {resource}")
    advice = (
        "for stages with gpus: install NVIDIA's GPU operator (k8s/overlays/gpu); or set cluster.gpu_resource"
    )
    asked = [stage for stage in STAGES if config.needs(stage).gpus]
    if asked:
        found = f"no node has {resource}, which {', '.join(asked)} ask for"
        return Finding("cluster gpus", "missing", found, advice)
    return Finding("cluster gpus", "optional", f"no node has {resource}", advice)


def _store(cluster: Namespace, config: ClusterConfig) -> Finding:
    from hpml.io import storage

    said: list[str] = []
    try:
        use_store(cluster, config, said.append)
        storage.list_names(f"{config.store}/newest")
    except HpmlError as error:
        return Finding("store", "missing", _one_line(error), error.fix)
    return Finding("store", "ok", "; ".join([f"{config.store} answers", *said]))


def _mlflow(cluster: Namespace, config: ClusterConfig) -> Finding:
    from urllib.parse import urlsplit

    host = urlsplit(config.tracking_uri).hostname or ""
    if not host:
        return Finding("mlflow server", "optional", "runs are not tracked", "set cluster.tracking_uri")
    service, _, domain = host.partition(".")
    if domain.partition(".")[0] not in ("", cluster.name):
        found = f"{config.tracking_uri}, which only pods need to reach, was not looked at"
        return Finding("mlflow server", "ok", found)
    return replace(
        _there(cluster, _SERVICES, service, f"{_BASE} makes it; or set cluster.tracking_uri"),
        name="mlflow server",
    )


def _kubeflow(cluster: Namespace, config: ClusterConfig) -> list[Finding]:
    """Kubeflow Pipelines, and what the steps of `hpml submit` need in the namespace that it is in."""
    try:
        found = cluster.find(_ALL_SERVICES, fields="metadata.name=ml-pipeline")
    except HpmlError as error:
        return [_unseen("pipelines", error)]
    if not found:
        advice = "for hpml submit: install Kubeflow Pipelines 2, as make kind-up does"
        return [Finding("pipelines", "optional", "no Kubeflow Pipelines", advice)]
    there = cluster.beside(found[0]["metadata"]["namespace"])
    account = f"for train.nodes > 1: k8s/components/kubeflow makes it in the namespace {there.name}"
    looks: list[tuple[str, Callable[[], Finding]]] = [
        ("secret", lambda: _there(there, SECRETS, config.store_secret, f"k8s/make-secrets {there.name}")),
        ("launcher", lambda: _there(there, _BINDINGS, "hpml-launcher", account)),
        ("store", lambda: _kubeflow_store(there)),
    ]
    return [
        Finding("pipelines", "ok", f"Kubeflow Pipelines in {there.name}"),
        *(replace(_look(name, look), name=f"pipelines {name}") for name, look in looks),
    ]


def _kubeflow_store(kubeflow: Namespace) -> Finding:
    """Whether Kubeflow's launcher knows how to reach an S3 that artifacts are to be kept in."""
    settings = (kubeflow.get(CONFIGMAPS, "kfp-launcher") or {}).get("data") or {}
    root = str(settings.get("defaultPipelineRoot") or "")
    if not root.startswith("s3://"):
        return Finding("store", "ok", f"artifacts of its runs are in {root or 'its own store'}")
    if "s3:" in str(settings.get("providers", "")):
        return Finding("store", "ok", f"artifacts of its runs are in {root}")
    found = f"the ConfigMap kfp-launcher names {root}, and no endpoint and credentials for it"
    return Finding(
        "store", "missing", found, "add `providers` to it, as k8s/components/kubeflow-store has them"
    )


def _volumes(cluster: Namespace) -> Finding:
    default = [
        item["metadata"]["name"]
        for item in cluster.find(_STORAGE_CLASSES)
        if (item["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true"
    ]
    if default:
        return Finding("volumes", "ok", f"the default StorageClass is {default[0]}")
    advice = (
        "MLflow's and the store's volumes of k8s/base need one: mark one as default, or name it in an overlay"
    )
    return Finding("volumes", "missing", "there is no default StorageClass", advice)
