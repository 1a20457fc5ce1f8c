"""A client of the REST API of Kubeflow Pipelines, v2beta1.

Not kfp's own: that one reads a cookie from a file in the home folder, writes one there, prints, waits without
a limit, and takes a second to import.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote, urlencode, urlsplit

from pydantic import BaseModel, ValidationError

from hpml.core.errors import Unavailable, UsageError

IN_CLUSTER = "http://ml-pipeline.kubeflow:8888"
HOST_VARIABLE = "KF_PIPELINES_ENDPOINT"  # as kfp has it
TOKEN_VARIABLE = "KFP_EXISTING_TOKEN"  # noqa: S105 - a name; as kfp's command has it
TOKEN_FILE_VARIABLE = "KF_PIPELINES_SA_TOKEN_PATH"  # noqa: S105 - likewise
_TOKEN_FILE = "/var/run/secrets/kubeflow/pipelines/token"  # noqa: S105 - likewise

_API = "/apis/v2beta1"
_TIMEOUT_S = 15.0
_MAX_BYTES = 64 << 20
_UPGRADE = "upgrade it to 2.17, for which this version of hpml compiles"
_PORT_FORWARD = "kubectl -n kubeflow port-forward svc/ml-pipeline-ui 8080:80"


class _Error(BaseModel):
    message: str = ""


class _Moment(BaseModel):
    state: str = ""


class Run(BaseModel):
    """What Kubeflow tells about a run, as far as it concerns us."""

    state: str = ""
    state_history: tuple[_Moment, ...] = ()
    created_at: datetime | None = None
    finished_at: datetime | None = None
    error: _Error | None = None

    @property
    def was_stopped(self) -> bool:
        """Whether somebody terminated it: it ends as FAILED nevertheless."""
        return any(moment.state == "CANCELING" for moment in self.state_history)

    @property
    def seconds(self) -> float | None:
        """How long it took; None where that is not known."""
        if self.created_at is None or self.finished_at is None or self.finished_at < self.created_at:
            return None
        return (self.finished_at - self.created_at).total_seconds()


@dataclass(frozen=True)
class Server:
    """A server of Kubeflow Pipelines.

    host: the URL of its user interface or of its API. token: who asks; empty where nobody has to say.
    """

    host: str
    token: str = field(default="", repr=False)

    # ------------------------------------------------------------------------------------------- what it is

    def check(self) -> bool:
        """Whether it has users with namespaces of their own. Raises Unavailable if it is no KFP of ours."""
        try:
            answer = self._json(self._send("GET", f"{_API}/healthz"))
        except _Refused as refused:
            if refused.status == 404 and self._is_old():
                raise Unavailable(
                    f"Kubeflow Pipelines at {self.host} is too old",
                    why="it has the API of version 1 only",
                    fix=_UPGRADE,
                ) from None
            self._explain(refused, "asking for its health")
        return bool(answer.get("multi_user"))

    def _is_old(self) -> bool:
        try:
            self._json(self._send("GET", "/apis/v1beta1/healthz"))
        except (_Refused, Unavailable):
            return False
        return True

    def page(self, run: str) -> str:
        """The page of a run."""
        return f"{os.environ.get('KF_PIPELINES_UI_ENDPOINT') or self.host}/#/runs/details/{run}"

    # ------------------------------------------------------------------------------------------- what is run

    def experiment(self, name: str, namespace: str) -> tuple[str, bool]:
        """The id of the experiment `name`, and whether it had to be made. Raises Unavailable."""
        predicate = {"operation": 1, "key": "display_name", "stringValue": name}  # 1: equals
        query = {"filter": json.dumps({"predicates": [predicate]}), "namespace": namespace}
        found = self._asked("looking for the experiment", "GET", f"{_API}/experiments", query=query)
        for experiment in found.get("experiments") or ():
            return self._id(experiment, "experiment_id"), False
        body = {"display_name": name, "namespace": namespace}
        made = self._asked(f"making the experiment {name}", "POST", f"{_API}/experiments", body=body)
        return self._id(made, "experiment_id"), True

    def create_run(self, body: Mapping[str, Any]) -> str:
        """Start a run; returns its id. Raises Unavailable."""
        return self._id(self._asked("starting the run", "POST", f"{_API}/runs", body=body), "run_id")

    def create_recurring_run(self, body: Mapping[str, Any]) -> str:
        """Have runs started by the clock; returns the id of the schedule. Raises Unavailable."""
        made = self._asked("making the schedule", "POST", f"{_API}/recurringruns", body=body)
        return self._id(made, "recurring_run_id")

    def run(self, run: str) -> Run:
        """The state of a run. Raises Unavailable."""
        answer = self._asked("asking for the run", "GET", f"{_API}/runs/{quote(run, safe='')}")
        try:
            return Run.model_validate(answer)
        except ValidationError as error:
            raise self._is_no_kubeflow(f"it tells about a run in another way: {_first(error)}") from None

    def workflow_manifest(self, run: str) -> str:
        """The workflow that a run is, JSON; empty before it has started. Raises Unavailable."""
        path = f"/apis/v1beta1/runs/{quote(run, safe='')}"  # version 2 of the API does not have it
        runtime = self._asked("asking for the run's workflow", "GET", path).get("pipeline_runtime") or {}
        return str(runtime.get("workflow_manifest") or "")

    def log(self, run: str, pod: str, namespace: str) -> str | None:
        """What a pod of a run has printed so far; None if it or its log is gone. Raises Unavailable."""
        query = {"podname": pod, "runid": run, "podnamespace": namespace}
        ways: tuple[tuple[str, Mapping[str, str]], ...] = (
            (f"/apis/v1alpha1/runs/{quote(run, safe='')}/nodes/{quote(pod, safe='')}/log", {}),  # of the API
            ("/k8s/pod/logs", query),  # of the user interface, which does not pass the other on
        )
        for path, given in ways:
            try:
                text = self._send("GET", path, query=given).decode(errors="replace")
            except _Refused as refused:
                if refused.status in (401, 403):
                    self._explain(refused, "reading a log")
                continue
            if not _is_no_log(text):
                return text
        return None

    def artifact(self, uri: str, namespace: str) -> bytes:
        """The file that an artifact is, from where the user interface gets it. Raises Unavailable."""
        place = urlsplit(uri)
        query = {"source": place.scheme, "bucket": place.netloc, "key": place.path.lstrip("/")}
        query["namespace"] = namespace
        try:
            return self._send("GET", "/artifacts/get", query=query)
        except _Refused as refused:
            if refused.status == 404:
                raise Unavailable(
                    f"{self.host} gives no artifacts",
                    why="it is the address of Kubeflow's API, and its user interface gives them",
                    fix=f"{_PORT_FORWARD}, and --host http://localhost:8080",
                ) from None
            self._explain(refused, "fetching an artifact")

    # ------------------------------------------------------------------------------------------------- HTTP

    def _asked(self, what: str, method: str, path: str, **given: Any) -> dict[str, Any]:
        try:
            return self._json(self._send(method, path, **given))
        except _Refused as refused:
            self._explain(refused, what)

    def _id(self, answer: Any, name: str) -> str:
        found = answer.get(name) if isinstance(answer, dict) else None
        if not isinstance(found, str) or not found:
            raise self._is_no_kubeflow(f"its answer has no {name}")
        return found

    def _json(self, data: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(data)
        except ValueError:
            raise self._is_no_kubeflow("it answers with something else than JSON") from None
        if isinstance(answer, dict):
            return answer
        raise self._is_no_kubeflow("it answers with JSON of another shape")

    def _send(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Any = None
    ) -> bytes:
        """The answer to one request. Raises _Refused for a status of 3xx and above, Unavailable."""
        given = urlencode({name: value for name, value in (query or {}).items() if value})
        url = f"{self.host}{path}" + (f"?{given}" if given else "")
        request = urllib.request.Request(url, method=method)  # noqa: S310 - `find_server` allows http(s) only
        request.add_header("Accept", "application/json")
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with _OPENER.open(request, timeout=_TIMEOUT_S) as answer:
                data = bytes(answer.read(_MAX_BYTES + 1))
        except urllib.error.HTTPError as error:
            with error:
                raise _Refused(error.code, error.read(_MAX_BYTES)) from None
        except urllib.error.URLError as error:
            raise self._no_answer(error.reason) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(error) from None
        if len(data) > _MAX_BYTES:
            raise self._is_no_kubeflow(f"its answer is over {_MAX_BYTES >> 20} MiB")
        return data

    # ---------------------------------------------------------------------------------------- what is wrong

    def _no_answer(self, reason: object) -> Unavailable:
        what, why, fix = f"Kubeflow Pipelines at {self.host} does not answer", str(reason), ""
        if isinstance(reason, ssl.SSLCertVerificationError):
            what, why = f"the certificate of {self.host} is not trusted", reason.verify_message
            fix = "name the file of your authority's certificate in SSL_CERT_FILE"
        elif isinstance(reason, ssl.SSLError):
            what, why = f"{self.host} does not speak TLS", str(reason.reason or reason)
            fix = "try http://"
        elif isinstance(reason, socket.gaierror):
            why, fix = "there is no host of that name", "check --host"
        elif isinstance(reason, ConnectionRefusedError):
            why, fix = "connection refused", f"does this still run? {_PORT_FORWARD}"
        elif isinstance(reason, TimeoutError):
            why = f"not within {_TIMEOUT_S:.0f} s"
        elif isinstance(reason, http.client.HTTPException | ConnectionResetError):
            why, fix = "it hung up, or speaks no HTTP", "try https://"
        return Unavailable(what, why=why, fix=fix or "check --host and the network")

    def _is_no_kubeflow(self, why: str) -> Unavailable:
        return Unavailable(
            f"there is no Kubeflow Pipelines at {self.host}",
            why=why,
            fix="--host is the address of its user interface or its API, without #/... at the end",
        )

    def _explain(self, refused: _Refused, what: str) -> NoReturn:
        status, message = refused.status, refused.message
        if status == 404 and not refused.is_of_api:
            raise self._is_no_kubeflow("it has no such API")
        does, why, fix = f"refused {what}", message, ""
        if 300 <= status < 400 or status == 401:
            does, why = "wants to know who you are", message or f"HTTP {status}"
            fix = f"put a token into {TOKEN_VARIABLE}"
        elif status == 403:
            does, fix = f"does not allow {what}", "is --namespace yours, and may your token use it?"
        elif "namespace" in message.lower():
            fix = "check --namespace"
        elif "unknown field" in message:
            does, fix = "does not understand the pipeline", _UPGRADE
        else:
            why = f"HTTP {status}, {message}".rstrip(", ")
        raise Unavailable(f"Kubeflow Pipelines at {self.host} {does}", why=why, fix=fix)


class _Refused(Exception):
    """An answer with a status that is not success, and what the API says about it."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        told = _told_in(body)
        self.status, self.is_of_api = status, told is not None
        words = [str(told[key]) for key in ("message", "error_message", "error") if told and told.get(key)]
        self.message = words[0][:500] if words else ""


