"""What became of a rollout, at the version that it was of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from hpml.components.register.retrieval import registered_engine
from hpml.core.errors import StageFailed
from hpml.io import tracking
from hpml.pipelines.delivery.evidence import Keeper
from hpml.pipelines.delivery.rollout import Evidence
from hpml.pipelines.delivery.smoke_limits import Benchmark, SmokeLimits
from tests.pipelines.delivery.releases import release, seen

FIRST, SECOND = release("1"), release("2")
LIMITS = SmokeLimits(p50_factor=1.5)


def kept(registry: str, home: Path, evidence: Evidence) -> tuple[str, Path]:
    """The tag of the version, and the file."""
    client = MlflowClient(registry)
    client.create_registered_model("small")
    for _ in ("1", "2"):
        client.create_model_version("small", source=str(home))
    said: list[str] = []
    Keeper(home, "digits", "local", said.append).keep(evidence)
    assert not [line for line in said if "warning" in line]
    [file] = (home / "deployments" / "digits").iterdir()
    return client.get_model_version("small", "2").tags["hpml.deployment.local/digits"], file


def test_the_limits_are_with_what_was_held_to_them(registry: str, tmp_path: Path) -> None:
    evidence = Evidence(
        "promoted", SECOND, FIRST, figures=seen(SECOND), limits=LIMITS, benchmark=Benchmark(0.5, "a CPU")
    )
    tag, file = kept(registry, tmp_path, evidence)
    told = json.loads(file.read_text())
    assert json.loads(tag) == told
    assert told["limits"] == {
        "seconds": 10,
        "p50_factor": 1.5,
        "p99_factor": 2,
        "benchmark_factor": 2,
        "cold_ms": 0.2,
        "replay_agreement": None,
    }
    assert told["benchmark"] == {"latency_ms_p50": 0.5, "cpu": "a CPU"}


def test_what_is_fetched_draws_no_bars(
    registry: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "model.onnx").write_bytes(b"0")
    client = tracking.client(registry)
    run = client.create_run(tracking.experiment_id(client, registry, "fetched"))
    client.log_artifacts(run.info.run_id, str(tmp_path / "engine"), "engine")
    client.create_registered_model("small")
    client.create_model_version("small", source=f"runs:/{run.info.run_id}/engine", run_id=run.info.run_id)
    capfd.readouterr()
    with pytest.raises(StageFailed, match="is not an artifact"):  # once it was fetched
        registered_engine(registry, "small", version="1", folder=tmp_path / "fetched")
    assert capfd.readouterr().err == ""


def test_a_tag_that_would_be_too_long_has_the_essentials_and_names_the_file(
    registry: str, tmp_path: Path
) -> None:
    problems = tuple(f'{number}: "\U0001f600\x00{"ü" * 5000}' for number in range(50))
    evidence = Evidence("refused", SECOND, FIRST, problems, figures=seen(SECOND), limits=LIMITS)
    tag, file = kept(registry, tmp_path, evidence)
    told: dict[str, Any] = json.loads(tag)
    assert len(tag) <= 5000
    assert (told["outcome"], told["release"], told["former"]) == ("refused", SECOND.digest, FIRST.digest)
    assert len(told["problems"]) == 3 and told["problems"][0].startswith('0: "')
    assert told["limits"]["p50_factor"] == 1.5
    assert len(json.loads((tmp_path / told["rest"]).read_text())["problems"]) == 50
    assert tmp_path / told["rest"] == file
