"""What can be said about a deployment."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from hpml.core.contract import Config
from hpml.pipelines.cluster.config import StoreUri
from hpml.pipelines.delivery.smoke_limits import SmokeLimits
from hpml.serving.config import ServerConfig

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # of RFC 1123
_NAME = re.compile(rf"(?=[a-z]){_LABEL.pattern}")  # of RFC 1035: a Service may be called so
_OF_LABELS = "small letters, digits and - between them, at most 63"
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,500}")
_MEMORY = re.compile(r"([1-9][0-9]{0,6})(Mi|Gi)")
_URI = re.compile(
    r"(?P<scheme>s3|pvc)://(?P<place>[a-z0-9][a-z0-9.-]{1,62})/(?P<path>[\w.=+@-]+(/[\w.=+@-]+)*)"
)
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_GATEWAY = re.compile(rf"({_LABEL.pattern}/)?{_LABEL.pattern}")
_SERVER, _LIMITS = ServerConfig(), SmokeLimits()


class DeployOptions(Config):
    """Where something is deployed, how large, and within which bounds; "" and None are for the destination.

    The fields of rollouts are those of `SmokeLimits`; wait_s is for another rollout to end, ready_s for
    servers to get ready, max_replicas above replicas for as many as the load needs, cpu_limit for more CPUs
    than a pod has to itself. token_secret: a Secret of the cluster whose key `token` requests have to bring.
    store_cidr, store_port: where pods reach the store, and nothing else. ingress_annotation: KEY=VALUE, each.

    name: of the deployment. image: of the server. replicas: servers, or instances of the engine in one.
    bundle_uri: where a cluster finds the bundle. canary_percent: of the requests that go to this version
    beside the one that is there. mode: KServe's. elsewhere: it is written for another machine than this one.
    rebuild: an engine that is bound to other hardware is built again for this machine.
    max_batch, max_queue_ms: as of `hpml serve`. drain_s: of being not ready before it stops. replay: a file
    of recorded requests.
    """

    name: str = ""
    image: str = ""
    host: str = _SERVER.host
    port: int = Field(default=_SERVER.port, ge=1, le=65535)
    replicas: int = Field(default=1, ge=1, le=1000)
    cpus: float | None = Field(default=None, gt=0, le=1024)
    memory: str = ""
    namespace: str = "default"
    service_account: str = ""
    store: StoreUri = "s3://hpml"
    max_replicas: int = Field(default=0, ge=0, le=1000)
    cpu_limit: float | None = Field(default=None, gt=0, le=1024)
    token_secret: str = ""
    ingress_host: str = ""
    ingress_class: str = ""
    ingress_tls_secret: str = ""
    ingress_annotation: tuple[str, ...] = ()
    store_cidr: tuple[str, ...] = ()
    store_port: int = Field(default=443, ge=1, le=65535)
    gateway: str = ""
    wait_s: float = Field(default=60, ge=0, le=86400)
    ready_s: float = Field(default=300, ge=1, le=86400)
    bundle_uri: str = ""
    canary_percent: int | None = Field(default=None, ge=0, le=100)
    mode: Literal["standard", "knative"] = "standard"
    token_file: Path | None = None
    max_batch: int = Field(default=_SERVER.max_batch_rows, ge=1, le=4096)
    max_queue_ms: float = Field(default=_SERVER.max_queue_ms, gt=0)
    drain_s: float | None = Field(default=None, ge=0, le=3600)
    run_code: bool = False
    elsewhere: bool = False
    rebuild: bool = False
    unverified: bool = False
    smoke_s: float = Field(default=_LIMITS.seconds, ge=1, le=3600)
    p50_factor: float = Field(default=_LIMITS.p50_factor, ge=1)
    p99_factor: float = Field(default=_LIMITS.p99_factor, ge=1)
    benchmark_factor: float = Field(default=_LIMITS.benchmark_factor, ge=1)
    replay: Path | None = None
    replay_agreement: float | None = Field(default=None, ge=0, le=1)

    @property
    def limits(self) -> SmokeLimits:
        """What a canary is held to."""
        return SmokeLimits(
            seconds=self.smoke_s,
            p50_factor=self.p50_factor,
            p99_factor=self.p99_factor,
            benchmark_factor=self.benchmark_factor,
            replay_agreement=self.replay_agreement,
        )

    @property
    def memory_mib(self) -> int | None:
        """What `memory` says; None if it says nothing."""
        match = _MEMORY.fullmatch(self.memory)
        return int(match[1]) * (1024 if match[2] == "Gi" else 1) if match else None

    @property
    def ingress_annotations(self) -> Mapping[str, str]:
        """By their keys."""
        return dict(one.split("=", 1) for one in self.ingress_annotation)

    def given(self, name: str) -> bool:
        """Whether somebody said it."""
        return name in self.model_fields_set

    @field_validator("name")
    @classmethod
    def _is_a_name(cls, text: str) -> str:
        return _matching(text, _NAME, f"no name of a deployment: {_OF_LABELS}, a letter first")

    @field_validator("ingress_host")
    @classmethod
    def _is_a_host(cls, text: str) -> str:
        return _matching(text, _HOST, "no name of a host: give one like small.example.org")

    @field_validator("gateway")
    @classmethod
    def _is_a_gateway(cls, text: str) -> str:
        return _matching(text, _GATEWAY, "no gateway: give NAMESPACE/NAME")

    @field_validator("namespace", "service_account", "token_secret", "ingress_class", "ingress_tls_secret")
    @classmethod
    def _is_a_label(cls, text: str) -> str:
        return _matching(text, _LABEL, f"no name in a cluster: {_OF_LABELS}")

    @field_validator("ingress_annotation")
    @classmethod
    def _are_pairs(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        keys = [one.partition("=")[0] for one in given]
        for one, key in zip(given, keys, strict=True):
            if "=" not in one or keys.count(key) > 1:
                raise ValueError(f"{one[:80]!r} is no annotation: give KEY=VALUE, each key once")
        return given

    @field_validator("image")
    @classmethod
    def _is_an_image(cls, text: str) -> str:
        return _matching(
            text, _IMAGE, "no name of an image: give one like registry.example/hpml-serving:0.1.0"
        )

    @field_validator("memory")
    @classmethod
    def _is_memory(cls, text: str) -> str:
        return _matching(text, _MEMORY, "no size of memory: give one like 512Mi or 2Gi")

    @field_validator("bundle_uri")
    @classmethod
    def _is_a_uri(cls, text: str) -> str:
        text = text.rstrip("/")
        allowed = "no place of a bundle: give s3://BUCKET/FOLDER or pvc://CLAIM/FOLDER"
        if ".." in text.split("/"):
            raise ValueError(f"{text!r} is {allowed}, without ..")
        return _matching(text, _URI, allowed)

    @field_validator("host")
    @classmethod
    def _is_an_address(cls, text: str) -> str:
        try:
            return str(ipaddress.ip_address(text))
        except ValueError:
            raise ValueError(
                f"{text!r} is no IP address: give one of this machine, or 0.0.0.0 for all"
            ) from None


def is_name(text: str) -> bool:
    """Whether a deployment can be called so."""
    return bool(_NAME.fullmatch(text))


def _matching(text: str, pattern: re.Pattern[str], otherwise: str) -> str:
    if text and not pattern.fullmatch(text):
        raise ValueError(f"{text[:80]!r} is {otherwise}")
    return text
