"""register gives an engine one version, and moves the champion for good reasons only."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest
from pydantic import ValidationError

from hpml.artifacts.folder import Artifact, open_artifact
from hpml.artifacts.interval import Interval
from hpml.artifacts.registration import RegistrationSpec
from hpml.components.register import stage as register
from hpml.components.register.champion import STANDING_TAG, Standing, judge
from hpml.components.register.config import RegisterConfig
from hpml.components.register.references import references
from hpml.core.errors import ConfigInvalid, ExitCode, StageFailed, Unavailable
from hpml.io.tracking import client, store_identity
from hpml.measuring.goals import Goals
from tests import measured_specs

CONFIG = RegisterConfig(model_name="digits", tags={"team": "vision"})

RunStage = Callable[..., Artifact[Any]]
Choose = Callable[..., Any]


@pytest.fixture
def register_engine(run_stage: RunStage) -> Callable[[Any], RegistrationSpec]:
    def run(chosen: Any) -> RegistrationSpec:
        artifact = run_stage(register.run, CONFIG, **chosen.inputs)
        spec: RegistrationSpec = artifact.spec
        assert artifact.manifest.metrics == {
            "version": spec.version,
            "champion": float("champion" in spec.aliases),
        }
        return spec

    return run


def versions(uri: str) -> dict[int, Any]:
    return {int(found.version): found for found in client(uri).search_model_versions("name = 'digits'")}


def champion(uri: str) -> int:
    return int(client(uri).get_registered_model("digits").aliases["champion"])


def test_the_first_version_is_the_champion_and_says_where_it_comes_from(
    registry: str, choose: Choose, register_engine: Any, tmp_path: Path
) -> None:
    chosen = choose(b"weights", p50=1.0)
    spec = register_engine(chosen)
    assert (spec.model_name, spec.version, spec.aliases) == ("digits", 1, ("candidate", "champion"))
    assert spec.registry == registry and spec.champion_reason == "there was no champion"

    version = versions(registry)[1]
    tags = version.tags
    assert tags["hpml.engine"] == "int8/onnx" and tags["hpml.precision"] == "int8"
    assert tags["hpml.methods"] == "prune, quantize" and tags["team"] == "vision"
    assert tags["hpml.latency_ms_p50"] == "1 (0.95 to 1.05)"
    assert tags["hpml.accuracy_top1"] == "0.97 (0.96 to 0.98)"
    assert tags["hpml.test_accuracy_top1"] == "0.96 (0.95 to 0.97)"
    assert (tags["hpml.test_rows"], tags["hpml.test_split_read"]) == ("500", "once")
    assert json.loads(tags["hpml.goals"]) == Goals().model_dump()
    assert json.loads(tags["hpml.measured_on"])["cpu"] == "a CPU"
    assert json.loads(tags["hpml.parents"])["measured"] == chosen.measured.digest
    assert tags["hpml.engine_digest"] == spec.engine_digest != chosen.engine.digest
    assert tags["hpml.file_sha256"] == hashlib.sha256(b"weights").hexdigest()
    assert "latency p50 1 ms" in version.description


def test_the_registry_holds_the_engine_itself_and_no_code(
    registry: str, choose: Choose, register_engine: Any, tmp_path: Path
) -> None:
    chosen = choose(b"weights")
    register_engine(chosen)
    mlflow.set_tracking_uri(registry)
    try:
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri="models:/digits@champion"))
        assert (folder / "model.onnx").read_bytes() == b"weights"
        downloaded = open_artifact(folder, kind="engine")
        assert downloaded.digest == chosen.engine.digest
        signature = mlflow.models.get_model_info("models:/digits@champion").signature
        with pytest.raises(mlflow.MlflowException, match="python_function"):
            mlflow.pyfunc.load_model("models:/digits@champion")
    finally:
        mlflow.set_tracking_uri(None)
    assert [(tensor.name, tensor.shape) for tensor in signature.inputs] == [("x_nchw", (-1, 1, 8, 8))]
    assert [(tensor.name, tensor.shape) for tensor in signature.outputs] == [("logits", (-1, 3))]
    assert folder.is_relative_to(Path(registry.removeprefix("sqlite:///")).parent)


def test_the_same_engine_is_the_same_version_with_its_last_figures(
    registry: str, choose: Choose, register_engine: Any
) -> None:
    first = register_engine(choose(b"weights", p50=1.0))
    again = register_engine(choose(b"weights", p50=0.5))
    assert again.version == first.version == 1
    assert again.champion_reason == "it is the champion already"
    assert list(versions(registry)) == [1]
    assert versions(registry)[1].tags["hpml.latency_ms_p50"] == "0.5 (0.475 to 0.525)"
    assert "0.5 ms" in versions(registry)[1].description
    assert len(list(Path(registry.removeprefix("sqlite:///")).parent.rglob("model.onnx"))) == 1


@pytest.mark.parametrize(
    ("given", "moves", "reason"),
    [
        (
            {"p50": 0.5},
            True,
            "better than the champion before it: latency p50 0.5 ms (0.475 to 0.525) against",
        ),
        ({"p50": 2.0}, False, "the champion stays, it is better: latency p50 2 ms"),
        ({"p50": 0.95}, False, "the champion stays, the difference is within the noise"),
        (
            {"p50": 0.5, "goals": Goals(max_quality_loss=0.02)},
            False,
            'it was chosen under other goals, {"max_quality_loss":0.01}',
        ),
        ({"p50": 0.5, "cpu": "another CPU"}, False, "measured with another cpu, 'a CPU', not 'another CPU'"),
        ({"p50": 0.5, "data": "d2"}, False, "measured with another dataset"),
        ({"p50": 0.5, "threads": 2}, False, "measured with another threads, '1', not '2'"),
    ],
    ids=["better", "worse", "tied", "goals", "hardware", "dataset", "threads"],
)
def test_the_champion_moves_only_for_a_better_one_under_the_same_goals(
    registry: str, choose: Choose, register_engine: Any, given: Any, moves: bool, reason: str
) -> None:
    register_engine(choose(b"first", p50=1.0))
    spec = register_engine(choose(b"second", **given))
    assert spec.version == 2
    assert reason in spec.champion_reason
    assert champion(registry) == (2 if moves else 1)
    assert spec.aliases == (("candidate", "champion") if moves else ("candidate",))


def test_what_is_not_known_stands_in_tags_and_the_champion_waits(
    registry: str, choose: Choose, register_engine: Any
) -> None:
    goals = Goals(max_latency_ms_p99=2.0)
    untimed = measured_specs.untimed("int8/onnx")
    first = register_engine(choose(b"first", figures=untimed, goals=goals))
    assert first.aliases == ("candidate",)
    assert first.champion_reason == (
        "it does not become the champion: latency is not measured; "
        f"latency p99, allowed 2 ms, is not measured: {measured_specs.BUSY}"
    )
    tags = versions(registry)[1].tags
    assert tags["hpml.undecided"] == "latency is not measured"
    assert tags["hpml.unverified"].startswith("latency p99, allowed 2 ms, is not measured")
    assert not {"hpml.latency_ms_p50", "hpml.settings", "hpml.core_states"} & tags.keys()

    timed = measured_specs.engine("int8/onnx")
    again = register_engine(choose(b"first", figures=timed, goals=goals, states=measured_specs.states()))
    assert again.version == 1 and again.aliases == ("candidate", "champion")
    tags = versions(registry)[1].tags
    assert not {"hpml.undecided", "hpml.unverified"} & tags.keys()
    assert json.loads(tags["hpml.settings"]) == {"threads": 2, "spinning": True, "variant": ""}
    assert tags["hpml.core_states"] == "35 % near, 65 % far"
    assert tags["hpml.latency_ms_p50_near"].startswith("0.124 (")
    assert tags["hpml.speedup_vs_reference_far"].startswith("9.224 (")

    late = register_engine(choose(b"second", figures=untimed, goals=goals))
    assert late.champion_reason.startswith("the champion stays: latency is not measured")
    assert champion(registry) == 1


@pytest.mark.parametrize(
    ("faster", "shares", "moves", "reason"),
    [
        (1.5, {"near": 0.1, "far": 0.9}, True, "better than the champion before it: latency p50 0.0827 ms"),
        (1.0, {"near": 0.9, "far": 0.1}, False, "the difference is within the noise"),
        (0.9, {"near": 0.9, "far": 0.1}, False, "the champion stays, it is better"),
    ],
    ids=["faster, cores farther", "same, cores nearer", "slower, cores nearer"],
)
def test_the_champion_is_judged_in_each_state_of_the_cores(
    registry: str,
    choose: Choose,
    register_engine: Any,
    faster: float,
    shares: dict[str, float],
    moves: bool,
    reason: str,
) -> None:
    """By what they took where the cores were as far apart, not by how long they were near."""
    before = measured_specs.engine("int8/onnx")
    register_engine(choose(b"first", figures=before, states=measured_specs.states()))
    figures = measured_specs.engine("int8/onnx", shares=shares)
    in_states = tuple(
        one.model_copy(update={"latency_ms_p50": measured_specs.around(one.latency_ms_p50.value / faster)})
        for one in figures.states
        if one.latency_ms_p50
    )
    changed = figures.model_copy(update={"states": in_states})
    spec = register_engine(choose(b"second", figures=changed, states=measured_specs.states(shares)))
    assert reason in spec.champion_reason
    assert champion(registry) == (2 if moves else 1)


def test_a_champion_of_before_there_were_tasks_is_compared() -> None:
    """Its goals and figures have other names."""
    latency_ms = {"value": 1.0, "low": 0.95, "high": 1.05}
    standing = {
        "goals": {"max_accuracy_drop": 0.01, "objective": "latency_ms_p50"},
        "conditions": {"cpu": "a CPU"},
        "figures": {
            "status": "measured",
            "target": "onnx",
            "precision": "fp32",
            "methods": [],
            "size_bytes": 10,
            "parameters": 10,
            "macs": 10,
            "accuracy_top1": {"value": 0.97, "low": 0.96, "high": 0.98},
            "latency_ms_p50": latency_ms,
            "throughput": [{"batch": 8, "images_per_s": {"value": 9, "low": 8, "high": 10}}],
        },
    }
    tags = {STANDING_TAG: json.dumps(standing)}
    of_before = Standing.model_validate_json(tags[STANDING_TAG])
    faster = Interval(value=0.5, low=0.45, high=0.55)
    figures = of_before.figures.model_copy(update={"latency_ms_p50": faster})
    moves, reason = judge(Standing(goals=Goals(), conditions={"cpu": "a CPU"}, figures=figures), tags)
    assert moves, reason
    assert figures.quality["accuracy_top1"].value == 0.97 and figures.throughput[0].rows_per_s.value == 9


def test_a_champion_that_someone_else_made_stays(registry: str, choose: Choose, register_engine: Any) -> None:
    theirs = client(registry)
    theirs.create_registered_model("digits")
    theirs.create_model_version("digits", source="s3://elsewhere/model")
    theirs.set_registered_model_alias("digits", "champion", "1")
    spec = register_engine(choose())
    assert (spec.version, spec.aliases) == (2, ("candidate",))
    assert "does not say how it was measured" in spec.champion_reason and champion(registry) == 1


def test_a_champion_that_was_taken_back_is_replaced(
    registry: str, choose: Choose, register_engine: Any
) -> None:
    register_engine(choose(b"first", p50=1.0))
    client(registry).delete_registered_model_alias("digits", "champion")
    assert register_engine(choose(b"second", p50=2.0)).aliases == ("candidate", "champion")


@pytest.mark.slow  # makes a second registry
def test_a_deleted_registry_is_filled_anew(
    choose: Choose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choose()
    place = tmp_path / "store"
    uri = f"sqlite:///{place / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    seen = set()
    for attempt in range(2):  # in processes of their own, as the stage runs
        done = subprocess.run(command(chosen, tmp_path / f"out-{attempt}"), capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert open_artifact(tmp_path / f"out-{attempt}", kind="registration").spec.version == 1
        seen.add(store_identity(uri))
        shutil.rmtree(place)
    assert len(seen) == 2 and "" not in seen


def command(chosen: Any, out: Path, name: str = "digits") -> list[str]:
    """The command line of the stage's container."""
    config = RegisterConfig(model_name=name).model_dump_json()
    inputs = [part for input_, path in chosen.paths.items() for part in (f"--{input_}", path)]
    flags = ["--config", config, *inputs, "--out", str(out)]
    return [sys.executable, "-m", "hpml.components", "register", *flags]


