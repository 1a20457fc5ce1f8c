"""The objects of a cluster that serve the releases of one name.

Two Deployments, NAME and NAME-canary, stand behind the Service NAME, so that the canary's share of the
traffic is that of its pods; NAME-stable and NAME-canary reach one of them. Pods are what Pod Security
*restricted* allows.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from hpml.core.contract import Config
from hpml.pipelines.cluster.config import DnsLabel, Quantity
from hpml.pipelines.cluster.pods import PART_OF, UID
from hpml.pipelines.delivery.own_server import LIVE, READY, stop_s
from hpml.pipelines.delivery.release import Release
from hpml.serving.rollout.figures import MOST_REPLAY_S

Json = dict[str, Any]
Track = Literal["stable", "canary"]

RELEASE, PREVIOUS, TRIED = "hpml.dev/release", "hpml.dev/previous-release", "hpml.dev/tried"
NAME_LABEL, TRACK_LABEL, RELEASE_LABEL = "app.kubernetes.io/name", "hpml.dev/track", "hpml.dev/release"
CLIENTS = {"hpml.dev/clients": "true"}  # a label of namespaces whose pods may ask
PORT = 8000
_SUFFIXES = ("-stable", "-canary", "-smoke", "-rollout")  # of the names of our objects
_LONGEST_NAME = 45  # what tells jobs and pods apart is added, too; 63 are allowed
_QUALIFIED = re.compile(  # of a label or an annotation
    r"(?=.{1,317}$)([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
_LONGEST_ANNOTATION = 4096
_BUNDLE, _TOKEN = "/bundle", "/var/run/hpml"
_REQUESTS = "/tmp/requests.jsonl"  # noqa: S108 - the pod's own


class KubernetesConfig(Config):
    """How a model is served in a cluster. What is empty is left out."""

    name: DnsLabel
    image: str = Field(min_length=1)
    store_secret: DnsLabel = "hpml-store"  # noqa: S105 - its name
    replicas: int = Field(default=2, ge=1, le=1000)
    max_replicas: int = Field(default=0, ge=0, le=1000)  # above `replicas`: as many, by their use of CPU
    cpus: float = Field(default=1, ge=0.001)  # Kubernetes counts thousandths
    cpu_limit: float | None = Field(default=None, gt=0)  # None: `cpus`, which are then the pod's own
    memory: Quantity = "1Gi"
    gpus: int = Field(default=0, ge=0, le=16)
    gpu_resource: str = "nvidia.com/gpu"
    drain_s: float = Field(default=5, ge=0, le=3600)  # of answering on, while balancers turn away
    arguments: tuple[str, ...] = ()  # further ones of hpml serve
    token_secret: str = ""  # a Secret whose key `token` requests have to bring
    ingress_host: str = ""
    ingress_class: str = ""
    ingress_tls_secret: str = ""  # of type kubernetes.io/tls, for `ingress_host`
    ingress_annotations: dict[str, str] = Field(default_factory=dict)
    store_cidrs: tuple[str, ...] = ()  # where the store's endpoint is; none: everywhere
    store_port: int = Field(default=443, ge=1, le=65535)
    gateway: str = ""  # of the Gateway API, as NAMESPACE/NAME; with `ingress_host`

    @field_validator("name")
    @classmethod
    def _leaves_room(cls, name: str) -> str:
        if len(name) > _LONGEST_NAME or name.endswith(_SUFFIXES):
            raise ValueError(
                f"{name!r} may have {_LONGEST_NAME} characters, and may not end with {', '.join(_SUFFIXES)}:"
                " these are added to it"
            )
        return name

    @field_validator("ingress_annotations")
    @classmethod
    def _are_annotations(cls, given: dict[str, str]) -> dict[str, str]:
        for key, value in given.items():
            if not _QUALIFIED.fullmatch(key):
                raise ValueError(f"{key[:80]!r} is no key of an annotation: give one like example.org/name")
            if len(value) > _LONGEST_ANNOTATION or not value.isprintable():
                raise ValueError(f"{key} may have {_LONGEST_ANNOTATION:,} printable characters")
        return given

    @field_validator("store_cidrs")
    @classmethod
    def _are_networks(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return tuple(str(ipaddress.ip_network(one)) for one in given)
        except ValueError as error:
            raise ValueError(f"{error}: give a network like 10.1.2.0/24, or an address") from None

    @model_validator(mode="after")
    def _goes_together(self) -> KubernetesConfig:
        if self.cpu_limit is not None and self.cpu_limit < self.cpus:
            raise ValueError(f"cpu_limit ({self.cpu_limit:g}) is less than cpus ({self.cpus:g})")
        if 0 < self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas ({self.max_replicas}) is less than replicas ({self.replicas})")
        of_ingress = [self.ingress_class, self.ingress_tls_secret, self.ingress_annotations]
        if any([self.gateway, *of_ingress]) and not self.ingress_host:
            raise ValueError("what is said of an Ingress or a gateway needs an ingress_host")
        if self.gateway and any(of_ingress):
            raise ValueError(
                "class, TLS and annotations are of an Ingress: with a gateway, its listener has them"
            )
        if self.store_port != 443 and not self.store_cidrs:
            raise ValueError("store_port needs store_cidrs")
        return self


def common(config: KubernetesConfig, release: Release) -> list[tuple[str, Json]]:
    """All that is around the stable Deployment of a release, by the API's name for each kind."""
    return [
        ("services", _service(config, "", {})),
        ("services", _service(config, "-stable", {TRACK_LABEL: "stable"})),
        ("services", _service(config, "-canary", {TRACK_LABEL: "canary"})),
        ("poddisruptionbudgets", _disruption_budget(config)),
        ("networkpolicies", policy_of_servers(config, release, "stable")),
        ("networkpolicies", policy_of_smoke(config, release)),
        *optional(config),
    ]


