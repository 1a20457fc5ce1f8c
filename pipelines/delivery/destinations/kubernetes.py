"""A Kubernetes cluster: a canary beside the stable version; see `delivery/kubernetes`."""

from __future__ import annotations

import shlex
from pathlib import Path

from hpml.artifacts.folder import MANIFEST
from hpml.core import regular_files, strict_yaml
from hpml.core.contract import validate_options
from hpml.core.errors import UsageError
from hpml.io import storage
from hpml.measuring.subjects.bundle import BUNDLE
from hpml.pipelines.cluster.client import connect
from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.cluster.store import use_store
from hpml.pipelines.delivery import own_server
from hpml.pipelines.delivery.deploy_options import DeployOptions
from hpml.pipelines.delivery.deployable import Deployable
from hpml.pipelines.delivery.kubernetes import manifests
from hpml.pipelines.delivery.kubernetes.manifests import KubernetesConfig
from hpml.pipelines.delivery.kubernetes.place import KubernetesPlace
from hpml.pipelines.delivery.origin import origin_of
from hpml.pipelines.delivery.release import Release
from hpml.pipelines.delivery.rollout import Say

_NAMESPACE = "hpml"
_REPLICAS = 2  # so that one may go
_DRAIN_S = 5.0  # until every proxy knows that a pod is not ready
_PATIENCE_S = 120.0  # with an API server that is away


def write(bundle: Deployable, options: DeployOptions, folder: Path) -> list[str]:
    """`kubernetes.yaml`, for whoever applies it otherwise than by hpml deploy: no canary then."""
    if not options.bundle_uri:
        raise UsageError(
            "--bundle-uri is not given",
            why="the pods get the bundle from there",
            fix="give s3://BUCKET/FOLDER or pvc://CLAIM/FOLDER",
        )
    bundle = _sealed(bundle)
    config = _config(bundle, options)
    released = bundle.released(options.bundle_uri, config.model_dump(mode="json"))
    made = [body for _, body in manifests.common(config, released)]
    made.append(manifests.deployment(config, released, "stable", tried=True))
    head = f"# {bundle.title}, by hpml deploy --to kubernetes\n"
    text = head + "---\n".join(map(strict_yaml.dump, made))
    (folder / "kubernetes.yaml").write_text(text, encoding="utf-8")
    where = f"--namespace {_namespace(options)}"
    before = []
    if options.bundle_uri.startswith("s3://"):
        folder_here = shlex.quote(str(bundle.folder.resolve()))
        before = [
            f"aws s3 sync {folder_here} {options.bundle_uri}",
            f"# the Secret {config.store_secret} has the keys to read it: k8s/make-secrets",
        ]
    return [
        *before,
        f"kubectl apply --filename kubernetes.yaml {where}",
        f"kubectl rollout status deployment/{options.name} {where}",
    ]


def release(bundle: Deployable, options: DeployOptions, say: Say) -> Release:
    """`bundle`, as pods find it: where `options` say, else in the cluster's store, to which it is uploaded.

    Raises UsageError and ConfigInvalid for what cannot be served so, Unavailable.
    """
    bundle = _sealed(bundle)
    config = _config(bundle, options)
    uri = options.bundle_uri or _uploaded(bundle, options, say)
    return bundle.released(uri, config.model_dump(mode="json"))


def place(options: DeployOptions, home: Path, say: Say) -> KubernetesPlace:
    """The name in its namespace. Raises Unavailable if requests are to be replayed and there is no store."""
    cluster = connect(_namespace(options), patience_s=_PATIENCE_S, say=say)
    if options.replay:
        use_store(cluster, ClusterConfig(namespace=cluster.name, store=options.store), say)
    return KubernetesPlace(
        cluster,
        options.name,
        say,
        wait_s=options.wait_s,
        ready_s=options.ready_s,
        smoke_s=options.smoke_s,
        replay=storage.read_text(str(options.replay)) if options.replay else "",
        store=options.store,
    )


def address(options: DeployOptions) -> str:
    """Which place that is, for the records."""
    return f"kubernetes/{_namespace(options)}"


def _namespace(options: DeployOptions) -> str:
    return options.namespace if options.given("namespace") else _NAMESPACE


def _sealed(bundle: Deployable) -> Deployable:
    """It with its manifest, by which pods verify it: the store has that, a run's folder the files alone.

    Raises as `origin_of`, and UsageError if the run that is found made another bundle.
    """
    if (bundle.folder / MANIFEST).is_file():
        return bundle
    origin = origin_of(bundle)
    [step] = (name for name, one in origin.record.steps.items() if one.stage == "bundle")
    found = Deployable(origin.artifact(step).path, bundle.home)
    if regular_files.sha256(found.folder / BUNDLE) != regular_files.sha256(bundle.folder / BUNDLE):
        raise UsageError(
            f"the bundle {bundle.folder} has no {MANIFEST}",
            why=f"pods verify it by that, and run {origin.record.id} made another bundle of its engine",
            fix="give the run that made it in place of the folder",
        )
    return found


def _config(bundle: Deployable, options: DeployOptions) -> KubernetesConfig:
    own_server.check_can_serve(bundle, options)
    given = {
        "name": options.name,
        "image": own_server.image(options),
        "replicas": options.replicas if options.given("replicas") else _REPLICAS,
        "max_replicas": options.max_replicas,
        "cpus": own_server.cpus(bundle, options),
        "cpu_limit": options.cpu_limit,
        "memory": f"{own_server.memory_mib(bundle, options)}Mi",
        "gpus": int(bundle.runs_on_gpu),
        "drain_s": _DRAIN_S if options.drain_s is None else options.drain_s,
        "arguments": own_server.settings(bundle, options),
        "token_secret": options.token_secret,
        "ingress_host": options.ingress_host,
        "ingress_class": options.ingress_class,
        "ingress_tls_secret": options.ingress_tls_secret,
        "ingress_annotations": dict(options.ingress_annotations),
        "store_cidrs": options.store_cidr,
        "store_port": options.store_port,
        "gateway": options.gateway,
    }
    config: KubernetesConfig = validate_options(KubernetesConfig, given, where="what is given to hpml deploy")
    return config


def _uploaded(bundle: Deployable, options: DeployOptions, say: Say) -> str:
    """The place of `bundle` in the cluster's store, once it is there."""
    told = ClusterConfig(namespace=_namespace(options), store=options.store)
    use_store(connect(told.namespace, patience_s=0, say=say), told, say)
    uri = f"{told.store}/bundles/{bundle.digest}"
    if storage.digest_at(uri) != bundle.digest:
        say(f"{bundle.folder} goes to {uri}")
        storage.upload(bundle.folder, uri)
    return uri
