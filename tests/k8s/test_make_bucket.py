"""The init container of MLflow, against moto's S3 server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import pytest
import requests
from moto.server import ThreadedMotoServer

from tests.ports import free_port

SCRIPT = Path(__file__).resolve().parents[2] / "k8s" / "base" / "mlflow" / "make_bucket.py"


@pytest.fixture
def store(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of an empty store that the script finds by the environment."""
    requests.post(f"{s3_endpoint}/moto-api/reset", timeout=10)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return boto3.client("s3")


def run(bucket: str) -> str:
    command = [sys.executable, str(SCRIPT), bucket]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_bucket_is_made_once_and_keeps_what_is_in_it(store: Any) -> None:
    assert run("hpml") == "made bucket hpml\n"
    store.put_object(Bucket="hpml", Key="artifact", Body=b"weights")

    assert run("hpml") == ""
    assert store.get_object(Bucket="hpml", Key="artifact")["Body"].read() == b"weights"


def test_a_bucket_of_another_region_is_made_there(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")

    assert run("abroad") == "made bucket abroad\n"
    assert store.get_bucket_location(Bucket="abroad")["LocationConstraint"] == "eu-west-1"


def test_it_waits_for_a_store_that_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    command = [sys.executable, "-u", str(SCRIPT), "late"]
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert waiting.stdout
    assert waiting.stdout.readline().startswith("waiting for the store: ")

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port)
    server.start()
    try:
        said = waiting.communicate(timeout=60)[0]
    finally:
        waiting.kill()
        server.stop()
    assert waiting.returncode == 0
    assert said.endswith("made bucket late\n")