def optional(config: KubernetesConfig) -> list[tuple[str, Json]]:
    """Of `common`, what has to be asked for."""
    made = []
    if config.max_replicas > config.replicas:
        made.append(("horizontalpodautoscalers", _autoscaler(config)))
    if config.ingress_host:
        made.append(("httproutes", _route(config)) if config.gateway else ("ingresses", _ingress(config)))
    return made


def deployment(
    config: KubernetesConfig,
    release: Release,
    track: Track,
    *,
    tried: bool = False,
    previous: Release | None = None,
) -> Json:
    """The pods of a release. tried, previous: what a rollout wants to find again."""
    labels = {**_labels(config), TRACK_LABEL: track, RELEASE_LABEL: release_label(release)}
    told = {RELEASE: release.model_dump_json(), TRIED: str(tried).lower()}
    spec: Json = {
        "selector": {"matchLabels": {NAME_LABEL: config.name, TRACK_LABEL: track}},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "minReadySeconds": 1,
        "progressDeadlineSeconds": 3600,  # whoever rolls out looks for the cause, and has patience of its own
        "revisionHistoryLimit": 3,
        "template": {"metadata": {"labels": labels}, "spec": _pod(config, release)},
    }
    if track == "canary":
        spec["replicas"] = 1
    elif config.max_replicas <= config.replicas:  # if not, the autoscaler says how many
        spec["replicas"] = config.replicas
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": name_of(config.name, track),
            "labels": {**_labels(config), TRACK_LABEL: track},
            "annotations": {**told, PREVIOUS: previous.model_dump_json() if previous else ""},
        },
        "spec": spec,
    }


def release_label(release: Release) -> str:
    """Of the pods of a release; a digest alone might be taken for a number."""
    return f"sha256-{release.digest[:12]}"


def name_of(name: str, track: Track) -> str:
    """Of the Deployment of releases called so."""
    return name if track == "stable" else f"{name}-canary"


@dataclass(frozen=True)
class StoredRequests:
    """A file of recorded requests in S3, and the SHA-256 of its content."""

    uri: str
    sha256: str


def smoke_job(
    config: KubernetesConfig,
    release: Release,
    *,
    name: str,
    seconds: float,
    beside_stable: bool,
    requests: StoredRequests | None = None,
) -> Json:
    """A pod beside the servers that asks them; it prints what it saw. requests: which it sends them, too."""
    track = "canary" if beside_stable else "stable"
    command = ["python", "-m", "hpml.serving.rollout.smoke", _path(release), release.digest]
    command += [f"http://{config.name}-{track}:{PORT}", "--through", f"http://{config.name}:{PORT}"]
    command += ["--stable", f"http://{config.name}-stable:{PORT}"] if beside_stable else []
    command += ["--token-file", f"{_TOKEN}/token"] if config.token_secret else []
    command += ["--seconds", f"{seconds:g}"]
    pod = _bare_pod(config, release)
    memory, deadline_s = "256Mi", 600 + round(seconds)
    if requests:
        command += ["--requests", _REQUESTS]
        pod["initContainers"].append(_fetch_requests(config, requests))
        memory, deadline_s = "512Mi", deadline_s + round(MOST_REPLAY_S)
    pod["restartPolicy"] = "Never"
    pod["containers"] = [{**_container(config, "step", command), "resources": _briefly(memory)}]
    labels = _labels(config, "-smoke")
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": deadline_s,
            "ttlSecondsAfterFinished": 600,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


