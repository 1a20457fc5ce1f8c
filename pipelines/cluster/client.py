"""A namespace of a Kubernetes cluster: objects as the JSON of a manifest, errors as a user understands them.

Whatever goes wrong with the cluster itself becomes Unavailable; an API server that is away for a while is
waited for, aloud. What the status and the events of a pod mean is in pipelines/cluster/causes.py.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from hpml.core.errors import ConfigInvalid, HpmlError, Unavailable
from hpml.pipelines.cluster.causes import container_state

CONNECT_S, ANSWER_S = 5.0, 30.0  # how long one request may take
SILENT_LOG_S = 60.0  # a log stream that said nothing for so long is opened anew: its connection may be dead
RETRY_EVERY_S = 1.0
LOOK_EVERY_S = 0.2  # whether a container, or an object that is being deleted, is gone
LOST_AFTER = 5  # attempts at the log of a container that has ended
NO_ANSWER = 0  # instead of a status
RETRIED = {NO_ANSWER, 429, 500, 502, 503, 504}  # 500 is also what a webhook causes that does not answer
METHODS = {"get": "GET", "list": "GET", "create": "POST", "patch": "PATCH", "delete": "DELETE"}
TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")  # of a pod, unless it wants none

Json = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Resource:
    """A kind of objects, as the paths of the API spell it, such as Resource("batch/v1", "jobs").

    namespaced: whether each namespace has its own; if not, they are the cluster's, such as nodes.
    """

    api: str
    plural: str
    namespaced: bool = True


PODS = Resource("v1", "pods")
PODS_LOG = Resource("v1", "pods/log")
EVENTS = Resource("v1", "events")
JOBS = Resource("batch/v1", "jobs")
CONFIGMAPS = Resource("v1", "configmaps")
REVIEWS = Resource("authorization.k8s.io/v1", "selfsubjectaccessreviews", namespaced=False)


def say_on_stderr(text: str) -> None:
    """Tell the user something, beside what a program prints as its result."""
    print(text, file=sys.stderr, flush=True)


def connect(namespace: str, *, patience_s: float = 60.0, say: Say = say_on_stderr) -> Namespace:
    """A namespace of the cluster that KUBECONFIG names, else that this pod is in, else of ~/.kube/config.

    patience_s: how long an API server that is away is waited for. Nothing is asked of the cluster yet.
    Raises Unavailable if no cluster is configured.
    """
    from kubernetes import client, config
    from kubernetes.config import ConfigException

    configuration = client.Configuration()
    try:
        if not os.environ.get("KUBECONFIG") and TOKEN.exists():
            config.load_incluster_config(client_configuration=configuration)
        else:
            file = os.environ.get("KUBECONFIG")  # named here, or the library takes that of its import
            config.load_kube_config(config_file=file, client_configuration=configuration)
    except (ConfigException, yaml.YAMLError, OSError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(
            "no cluster is configured",
            why=str(error) or type(error).__name__,
            fix="point KUBECONFIG at the file that kubectl uses; in a pod, give it a service account's token",
        ) from None
    configuration.retries = False  # ours say what they wait for
    configuration.connection_pool_maxsize = 64  # each log that is followed keeps one
    return Namespace(client.ApiClient(configuration), namespace, patience_s=patience_s, say=say)


def own_namespace() -> str:
    """The namespace of the pod that this process runs in; empty where it is in none that has a token."""
    try:
        return TOKEN.with_name("namespace").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class _Request:
    """verb: of METHODS. query: what is empty in it is left out."""

    verb: str
    resource: Resource
    name: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    body: Json | None = None


class Namespace:
    """The objects of one namespace. Safe to use from several threads.

    Every method raises Unavailable if the cluster does not answer, does not know us, or forbids what was
    asked, and ConfigInvalid if it finds an object invalid.
    """

    def __init__(self, api_client: Any, name: str, *, patience_s: float, say: Say) -> None:
        self.name = name
        self._client, self._patience_s, self._say = api_client, patience_s, say
        self._is_away = threading.Event()  # said once, however many threads are waiting

    def beside(self, name: str) -> Namespace:
        """The namespace `name` of the same cluster."""
        return Namespace(self._client, name, patience_s=self._patience_s, say=self._say)

    @property
    def host(self) -> str:
        """The address of the API server."""
        return str(self._client.configuration.host)

    def get(self, resource: Resource, name: str, *, patience_s: float | None = None) -> Json | None:
        """The object, or None if there is none of that name. patience_s: instead of ours."""
        return self._ask(_Request("get", resource, name), patience_s)

    def find(self, resource: Resource, *, labels: str = "", fields: str = "") -> list[Json]:
        """What the selectors choose, such as labels="app=x,tier=y" and fields="involvedObject.name=x"."""
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        answer = self._ask(_Request("list", resource, query=selectors))
        return list((answer or {}).get("items") or ())

    def create(self, resource: Resource, body: Json) -> Json | None:
        """The new object, or None if its name is taken: also by an attempt of ours whose answer was lost."""
        return self._ask(_Request("create", resource, body=body))

    def patch(self, resource: Resource, name: str, changes: Json) -> Json | None:
        """The object with `changes` merged in (null removes a key), or None if there is none of that name, or
        it is no more of the resourceVersion that `changes` name."""
        return self._ask(_Request("patch", resource, name, body=changes))

    def delete(
        self,
        resource: Resource,
        name: str,
        *,
        uid: str = "",
        keep_owned: bool = False,
        patience_s: float | None = None,
    ) -> bool:
        """Remove the object, and what it owns soon after; returns whether there was one.

        uid: remove that very object, and not another one that took its name. keep_owned: what it owns stays
        and has no owner from then on. patience_s: instead of ours.
        """
        policy = "Orphan" if keep_owned else "Background"
        body: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": policy}
        if uid:
            body["preconditions"] = {"uid": uid}
        return self._ask(_Request("delete", resource, name, body=body), patience_s) is not None

    def wait_until_gone(self, resource: Resource, name: str, *, uid: str, timeout_s: float = 60.0) -> None:
        """Return once that very object is no longer there. Raises Unavailable after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while (found := self.get(resource, name)) and found["metadata"]["uid"] == uid:
            if time.monotonic() > until:
                raise Unavailable(
                    f"{resource.plural}/{name} in the namespace {self.name} is being deleted and still there",
                    why=f"waited {timeout_s:.0f} s",
                    fix=f"see kubectl -n {self.name} get {resource.plural} {name} -o yaml",
                )
            time.sleep(LOOK_EVERY_S)

    def raw(self, path: str) -> Json:
        """What the API server answers at a path of its own, such as /version."""
        return self._ask(_Request("get", Resource("", path, namespaced=False))) or {}

    def may(self, verb: str, resource: Resource, name: str = "") -> bool:
        """Whether we are allowed to do `verb` to such objects, or to the one of that name."""
        plural, _, part = resource.plural.partition("/")
        group, namespace = resource.api.rpartition("/")[0], self.name if resource.namespaced else ""
        asked = {"verb": verb, "group": group, "resource": plural, "subresource": part, "name": name}
        given = {key: value for key, value in {**asked, "namespace": namespace}.items() if value}
        kind = {"apiVersion": REVIEWS.api, "kind": "SelfSubjectAccessReview"}
        answer = self.create(REVIEWS, {**kind, "spec": {"resourceAttributes": given}})
        return bool((answer or {}).get("status", {}).get("allowed"))

    def events(self, uid: str) -> list[Json]:
        """What the cluster noted about the object with this uid, oldest first."""
        found = self.find(EVENTS, fields=f"involvedObject.uid={uid}")
        return sorted(
            found, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or "")
        )

    # ------------------------------------------------------------------------------------------------- logs

    def log(self, pod: Json, container: str) -> Iterator[str]:
        """Every line of a container of `pod`, as it is written, until the container or the pod is gone.

        A stream that breaks is taken up again where it broke: by the time of the lines, no line twice, none
        left out. Of a pod that was replaced by one of the same name, only the lines of the given one.
        """
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        seen, broken = _Seen(), 0
        while True:
            was_over = self._is_over(name, uid, container)  # asked before: what follows is then all there is
            if was_over is None:
                return
            try:
                for line in seen.new(self._log_lines(name, uid, container, seen.since)):
                    broken = 0
                    stamp, _, text = line.partition(" ")
                    if stamp[:1].isdigit():  # if not, it is the kubelet that says it has no log any more
                        yield text
                if was_over:
                    return
            except _Failed as error:
                broken += 1
                if was_over and broken > LOST_AFTER:  # the node, or its copy of the log, is gone
                    self._say(f"the rest of the log of {name} cannot be read: {error}")
                    return
            time.sleep(LOOK_EVERY_S)

    def _is_over(self, name: str, uid: str, container: str) -> bool | None:
        """Whether the container has ended for good; None: the pod is gone."""
        pod = self.get(PODS, name)
        if pod is None or pod["metadata"]["uid"] != uid:
            return None
        return pod["status"].get("phase") in ("Succeeded", "Failed") or (
            pod["spec"].get("restartPolicy") == "Never" and container_state(pod, container)[0] == "terminated"
        )

    def _log_lines(self, name: str, uid: str, container: str, since: str) -> Iterator[str]:
        """The lines of a stream; one that was cut off is left out. Raises _Failed if it breaks."""
        import urllib3

        query = {"container": container, "follow": "true", "timestamps": "true", "sinceTime": since}
        try:
            response = self._send(_Request("get", PODS, f"{name}/log", query), stream=True)
        except _Failed as failed:
            if failed.status not in (400, 404, *RETRIED):  # these: not started yet, or just gone
                raise self._explained(failed, _Request("get", PODS_LOG, name)) from None
            time.sleep(RETRY_EVERY_S)
            raise
        try:
            now = self.get(PODS, name)
            if now is not None and now["metadata"]["uid"] != uid:
                return  # a pod of the same name came in between, and this is its log
            for line in response:
                yield line.decode(errors="replace").removesuffix("\n")
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _Failed(NO_ANSWER, _why_away(error)) from None
        finally:
            response.close()  # not back to the pool: there may be more in it
            response.release_conn()

    # --------------------------------------------------------------------------------------------- requests

    def _ask(self, request: _Request, patience_s: float | None = None) -> Json | None:
        """The answer, or None for "there is none of that name" and, to create, for "there is one already"."""
        patience_s = self._patience_s if patience_s is None else patience_s
        until = time.monotonic() + patience_s
        while True:
            try:
                answer = self._send(request)
                if self._is_away.is_set():
                    self._is_away.clear()
                    self._say(f"the cluster at {self.host} answers again")
                return answer if isinstance(answer, dict) else {}
            except _Failed as failed:
                taken = request.verb == "create" and failed.reason == "AlreadyExists"
                # For delete: another object has taken the name; for patch: it is of another version by now.
                another = request.verb in ("delete", "patch") and failed.status == 409
                if taken or another or (request.name and failed.is_missing_object):
                    return None
                if failed.status not in RETRIED or time.monotonic() >= until:
                    raise self._explained(failed, request, patience_s) from None
                if not self._is_away.is_set():
                    self._is_away.set()
                    trying = f"trying for {patience_s:.0f} s"
                    self._say(f"the cluster at {self.host} does not answer ({failed}): {trying}")
            except ValueError as error:
                raise Unavailable(f"{self.host} answers what is not JSON", why=str(error)) from None
            time.sleep(min(RETRY_EVERY_S, max(0.0, until - time.monotonic())))

    def _send(self, request: _Request, *, stream: bool = False) -> Any:
        """What is answered, or the stream of it. Raises _Failed; ValueError if the answer is not JSON."""
        import urllib3
        from kubernetes.client import ApiException

        kind = "application/merge-patch+json" if request.verb == "patch" else "application/json"
        try:
            response = self._client.call_api(
                self._path(request.resource, request.name),
                METHODS[request.verb],
                query_params=[(key, text) for key, text in request.query.items() if text],
                header_params={"Accept": "*/*" if stream else "application/json", "Content-Type": kind},
                body=request.body,
                auth_settings=["BearerToken"],  # in a pod: a token that is renewed
                _preload_content=False,
                _return_http_data_only=True,
                _request_timeout=(CONNECT_S, SILENT_LOG_S if stream else ANSWER_S),
            )
            return response if stream else json.loads(response.data)
        except (ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            if isinstance(error, ApiException) and error.status:  # else it is of a certificate
                raise _Failed(error.status, error.body) from None
            raise _Failed(NO_ANSWER, _why_away(error)) from None

    def _path(self, resource: Resource, name: str) -> str:
        if not resource.api:
            return resource.plural
        root = "/api" if "/" not in resource.api else "/apis"
        namespace = f"/namespaces/{quote(self.name, safe='')}" if resource.namespaced else ""
        path = f"{root}/{resource.api}{namespace}/{resource.plural}"
        return f"{path}/{quote(name, safe='/')}" if name else path

    def _explained(self, failed: _Failed, request: _Request, patience_s: float = 0) -> HpmlError:
        verb, resource, name = request.verb, request.resource, request.name
        where = f"in the namespace {self.name}" if resource.namespaced else "of the cluster"
        thing = f"{resource.plural} {where}"
        if failed.status == NO_ANSWER:
            tried = f", for {patience_s:.0f} s" if patience_s >= 1 else ""
            return Unavailable(
                f"the cluster at {self.host} does not answer{tried}",
                why=failed.message,
                fix="is it up, and is KUBECONFIG the right one? kubectl get nodes",
            )
        if failed.status == 401:
            return Unavailable(
                f"the cluster at {self.host} does not know who you are",
                why=failed.message,
                fix="log in again, as the file in KUBECONFIG has it (its token or certificate may be over)",
            )
        if failed.status == 403 and " cannot " in failed.message:
            return Unavailable(
                f"not allowed to {verb} {thing}",
                why=failed.message,
                fix="k8s/base grants it in the namespace hpml, k8s/components/kubeflow in Kubeflow's"
                f" (kubectl apply -k); see kubectl -n {self.name} get rolebindings",
            )
        if failed.status == 404 and failed.kind == "namespaces":
            return Unavailable(
                f"the cluster at {self.host} has no namespace {self.name}",
                fix="kubectl apply -k k8s/base makes it; or set cluster.namespace",
            )
        if failed.status == 404 and not failed.kind:
            return Unavailable(
                f"the cluster at {self.host} does not know {resource.plural} of {resource.api}",
                why=failed.message,
                fix="install what provides them (hpml doctor says what and how)",
            )
        if failed.status in (400, 403, 413, 422):
            subject = f"{resource.plural}/{name}" if name else resource.plural
            return ConfigInvalid(f"the cluster refused to {verb} {subject}", why=failed.message)
        return Unavailable(f"the cluster could not {verb} {thing}", why=f"{failed.status} {failed.message}")


class _Failed(Exception):
    """No success, in the words of the `Status` object that was answered; or no answer, and why."""

    def __init__(self, status: int, told: bytes | str | None) -> None:
        text = told.decode(errors="replace") if isinstance(told, bytes) else told or ""
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        answer = answer if isinstance(answer, dict) else {}
        details = answer.get("details") or {}
        self.status = status
        self.reason = str(answer.get("reason", ""))
        self.message = str(answer.get("message") or text.strip()[:300] or f"HTTP {status}")
        self.kind = str(details.get("kind", ""))  # of what is missing: the namespace, or the object itself
        self.is_missing_object = status == 404 and bool(details.get("name")) and self.kind != "namespaces"
        super().__init__(self.message)


def _why_away(error: BaseException) -> str:
    """The innermost reason of a connection that failed, without the library's wrapping."""
    chain = [error]
    for link in chain:  # which grows
        inner = (getattr(link, "reason", None), link.__cause__, link.__context__)
        chain += [one for one in inner if isinstance(one, BaseException) and one not in chain][:1]
    for link in reversed(chain):
        if isinstance(link, ssl.SSLError):
            return f"its certificate is not the one expected ({link.reason or link})"
        if isinstance(link, OSError) and link.strerror:
            return link.strerror.lower()
    return str(chain[-1]) or type(chain[-1]).__name__


class _Seen:
    """Which lines of a log were read, so far as they could come again."""

    OVERLAP = timedelta(seconds=2)  # stdout and stderr are stamped apart, so times are not quite in order

    def __init__(self) -> None:
        self._recent: deque[tuple[datetime, str]] = deque()
        self._newest: datetime | None = None

    @property
    def since(self) -> str:
        """What to ask the log for: RFC 3339, whole seconds; empty for all of it."""
        if self._newest is None:
            return ""
        return (self._newest - self.OVERLAP).replace(microsecond=0).isoformat()

    def new(self, lines: Iterable[str]) -> Iterator[str]:
        """Those of `lines` (each "TIME TEXT") that were not there when the log was read before."""
        known = Counter(line for _, line in self._recent)
        for line in lines:
            if known[line]:
                known[line] -= 1
                continue
            self._remember(line)
            yield line

    def _remember(self, line: str) -> None:
        try:
            time_of_line = datetime.fromisoformat(line.partition(" ")[0])
        except ValueError:  # a line without a time; it cannot be asked for again
            return
        self._newest = max(self._newest or time_of_line, time_of_line)
        self._recent.append((time_of_line, line))
        oldest = self._newest.replace(microsecond=0) - self.OVERLAP
        while self._recent and self._recent[0][0] < oldest:
            self._recent.popleft()