def _is_no_log(text: str) -> bool:
    """Whether a server says, with status 200, that it has no log, or shows its start page."""
    shows_page = text[:100].lstrip().lower().startswith("<!doctype html")
    return shows_page or "error_message" in (_told_in(text) or {})


def _told_in(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object that `text` is, if it is one."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return told if isinstance(told, dict) else None


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in problem['loc'])}, {problem['msg']}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirection leads to a page for logging in, or would take the token elsewhere."""

    def redirect_request(self, *_given: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def find_server(host: str = "", *, in_cluster: bool = False) -> Server:
    """The server that `host` or the environment names, or the one of the cluster that this pod runs in.

    Raises Unavailable if none is named, UsageError if what is named is no URL.
    """
    if host and in_cluster:
        raise UsageError("--host and --in-cluster are two answers to one question", fix="give one of them")
    if in_cluster:
        return Server(IN_CLUSTER, _token_of_pod())
    named = host or os.environ.get(HOST_VARIABLE, "")
    if not named:
        raise Unavailable(
            "no Kubeflow to submit to",
            why=f"neither --host nor {HOST_VARIABLE} names one",
            fix=f"for example {_PORT_FORWARD} and --host http://localhost:8080; in a pod, --in-cluster",
        )
    url = named.partition("#")[0].rstrip("/")
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or parts.query or "@" in parts.netloc:
        raise UsageError(
            "--host is not the URL of a server",
            fix=f"for example http://localhost:8080; a token goes into {TOKEN_VARIABLE}",
        )
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token and parts.scheme == "http" and not _is_this_machine(parts.hostname or ""):
        raise UsageError(
            f"a token is not sent to {url} in the clear", fix=f"use https://, or unset {TOKEN_VARIABLE}"
        )
    return Server(url, token)


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token_of_pod() -> str:
    """The token that the kubelet puts into a pod for Kubeflow, if it was asked to."""
    file = Path(os.environ.get(TOKEN_FILE_VARIABLE) or _TOKEN_FILE)
    try:
        return file.read_text().strip()
    except OSError:
        return ""
