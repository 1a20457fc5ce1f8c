"""What `hpml deploy` is given: a run, and a version of a registered model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hpml.core.errors import UsageError
from hpml.pipelines.delivery.served_source import bundle_folder
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.run_record import RunRecord
from tests.components.bundle.conftest import deployable, deployed  # noqa: F401 (they are fixtures)
from tests.conftest import Hpml
from tests.pipelines.delivery.bundles import bundle_of


def a_run(home: Path, name: str, bundle: Path | None) -> None:
    """As if it had made the bundle, or had not got as far."""
    (home / name).mkdir(parents=True)
    record = RunRecord(id=name, recipe="r", recipe_file="r.yaml", status="done", started_at_s=1.0, steps={})
    run_record.save(home, record)
    run_record.point_latest(home, name)
    if bundle:
        shutil.copytree(bundle, home / name / "bundle")


def test_a_run_is_deployed_by_its_bundle(hpml: Hpml, tmp_path: Path) -> None:
    a_run(tmp_path / "runs", "one", bundle_of(tmp_path / "bundle"))
    for source in ("one", "latest"):
        assert hpml("deploy", source, "--to", "compose", "-o", f"of-{source}").returncode == 0
    a_run(tmp_path / "runs", "two", None)
    for source, said in (
        ("latest", "run two has no bundle here"),
        ("three", "there is no run 'three'"),
        ("runs", "runs cannot be served: it is a folder without bundle.json"),
    ):
        answer = hpml("deploy", source, "--to", "compose", "-o", "out")
        [line] = answer.stderr.splitlines()
        assert answer.returncode == 2 and said in line


@pytest.mark.slow  # trains, exports and registers a small network
def test_a_registered_model_is_deployed_by_the_bundle_of_its_run(
    tmp_path: Path,
    deployable: Any,  # noqa: F811
    deployed: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", deployable.registry)
    home = tmp_path / "runs"
    a_run(home, "another", bundle_of(tmp_path / "bundle", model_name="digits"))
    with pytest.raises(UsageError, match=r"has the bundle of digits/1: the registry holds its engine alone"):
        bundle_folder("digits@champion", home)
    a_run(home, "its-own", deployed.path)
    for source in ("digits@champion", "digits/1"):
        assert bundle_folder(source, home) == home / "its-own" / "bundle"
