"""The container executor with a stand-in for podman, which runs each stage's command line as a process."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import stub_engine
from conftest import Listener

from hpml.components import STAGES
from hpml.components.__main__ import about
from hpml.components.prepare import stage as prepare
from hpml.components.train import stage as train
from hpml.core.errors import ConfigInvalid, ExitCode, Unavailable
from hpml.pipelines import recipe
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.execution import Execution, Settings
from hpml.pipelines.engine.run_record import RunRecord
from hpml.pipelines.executors.base import Executor
from hpml.pipelines.executors.container import Containers, _is_loopback, quantity_bytes
from hpml.pipelines.executors.process import Processes
from hpml.pipelines.graph import graph
from hpml.pipelines.plan import Plan, Step, trace
from hpml.pipelines.recipe import LoadedRecipe
from hpml.pipelines.stage_needs import needs_of

_RECIPE = """
data: digits
train: {model: {architecture: cnn, arguments: {width: 4}}, epochs: 1, seed: 3}
cluster:
  images: {cpu: "hpml-test:1"}
  stages: {train: {memory: 1500Mi}}
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`podman` is the stand-in; its folder."""
    folder, programs = tmp_path / "engine", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    podman = programs / "podman"
    podman.write_text(f'#!/bin/sh\nexec {sys.executable} {stub_engine.__file__} "$@"\n')
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("STUB_ENGINE", str(folder))
    return folder


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedRecipe:
    file = tmp_path / "small.yaml"
    file.write_text(_RECIPE)
    return recipe.load(file)


def two_steps(loaded: LoadedRecipe) -> Plan:
    def graph(step: Step[str], recipe: recipe.Recipe) -> None:
        step(train.run, recipe.train, data=step(prepare.run, recipe.data))

    return trace(graph, loaded.recipe)


def execute(loaded: LoadedRecipe, settings: Settings, place: Executor, listener: Listener) -> RunRecord:
    plan = two_steps(loaded)
    record = run_record.start(settings.home, run_record.new_run_id("small"), "small", "", plan)
    return Execution(plan, record, settings, listener, place).execute()


def settings_in(home: Path) -> Settings:
    return Settings(home=home)


def materials(home: Path) -> dict[str, Any]:
    keys = [json.loads(file.read_text())["material"] for file in (home / ".store" / "keys").iterdir()]
    return {material["stage"]: material for material in keys}


def calls(engine: Path, verb: str) -> list[list[str]]:
    lines = [json.loads(line) for line in (engine / "calls.jsonl").read_text().splitlines()]
    return [call[1:] for call in lines if call[0] == verb]


def values(call: list[str], flag: str) -> list[str]:
    return [after for before, after in itertools.pairwise(call) if before == flag]


@pytest.mark.slow  # runs every step in a container and in a process
def test_same_results_and_keys_apart_from_the_image(
    engine: Path, loaded: LoadedRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)  # a container does not get it
    contained, plain = settings_in(tmp_path / "contained"), settings_in(tmp_path / "plain")
    listener = Listener()
    boxed = execute(loaded, contained, Containers(loaded, contained, listener), listener)
    bare = execute(loaded, plain, Processes(plain.home), Listener())
    assert [step.status for step in boxed.steps.values()] == ["done", "done"], boxed
    assert [step.digest for step in boxed.steps.values()] == [step.digest for step in bare.steps.values()]
    assert all(step.peak_rss_bytes for step in boxed.steps.values())
    for stage, material in materials(contained.home).items():
        image = material.pop("image")
        assert image == stub_engine.IMAGES["hpml-test:1"].removeprefix("sha256:")
        assert material == materials(plain.home)[stage]
    events = contained.home / boxed.id / "logs" / "train.events.jsonl"
    assert '"metric"' in events.read_text()

    again = execute(loaded, contained, Containers(loaded, contained, listener), listener)
    assert [step.status for step in again.steps.values()] == ["cached", "cached"]


def test_what_a_container_may_do_and_see(engine: Path, loaded: LoadedRecipe, tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "runs")
    record = execute(loaded, settings, Containers(loaded, settings, Listener()), Listener())
    dataset = record.steps["prepare"].digest
    call = next(call for call in calls(engine, "run") if "train" in call)
    assert {"--read-only"} <= set(call)
    assert values(call, "--network") == ["none"]
    assert values(call, "--cap-drop") == ["all"]
    assert values(call, "--security-opt") == ["no-new-privileges"]
    assert values(call, "--user") == [f"{os.getuid()}:{os.getgid()}"]
    assert values(call, "--memory") == [str(1500 * 2**20)]
    assert int(values(call, "--cpus")[0]) >= 1
    mounted = {
        volume.rpartition(":")[0].partition(":")[0]: volume.rpartition(":")[2]
        for volume in values(call, "--volume")
    }
    store = settings.home / ".store"
    writable = {place for place, mode in mounted.items() if mode == "rw"}
    assert mounted[str(store / "objects" / dataset)] == "ro"
    assert str(settings.home) not in mounted and str(store) not in mounted
    assert str(store / "incoming") in writable and len(writable) == 3
    assert len(calls(engine, "rm")) == 2


URL = ["data={source: cifar10, url: 'https://data.example/cifar.tgz', sha256: " + "ab" * 32 + "}"]


@pytest.mark.parametrize(
    ("overrides", "network"), [([], "bridge"), (["cluster.container_network=lab"], "lab")]
)
def test_a_step_that_needs_a_network_gets_a_bridge_and_the_others_none(
    engine: Path, loaded: LoadedRecipe, tmp_path: Path, overrides: list[str], network: str
) -> None:
    loaded = recipe.load(loaded.file, (*URL, *overrides))
    settings, listener = settings_in(tmp_path / "runs"), Listener()
    place = Containers(loaded, settings, listener)
    plan = two_steps(loaded)
    place.check(plan)
    (engine / "refuse").touch()  # what the engine was asked is enough
    execute(loaded, settings, place, listener)
    assert values(calls(engine, "run")[-1], "--network") == [network]
    assert [text for text in listener.said if "network" in text] == [
        f"prepare has a network ({network}), for data.example"
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "0.0.0.0", "mlflow.localhost"])
def test_an_address_of_this_machines_loopback_is_known(host: str) -> None:
    assert _is_loopback(host) and not _is_loopback("10.0.0.7") and not _is_loopback("mlflow.example")


def test_a_loopback_is_refused_before_anything_starts(
    engine: Path, loaded: LoadedRecipe, tmp_path: Path
) -> None:
    plan = trace(graph, loaded.recipe)
    settings = Settings(home=tmp_path / "runs", registry_uri="http://user:secret@[::1]:5000")
    with pytest.raises(ConfigInvalid, match=r"register cannot reach .*container_network=host") as caught:
        Containers(loaded, settings, Listener()).check(plan)
    assert "secret" not in str(caught.value)
    on_the_host = recipe.load(loaded.file, ("cluster.container_network=host",))
    Containers(on_the_host, settings, Listener()).check(plan)
    elsewhere = Settings(home=tmp_path / "runs", registry_uri="http://10.0.0.7:5000")
    Containers(loaded, elsewhere, Listener()).check(plan)


def test_a_registry_in_a_file_needs_no_network(engine: Path, loaded: LoadedRecipe, tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "runs", registry_uri=f"sqlite:///{tmp_path}/mlflow.db")
    place = Containers(loaded, settings, Listener())
    [register] = [node for node in trace(graph, loaded.recipe).nodes.values() if node.stage == "register"]
    assert place._network(register) == "none"


def test_an_image_that_is_not_there(engine: Path, loaded: LoadedRecipe, tmp_path: Path) -> None:
    loaded = recipe.load(loaded.file, ("cluster.images.cpu=absent:1",))
    settings = settings_in(tmp_path / "runs")
    with pytest.raises(ConfigInvalid, match=r"no image absent:1 on this machine.*make images"):
        Containers(loaded, settings, Listener()).check(two_steps(loaded))


def test_an_image_of_other_code(
    engine: Path, loaded: LoadedRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpml.components.__main__.source_digest", lambda: "another")
    with pytest.raises(ConfigInvalid, match=r"holds other code than this installation.*make images"):
        Containers(loaded, settings_in(tmp_path / "runs"), Listener()).check(two_steps(loaded))


def test_no_engine(loaded: LoadedRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="neither podman nor docker is installed"):
        Containers(loaded, settings_in(tmp_path / "runs"), Listener())


def test_a_container_that_is_killed_for_its_memory(
    engine: Path, loaded: LoadedRecipe, tmp_path: Path
) -> None:
    (engine / "oom").touch()
    loaded = recipe.load(loaded.file, ("train.epochs=5000",))
    settings, listener = settings_in(tmp_path / "runs"), Listener()
    place = Containers(loaded, settings, listener)

    def kill_the_training() -> None:
        for _ in range(600):
            found = list((engine / "containers").glob("hpml-train-*"))
            if found:
                os.kill(int(found[0].read_text()), 9)
                return
            threading.Event().wait(0.1)

    killer = threading.Thread(target=kill_the_training)
    killer.start()
    record = execute(loaded, settings, place, listener)
    killer.join()
    failed = record.steps["train"]
    assert failed.status == "failed" and failed.exit_code == ExitCode.STAGE_FAILED
    assert "limit of 1500Mi of memory" in failed.error and "cluster.stages" in failed.error


def test_a_container_that_does_not_start(engine: Path, loaded: LoadedRecipe, tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "runs")
    place = Containers(loaded, settings, Listener())
    place.check(two_steps(loaded))
    (engine / "refuse").touch()
    record = execute(loaded, settings, place, Listener())
    assert "its container was not started: the container engine refused it" in record.steps["prepare"].error
    assert record.steps["train"].status == "blocked"


@pytest.mark.parametrize(
    ("quantity", "size"),
    [("1Gi", 2**30), ("1500Mi", 1500 * 2**20), ("2G", 2 * 10**9), ("0.5Gi", 2**29), ("7", 7)],
)
def test_quantities(quantity: str, size: int) -> None:
    assert quantity_bytes(quantity) == size


def test_every_stage_has_a_memory_that_can_be_read() -> None:
    assert all(quantity_bytes(row.memory) >= 2**30 for row in map(needs_of, STAGES))


def test_what_an_image_lacks_for_the_network_is_said_before_anything_starts(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds what this machine has, less the library."""
    monkeypatch.setattr(Containers, "_about", lambda *_: {**about(), "libraries": {"torch": "2"}})
    file = tmp_path / "small.yaml"
    file.write_text(_RECIPE.replace("data: digits", "data: chitchat").replace("cnn", "transformers"))
    loaded = recipe.load(file)
    place = Containers(loaded, settings_in(tmp_path / "runs"), Listener())
    with pytest.raises(
        ConfigInvalid, match=r"hpml-test:1 cannot run train: it does not hold transformers.*docker"
    ):
        place.check(two_steps(loaded))
    assert not [call for call in calls(engine, "run") if "--about" not in call]


