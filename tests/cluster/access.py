"""What the tests on a cluster share: `kubectl`, waiting, and the ways into the namespace."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NAMESPACE = "hpml"
CPU_IMAGE, CLIENT_IMAGE = "localhost/hpml-cpu:test", "localhost/hpml-client:test"
MOTO_IMAGE, SERVING_IMAGE = "localhost/hpml-moto:test", "localhost/hpml-serving:test"


def kubectl(*arguments: str, stdin: str = "", check: bool = True) -> str:
    """What `kubectl` prints on stdout."""
    answer = subprocess.run(
        ["kubectl", *arguments], input=stdin or None, capture_output=True, text=True, check=False
    )
    if check and answer.returncode:
        raise AssertionError(f"kubectl {' '.join(arguments)}: {answer.stderr}")
    return answer.stdout


def run_script(script: Path, *arguments: str) -> None:
    """Run a script of ours, which is to succeed."""
    answer = subprocess.run([str(script), *arguments], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def kubectl_json(*arguments: str) -> Any:
    """What `kubectl ... -o json` prints."""
    return json.loads(kubectl(*arguments, "-o", "json"))


def wait_until(condition: Callable[[], Any], what: str, *, seconds: float = 120) -> Any:
    """The first true value of `condition`; an AssertionError that says `what` if there is none in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        value = condition()
        if value:
            return value
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


@dataclass(frozen=True)
class Workspace:
    """The namespace, its S3 and its MLflow as this machine reaches them; `environment` is for `hpml`."""

    namespace: str
    store_endpoint: str
    mlflow: str
    environment: dict[str, str]


@contextmanager
def forwarded(service: str, port: int) -> Iterator[str]:
    """The URL at which this machine reaches a service of the namespace."""
    command = ["kubectl", "-n", NAMESPACE, "port-forward", f"service/{service}", f":{port}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found, f"no port was forwarded to {service}"
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        process.terminate()
        process.wait()