# ------------------------------------------------------------------------------------------------------ pods


def _labels(config: KubernetesConfig, suffix: str = "") -> dict[str, str]:
    return {**PART_OF, NAME_LABEL: f"{config.name}{suffix}"}


def _path(release: Release) -> str:
    """Where the bundle is in a pod."""
    return f"{_BUNDLE}/{_claim(release)[1]}".rstrip("/")


def _claim(release: Release) -> tuple[str, str]:
    """The claim of a volume that a release is on, and where; empty for one in S3."""
    if not release.uri.startswith("pvc://"):
        return "", ""
    claim, _, path = release.uri.removeprefix("pvc://").partition("/")
    return claim, path


def _bare_pod(config: KubernetesConfig, release: Release) -> Json:
    """What pods that have the bundle share, without their container. Its files are verified before that."""
    claim, _ = _claim(release)
    source = _path(release) if claim else release.uri
    fetch = _container(
        config, "fetch", ["python", "-m", "hpml.serving.rollout.fetch", source, _BUNDLE, release.digest]
    )
    if claim:
        bundle: Json = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    else:
        bundle = {"emptyDir": {}}
        fetch["envFrom"] = [{"secretRef": {"name": config.store_secret}}]
        fetch["volumeMounts"] = [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own
            {"name": "bundle", "mountPath": _BUNDLE},
        ]
    volumes: list[Json] = [{"name": "tmp", "emptyDir": {}}, {"name": "bundle", **bundle}]
    if config.token_secret:
        volumes.append({"name": "token", "secret": {"secretName": config.token_secret}})
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [{**fetch, "resources": _briefly("512Mi")}],
        "volumes": volumes,
    }


def _fetch_requests(config: KubernetesConfig, requests: StoredRequests) -> Json:
    command = ["python", "-m", "hpml.serving.rollout.fetch", "--file", requests.uri, _REQUESTS]
    return {
        **_container(config, "fetch-requests", [*command, requests.sha256]),
        "envFrom": [{"secretRef": {"name": config.store_secret}}],
        "resources": _briefly("512Mi"),
    }


def _pod(config: KubernetesConfig, release: Release) -> Json:
    command = ["hpml", "serve", _path(release), "--host", "0.0.0.0", "--port", str(PORT)]  # noqa: S104 - a pod's own
    command += ["--drain-s", f"{config.drain_s:g}", *config.arguments]
    command += ["--token-file", f"{_TOKEN}/token"] if config.token_secret else []
    server = {
        **_container(config, "server", command),
        "resources": _of_server(config),
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": {
            **_probe(READY),
            "periodSeconds": 1,
            "failureThreshold": 330,
        },  # 300 s are given to a bundle
        "readinessProbe": {**_probe(READY), "periodSeconds": 1, "failureThreshold": 2},
        "livenessProbe": {**_probe(LIVE), "periodSeconds": 10},
    }
    return {
        **_bare_pod(config, release),
        "containers": [server],
        "terminationGracePeriodSeconds": stop_s(config.drain_s),
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {NAME_LABEL: config.name}},
            }
        ],
    }


