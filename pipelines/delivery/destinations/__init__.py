"""Where a bundle can be deployed to. A destination is one file here and one row of DESTINATIONS."""

from __future__ import annotations

from hpml.pipelines.delivery.destinations import compose, kserve, kubernetes, local, triton, vllm
from hpml.pipelines.delivery.destinations.base import Destination, Rollouts

_BATCHES = {"max_batch", "max_queue_ms"}
_SERVER = {*_BATCHES, "run_code"}
_CONTAINER = {"image", "memory"}
_HARDWARE = {"elsewhere", "rebuild"}
_ROLLOUT = {
    *("smoke_s", "p50_factor", "p99_factor", "benchmark_factor", "wait_s", "ready_s"),
    *("replay", "replay_agreement"),
}
_CLUSTER = {*_CONTAINER, "replicas", "namespace", "bundle_uri", "drain_s"}
_KUBERNETES = {
    "max_replicas",
    "cpu_limit",
    "store",
    "token_secret",
    "ingress_host",
    "ingress_class",
    "ingress_tls_secret",
    "ingress_annotation",
    "store_cidr",
    "store_port",
    "gateway",
}
_KSERVE = {"service_account", "canary_percent", "mode", "port", "token_file"}

DESTINATIONS: dict[str, Destination] = {
    "local": Destination(
        frozenset({*_SERVER, *_ROLLOUT, "port", "token_file", "rebuild"}),
        rollouts=Rollouts(local.release, local.place, local.address),
        runs_here=True,
    ),
    "kubernetes": Destination(
        frozenset({*_SERVER, *_CLUSTER, *_ROLLOUT, *_KUBERNETES}),
        write=kubernetes.write,
        rollouts=Rollouts(kubernetes.release, kubernetes.place, kubernetes.address),
    ),
    "compose": Destination(
        frozenset({*_SERVER, *_CONTAINER, "drain_s", "token_file", "host", "port", *_HARDWARE}),
        write=compose.write,
        runs_here=True,
    ),
    "triton": Destination(
        frozenset({*_BATCHES, *_CONTAINER, "host", "port", "replicas", *_HARDWARE}),
        write=triton.write,
        runs_here=True,
    ),
    "vllm": Destination(frozenset({*_CONTAINER, "host", "port", "token_file"}), write=vllm.write),
    "kserve": Destination(frozenset({*_SERVER, *_CLUSTER, *_KSERVE}), write=kserve.write),
}
