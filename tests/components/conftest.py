"""bucket: a fresh one, in an S3 that the environment names. uri: of a fresh MLflow store. nvidia_driver: one
that is not here."""

from __future__ import annotations

import ctypes
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

from hpml.core import hardware
from hpml.io.tracking import ensure_store
from tests.components.fake_nvml import FakeNvml


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
def new_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's database as it is at first, which takes a second to make. To be copied."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    ensure_store(f"sqlite:///{path}")
    return path


@pytest.fixture
def uri(new_store: Path, tmp_path: Path) -> str:
    """Of a fresh MLflow store of this machine."""
    shutil.copy(new_store, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def s3_environment(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the store's Secret gives a pod."""
    given = {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "our-key",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "AWS_REGION": "us-east-1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return given


@pytest.fixture(scope="session")
def s3_client(s3_endpoint: str) -> Any:
    """A client of it, which takes a quarter of a second to make."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=s3_endpoint,
        region_name="us-east-1",
        aws_access_key_id="our-key",
        aws_secret_access_key="hunter2",
    )


@pytest.fixture
def bucket(s3_client: Any, s3_environment: dict[str, str]) -> Bucket:
    name = f"hpml-{uuid.uuid4().hex[:12]}"
    s3_client.create_bucket(Bucket=name)
    return Bucket(name, s3_client)


@pytest.fixture
def nvidia_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeNvml]]:
    """nvidia_driver(driver="570.86"): from now on this process finds that driver's NVML."""

    def install(**given: Any) -> FakeNvml:
        library = FakeNvml(**given)
        monkeypatch.setattr(ctypes, "CDLL", library)
        hardware._gpus.cache_clear()
        return library

    yield install
    hardware._gpus.cache_clear()
