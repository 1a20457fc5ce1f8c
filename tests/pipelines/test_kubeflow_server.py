"""Kubeflow that is not there, is something else, or says no: one clear line each, and exit code 6."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from kubeflow_api import RUN_ID, Api, run, serving

from hpml.core.errors import ExitCode, Unavailable, UsageError
from hpml.pipelines.kubeflow import server as kubeflow_server
from hpml.pipelines.kubeflow.server import IN_CLUSTER, Server, find_server


@pytest.fixture
def api() -> Iterator[Api]:
    with serving(Api()) as api:
        yield api


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KF_PIPELINES_ENDPOINT", "KFP_EXISTING_TOKEN", "KF_PIPELINES_UI_ENDPOINT", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


def said(call: Callable[[], object]) -> str:
    """The line of an Unavailable."""
    with pytest.raises(Unavailable) as caught:
        call()
    assert caught.value.exit_code == ExitCode.UNAVAILABLE == 6
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- which server


def test_no_host_at_all() -> None:
    line = said(lambda: find_server())
    assert "no Kubeflow to submit to" in line and "port-forward" in line and "--in-cluster" in line


def test_the_host_of_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", "https://kubeflow.example/pipeline/")
    assert find_server().host == "https://kubeflow.example/pipeline"
    assert find_server("http://localhost:8080/#/runs").host == "http://localhost:8080"


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8080",
        "file:///etc/passwd",
        "http://",
        "https://me:secret@kubeflow.example",
        "http://x:port",
    ],
)
def test_what_is_no_url(host: str) -> None:
    with pytest.raises(UsageError, match="--host is not the URL of a server") as caught:
        find_server(host)
    assert "secret" not in str(caught.value)


def test_two_answers_to_one_question() -> None:
    with pytest.raises(UsageError, match="two answers"):
        find_server("http://localhost:1", in_cluster=True)


def test_in_a_cluster_the_pods_token_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_server(in_cluster=True) == Server(IN_CLUSTER)
    (tmp_path / "token").write_text("of-the-pod\n")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    assert find_server(in_cluster=True).token == "of-the-pod"


def test_a_token_is_sent_and_never_shown(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_EXISTING_TOKEN", "hunter2")
    server = find_server(api.host)
    assert server.check() is False
    assert api.headers[0]["Authorization"] == "Bearer hunter2"
    assert "hunter2" not in repr(server)


def test_a_token_does_not_leave_this_machine_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_EXISTING_TOKEN", "hunter2")
    with pytest.raises(UsageError, match=r"not sent to http://kubeflow\.example in the clear"):
        find_server("http://kubeflow.example")


def test_nothing_is_read_from_or_written_to_the_home_folder(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kfp's own client does."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".config" / "kfp").mkdir(parents=True)
    (tmp_path / ".config" / "kfp" / "context.json").write_text('{"client_authentication_cookie": "theirs"}')
    find_server(api.host).check()
    assert "Cookie" not in api.headers[0]
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["context.json"]


# ------------------------------------------------------------------------------------------------- no answer


def test_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        host = f"http://127.0.0.1:{taken.getsockname()[1]}"
        line = said(Server(host).check)
    assert line.startswith(f"Kubeflow Pipelines at {host} does not answer: connection refused -> ")
    assert "port-forward" in line


def test_no_such_name() -> None:
    assert "there is no host of that name" in said(Server("http://kubeflow.invalid").check)


def test_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeflow_server, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "not within" in said(Server(f"http://127.0.0.1:{silent.getsockname()[1]}").check)


def test_it_hangs_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as rude:

        def hang_up() -> None:
            rude.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        assert "hung up, or speaks no HTTP" in said(Server(f"http://127.0.0.1:{rude.getsockname()[1]}").check)


def test_https_to_a_server_without_tls(api: Api) -> None:
    line = said(Server(api.host.replace("http://", "https://")).check)
    assert "does not speak TLS" in line and "http://" in line


def test_a_certificate_that_nobody_vouches_for(tmp_path: Path) -> None:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=x"),
            *("-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.handle_request, daemon=True).start()
    try:
        line = said(Server(f"https://127.0.0.1:{server.server_address[1]}").check)
    finally:
        server.server_close()
    assert "is not trusted" in line and "SSL_CERT_FILE" in line


# ---------------------------------------------------------------------------------------------- other answers


def test_a_page_instead_of_an_api(api: Api) -> None:
    api.overrides["GET /apis"] = (200, b"<!doctype html><title>Shop</title>")
    assert "there is no Kubeflow Pipelines at" in said(Server(api.host).check)
    api.overrides["GET /apis"] = (404, b"<h1>Not Found</h1>")
    assert "it has no such API" in said(Server(api.host).check)
    api.overrides["GET /apis"] = (200, [])
    assert "JSON of another shape" in said(Server(api.host).check)


def test_an_old_kubeflow(api: Api) -> None:
    api.overrides["GET /apis/v2beta1"] = (404, {"error": "Not Found", "code": 5, "message": "Not Found"})
    api.overrides["GET /apis/v1beta1"] = (200, {"commit_sha": "unknown", "tag_name": "1.8.5"})
    line = said(Server(api.host).check)
    assert "is too old" in line and "upgrade it to 2.17" in line


def test_a_pipeline_that_the_server_does_not_understand(api: Api) -> None:
    api.overrides["POST /apis/v2beta1/runs"] = (
        400,
        {"code": 3, "message": 'proto: (line 1:2): unknown field "securityContext"'},
    )
    line = said(lambda: Server(api.host).create_run({}))
    assert "does not understand the pipeline" in line and "securityContext" in line and "2.17" in line


@pytest.mark.parametrize("status", [302, 401])
def test_who_are_you(api: Api, status: int) -> None:
    api.overrides["GET /apis"] = (status, b"")
    line = said(Server(api.host).check)
    assert "wants to know who you are" in line and "KFP_EXISTING_TOKEN" in line
    assert api.asked == ["GET /apis/v2beta1/healthz"]  # a redirection is not followed


def test_not_allowed(api: Api) -> None:
    denied = "User 'jo' is not authorized with reason: namespace team-b"
    api.overrides["GET /apis/v2beta1/experiments"] = (403, {"code": 7, "message": denied})
    line = said(lambda: Server(api.host).experiment("x", "team-b"))
    assert "does not allow looking for the experiment" in line and denied in line and "--namespace" in line


def test_a_namespace_that_is_not_there(api: Api) -> None:
    message = "Namespace required in multi-user mode"
    api.overrides["POST /apis/v2beta1/experiments"] = (400, {"code": 3, "message": message})
    line = said(lambda: Server(api.host).experiment("x", "nowhere"))
    assert message in line and "check --namespace" in line


def test_an_experiment_that_is_refused(api: Api) -> None:
    api.overrides["POST /apis/v2beta1/experiments"] = (500, {"code": 13, "message": "database is away"})
    line = said(lambda: Server(api.host).experiment("x", ""))
    assert "refused making the experiment x: HTTP 500, database is away" in line


@pytest.mark.parametrize(
    "answer",
    [
        {"state": {"a": 1}},
        {"state": "RUNNING", "state_history": {}},
        {"state_history": ["RUNNING"]},
        {"finished_at": "tomorrow"},
    ],
)
def test_answers_of_another_shape(api: Api, answer: object) -> None:
    api.overrides[f"GET /apis/v2beta1/runs/{RUN_ID}"] = (200, answer)
    assert "it tells about a run in another way" in said(lambda: Server(api.host).run(RUN_ID))


def test_a_run_without_an_id(api: Api) -> None:
    api.overrides["POST /apis/v2beta1/runs"] = (200, {"run_id": None})
    assert "its answer has no run_id" in said(lambda: Server(api.host).create_run({}))


def test_an_answer_without_an_end(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeflow_server, "_MAX_BYTES", 1000)
    api.overrides["GET /apis"] = (200, b" " * 2000)
    assert "its answer is over" in said(Server(api.host).check)


def test_names_cannot_lead_elsewhere(api: Api) -> None:
    api.runs = [run("RUNNING", [])]
    said(lambda: Server(api.host).run("../../v1beta1/healthz"))
    assert api.asked == ["GET /apis/v2beta1/runs/..%2F..%2Fv1beta1%2Fhealthz"]
