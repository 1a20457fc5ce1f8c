"""What is sent to a cluster, without one: valid, restricted, and what it refers to is there."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
from pydantic import ValidationError

from hpml.pipelines.delivery.kubernetes import manifests
from hpml.pipelines.delivery.kubernetes.manifests import KubernetesConfig
from tests.k8s.pod_security import violations
from tests.pipelines.delivery.releases import release

Object = dict[str, Any]
A = release("a" * 12)
ON_VOLUME = A.model_copy(update={"uri": "pvc://models/small/1"})
CONFIGS = {
    "plain": KubernetesConfig(name="small", image="hpml-serving:1"),
    "all": KubernetesConfig(
        name="small",
        image="hpml-serving:1",
        max_replicas=9,
        ingress_host="small.example",
        ingress_tls_secret="small-tls",
        ingress_annotations={"nginx.ingress.kubernetes.io/proxy-body-size": "20m"},
        store_cidrs=("10.1.2.0/24", "fd00::1"),
        store_port=8333,
        token_secret="small-token",
        gpus=1,
        arguments=("--run-code",),
    ),
}


def objects(config: KubernetesConfig, of: manifests.Release = A) -> list[Object]:
    made = [body for _, body in manifests.common(config, of)]
    made.append(manifests.policy_of_servers(config, of, "canary"))
    made += [manifests.deployment(config, of, track) for track in ("stable", "canary")]
    for requests in (None, manifests.StoredRequests("s3://hpml/replays/hpml/small.jsonl", "a" * 64)):
        job = manifests.smoke_job(
            config, of, name="small-smoke-1", seconds=1, beside_stable=True, requests=requests
        )
        made.append(job)
    return made


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("of", [A, ON_VOLUME], ids=["s3", "volume"])
def test_every_object_is_valid_for_kubernetes_and_every_pod_restricted(
    name: str, of: manifests.Release
) -> None:
    for each in objects(CONFIGS[name], of):
        kubernetes_validate.validate(each, "1.34", strict=True)
        if "template" in each["spec"]:
            assert violations(each["spec"]["template"]["spec"]) == []


def test_services_choose_the_pods_of_their_track() -> None:
    made = objects(CONFIGS["plain"])
    services = {
        each["metadata"]["name"]: each["spec"]["selector"] for each in made if each["kind"] == "Service"
    }
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in made
        if each["kind"] == "Deployment"
    }
    chosen = {
        service: {name for name, labels in pods.items() if selector.items() <= labels.items()}
        for service, selector in services.items()
    }
    assert chosen == {
        "small": {"small", "small-canary"},
        "small-stable": {"small"},
        "small-canary": {"small-canary"},
    }


def egress(config: KubernetesConfig, of: manifests.Release) -> dict[str, Any]:
    """What pods may ask, by the name of the policy."""
    made = [each for each in objects(config, of) if each["kind"] == "NetworkPolicy"]
    return {each["metadata"]["name"]: each["spec"]["egress"] for each in made}


def test_servers_ask_for_their_bundle_and_nothing_else() -> None:
    dns = {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}
    servers = {
        "to": [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "small"}}}],
        "ports": [{"protocol": "TCP", "port": 8000}],
    }
    store = {
        "to": [{"ipBlock": {"cidr": "10.1.2.0/24"}}, {"ipBlock": {"cidr": "fd00::1/128"}}],
        "ports": [{"protocol": "TCP", "port": 8333}],
    }
    assert egress(CONFIGS["all"], ON_VOLUME) == {
        "small": [],
        "small-canary": [],
        "small-smoke": [dns, servers],
    }
    assert egress(CONFIGS["all"], A) == {
        "small": [dns, store],
        "small-canary": [dns, store],
        "small-smoke": [dns, store, servers],
    }
    assert {"ports": [{"protocol": "TCP", "port": 443}]} in egress(CONFIGS["plain"], A)["small"]


def test_each_track_has_a_policy_of_its_own() -> None:
    """A canary may have its bundle elsewhere than the stable version."""
    made = [each for each in objects(CONFIGS["plain"]) if each["kind"] == "NetworkPolicy"]
    chosen = {each["metadata"]["name"]: each["spec"]["podSelector"]["matchLabels"] for each in made}
    assert chosen["small"]["hpml.dev/track"] == "stable"
    assert chosen["small-canary"]["hpml.dev/track"] == "canary"


def test_an_ingress_has_tls_and_annotations() -> None:
    (ingress,) = (each for each in objects(CONFIGS["all"]) if each["kind"] == "Ingress")
    assert ingress["spec"]["tls"] == [{"hosts": ["small.example"], "secretName": "small-tls"}]
    assert ingress["metadata"]["annotations"] == {"nginx.ingress.kubernetes.io/proxy-body-size": "20m"}


def test_no_more_is_made_than_was_asked_for() -> None:
    kinds = {each["kind"] for each in objects(CONFIGS["plain"])}
    assert kinds == {"Service", "Deployment", "PodDisruptionBudget", "NetworkPolicy", "Job"}
    assert {each["kind"] for each in objects(CONFIGS["all"])} - kinds == {
        "HorizontalPodAutoscaler",
        "Ingress",
    }


def test_the_autoscaler_alone_says_how_many_where_there_is_one() -> None:
    assert manifests.deployment(CONFIGS["plain"], A, "stable")["spec"]["replicas"] == 2
    assert "replicas" not in manifests.deployment(CONFIGS["all"], A, "stable")["spec"]


def test_a_route_of_the_gateway_api_in_place_of_an_ingress() -> None:
    config = CONFIGS["plain"].model_copy(update={"ingress_host": "small.example", "gateway": "edge/public"})
    (route,) = (body for plural, body in manifests.common(config, A) if plural == "httproutes")
    assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "edge"}]
    assert route["spec"]["hostnames"] == ["small.example"]


def test_a_bundle_on_a_volume_is_verified_and_served_where_it_is() -> None:
    pod = manifests.deployment(CONFIGS["plain"], ON_VOLUME, "stable")["spec"]["template"]["spec"]
    assert {"name": "bundle", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}} in pod[
        "volumes"
    ]
    assert "/bundle/small/1" in pod["initContainers"][0]["command"]
    assert "/bundle/small/1" in pod["containers"][0]["command"]
    assert "envFrom" not in pod["initContainers"][0]


def test_secrets_of_the_store_are_not_in_the_server() -> None:
    pod = manifests.deployment(CONFIGS["plain"], A, "stable")["spec"]["template"]["spec"]
    assert "envFrom" not in pod["containers"][0] and "env" not in pod["containers"][0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "a" * 46}, "may have 45 characters"),
        ({"name": "small-canary"}, "may not end with"),
        ({"cpus": 4, "cpu_limit": 2}, "is less than cpus"),
        ({"replicas": 3, "max_replicas": 2}, "is less than replicas"),
        ({"gateway": "edge/public"}, "needs an ingress_host"),
        ({"ingress_class": "nginx"}, "needs an ingress_host"),
        ({"ingress_tls_secret": "tls"}, "needs an ingress_host"),
        ({"ingress_host": "a", "gateway": "b", "ingress_tls_secret": "c"}, "its listener has them"),
        ({"ingress_host": "a", "ingress_annotations": {"a b": "c"}}, "no key of an annotation"),
        ({"ingress_host": "a", "ingress_annotations": {"a": "b\nc"}}, "printable"),
        ({"store_cidrs": ["10.1.2.3/24"]}, "has host bits set: give a network"),
        ({"store_port": 9000}, "needs store_cidrs"),
    ],
)
def test_what_cannot_work_is_refused_before_a_cluster_would(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        KubernetesConfig(**{"name": "small", "image": "hpml-serving:1", **given})
