"""`hpml deploy --rebuild`: an engine that is bound to another CPU is exported again for this one."""

from __future__ import annotations

import itertools
import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from hpml.components.__main__ import Job, execute
from hpml.core import hardware
from hpml.core.errors import HpmlError
from hpml.pipelines import graph
from hpml.pipelines import recipe as recipes
from hpml.pipelines.delivery.deployable import Deployable
from hpml.pipelines.delivery.origin import Origin, origin_of
from hpml.pipelines.delivery.rebuild import plan_of
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.run_record import StepRecord
from hpml.pipelines.executors.base import StepExit
from hpml.pipelines.executors.process import Processes
from hpml.pipelines.plan import Node, trace
from tests.chain import QUICK
from tests.conftest import Hpml
from tests.pipelines.delivery.bundles import PLAN, bundle_of

VNNI, PLAIN = ("avx2", "avx512_vnni"), ("avx2",)
OF_VNNI = {"identity": {"device": "cpu", "activations": "uint8", "weight_bits": "8"}}
RECIPE = """
data: digits
train: {model: {architecture: cnn, arguments: {width: 8}}, epochs: 2}
variants: {fp32: [], int8: [{method: quantize, activations: uint8}]}
targets: [{target: onnx, tolerance: {min_agreement: 0.9}}]
goals: {max_quality_loss: 0.5, objective: size_bytes}
"""


