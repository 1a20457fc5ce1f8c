"""A name of a Kubernetes cluster as a place where releases are served; see `manifests` for its objects.

What is served is what the annotations of the Deployment say, which change in one patch with its pods.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from hashlib import sha256

from pydantic import ValidationError

from hpml.core.contract import validate
from hpml.core.errors import HpmlError, StageFailed, Unavailable, UsageError
from hpml.io import storage
from hpml.pipelines.cluster import causes
from hpml.pipelines.cluster.client import JOBS, PODS, Json, Namespace, Resource
from hpml.pipelines.delivery.kubernetes import manifests
from hpml.pipelines.delivery.kubernetes.lease import Lease
from hpml.pipelines.delivery.kubernetes.manifests import KubernetesConfig, StoredRequests, Track
from hpml.pipelines.delivery.release import Release
from hpml.pipelines.delivery.rollout import Say, Stable
from hpml.pipelines.executors.cluster_job import JobRunner
from hpml.serving.rollout.figures import SmokeFigures

DEPLOYMENTS = Resource("apps/v1", "deployments")
_POLICIES = Resource("networking.k8s.io/v1", "networkpolicies")
_INGRESSES = Resource("networking.k8s.io/v1", "ingresses")
# Routes of the Gateway API stay: a cluster without it does not know them.
_OPTIONAL = {Resource("autoscaling/v2", "horizontalpodautoscalers"), _INGRESSES}
_LOOK_EVERY_S = 0.5
_SAID = 20  # last lines of the pod that looks at a canary, for the message if it fails


class KubernetesPlace:
    """Serves the releases of `name`, each as its settings say, which are those of a KubernetesConfig.

    wait_s: how long another rollout is waited for. ready_s: how long pods may take to get ready.
    smoke_s: how long a canary is asked. replay: recorded requests, which it is sent afterwards, as a text
    of lines; for as long they are below `store`, in S3.
    """

    def __init__(
        self,
        cluster: Namespace,
        name: str,
        say: Say,
        *,
        wait_s: float,
        ready_s: float,
        smoke_s: float,
        replay: str = "",
        store: str = "",
    ) -> None:
        self._cluster, self._name, self._say = cluster, name, say
        self._wait_s, self._ready_s, self._smoke_s = wait_s, ready_s, smoke_s
        self._replay = replay
        self._replay_uri = f"{store}/replays/{cluster.name}/{name}.jsonl"  # one at a time: there is a lease
        self._lease = Lease(cluster, f"{name}-rollout", say)

    def lock(self) -> AbstractContextManager[None]:
        """One rollout at a time. Raises Unavailable naming who rolls out."""
        return self._lease.held(self._wait_s)

    # ----------------------------------------------------------------------------------------- what is there

    def stable(self) -> Stable | None:
        """What takes the traffic now. Raises StageFailed if somebody else made it."""
        told = self._annotations("stable")
        if told is None:
            return None
        release = _release(told.get(manifests.RELEASE))
        if release is None:
            raise StageFailed(
                f"the Deployment {self._name} in {self._cluster.name} is not of hpml deploy",
                fix="give another --name, or delete it",
            )
        return Stable(release, told.get(manifests.TRIED) == "true", _release(told.get(manifests.PREVIOUS)))

    def canary(self) -> Release | None:
        """What is beside it."""
        told = self._annotations("canary")
        return _release(told.get(manifests.RELEASE)) if told is not None else None

    def _annotations(self, track: Track) -> dict[str, str] | None:
        found = self._cluster.get(DEPLOYMENTS, manifests.name_of(self._name, track))
        if found is None or "deletionTimestamp" in found["metadata"]:
            return None
        return dict(found["metadata"].get("annotations") or {})

    # --------------------------------------------------------------------------------------- what is changed

    def begin(self, release: Release) -> None:
        """Serve `release` where nothing was served before; it is not tried yet."""
        self._apply_around(release)
        self._apply(DEPLOYMENTS, manifests.deployment(_config(release), release, "stable"))
        self._wait_until_ready(release, "stable")

    def start_canary(self, release: Release) -> None:
        """Serve `release` beside the stable one, by one pod behind the same Service.

        Raises UsageError if it is to be asked with another token than the stable one.
        """
        stable = self.stable()
        if stable and _config(stable.release).token_secret != _config(release).token_secret:
            raise UsageError(
                "the token and the bundle cannot change together",
                why="both versions are asked in turns, with one token",
                fix=f"deploy {stable.release} with the new token first",
            )
        self._apply(_POLICIES, manifests.policy_of_servers(_config(release), release, "canary"))
        self._apply(DEPLOYMENTS, manifests.deployment(_config(release), release, "canary"))
        self._wait_until_ready(release, "canary")
        replicas = self._replicas()
        self._say(
            f"the canary has 1 of {replicas + 1} pods, and so about {100 / (replicas + 1):.0f} % of requests"
        )

    def promote(self, release: Release, previous: Release | None) -> None:
        """Replace the stable pods one after the other: a new one is ready before an old one goes."""
        self._apply_around(release)
        body = manifests.deployment(_config(release), release, "stable", tried=True, previous=previous)
        self._apply(DEPLOYMENTS, body)
        self._wait_until_ready(release, "stable")

    def remove_canary(self) -> None:
        """Delete the canary: its pod answers what it has accepted, and goes."""
        self._delete("canary")
        self._cluster.delete(_POLICIES, manifests.name_of(self._name, "canary"))

    def remove(self) -> None:
        """Delete all that was made; the stable Deployment last, which says what there is."""
        stable = self.stable()
        self.remove_canary()
        for plural, body in manifests.common(_config(stable.release), stable.release) if stable else ():
            self._cluster.delete(Resource(body["apiVersion"], plural), body["metadata"]["name"])
        self._delete("stable")
        if stable:
            bundles = {one.uri for one in (stable.release, stable.previous) if one}
            self._say(f"what stays: {', '.join(sorted(bundles))}, and the Lease {self._name}-rollout")

    def _apply_around(self, release: Release) -> None:
        """Have what the release is to have around its pods, and not what only the one before had."""
        wanted = {
            Resource(body["apiVersion"], plural): body
            for plural, body in manifests.optional(_config(release))
        }
        for resource in _OPTIONAL - wanted.keys():
            self._cluster.delete(resource, self._name)
        if _INGRESSES in wanted:
            self._forget_left_out(wanted[_INGRESSES])
        for plural, body in manifests.common(_config(release), release):
            self._apply(Resource(body["apiVersion"], plural), body)

    def _forget_left_out(self, ingress: Json) -> None:
        """Take from the Ingress what `ingress` does not have any more: a patch leaves that alone."""
        stable = self.stable()
        if stable is None or self._cluster.get(_INGRESSES, self._name) is None:
            return
        ours = _config(stable.release).ingress_annotations
        gone = dict.fromkeys(ours.keys() - ingress["metadata"].get("annotations", {}).keys())
        spec = dict.fromkeys({"tls", "ingressClassName"} - ingress["spec"].keys())
        self._cluster.patch(_INGRESSES, self._name, {"metadata": {"annotations": gone}, "spec": spec})

    def _apply(self, resource: Resource, body: Json) -> None:
        self._lease.check()
        if self._cluster.create(resource, body) is None:
            self._cluster.patch(resource, body["metadata"]["name"], body)

    def _delete(self, track: Track) -> None:
        self._lease.check()
        self._cluster.delete(DEPLOYMENTS, manifests.name_of(self._name, track))

    def _replicas(self) -> int:
        found = self._cluster.get(DEPLOYMENTS, self._name) or {}
        return int((found.get("status") or {}).get("readyReplicas") or 0)

    # ---------------------------------------------------------------------------------------- until it is so

    def _wait_until_ready(self, release: Release, track: Track) -> None:
        """Return once all pods of the Deployment are of `release` and ready, and no others are left.

        Raises StageFailed with the cause once one of them has ended, Unavailable if they wait too long.
        """
        name, until = manifests.name_of(self._name, track), time.monotonic() + self._ready_s
        waiting = causes.Patience(self._ready_s, self._say)
        of_before = {pod["metadata"]["uid"]: _restarts(pod) for pod in self._pods(release, track)}
        while True:
            self._lease.check()
            found = self._cluster.get(DEPLOYMENTS, name)
            if found is None:
                raise Unavailable(f"somebody deleted the Deployment {name}", fix="deploy again")
            if _is_complete(found):
                return
            pods = self._pods(release, track)
            for pod in pods:
                is_as_before = of_before.get(pod["metadata"]["uid"]) == _restarts(pod) > 0
                if not is_as_before and (why := _why_ended(pod)):
                    raise StageFailed(f"{release} does not get ready", why=why)
            waiting.look(dict(self._causes(pods)))
            if time.monotonic() > until:
                raise StageFailed(
                    f"{release} does not get ready", why=f"waited {self._ready_s:.0f} s for {name}"
                )
            time.sleep(_LOOK_EVERY_S)

    def _pods(self, release: Release, track: Track) -> list[Json]:
        labels = {
            manifests.NAME_LABEL: self._name,
            manifests.TRACK_LABEL: track,
            manifests.RELEASE_LABEL: manifests.release_label(release),
        }
        found = self._cluster.find(PODS, labels=",".join(f"{name}={value}" for name, value in labels.items()))
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def _causes(self, pods: list[Json]) -> Iterator[tuple[str, causes.Cause]]:
        for pod in pods:
            if why := causes.cause(pod, self._cluster.events(pod["metadata"]["uid"])):
                yield pod["metadata"]["name"], why

    # ------------------------------------------------------------------------------------------------- smoke

    def smoke(self, release: Release, *, beside_stable: bool) -> SmokeFigures:
        """Ask it from a pod of its own. Raises Unavailable if that cannot be run."""
        with self._stored_requests() as requests:
            return self._asked(release, beside_stable, requests)

    @contextmanager
    def _stored_requests(self) -> Iterator[StoredRequests | None]:
        """Where the pod finds what is to be replayed, while entered; what a killed rollout left goes, too."""
        if not self._replay:
            yield None
            return
        self._say(f"recorded requests go to {self._replay_uri}, until they have been replayed")
        try:
            storage.write_text(self._replay_uri, self._replay)
            yield StoredRequests(self._replay_uri, sha256(self._replay.encode()).hexdigest())
        finally:
            self._delete_requests()

    def _delete_requests(self) -> None:
        try:
            storage.delete(self._replay_uri)
        except HpmlError as error:
            self._say(f"warning: recorded requests are left at {self._replay_uri}: {error}")

    def _asked(self, release: Release, beside_stable: bool, requests: StoredRequests | None) -> SmokeFigures:
        name = f"{self._name}-smoke-{secrets.token_hex(3)}"
        body = manifests.smoke_job(
            _config(release),
            release,
            name=name,
            seconds=self._smoke_s,
            beside_stable=beside_stable,
            requests=requests,
        )
        said: deque[str] = deque(maxlen=_SAID)
        runner = JobRunner(
            self._cluster,
            body,
            timeout_s=body["spec"]["activeDeadlineSeconds"],
            pending_s=self._ready_s,
            write=said.append,
            say=self._say,
        )
        self._say(f"{release} is asked for {self._smoke_s:g} s, in turns with what is served")
        self._apply(_POLICIES, manifests.policy_of_smoke(_config(release), release))
        try:
            outcome = runner.attend()
        finally:
            with suppress(HpmlError):  # it goes by itself
                self._cluster.delete(JOBS, name)
        for line in reversed(said):
            with suppress(ValidationError):
                return SmokeFigures.model_validate_json(line)
        own = said[-1].removeprefix("error: ") if said else ""
        raise Unavailable(f"{release} could not be asked", why=own or outcome.cause or "its pod said nothing")


def _config(release: Release) -> KubernetesConfig:
    config: KubernetesConfig = validate(KubernetesConfig, release.settings, where="the settings of a release")
    return config


def _release(told: str | None) -> Release | None:
    try:
        return Release.model_validate_json(told) if told else None
    except ValidationError:
        return None


def _is_complete(deployment: Json) -> bool:
    """Whether all of its pods are of its template and ready."""
    status, wanted = deployment.get("status") or {}, deployment["spec"].get("replicas", 1)
    is_seen = status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
    counts = [status.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas")]
    return is_seen and all(count == wanted for count in counts)


def _restarts(pod: Json) -> int:
    return sum(one.get("restartCount", 0) for one in (pod.get("status") or {}).get("containerStatuses") or ())


def _why_ended(pod: Json) -> str:
    """Why a container of it has ended with an error, in its own last words; empty if none has."""
    status = pod.get("status") or {}
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        for state in (container.get("state") or {}, container.get("lastState") or {}):
            ended = state.get("terminated") or {}
            if ended.get("exitCode"):
                lines = str(ended.get("message") or "").strip().splitlines()
                said = lines[-1].removeprefix("error: ") if lines else str(ended.get("reason") or "no words")
                return f"{container['name']} ended with exit code {ended['exitCode']}: {said}"
    return ""