def test_what_is_on_the_hub_is_fetched_by_its_step_alone(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    file = tmp_path / "small.yaml"
    commit = "0" * 40
    file.write_text(
        f"data: {{source: chitchat, tokenizer: 'hf://org/name@{commit}'}}\n"
        "train: {model: transformers, weights: weights, epochs: 0}\n"
        "cluster: {images: {cpu: 'hpml-test:1'}}"
    )
    loaded, listener = recipe.load(file), Listener()
    place = Containers(loaded, settings_in(tmp_path / "runs"), listener)
    job = {
        "threads": 1,
        "import_paths": (),
        "inputs": {},
        "out": "/out/a",
        "scratch": "/scratch",
        "events": "/e",
    }
    commands = {
        name: place._command(node, {**job, "run": node.run_path, "config": {}}, name)
        for name, node in two_steps(loaded).nodes.items()
    }
    assert [values(commands[name], "--network") for name in ("prepare", "train")] == [["bridge"], ["none"]]
    assert "HF_TOKEN" in values(commands["prepare"], "--env") and "secret" not in str(commands)
    assert "HF_HOME=/scratch/hub" in values(commands["prepare"], "--env")
    assert not any("HF_" in value for value in values(commands["train"], "--env"))
    assert any("huggingface.co" in text for text in listener.said)