def test_two_runs_at_once_make_one_version(registry: str, choose: Choose, tmp_path: Path) -> None:
    chosen = choose()
    outs = [tmp_path / f"out-{index}" for index in range(2)]
    both = [
        subprocess.Popen(command(chosen, out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for out in outs
    ]
    assert [process.communicate(timeout=120)[1] for process in both] == ["", ""]
    assert [open_artifact(out, kind="registration").spec.version for out in outs] == [1, 1]
    assert list(versions(registry)) == [1]


def test_no_registry_named(choose: Choose, run_stage: RunStage, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigInvalid, match="set MLFLOW_TRACKING_URI"):
        run_stage(register.run, CONFIG, **chosen.inputs)


def test_a_registry_that_cannot_be_reached_is_one_line_without_credentials(
    choose: Choose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = choose()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://someone:hunter2@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    # as an executor's fork: the entrypoint would wait two minutes for the registry, and say so
    job = {
        "run": "hpml.components.register.stage:run",
        "config": {"model_name": "digits"},
        "inputs": chosen.paths,
        "out": str(tmp_path / "out"),
        "events": str(tmp_path / "events.jsonl"),
    }
    code = "import json, sys; from hpml.steps.job import run_job; run_job(**json.loads(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, json.dumps(job)], capture_output=True, text=True)
    assert done.returncode == ExitCode.UNAVAILABLE
    assert done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert (
        "the MLflow store at http://127.0.0.1:9 cannot be used: [Errno 111] Connection refused" in done.stderr
    )
    assert "hunter2" not in done.stderr and "someone" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_damaged_registry_is_named_with_what_to_do(
    registry: str, choose: Choose, run_stage: RunStage
) -> None:
    file = Path(registry.removeprefix("sqlite:///"))
    content = file.read_bytes()
    file.write_bytes(content[:4096] + b"\xa5" * (len(content) - 4096))
    chosen = choose()
    with pytest.raises(Unavailable, match=r"is damaged: .* -> move .*mlflow.db away"):
        run_stage(register.run, CONFIG, **chosen.inputs)


def test_what_versions_refer_to_is_found(registry: str, choose: Choose, register_engine: Any) -> None:
    chosen, other = choose(), choose(b"other weights", p50=2.0)
    digests = {register_engine(item).engine_digest for item in (chosen, other)}
    client(registry).create_registered_model("theirs")
    client(registry).create_model_version("theirs", source="file:///elsewhere")
    found = references(registry)
    assert {version.engine_digest for version in found} == digests
    assert {version.measurements_digest for version in found} == {
        chosen.measured.digest,
        other.measured.digest,
    }


def test_a_deleted_experiment_is_named(registry: str, choose: Choose, run_stage: RunStage) -> None:
    theirs = client(registry)
    theirs.delete_experiment(theirs.create_experiment("digits"))
    chosen = choose()
    with pytest.raises(Unavailable, match="experiment 'digits' is deleted -> restore it"):
        run_stage(register.run, CONFIG, **chosen.inputs)


def test_other_measurements_than_it_was_chosen_from(
    registry: str, choose: Choose, run_stage: RunStage
) -> None:
    with pytest.raises(StageFailed, match="chosen from other measurements"):
        run_stage(register.run, CONFIG, **choose().inputs | {"measured": choose().measured})


def test_the_score_of_another_engine(registry: str, choose: Choose, run_stage: RunStage) -> None:
    other = choose(b"other weights").evaluation
    with pytest.raises(StageFailed, match="another engine was scored on the test split"):
        run_stage(register.run, CONFIG, **choose().inputs | {"evaluation": other})


def test_names(registry: str, choose: Choose, run_stage: RunStage) -> None:
    chosen = choose()
    with pytest.raises(ConfigInvalid, match=r"set register\.model_name"):
        run_stage(register.run, RegisterConfig(), **chosen.inputs)
    for tags in ({"hpml.engine": "x"}, {"mlflow.user": "x"}, {"": "x"}, {"a\nb": "x"}):
        with pytest.raises(ValidationError):
            RegisterConfig(tags=tags)
    with pytest.raises(ValidationError):
        RegisterConfig(model_name="a/b")
