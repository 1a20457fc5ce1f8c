"""bucket: a fresh one on a real S3 server of this machine (moto's), which the environment names."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer


@dataclass(frozen=True)
class Bucket:
    """A bucket, looked at past our own code."""

    name: str
    client: Any

    @property
    def uri(self) -> str:
        return f"s3://{self.name}"

    def listing(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.name).get("Contents", [])
        return [item["Key"] for item in found]

    def put(self, key: str, content: bytes = b"") -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def get(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return content


@pytest.fixture(scope="session")
def _s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture
def s3_environment(_s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the store's Secret gives a pod."""
    given = {
        "AWS_ENDPOINT_URL": _s3_endpoint,
        "AWS_ACCESS_KEY_ID": "our-key",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "AWS_REGION": "us-east-1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return given


@pytest.fixture
def bucket(s3_environment: dict[str, str]) -> Bucket:
    client = boto3.session.Session().client("s3", region_name="us-east-1")
    name = f"hpml-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=name)
    return Bucket(name, client)
