"""The server as its clients see it: over sockets, by the protocol, and within its bounds."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpml.serving.application import Application
from hpml.serving.config import ServerConfig
from hpml.serving.prometheus import Metrics
from hpml.tasks.base import Arrays
from hpml.tasks.drift.baseline import save_reference
from hpml.tasks.image_classification.task import ImageClassification
from tests.fuzz_serving import fuzz_server
from tests.serving.small_bundles import (
    OPERATION,
    PICTURES,
    WEIGHTS,
    as_request,
    graph,
    logits,
    seal,
    write_bundle,
)

HPML = Path(sys.executable).with_name("hpml")
X = np.random.default_rng(5).standard_normal((2, 1, 4, 4)).astype(np.float32)


@dataclass(frozen=True)
class Address:
    """Of a server of ours that runs."""

    port: int
    process: subprocess.Popen[str]

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """The status, the body, as JSON where it is some, and the headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            content = answer.read()
            told = {name.lower(): value for name, value in answer.getheaders()}
            if told.get("content-type") == "application/json":
                return answer.status, json.loads(content), told
            return answer.status, content, told
        finally:
            connection.close()

    def infer(self, x_nchw: np.ndarray = X, **more: Any) -> tuple[int, Any, dict[str, str]]:
        body, headers = as_request(x_nchw, binary=more.pop("binary", False))
        return self.ask("POST", "/v2/models/small/infer", body, headers | more.get("headers", {}))

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextmanager
def serving(source: str, *options: str, ready: bool = True) -> Iterator[Address]:
    command = [str(HPML), "serve", source, "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr
    try:
        line = process.stderr.readline()
        assert "://127.0.0.1:" in line, line + process.stderr.read()
        yield Address(int(line.rsplit(":", 1)[1]), process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        process.stderr.close()


def picture_spec() -> dict[str, Any]:
    """As `prepare` notes it of grey pictures of 4x4."""
    return {
        "data_from": "pictures",
        "formats": ["PNG", "JPEG"],
        "max_pixels": 10_000,
        "exif_transpose": True,
        "background": 0,
        "mode": "L",
        "resize": "shrink",
        "resampling": "lanczos",
        "reducing_gap": 3.0,
        "fit_within_hw": [4, 4],
        "size_hw": [4, 4],
        "pillow": "",
        "golden_sha256": [],
    }


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "bundle"
    return write_bundle(folder, task=PICTURES | {"pictures": picture_spec()})


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Address]:
    with serving(str(bundle), "--max-body-mb", "0.05", "--max-batch", "16") as address:
        yield address


def test_health_and_metadata(server: Address) -> None:
    assert server.ask("GET", "/v2/health/live")[0] == 200
    assert server.ask("GET", "/v2/health/ready")[0] == 200
    assert server.ask("GET", "/v2/models/small/versions/1/ready")[0] == 200
    assert server.ask("GET", "/v2")[1]["extensions"] == ["binary_tensor_data", "model_repository"]
    assert server.ask("GET", "/v2/models/small")[1]["inputs"] == [
        {"name": "x_nchw", "datatype": "FP32", "shape": [-1, 1, 4, 4]}
    ]
    [entry] = server.ask("POST", "/v2/repository/index")[1]
    assert (entry["name"], entry["state"]) == ("small", "READY")


def test_answers_are_the_engines(server: Address) -> None:
    status, told, _ = server.infer()
    assert status == 200
    assert np.allclose(np.reshape(told["outputs"][0]["data"], (2, 3)), logits(X), atol=1e-5)
    status, content, headers = server.infer(binary=True)
    numbers = content[int(headers["inference-header-content-length"]) :]
    assert np.allclose(np.frombuffer(numbers, "<f4").reshape(2, 3), logits(X), atol=1e-5)


@pytest.mark.parametrize("binary", [False, True])
def test_nvidias_client_understands_it(server: Address, binary: bool) -> None:
    from tritonclient import http as triton

    with triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("small", "1")
        assert client.get_server_metadata()["name"] == "hpml"
        assert client.get_model_metadata("small")["versions"] == ["1"]
        assert client.get_model_repository_index()[0]["name"] == "small"
        given = triton.InferInput("x_nchw", list(X.shape), "FP32")
        given.set_data_from_numpy(X, binary_data=binary)
        wanted = triton.InferRequestedOutput("logits", binary_data=binary)
        answer = client.infer("small", [given], outputs=[wanted], request_id="7", model_version="1")
        assert answer.get_response()["id"] == "7"
        assert np.allclose(answer.as_numpy("logits"), logits(X), atol=1e-5)
        with pytest.raises(triton.InferenceServerException, match="there is no such model; there is small"):
            client.infer("other", [given])


def png(pixels: np.ndarray, folder: Path) -> bytes:
    Image.fromarray(pixels).save(folder / "picture.png")
    return (folder / "picture.png").read_bytes()


def test_a_picture_is_read_as_those_of_training_were(server: Address, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4), np.uint8)
    status, told, _ = server.ask("POST", "/v1/classify", png(pixels, tmp_path), {"Content-Type": "image/png"})
    scaled = (pixels[None, None].astype(np.float32) / 255 - 0.5) / 0.25
    expected = np.exp(logits(scaled)[0])
    assert status == 200
    assert [one["class"] for one in told["classes"]] == ["abc"[place] for place in np.argsort(-expected)]
    assert told["classes"][0]["probability"] == pytest.approx(expected.max() / expected.sum(), abs=1e-4)


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/v2/health/live/", b"", {}, 404),
        ("GET", "//v2", b"", {}, 404),
        ("GET", "/v2?" + "a" * 20_000, b"", {}, 431),
        ("POST", "/v2/models/small/infer", b"{}", {"Inference-Header-Content-Length": "0" * 5_000}, 400),
        ("GET", "/", b"", {}, 404),
        ("GET", "/v2/models/other", b"", {}, 404),
        ("GET", "/v2/models/small/versions/2", b"", {}, 404),
        ("GET", "/v2/models/small/infer", b"", {}, 405),
        ("POST", "/v2/health/live", b"", {}, 405),
        ("POST", "/v2/models/small/infer", b"", {}, 400),
        ("POST", "/v2/models/small/infer", b"x" * 60_000, {}, 413),
        ("POST", "/v2/models/small/infer", b"x", {"Content-Encoding": "gzip"}, 415),
        ("POST", "/v1/classify", b"x", {"Content-Type": "text/plain"}, 415),
        ("POST", "/v1/classify", b"x", {"Content-Type": "image/png"}, 400),
        ("PATCH", "/v2", b"", {}, 405),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", b"", {}, 404),
        ("GET", "/v2/models/small", b"", {"X-Long": "x" * 20_000}, 431),
    ],
)
def test_what_is_refused_says_so_in_a_line(
    server: Address, method: str, path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    got, told, _ = server.ask(method, path, body, headers)
    assert got == status
    if status != 431:
        assert len(told["error"].splitlines()) == 1
        assert "/work" not in told["error"]
        assert "Traceback" not in told["error"]


def test_a_picture_bomb_is_not_decoded(server: Address, tmp_path: Path) -> None:
    bomb = png(np.zeros((2000, 2000), np.uint8), tmp_path)
    assert len(bomb) < 50_000
    status, told, _ = server.ask("POST", "/v1/classify", bomb, {"Content-Type": "image/png"})
    assert (status, told["error"]) == (400, "2000x2000 are more than 10000 pixels")


def test_a_body_in_chunks_is_read_and_bounded(server: Address) -> None:
    body, _ = as_request(X)
    chunks = lambda content: iter([content[:100], content[100:]])  # noqa: E731
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("POST", "/v2/models/small/infer", chunks(body), encode_chunked=True)
    assert connection.getresponse().status == 200
    connection.close()
    connection.request("POST", "/v2/models/small/infer", chunks(b"x" * 60_000), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


def test_what_is_no_http_ends_the_connection_and_nothing_else(server: Address) -> None:
    for nonsense in (b"\x16\x03\x01\x00", b"GET\r\n\r\n", b"POST /v2 HTTP/1.1\r\nContent-Length: -1\r\n\r\n"):
        with server.raw() as connection:
            connection.sendall(nonsense)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(1000)
            assert not answer or answer.startswith(b"HTTP/1.1 400")
    assert server.infer()[0] == 200


def test_a_client_that_sends_no_more_gets_its_answer(server: Address) -> None:
    body, _ = as_request(X)
    head = f"POST /v2/models/small/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    with server.raw() as connection:
        connection.sendall(head.encode() + body)
        connection.shutdown(socket.SHUT_WR)
        assert connection.makefile("rb").read().startswith(b"HTTP/1.1 200")


def test_two_thousand_requests_that_no_client_should_send(bundle: Path) -> None:
    """`make fuzz-serving` sends a hundred thousand."""
    answers = fuzz_server(bundle, 2_000, seed=1, examples=5)
    assert answers.total() == 2_000
    assert all(answers[status] for status in ("200", "400", "404", "413", "415", "431"))
    assert all(answers[code] for code in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"))


def test_metrics_tell_what_happened(server: Address) -> None:
    server.infer()
    status, text, headers = server.ask("GET", "/metrics")
    assert status == 200
    assert "text/plain" in headers["content-type"]
    assert b'hpml_model{digest="digest-1",name="small",version="1"} 1.0' in text
    assert b'hpml_requests_total{path="/v2/models/{name}/infer",status="200"}' in text
    assert b"hpml_batch_rows_count" in text
    for path in ("/made/up/path", "/v2/health/live/made", "//made//v2", "/v2/models/made"):
        server.ask("GET", path)
    assert b"made" not in server.ask("GET", "/metrics")[1]


class _Ready(ImageClassification):
    """Rows are stored as the network takes them."""

    def features(self, stored: Arrays) -> dict[str, np.ndarray]:
        return dict(stored)


def test_metrics_tell_how_far_requests_are_from_the_validation_split(tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    pictures = chance.standard_normal((1000, 1, 4, 4)).astype(np.float32)
    (tmp_path / "bundle").mkdir()
    engine = SimpleNamespace(
        operations={"predict": OPERATION}, run=lambda feeds, _: {"logits": logits(feeds["x_nchw"])}
    )
    save_reference(tmp_path / "bundle", _Ready(**PICTURES), engine, engine, {"x_nchw": pictures})

    def indices(address: Address) -> dict[str, float]:
        text = address.ask("GET", "/metrics")[1].decode()
        return {name: float(value) for name, value in re.findall(r'hpml_drift_psi{of="(.+)"} (.+)', text)}

    def ask_until(address: Address, shift: float, done: Callable[[dict[str, float]], bool]) -> None:
        def is_done() -> bool:
            for _ in range(10):
                x_nchw = chance.standard_normal((16, 1, 4, 4)).astype(np.float32) + shift
                assert address.infer(x_nchw, binary=True)[0] == 200
            return done(indices(address))

        eventually(is_done)

    with serving(str(write_bundle(tmp_path / "bundle", task=PICTURES))) as address:
        assert not indices(address)
        ask_until(address, 0.0, lambda told: len(told) == 4 and max(told.values()) < 0.1)
        ask_until(address, 0.5, lambda told: told["mean of channel 0"] > 0.25 > told["contrast of channel 0"])
        assert b"hpml_drift_failures_total 0.0" in address.ask("GET", "/metrics")[1]


def test_with_a_token_nobody_else_is_answered(bundle: Path, tmp_path: Path) -> None:
    token = "a-token-of-this-test"
    (tmp_path / "token").write_text(token + "\n")
    with serving(str(bundle), "--token-file", str(tmp_path / "token")) as address:
        assert address.ask("GET", "/v2/health/ready")[0] == 200
        for path in ("/v2", "/metrics", "/v2/models/small"):
            assert address.ask("GET", path)[0] == 401
            assert address.ask("GET", path, headers={"Authorization": f"Bearer {token}x"})[0] == 401
            assert address.ask("GET", path, headers={"Authorization": f"Bearer {token}"})[0] == 200
        assert address.infer(headers={"Authorization": f"Bearer {token}"})[0] == 200


def as_the_kubelet_does(volume: Path, **files: str) -> None:
    """Put `files` where the volume of a Secret has them: behind a link to a folder, which is swapped."""
    folder = volume / f"..{time.monotonic_ns()}"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)
        if not (volume / name).is_symlink():
            (volume / name).symlink_to(f"..data/{name}")
    (volume / "..data_tmp").symlink_to(folder.name)
    (volume / "..data_tmp").rename(volume / "..data")


def test_a_token_that_is_rotated_is_the_one_to_bring(tmp_path: Path) -> None:
    volume, said, metrics = tmp_path / "secret", list[str](), Metrics()
    as_the_kubelet_does(volume, token="the-first-of-the-tokens")
    application = Application(ServerConfig(token_file=volume / "token"), metrics, said.append)
    allows = application.token.allows
    assert allows("Bearer the-first-of-the-tokens") and not allows("Bearer the-second-of-them-all")
    as_the_kubelet_does(volume, token="the-second-of-them-all")
    assert allows("bearer the-second-of-them-all") and not allows("Bearer the-first-of-the-tokens")
    for unusable in ("", "short", "x" * 5_000, "a token with\xa0 spaces"):
        as_the_kubelet_does(volume, token=unusable)
        assert allows("Bearer the-second-of-them-all") and not allows(f"Bearer {unusable}")
    (volume / "..data").unlink()
    assert allows("Bearer the-second-of-them-all") and not allows("Bearer ")
    assert len(said) == 5 and all(line.endswith("; what was there before is still used") for line in said)
    assert "the-second" not in "".join(said) and b"hpml_failed_secrets_total 5.0" in metrics.text()
    as_the_kubelet_does(volume, token="the-third-of-the-tokens")
    assert allows("Bearer the-third-of-the-tokens") and not allows("Bearer \ud800")


def certificate_of(name: str, folder: Path) -> dict[str, str]:
    """A key and a certificate for this machine, as the files of a Secret."""
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return {"tls.key": key.read_text(), "tls.crt": certificate.read_text()}


def test_over_tls_with_a_certificate_that_is_renewed_and_a_token_that_is_rotated(
    bundle: Path, tmp_path: Path
) -> None:
    import grpc
    from tritonclient.grpc import service_pb2 as messages
    from tritonclient.grpc import service_pb2_grpc as services

    volume, pairs = tmp_path / "secret", [certificate_of(name, tmp_path) for name in ("one", "two")]
    tokens = ["the-first-of-the-tokens", "the-second-of-them-all"]

    def status(address: Address, pair: dict[str, str], token: str) -> int:
        trusted = ssl.create_default_context(cadata=pair["tls.crt"])
        connection = http.client.HTTPSConnection("127.0.0.1", address.port, context=trusted, timeout=30)
        try:
            connection.request("GET", "/v2", headers={"Authorization": f"Bearer {token}"})
            return connection.getresponse().status
        finally:
            connection.close()

    def code(port: str, pair: dict[str, str], token: str) -> str:
        trusted = grpc.ssl_channel_credentials(pair["tls.crt"].encode())
        with grpc.secure_channel(port, trusted) as channel:
            try:
                services.GRPCInferenceServiceStub(channel).ServerMetadata(
                    messages.ServerMetadataRequest(), metadata=[("authorization", f"Bearer {token}")]
                )
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    as_the_kubelet_does(volume, token=tokens[0], **pairs[0])
    options = ["--tls-certificate", str(volume / "tls.crt"), "--tls-key", str(volume / "tls.key")]
    options += ["--token-file", str(volume / "token"), "--grpc-port", "0"]
    with serving(str(bundle), *options) as address:
        assert address.process.stderr
        port = address.process.stderr.readline().split()[-1]
        assert (status(address, pairs[0], tokens[0]), code(port, pairs[0], tokens[0])) == (200, "OK")
        as_the_kubelet_does(volume, token=tokens[1], **pairs[1])
        assert (status(address, pairs[1], tokens[0]), code(port, pairs[1], tokens[0])) == (
            401,
            "UNAUTHENTICATED",
        )
        assert (status(address, pairs[1], tokens[1]), code(port, pairs[1], tokens[1])) == (200, "OK")
        with pytest.raises(ssl.SSLCertVerificationError):
            status(address, pairs[0], tokens[1])
        as_the_kubelet_does(volume, token=tokens[1], **pairs[1] | {"tls.key": pairs[0]["tls.key"]})
        assert status(address, pairs[1], tokens[1]) == 200
        assert "cannot be used for TLS" in address.process.stderr.readline()


def version_of(address: Address) -> str:
    told = address.ask("GET", "/v2/models/small")[1]
    return str(told["versions"][0])


def eventually(what: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 30
    while not what():
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


def test_it_goes_over_to_a_new_bundle_but_not_to_a_bad_one(tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(write_bundle(tmp_path / "one"))

    def point_at(bundle: Path) -> None:
        (tmp_path / "next").symlink_to(bundle)
        (tmp_path / "next").rename(link)

    with serving(str(link)) as address:
        point_at(write_bundle(tmp_path / "two", version=2))
        address.process.send_signal(signal.SIGHUP)
        eventually(lambda: version_of(address) == "2")
        x_nchw = np.ones((4, 1, 4, 4), np.float32)
        wrong = {"x_nchw": x_nchw, "logits": logits(x_nchw) + 1}
        point_at(write_bundle(tmp_path / "three", graph(-WEIGHTS), golden=wrong, version=3))
        address.process.send_signal(signal.SIGHUP)
        eventually(lambda: b"hpml_failed_swaps_total 1.0" in address.ask("GET", "/metrics")[1])
        assert version_of(address) == "2"
        assert np.allclose(np.reshape(address.infer()[1]["outputs"][0]["data"], (2, 3)), logits(X), atol=1e-5)


@pytest.mark.parametrize("path", ["/v2/models/small/infer", "/v1/classify"])
def test_a_request_that_has_begun_is_answered_by_whom_it_began_with(tmp_path: Path, path: str) -> None:
    task = PICTURES | {"pictures": picture_spec()}
    link = tmp_path / "current"
    link.symlink_to(write_bundle(tmp_path / "one", task=task))
    body = as_request(X)[0] if path.endswith("infer") else png(np.zeros((4, 4), np.uint8), tmp_path)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
        f"Content-Type: image/png\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with serving(str(link)) as address, address.raw() as connection:
        connection.sendall(head.encode() + body[:10])
        (tmp_path / "next").symlink_to(write_bundle(tmp_path / "two", task=task, version=2))
        (tmp_path / "next").rename(link)
        address.process.send_signal(signal.SIGHUP)
        eventually(lambda: version_of(address) == "2")
        connection.sendall(body[10:])
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"model_version":"2"' not in answer


def test_after_a_bundle_that_nobody_foresaw_the_next_one_is_opened(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "b")
    with serving(str(bundle)) as address:
        golden = (bundle / "logits.npy").read_bytes()
        for content, version in ((b"", "1"), (golden, "2")):
            (bundle / "logits.npy").write_bytes(content)
            told = json.loads((bundle / "bundle.json").read_text())
            seal(bundle, told | {"model_version": 2})
            address.process.send_signal(signal.SIGHUP)
            eventually(lambda: b"hpml_failed_swaps_total 1.0" in address.ask("GET", "/metrics")[1])
            eventually(lambda version=version: version_of(address) == version)  # type: ignore[misc]


def test_it_ends_while_a_model_is_opened(tmp_path: Path) -> None:
    program = (
        "import time; from hpml.serving.config import ServerConfig; from hpml.serving.run import serve\n"
        "serve(lambda: (print('opening', flush=True), time.sleep(60)), ServerConfig(port=0), print)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "opening\n"
    process.terminate()
    assert process.wait(timeout=30) == 143
    process.stdout.close()


def test_a_key_of_another_certificate_is_refused_before_it_listens(bundle: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        subprocess.run(
            [
                *(
                    "openssl",
                    "req",
                    "-x509",
                    "-newkey",
                    "ec",
                    "-pkeyopt",
                    "ec_paramgen_curve:P-256",
                    "-nodes",
                ),
                *("-keyout", str(tmp_path / f"{name}.key"), "-out", str(tmp_path / f"{name}.pem")),
                *("-subj", "/CN=localhost"),
            ],
            check=True,
            capture_output=True,
        )
    options = ["--tls-certificate", str(tmp_path / "one.pem"), "--tls-key", str(tmp_path / "two.key")]
    done = subprocess.run([str(HPML), "serve", str(bundle), *options], capture_output=True, text=True)
    assert done.returncode == 3
    assert len(done.stderr.strip().splitlines()) == 1
    assert "cannot be used for TLS" in done.stderr


def test_it_drains_before_it_stops(bundle: Path) -> None:
    with serving(str(bundle), "--drain-s", "4") as address:
        address.process.send_signal(signal.SIGTERM)
        eventually(lambda: address.ask("GET", "/v2/health/ready")[0] == 503)
        assert address.ask("GET", "/v2/health/live")[0] == 200
        assert address.infer()[0] == 200
        assert address.process.wait(timeout=30) == 0


def test_a_port_that_is_taken(server: Address, bundle: Path) -> None:
    command = [str(HPML), "serve", str(bundle), "--port", str(server.port)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 6
    assert f"port {server.port} of 127.0.0.1 cannot be listened at: Address already in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_who_sends_too_slowly_or_keeps_too_many_connections_is_cut_off(bundle: Path) -> None:
    """Bounds that no option of the command sets are those of `ServerConfig`."""
    program = (
        "import sys; from pathlib import Path; from hpml.serving.config import ServerConfig\n"
        "from hpml.serving.model import open_bundle; from hpml.serving.run import serve\n"
        "config = ServerConfig(port=0, receive_timeout_s=1, max_connections=4)\n"
        "serve(lambda: open_bundle(Path(sys.argv[1])), config, lambda line: print(line, file=sys.stderr))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(bundle)], stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stderr
    try:
        address = Address(int(process.stderr.readline().rsplit(":", 1)[1]), process)
        begun = b"POST /v2/models/small/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
        for part in (b"", begun, begun + b"\r\n{"):  # nothing at all, headers without an end, half a body
            with address.raw() as slow:
                slow.sendall(part)
                answer = slow.recv(1000)  # returns when the server ends the connection
                assert answer.startswith(b"HTTP/1.1 408") if part.endswith(b"{") else not answer
        kept = [address.raw() for _ in range(4)]
        with address.raw() as one_too_many:
            assert one_too_many.recv(1000).startswith(b"HTTP/1.1 429")
        for connection in kept:
            connection.close()
        eventually(lambda: is_served(address))
    finally:
        process.terminate()
        process.wait(timeout=30)
        process.stderr.close()


def is_served(address: Address) -> bool:
    """Whether a request is answered, and not cut off while it is sent, as one too many is."""
    with suppress(ConnectionError):
        return address.infer()[0] == 200
    return False


@pytest.fixture(scope="module")
def beside_grpc(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Address, str, str]]:
    """A server, its address over gRPC, and its token."""
    token, file = "a-token-of-this-test", tmp_path_factory.mktemp("token") / "token"
    file.write_text(token)
    options = ("--grpc-port", "0", "--token-file", str(file), "--max-batch", "16", "--max-body-mb", "0.05")
    with serving(str(bundle), *options) as address:
        assert address.process.stderr
        line = address.process.stderr.readline()
        assert line.startswith("gRPC at 127.0.0.1:")
        yield address, line.split()[-1], token


@pytest.fixture(scope="module")
def over_grpc(beside_grpc: tuple[Address, str, str]) -> tuple[str, str]:
    """The address of a server over gRPC, and its token."""
    return beside_grpc[1:]


def test_nvidias_client_understands_it_over_grpc(over_grpc: tuple[str, str]) -> None:
    from tritonclient import grpc as triton

    address, token = over_grpc
    headers = {"authorization": f"Bearer {token}"}
    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("small", "1", headers=headers)
        assert not client.is_model_ready("other", headers=headers)
        assert client.get_server_metadata(headers=headers).name == "hpml"
        assert client.get_model_metadata("small", headers=headers).inputs[0].shape == [-1, 1, 4, 4]
        assert client.get_model_repository_index(headers=headers).models[0].state == "READY"
        given = triton.InferInput("x_nchw", list(X.shape), "FP32").set_data_from_numpy(X)
        answer = client.infer("small", [given], request_id="7", headers=headers)
        assert answer.get_response().id == "7"
        assert np.allclose(answer.as_numpy("logits"), logits(X), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "datatype", "code", "told"),
    [
        ("other", [2, 1, 4, 4], "FP32", "NOT_FOUND", "there is no such model; there is small"),
        ("small", [2, 4, 4], "FP32", "INVALID_ARGUMENT", "the model takes [-1, 1, 4, 4]"),
        ("small", [1, 1, 4, 4], "FP32", "INVALID_ARGUMENT", "takes 64 bytes, not 128"),
        ("small", [2, 1, 4, 4], "INT32", "INVALID_ARGUMENT", "datatype INT32, not FP32"),
    ],
)
def test_what_is_malformed_over_grpc_is_named(
    over_grpc: tuple[str, str], name: str, shape: list[int], datatype: str, code: str, told: str
) -> None:
    import grpc
    from tritonclient.grpc import service_pb2 as messages
    from tritonclient.grpc import service_pb2_grpc as services

    address, token = over_grpc
    request = messages.ModelInferRequest(model_name=name, raw_input_contents=[X.tobytes()])
    request.inputs.add(name="x_nchw", datatype=datatype, shape=shape)
    with grpc.insecure_channel(address) as channel:
        stub = services.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.ModelInfer(request, metadata=[("authorization", f"Bearer {token}")])
        assert refused.value.code().name == code
        assert told in refused.value.details()
        with pytest.raises(grpc.RpcError) as nobody:
            stub.ModelInfer(request)
        assert nobody.value.code().name == "UNAUTHENTICATED"
        too_large = messages.ModelInferRequest(model_name="small", raw_input_contents=[b"x" * 60_000])
        with pytest.raises(grpc.RpcError) as large:
            stub.ModelInfer(too_large, metadata=[("authorization", f"Bearer {token}")])
        assert large.value.code().name == "RESOURCE_EXHAUSTED"


def test_numbers_over_grpc_may_be_typed(over_grpc: tuple[str, str]) -> None:
    import grpc
    from tritonclient.grpc import service_pb2 as messages
    from tritonclient.grpc import service_pb2_grpc as services

    address, token = over_grpc
    request = messages.ModelInferRequest(model_name="small")
    one = request.inputs.add(name="x_nchw", datatype="FP32", shape=X.shape)
    one.contents.fp32_contents.extend(X.ravel().tolist())
    with grpc.insecure_channel(address) as channel:
        answer = services.GRPCInferenceServiceStub(channel).ModelInfer(
            request, metadata=[("authorization", f"Bearer {token}")]
        )
    numbers = np.frombuffer(answer.raw_output_contents[0], "<f4").reshape(2, 3)
    assert np.allclose(numbers, logits(X), atol=1e-5)


def test_what_it_says_goes_to_a_file_of_bounded_size(bundle: Path, tmp_path: Path) -> None:
    """Its libraries write to the descriptors of this process, not to what Python calls its standard error."""
    program = (
        "import os, sys; from pathlib import Path; from hpml.serving.log_file import LogFile\n"
        "log = LogFile(Path(sys.argv[1]), print, most_bytes=100)\n"
        "for number in range(5): os.write(2, b'%d' % number * 80); log.begin_anew_if_full()\n"
        "print('the last', flush=True)\n"
    )
    file = tmp_path / "log"
    done = subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert file.read_text() == "4" * 80 + "the last\n"
    assert (tmp_path / "log.1").read_text() == "2" * 80 + "3" * 80
    refused = subprocess.run(
        [str(HPML), "serve", str(bundle), "--log-file", str(tmp_path)], capture_output=True, text=True
    )
    assert (
        refused.returncode == 3 and f"the log {tmp_path} cannot be written: Is a directory" in refused.stderr
    )


def test_a_message_that_grpc_itself_refuses_is_counted(beside_grpc: tuple[Address, str, str]) -> None:
    import grpc
    from tritonclient.grpc import service_pb2 as messages
    from tritonclient.grpc import service_pb2_grpc as services

    server, address, token = beside_grpc
    headers = {"authorization": f"Bearer {token}"}
    told = (
        'hpml_requests_total{path="/inference.GRPCInferenceService/ModelInfer",status="RESOURCE_EXHAUSTED"}'
    )

    def counted() -> float:
        text = server.ask("GET", "/metrics", headers=headers)[1].decode()
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(told))

    before = counted()
    request = messages.ModelInferRequest(model_name="small", raw_input_contents=[b"x" * 60_000])
    with grpc.insecure_channel(address) as channel:
        for _ in range(3):
            with pytest.raises(grpc.RpcError, match="larger than max"):
                services.GRPCInferenceServiceStub(channel).ModelInfer(request, metadata=[*headers.items()])
    eventually(lambda: counted() == before + 3)
