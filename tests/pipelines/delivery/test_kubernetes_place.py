"""What a rollout makes and leaves in a cluster, by the objects that are there; pods are ready at once."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest

from hpml.pipelines.cluster.client import Namespace, Resource
from hpml.pipelines.delivery.kubernetes.manifests import KubernetesConfig
from hpml.pipelines.delivery.kubernetes.place import KubernetesPlace
from hpml.pipelines.delivery.release import Release
from tests.pipelines.delivery.releases import release

Object = dict[str, Any]
CONFIG = KubernetesConfig(name="small", image="hpml-serving:1")


class Objects:
    """A namespace that is changed as the API server does it: by merge patches."""

    name = "hpml"

    def __init__(self) -> None:
        self.there: dict[tuple[str, str], Object] = {}

    def get(self, resource: Resource, name: str) -> Object | None:
        return copy.deepcopy(self.there.get((resource.plural, name)))

    def create(self, resource: Resource, body: Object) -> Object | None:
        key = resource.plural, body["metadata"]["name"]
        if key in self.there:
            return None
        self.there[key] = _merged({}, body)
        return self._versioned(key)

    def patch(self, resource: Resource, name: str, changes: Object) -> Object | None:
        key = resource.plural, name
        if key not in self.there:
            return None
        self.there[key] = _merged(self.there[key], changes)
        return self._versioned(key)

    def delete(self, resource: Resource, name: str) -> None:
        self.there.pop((resource.plural, name), None)

    def find(self, resource: Resource, labels: str) -> list[Object]:
        return []

    def _versioned(self, key: tuple[str, str]) -> Object:
        """As its controller leaves it."""
        metadata, wanted = self.there[key]["metadata"], self.there[key]["spec"].get("replicas", 1)
        metadata["resourceVersion"] = str(int(metadata.get("resourceVersion", "0")) + 1)
        metadata["generation"] = 1
        counts = dict.fromkeys(("replicas", "updatedReplicas", "availableReplicas", "readyReplicas"), wanted)
        self.there[key]["status"] = {"observedGeneration": 1, **counts}
        return copy.deepcopy(self.there[key])


def _merged(old: Object, changes: Object) -> Object:
    """RFC 7396."""
    made = dict(old)
    for name, value in changes.items():
        if value is None:
            made.pop(name, None)
        elif isinstance(value, dict):
            made[name] = _merged(made.get(name) or {}, value)
        else:
            made[name] = value
    return made


@pytest.fixture
def objects() -> Objects:
    return Objects()


def placed(objects: Objects, said: list[str] | None = None) -> KubernetesPlace:
    say = (said if said is not None else []).append
    return KubernetesPlace(cast(Namespace, objects), "small", say, wait_s=0, ready_s=5, smoke_s=1)


def configured(name: str, **given: Any) -> Release:
    config = KubernetesConfig(**{**CONFIG.model_dump(), **given})
    return release(name).model_copy(update={"settings": config.model_dump(mode="json")})


def test_in_the_end_nothing_is_left_but_what_is_said(objects: Objects) -> None:
    place, said = placed(objects), list[str]()
    first, second = configured("1"), configured("2", ingress_host="small.example", max_replicas=5)
    with place.lock():
        place.begin(first)
        place.start_canary(second)
        assert ("networkpolicies", "small-canary") in objects.there
        place.promote(second, first)
        place.remove_canary()
        assert ("networkpolicies", "small-canary") not in objects.there
    last = placed(objects, said)
    with last.lock():
        last.remove()
    assert list(objects.there) == [("leases", "small-rollout")]
    assert said == ["what stays: s3://hpml/1, s3://hpml/2, and the Lease small-rollout"]


def test_what_an_ingress_does_not_have_any_more_goes(objects: Objects) -> None:
    place = placed(objects)
    full = {
        "ingress_class": "nginx",
        "ingress_tls_secret": "tls",
        "ingress_annotations": {"a": "1", "b": "2"},
    }
    with place.lock():
        place.begin(configured("1", ingress_host="small.example", **full))
        objects.there["ingresses", "small"]["metadata"]["annotations"]["somebody/elses"] = "3"
        place.promote(
            configured("1", ingress_host="small.example", ingress_annotations={"b": "4"}), configured("1")
        )
    ingress = objects.there["ingresses", "small"]
    assert ingress["metadata"]["annotations"] == {"b": "4", "somebody/elses": "3"}
    assert "tls" not in ingress["spec"] and "ingressClassName" not in ingress["spec"]
