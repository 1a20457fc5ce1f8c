"""KServe's own clients, from an environment of their own that `make test-kserve-client` makes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.serving.small_bundles import logits, write_bundle
from tests.serving.test_server import X, serving

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "runs/.serving-peers/kserve/bin/python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="there is no kserve here: make test-kserve-client"),
]


def test_kserves_clients_understand_it(tmp_path: Path) -> None:
    token = "a-token-of-this-test"
    (tmp_path / "token").write_text(token)
    np.save(tmp_path / "x.npy", X)
    options = ("--grpc-port", "0", "--token-file", str(tmp_path / "token"))
    with serving(str(write_bundle(tmp_path / "bundle")), *options) as address:
        assert address.process.stderr
        grpc_port = address.process.stderr.readline().strip().rsplit(":", 1)[1]
        client = [str(PYTHON), str(ROOT / "tests/serving_peers/kserve_client.py")]
        command = [*client, str(address.port), grpc_port, "small", str(tmp_path / "x.npy"), token]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    for kind in ("http", "grpc"):
        assert [told[kind].pop(what) for what in ("live", "ready", "model ready")] == [True] * 3
        for outputs in told[kind].values():
            assert np.allclose(outputs, logits(X), atol=1e-5)
