"""Versions of a model side by side in a model repository of Triton."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpml.artifacts.bundle import BundleSpec
from hpml.artifacts.folder import Artifact, open_artifact, seal_artifact
from hpml.components.bundle import stage as bundling
from hpml.components.bundle.config import BundleConfig
from hpml.components.bundle.triton_repository import Refused, place
from hpml.measuring.goals import DECISION_FILE, DecisionRecord
from tests.components.bundle.conftest import perform, resealed


@pytest.fixture(scope="module")
def second(deployable: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of version 2 in the registry."""
    folder = tmp_path_factory.mktemp("second")
    (folder / "version").mkdir()
    spec = deployable.version.spec.model_copy(update={"version": 2})
    seal_artifact(folder / "version", spec=spec, metrics={}, lineage=deployable.version.manifest.lineage)
    version = open_artifact(folder / "version", kind="registration")
    config = BundleConfig(serve_versions="latest")
    return perform(folder / "bundle", bundling.run, config, **deployable.with_others(version=version)).path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


def contents(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


BOTH = {"digits/config.pbtxt", "digits/1/model.onnx", "digits/2/model.onnx"}


def test_the_version_is_that_of_the_registry(second: Path) -> None:
    told = json.loads((second / "bundle.json").read_text())
    assert told["file"] == "model_repository/digits/2/model.onnx"
    assert contents(second / "model_repository") == {"digits/config.pbtxt", "digits/2/model.onnx"}
    readme = (second / "README.md").read_text()
    assert "It becomes version 2 there" in readme and "serves the highest version" in readme
    assert (
        "version_policy: { latest { num_versions: 1 } }"
        in (second / "model_repository/digits/config.pbtxt").read_text()
    )


def test_two_versions_stand_side_by_side(bundle: Path, second: Path, repository: Path) -> None:
    """By the bundle's own script, in a Python that has nothing else."""
    for folder in (bundle, second):
        command = [sys.executable, "-I", "-S", "-B", str(folder / "triton_repository.py"), str(repository)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("placed ")
    assert contents(repository) == BOTH
    assert {path.name for path in (repository / "digits").iterdir()} == {"1", "2", "config.pbtxt"}
    config = (repository / "digits/config.pbtxt").read_text()
    assert "version_policy: { all { } }" in config  # of the first: nothing that is there is replaced
    assert place(second, repository).endswith("is there already, the same")


@pytest.fixture(scope="module")
def unverified(deployable: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of an engine whose p99 was not measured."""
    folder = tmp_path_factory.mktemp("unverified")

    def forget(place: Path) -> None:
        record = DecisionRecord.model_validate_json((place / DECISION_FILE).read_text())
        of_chosen = replace(record.verdicts[record.chosen], unverified=("latency p99 is not measured: busy",))
        doubtful = record.model_copy(
            update={
                "verdicts": record.verdicts | {record.chosen: of_chosen},
                "undecided": "latency is not measured",
            }
        )
        (place / DECISION_FILE).write_text(doubtful.model_dump_json())

    engine = resealed(deployable.engine, folder / "engine", forget)
    return perform(
        folder / "bundle", bundling.run, BundleConfig(), **deployable.with_others(engine=engine)
    ).path


def test_what_is_not_verified_is_bundled_and_marked_and_placed_only_if_asked_for(
    unverified: Path, repository: Path
) -> None:
    assert json.loads((unverified / "bundle.json").read_text())["unverified"] == [
        "latency p99 is not measured: busy"
    ]
    readme = " ".join((unverified / "README.md").read_text().split())
    assert "**Not verified:** latency p99 is not measured: busy." in readme
    assert "**Not decided:** latency is not measured." in readme
    assert "`hpml bench RUN`, RUN being the run that made this bundle, completes the measurement" in readme

    command = [sys.executable, "-I", "-S", "-B", str(unverified / "triton_repository.py"), str(repository)]
    refused = subprocess.run(command, capture_output=True, text=True)
    (line,) = refused.stderr.splitlines()
    assert refused.returncode == 5 and not contents(repository)
    assert line.startswith("error: not verified: latency p99 is not measured: busy: complete the measurement")
    assert "hpml bench RUN" in line and line.endswith("or give --unverified")
    placed = subprocess.run([*command, "--unverified"], capture_output=True, text=True)
    assert placed.returncode == 0 and "digits/1/model.onnx" in contents(repository)

    checked = subprocess.run([sys.executable, str(unverified / "bundle.py")], capture_output=True, text=True)
    assert checked.returncode == 0
    assert checked.stderr == "warning: not verified: latency p99 is not measured: busy\n"


def test_another_model_under_the_same_version_is_refused(bundle: Path, repository: Path) -> None:
    place(bundle, repository)
    (repository / "digits/1/model.onnx").write_bytes(b"another")
    with pytest.raises(Refused, match=r"digits/1 is there with other content: .* --as-version 2"):
        place(bundle, repository)
    assert (repository / "digits/1/model.onnx").read_bytes() == b"another"
    place(bundle, repository, 2)
    assert contents(repository) == BOTH


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("dims: [ 1, 8, 8 ]", "dims: [ 3, 8, 8 ]", "input"),
        ("dims: [ 10 ]", "dims: [ 11 ]", "output"),
        ("onnxruntime_onnx", "tensorrt_plan", "platform"),
        ("KIND_CPU", "KIND_GPU", "kind"),
        ("max_batch_size: 64", "max_batch_size: 8", "max_batch_size"),
    ],
)
def test_one_configuration_cannot_hold_for_versions_that_differ(
    bundle: Path, second: Path, repository: Path, old: str, new: str, named: str
) -> None:
    place(bundle, repository)
    config = repository / "digits/config.pbtxt"
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(Refused, match=rf"its {named} is not that of this bundle .*registry\.model_name"):
        place(second, repository)
    assert contents(repository) == BOTH - {"digits/2/model.onnx"}


def test_what_a_user_tuned_in_the_configuration_stays(bundle: Path, second: Path, repository: Path) -> None:
    place(bundle, repository)
    config = repository / "digits/config.pbtxt"
    tuned = config.read_text().replace("count: 1", "count: 4").replace("version_policy: { all { } }", "")
    config.write_text(tuned)
    assert "has no version_policy, so Triton serves the highest version only" in place(second, repository)
    assert config.read_text() == tuned


def test_threads_that_are_not_the_measured_ones_are_told(
    bundle: Path, second: Path, repository: Path
) -> None:
    place(bundle, repository)
    config = repository / "digits/config.pbtxt"
    config.write_text(config.read_text().replace('string_value: "2"', 'string_value: "8"'))
    note = "says 8 intra_op_thread_count, this model was measured with 2"
    assert note in place(second, repository)


def claim_a_name_outside(bundle: Path) -> None:
    told = json.loads((bundle / "bundle.json").read_text())
    (bundle / "bundle.json").write_text(json.dumps(told | {"model_name": "../elsewhere"}))


def change_the_engine(bundle: Path) -> None:
    with (bundle / "model_repository/digits/1/model.onnx").open("ab") as file:
        file.write(b"!")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (claim_a_name_outside, "cannot be the name of a folder"),
        (change_the_engine, "a file in .* was changed"),
    ],
)
def test_a_changed_bundle_leaves_no_trace(
    bundle: Path, repository: Path, change: Callable[[Path], None], complaint: str
) -> None:
    change(bundle)
    with pytest.raises(Refused, match=complaint):
        place(bundle, repository)
    assert not list(repository.iterdir())


def test_a_repository_that_is_not_there_is_named(deployed: Artifact[BundleSpec], tmp_path: Path) -> None:
    with pytest.raises(Refused, match="nowhere is no folder"):
        place(deployed.path, tmp_path / "nowhere")


@pytest.mark.parametrize(
    "arguments", [[], ["a", "b"], ["a", "--as-version", "0"], ["a", "--as-version", "x"]]
)
def test_wrong_arguments_are_a_usage_error(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hpml.components.bundle import triton_repository

    monkeypatch.setattr(sys, "argv", ["triton_repository.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        triton_repository.main()
    assert capsys.readouterr().err.startswith("usage: ")
