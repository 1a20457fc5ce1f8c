"""A bundle that is deployed by the name of its run: its folder there is files alone, without a manifest."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpml.artifacts.folder import read_manifest
from hpml.core.errors import UsageError
from hpml.pipelines import graph
from hpml.pipelines import recipe as recipes
from hpml.pipelines.delivery.deploy_options import DeployOptions
from hpml.pipelines.delivery.deployable import Deployable
from hpml.pipelines.delivery.destinations import kubernetes, local
from hpml.pipelines.delivery.local import LocalPlace
from hpml.pipelines.delivery.rollout import Stable
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.run_record import StepRecord
from hpml.pipelines.engine.store import Store
from hpml.pipelines.plan import trace
from tests.pipelines.delivery.releases import sealed_bundle
from tests.serving.small_bundles import write_bundle

URI = "s3://models/small"


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """As the stage made it."""
    return sealed_bundle(tmp_path / "sealed")


@pytest.fixture
def bundle(sealed: Path, tmp_path: Path) -> Deployable:
    """In the folder of its run."""
    home, recipe = tmp_path / "runs", tmp_path / "small.yaml"
    copy = tmp_path / "copy"
    shutil.copytree(sealed, copy)
    digests = {"bundle": Store(home).add(copy), "export": "digest-1"}
    recipe.write_text("data: digits")
    loaded = recipes.load(recipe)
    record = run_record.start(home, "small-run", "small", str(recipe), trace(graph.graph, loaded.recipe))
    steps = {
        name: StepRecord(stage=step.stage, status="done", digest=digests.get(step.stage, ""))
        for name, step in record.steps.items()
    }
    run_record.save(home, record.model_copy(update={"steps": steps, "status": "done"}))
    (home / record.id / "recipe.yaml").write_text(recipes.to_yaml(loaded.recipe))
    shown = home / record.id / "bundle"
    shutil.copytree(sealed, shown, ignore=shutil.ignore_patterns("manifest.json"))
    return Deployable(shown, home)


def test_pods_verify_it_by_the_manifest_that_the_store_has(bundle: Deployable, sealed: Path) -> None:
    options = DeployOptions(name="small", image="hpml-serving:1", bundle_uri=URI)
    release = kubernetes.release(bundle, options, lambda line: None)
    assert release.digest == read_manifest(sealed).digest != bundle.digest


def test_what_is_uploaded_for_them_has_the_manifest(bundle: Deployable, tmp_path: Path) -> None:
    options = DeployOptions(name="small", image="hpml-serving:1", bundle_uri=URI)
    [sync, *_] = kubernetes.write(bundle, options, tmp_path)
    folder = Path(sync.removeprefix("aws s3 sync ").removesuffix(f" {URI}"))
    assert (folder / "manifest.json").is_file() and (folder / "bundle.json").is_file()


def test_another_bundle_of_the_same_engine_is_not_taken_for_it(bundle: Deployable, tmp_path: Path) -> None:
    other = Deployable(write_bundle(tmp_path / "other", version=1, measured={"top1": 0.5}), bundle.home)
    with pytest.raises(UsageError, match="made another bundle of its engine"):
        kubernetes.release(other, DeployOptions(name="small", image="x:1", bundle_uri=URI), lambda line: None)


def test_on_this_machine_it_stays_at_its_port(bundle: Deployable, monkeypatch: pytest.MonkeyPatch) -> None:
    first = local.release(bundle, DeployOptions(name="small", port=8765), lambda line: None)
    monkeypatch.setattr(LocalPlace, "stable", lambda _: Stable(first, tried=True))
    again = local.release(bundle, DeployOptions(name="small"), lambda line: None)
    moved = local.release(bundle, DeployOptions(name="small", port=8766), lambda line: None)
    assert (again.settings["port"], moved.settings["port"]) == (8765, 8766)