def _probe(path: str) -> Json:
    return {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": 5}


def _container(config: KubernetesConfig, name: str, command: list[str]) -> Json:
    mounts: list[Json] = [
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - the pod's own
        {"name": "bundle", "mountPath": _BUNDLE, "readOnly": True},
    ]
    if config.token_secret:
        mounts.append({"name": "token", "mountPath": _TOKEN, "readOnly": True})
    return {
        "name": name,
        "image": config.image,
        "command": command,
        "terminationMessagePolicy": "FallbackToLogsOnError",  # so that whoever rolls out can say why
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _resources(cpus: float, memory: str, **others: str) -> Json:
    amounts = {"cpu": f"{cpus:g}", "memory": memory, **others}
    return {"requests": amounts, "limits": dict(amounts)}


def _briefly(memory: str) -> Json:
    """Of what runs for seconds beside a server: a quota would show in the latencies that it sees."""
    resources = _resources(0.1, memory)
    return {**resources, "limits": {**resources["limits"], "cpu": "1"}}


def _of_server(config: KubernetesConfig) -> Json:
    gpus = {config.gpu_resource: str(config.gpus)} if config.gpus else {}
    resources = _resources(config.cpus, config.memory, **gpus)
    limit = {"cpu": f"{config.cpu_limit or config.cpus:g}"}
    return {**resources, "limits": resources["limits"] | limit}


# ----------------------------------------------------------------------------------------------- around them


def _object(config: KubernetesConfig, api: str, kind: str, spec: Json, suffix: str = "") -> Json:
    metadata = {"name": f"{config.name}{suffix}", "labels": _labels(config)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def _service(config: KubernetesConfig, suffix: str, selector: dict[str, str]) -> Json:
    spec = {
        "selector": {NAME_LABEL: config.name, **selector},
        "ports": [{"name": "http", "port": PORT, "targetPort": "http"}],
    }
    return _object(config, "v1", "Service", spec, suffix)


def _disruption_budget(config: KubernetesConfig) -> Json:
    """Whoever drains nodes takes one replica at a time."""
    selector = {"matchLabels": {NAME_LABEL: config.name, TRACK_LABEL: "stable"}}
    return _object(config, "policy/v1", "PodDisruptionBudget", {"maxUnavailable": 1, "selector": selector})


def _autoscaler(config: KubernetesConfig) -> Json:
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": config.name},
        "minReplicas": config.replicas,
        "maxReplicas": config.max_replicas,
        "metrics": [
            {
                "type": "Resource",
                "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}},
            }
        ],
    }
    return _object(config, "autoscaling/v2", "HorizontalPodAutoscaler", spec)


_DNS = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


def policy_of_servers(config: KubernetesConfig, release: Release, track: Track) -> Json:
    """Asked by the namespace and by those labelled so; asking for nothing but their bundle.

    Policies are of pods, not of containers: what their init container needs, the server may, too.
    """
    asked = [{"podSelector": {}}, {"namespaceSelector": {"matchLabels": CLIENTS}}]
    spec = {
        "podSelector": {"matchLabels": {NAME_LABEL: config.name, TRACK_LABEL: track}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": asked, "ports": [{"protocol": "TCP", "port": PORT}]}],
        "egress": _to_bundle(config, release),
    }
    suffix = "" if track == "stable" else "-canary"
    return _object(config, "networking.k8s.io/v1", "NetworkPolicy", spec, suffix)


def policy_of_smoke(config: KubernetesConfig, release: Release) -> Json:
    """Of the pod that asks a release: asked by nobody, it asks the servers."""
    servers = {"podSelector": {"matchLabels": {NAME_LABEL: config.name}}}
    to_bundle = _to_bundle(config, release) or [_DNS]  # the servers have names in any case
    spec = {
        "podSelector": {"matchLabels": {NAME_LABEL: f"{config.name}-smoke"}},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [],
        "egress": [*to_bundle, {"to": [servers], "ports": [{"protocol": "TCP", "port": PORT}]}],
    }
    return _object(config, "networking.k8s.io/v1", "NetworkPolicy", spec, "-smoke")


def _to_bundle(config: KubernetesConfig, release: Release) -> list[Json]:
    """Nowhere, if it is on a volume; the store else, where it is said to be: S3 by HTTPS, and k8s/base's."""
    if _claim(release)[0]:
        return []
    if config.store_cidrs:
        blocks = [{"ipBlock": {"cidr": cidr}} for cidr in config.store_cidrs]
        return [_DNS, {"to": blocks, "ports": [{"protocol": "TCP", "port": config.store_port}]}]
    inside = {"podSelector": {"matchLabels": {NAME_LABEL: "seaweedfs"}}}
    return [
        _DNS,
        {"ports": [{"protocol": "TCP", "port": 443}]},
        {"to": [inside], "ports": [{"protocol": "TCP", "port": 8333}]},
    ]


def _ingress(config: KubernetesConfig) -> Json:
    backend = {"service": {"name": config.name, "port": {"name": "http"}}}
    path = {"path": "/", "pathType": "Prefix", "backend": backend}
    spec: Json = {"rules": [{"host": config.ingress_host, "http": {"paths": [path]}}]}
    if config.ingress_class:
        spec["ingressClassName"] = config.ingress_class
    if config.ingress_tls_secret:
        spec["tls"] = [{"hosts": [config.ingress_host], "secretName": config.ingress_tls_secret}]
    made = _object(config, "networking.k8s.io/v1", "Ingress", spec)
    if config.ingress_annotations:
        made["metadata"]["annotations"] = dict(config.ingress_annotations)
    return made


def _route(config: KubernetesConfig) -> Json:
    namespace, _, name = config.gateway.rpartition("/")
    parent = {"name": name} | ({"namespace": namespace} if namespace else {})
    spec = {
        "parentRefs": [parent],
        "hostnames": [config.ingress_host],
        "rules": [{"backendRefs": [{"name": config.name, "port": PORT}]}],
    }
    return _object(config, "gateway.networking.k8s.io/v1", "HTTPRoute", spec)