def cpu_has(monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]) -> None:
    """The instruction sets of this machine, as every step in this process sees them."""
    monkeypatch.setattr(hardware, "cpu_flags", lambda: flags)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps run in this process, which is told what its CPU has; the names of those that did."""
    ran: list[str] = []
    ended: deque[StepExit] = deque()
    numbers = itertools.count(1)

    def start(self: Processes, node: Node, job: dict[str, Any], _log: Path) -> int:
        ran.append(node.name)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", self._registry_uri)
        number, code, cause = next(numbers), 0, ""
        try:
            execute(Job(**job))
        except HpmlError as error:
            code, cause = int(error.exit_code), str(error)
        ended.append(StepExit(number, code, cause=cause))
        return number

    monkeypatch.setattr(Processes, "start", start)
    monkeypatch.setattr(Processes, "ended", lambda _self, _timeout_s: [ended.popleft()] if ended else [])
    return ran


def bundle_facts(home: Path, run: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((home / run / "bundle" / "bundle.json").read_text())
    return facts


@pytest.mark.slow  # a run and a half; what is quick about it is below
def test_an_engine_of_another_cpu_is_built_for_this_one(
    hpml: Hpml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    cpu_has(monkeypatch, VNNI)
    ran = hpml("run", "small.yaml", "--no-tracking", *QUICK, "--set", "benchmark.time_budget_s=10")
    assert ran.returncode == 0, ran.stderr
    home = tmp_path / "runs"
    of_vnni = bundle_facts(home, "latest")
    assert of_vnni["engine_name"] == "int8/onnx" and of_vnni["engine"]["identity"]["weight_bits"] == "8"
    first = run_record.load(home)

    cpu_has(monkeypatch, PLAIN)
    deploy = ("deploy", "latest", "--to", "compose", "-o", "out")
    refused = hpml(*deploy)
    assert refused.returncode == 3 and "built for CPUs with VNNI" in refused.stderr
    assert "-> give --rebuild to build it again here" in refused.stderr
    steps.clear()
    answer = hpml(*deploy, "--rebuild")
    assert answer.returncode == 0, answer.stderr
    assert f"is rebuilt from run {first.id}: it was built for CPUs with VNNI" in answer.stderr
    assert sorted(steps) == [
        *("benchmark", "bundle", "evaluate", "export-eager", "export-quantize-onnx", "register", "select")
    ]

    [second] = [record for record in run_record.list_runs(home) if record.rebuilt_from]
    assert second.rebuilt_from == first.id and run_record.load(home).id == first.id  # which is still latest
    here = bundle_facts(home, second.id)
    assert here["engine_name"] == "int8/onnx" and here["engine"]["identity"]["weight_bits"] == "7"
    assert here["model_version"] == of_vnni["model_version"] + 1
    compress = second.steps["compress-quantize"]
    assert (compress.status, compress.digest) == ("cached", first.steps["compress-quantize"].digest)
    [place] = (tmp_path / "out").glob("bundle-*")
    assert json.loads((place / "bundle.json").read_text())["engine_digest"] == here["engine_digest"]

    steps.clear()
    assert hpml(*deploy, "--rebuild").returncode == 0
    assert not [name for name in steps if name.startswith("export")]  # they are stored
    completing = hpml("bench", second.id)
    assert completing.returncode == 2 and f"hpml deploy {first.id} --to" in completing.stderr
    assert origin_of(Deployable(home / second.id / "bundle", home)).export.name == "export-quantize-onnx"


# ---------------------------------------------------------------------------------------------------- quick


def made(home: Path, *, digest: str, recipe: str = RECIPE) -> None:
    """A run whose int8 engine has `digest`, and whose other steps made things that are gone."""
    home.mkdir()
    (home / "small.yaml").write_text(recipe)
    loaded = recipes.load(home / "small.yaml")
    plan = trace(graph.graph, loaded.recipe)
    record = run_record.start(home, "small-run", "small", str(loaded.file), plan)
    steps = {
        name: StepRecord(stage=step.stage, status="done", digest=f"{index:064x}")
        for index, (name, step) in enumerate(record.steps.items())
    }
    steps["export-quantize-onnx"] = StepRecord(stage="export", status="done", digest=digest)
    run_record.save(home, record.model_copy(update={"steps": steps}))
    (home / record.id / "recipe.yaml").write_text(recipes.to_yaml(loaded.recipe))


def origin(tmp_path: Path) -> Origin:
    made(tmp_path / "runs", digest="digest-1")
    return origin_of(Deployable(bundle_of(tmp_path / "bundle", engine_digest="digest-1"), tmp_path / "runs"))


def test_only_this_engine_and_the_reference_are_built(tmp_path: Path) -> None:
    plan = plan_of(origin(tmp_path))
    assert "export-onnx" not in plan.nodes and not {"report", "diagnose", "peaks"} & set(plan.nodes)
    engines = {"torch-eager": "export-eager", "int8/onnx": "export-quantize-onnx"}
    for name in ("benchmark", "evaluate", "select"):
        told = plan.nodes[name].inputs["engines"]
        assert not isinstance(told, str) and set(told.values()) == set(engines.values())
    assert plan.nodes["export-quantize-onnx"].inputs["model"] == "compress-quantize"


def test_a_network_that_is_gone_is_not_trained_again(
    hpml: Hpml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[str]
) -> None:
    """Nor asked for what its training needed: the weights that it began with are gone, too."""
    cpu_has(monkeypatch, PLAIN)
    began_with = RECIPE.replace("epochs: 2", "epochs: 2, weights: gone.safetensors, weights_licence: MIT")
    made(tmp_path / "runs", digest="digest-1", recipe=began_with)
    bundle_of(tmp_path / "bundle", OF_VNNI, engine_digest="digest-1")
    answer = hpml("deploy", "bundle", "--to", "local", "--rebuild")
    assert answer.returncode == 4 and not steps
    assert "is no longer in the workspace: hpml gc removes what old runs made -> hpml run" in answer.stderr
    assert len(run_record.list_runs(tmp_path / "runs")) == 1


@pytest.mark.parametrize(
    ("engine", "arguments", "code", "said"),
    [
        (OF_VNNI, (), 2, "has made the engine of small version 3: its network and its recipe are needed"),
        (OF_VNNI, ("--elsewhere",), 2, "--rebuild and --elsewhere are given"),
        (
            PLAN,
            (),
            3,
            "cannot be rebuilt here for the target tensorrt: this machine has no NVIDIA GPU -> run",
        ),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(
    hpml: Hpml,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: dict[str, Any],
    arguments: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    cpu_has(monkeypatch, PLAIN)
    monkeypatch.setattr(hardware, "gpu_names", lambda: ())
    bundle_of(tmp_path / "bundle", engine)
    answer = hpml("deploy", "bundle", "--to", "triton", "-o", "out", "--rebuild", *arguments)
    [line] = answer.stderr.splitlines()
    assert answer.returncode == code and said in line, line
    assert not (tmp_path / "out").exists()


def test_what_runs_here_is_not_rebuilt(hpml: Hpml, tmp_path: Path) -> None:
    bundle_of(tmp_path / "bundle")
    answer = hpml("deploy", "bundle", "--to", "compose", "-o", "out", "--rebuild")
    assert answer.returncode == 0 and "runs on this machine as it is: nothing is rebuilt" in answer.stderr
