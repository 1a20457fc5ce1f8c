"""The bundle of a task that is not ours: named arrays, several graphs, a processing.py of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml import models
from hpml.artifacts.bundle import BundleSpec
from hpml.artifacts.dataset import DatasetSpec, SplitSpec
from hpml.artifacts.folder import Artifact, open_artifact, seal_artifact
from hpml.artifacts.model import ArchitectureSpec, ModelSpec
from hpml.components.bundle import stage as bundling
from hpml.components.bundle.config import BundleConfig
from hpml.components.export import stage as export
from hpml.core.errors import ConfigInvalid, GateFailed, StageFailed
from hpml.measuring.subjects import BundleSubject
from hpml.targets import Eager, Onnx
from hpml.tasks import TASKS
from hpml.tasks import _task_of as known_tasks
from hpml.tasks.packaging.engine_script import BundleError, Engine
from tests.components.bundle.conftest import SETTINGS, Deployable, chosen_and_registered, lineage, perform
from tests.components.bundle.diabetes import Diabetes, arrays
from tests.components.bundle.test_bundle_stage import (
    edit,
    python,
    snippets,
    without_digest,
)


@pytest.fixture(scope="module", autouse=True)
def _task() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "diabetes", Diabetes)
        yield
    known_tasks.cache_clear()


@pytest.fixture(scope="module")
def deploy(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Deployable]:
    """An engine of a network that is not trained, chosen and registered: deploy(target, is_split=True)."""

    def make(target: Any, **options: Any) -> Deployable:
        place = tmp_path_factory.mktemp("diabetes")
        data = prepared(place / "data", **options)
        model = modelled(place / "model", data)
        exported = perform(place / "exported", export.run, target, model=model, data=data)
        return chosen_and_registered(place, exported, data, SETTINGS)

    return make


def prepared(place: Path, **options: Any) -> Artifact[DatasetSpec]:
    place.mkdir()
    whole = arrays()
    mean, std = (float(figure) for figure in (whole["progression"].mean(), whole["progression"].std()))
    whole["progression"] = (whole["progression"] - mean) / std
    parts = {"train": slice(0, 300), "validation": slice(300, 370), "test": slice(370, None)}
    for split, rows in parts.items():
        for name, array in whole.items():
            np.save(place / f"{split}_{name}.npy", array[rows])
    (place / "columns.txt").write_text("age sex bmi bp s1 s2 s3 s4 s5 s6\n")
    spec = DatasetSpec(
        task=Diabetes(mean=mean, std=std, **options).model_dump(mode="json"),
        splits={split: SplitSpec(rows=len(arrays()["body"][rows])) for split, rows in parts.items()},
        source="diabetes",
        licence="BSD-3-Clause",
    )
    seal_artifact(place, spec=spec, metrics={}, lineage=lineage())
    return open_artifact(place, kind="dataset")


def modelled(place: Path, data: Artifact[DatasetSpec]) -> Artifact[ModelSpec]:
    import torch

    torch.manual_seed(0)
    task = Diabetes.model_validate(data.spec.task)
    architecture = ArchitectureSpec(name=task.default_architecture)
    network = models.build(architecture, task)
    place.mkdir()
    models.save(network, place)
    spec = ModelSpec(
        architecture=architecture,
        task=data.spec.task,
        operations=task.operations(network),
        parameters=1,
        macs=1,
        quality={"rmse": 1.0},
    )
    seal_artifact(place, spec=spec, metrics={}, lineage=lineage())
    return open_artifact(place, kind="model")


@pytest.fixture(scope="module")
def deployable(deploy: Callable[..., Deployable]) -> Deployable:
    return deploy(Onnx(), reads_json=True)


@pytest.fixture(scope="module")
def deployed(deployable: Deployable, tmp_path_factory: pytest.TempPathFactory) -> Artifact[BundleSpec]:
    """Not to be changed."""
    place = tmp_path_factory.mktemp("deployed") / "bundle"
    return perform(place, bundling.run, BundleConfig(), **deployable.with_others())


@pytest.fixture(scope="module")
def split(deploy: Callable[..., Deployable], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of an engine of two graphs. Not to be changed."""
    place = tmp_path_factory.mktemp("split") / "bundle"
    inputs = deploy(Onnx(), is_split=True).with_others()
    return perform(place, bundling.run, BundleConfig(), **inputs).path


@pytest.fixture
def answers(bundle: Path) -> list[float]:
    found: list[float] = np.load(bundle / "golden/golden_progression.npy").tolist()
    return found


def inputs_file(bundle: Path, **changed: Any) -> str:
    """The golden inputs as a user's file beside the bundle."""
    golden = {name: np.load(bundle / f"golden/golden_{name}.npy") for name in ("body", "serum")}
    np.savez(bundle.parent / "inputs.npz", **{**golden, **changed})
    return "../inputs.npz"


def test_what_is_in_the_bundle(deployed: Artifact[BundleSpec]) -> None:
    told = json.loads(deployed.file("bundle.json").read_text())
    assert set(told["files"]) == set(deployed.manifest.files) - {"bundle.json"}
    assert set(told["files"]) == {
        "README.md",
        "bundle.py",
        "drift.json",
        "golden/golden_body.npy",
        "golden/golden_progression.npy",
        "golden/golden_serum.npy",
        "model_repository/digits/1/columns.txt",
        "model_repository/digits/1/model.onnx",
        "model_repository/digits/config.pbtxt",
        "preprocessing.json",
        "processing.py",
        "requirements.txt",
        "triton_repository.py",
    }
    assert told["task_files"] == ["model_repository/digits/1/columns.txt"]
    [operation] = told["operations"]
    assert operation["name"] == "predict" and told["format"] == 2
    assert operation["inputs"] == [
        {"name": "body", "datatype": "FP32", "shape": [-1, 4]},
        {"name": "serum", "datatype": "FP32", "shape": [-1, 6]},
    ]
    assert operation["outputs"] == [{"name": "progression", "datatype": "FP32", "shape": [-1]}]
    assert "process without torch" in deployed.spec.verified[-1]
    readme = deployed.file("README.md").read_text()
    assert "| predict | takes | `body` | float32 (batch, 4) | age, sex, bmi, bp, scaled |" in readme
    assert "RMSE, 72 test rows" in readme and "images" not in readme and "logit" not in readme


# ------------------------------------------------------------------------------------------- the command line


def test_it_checks_itself(bundle: Path) -> None:
    done = python(bundle, "bundle.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"max_abs_error": 0.0}


def test_arrays_get_outputs_in_json_or_in_a_file(bundle: Path, answers: list[float]) -> None:
    given = inputs_file(bundle, body=np.load(bundle / "golden/golden_body.npy").astype(float))
    done = python(bundle, "bundle.py", given)
    assert json.loads(done.stdout) == {"progression": pytest.approx(answers)}
    done = python(bundle, "bundle.py", given, "--out", "../outputs.npz")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with np.load(bundle.parent / "outputs.npz") as outputs:
        assert outputs["progression"].tolist() == pytest.approx(answers)


def test_json_goes_through_the_tasks_own_processing(bundle: Path, answers: list[float]) -> None:
    golden = [np.load(bundle / f"golden/golden_{name}.npy").tolist() for name in ("body", "serum")]
    patients = [{"body": body, "serum": serum} for body, serum in zip(*golden, strict=True)]
    (bundle.parent / "patients.json").write_text(json.dumps(patients))
    done = python(bundle, "bundle.py", "../patients.json")
    facts = json.loads((bundle / "preprocessing.json").read_text())
    expected = [answer * facts["std"] + facts["mean"] for answer in answers]
    assert [row["progression"] for row in json.loads(done.stdout)] == pytest.approx(expected, rel=1e-5)
    (bundle.parent / "patients.json").write_text('[{"body": [1, 2, 3, 4]}]')
    done = python(bundle, "bundle.py", "../patients.json")
    assert (done.returncode, done.stderr) == (
        5,
        "error: processing.py cannot use this input (KeyError: 'serum'):"
        " its preprocess() shows what it reads\n",
    )


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"bodies": 1}, "the inputs are body, serum, bodies; predict takes body float32 [-1, 4], serum"),
        (
            {"body": np.zeros((2, 5), np.float32)},
            "body is float32 (2, 5); predict takes body float32 [-1, 4]",
        ),
        ({"body": np.array(["a"])}, "body is <U1 (1,)"),
        (
            {"body": np.zeros((2, 4), np.float32)},
            "agree as those of the golden samples do, here they are body (2, 4), serum (",
        ),
        ({"body": np.zeros((0, 4), np.float32)}, "body has no rows"),
        ({"body": np.full((3, 4), np.nan, np.float32)}, "body holds numbers that are not finite"),
        ({"body": np.array([object()])}, "allow_pickle=False"),
    ],
)
def test_arrays_that_are_not_those_of_the_operation_are_refused(
    bundle: Path, changed: dict[str, Any], complaint: str
) -> None:
    done = python(bundle, "bundle.py", inputs_file(bundle, **changed))
    assert done.returncode == 5 and done.stdout == ""
    assert done.stderr.startswith("error: ") and complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_what_is_no_file_of_arrays_is_refused(bundle: Path) -> None:
    (bundle.parent / "inputs.npz").write_bytes(b"PK\x03\x04 and no more")
    done = python(bundle, "bundle.py", "../inputs.npz")
    assert done.returncode == 5 and ": numpy.savez('inputs.npz', NAME=array) writes" in done.stderr
    done = python(bundle, "bundle.py", "absent.npz")
    assert (done.returncode, done.stderr) == (
        5,
        "error: absent.npz: No such file or directory; check the path\n",
    )
    (bundle.parent / "broken.json").write_text("{")
    done = python(bundle, "bundle.py", "../broken.json")
    assert done.returncode == 5 and "broken.json is not JSON (" in done.stderr and "Trace" not in done.stderr
    assert python(bundle, "bundle.py", "--jsno").returncode == 2
    done = python(bundle, "bundle.py", "../inputs.npz", "--operation", "dream")
    assert done.returncode == 5


@pytest.mark.parametrize("wrong", [-1, 5])
def test_ids_that_there_are_not_are_refused(wrong: int) -> None:
    """ONNX takes negative ones from the end of the table, and says nothing."""
    engine = object.__new__(Engine)
    engine.bundle = {"operations": [{"inputs": [{"name": "input_ids", "below": 5}]}]}
    with pytest.raises(BundleError, match=f"input_ids holds the id {wrong}: give ids from 0 to 4"):
        engine.run({"input_ids": np.array([[0, 4, wrong]])})


# ------------------------------------------------------------------------------------------------- tampering


def change_answers(bundle: Path) -> None:
    file = bundle / "golden/golden_progression.npy"
    np.save(file, np.load(file) + np.float32(0.1))
    without_digest(bundle, "golden/golden_progression.npy")


def lose_its_operations(bundle: Path) -> None:
    told = json.loads((bundle / "bundle.json").read_text())
    (bundle / "bundle.json").write_text(json.dumps({"files": told["files"]}))


def list_bundle_json(bundle: Path) -> None:
    (bundle / "bundle.json").write_text("[]")


def cut_bundle_json(bundle: Path) -> None:
    (bundle / "bundle.json").write_bytes((bundle / "bundle.json").read_bytes()[:99])


def cut_the_graph(bundle: Path) -> None:
    [file] = bundle.rglob("model.onnx")
    file.write_bytes(b"no graph")
    without_digest(bundle, file.relative_to(bundle).as_posix())


def change_processing(bundle: Path) -> None:
    (bundle / "processing.py").write_text("raise SystemExit('run')")


def need_a_library(bundle: Path) -> None:
    (bundle / "processing.py").write_text("import torch")
    without_digest(bundle, "processing.py")


@pytest.mark.parametrize(
    ("tamper", "complaint"),
    [
        (change_answers, "progression of predict differs by 0.1 (allowed"),
        (change_processing, "processing.py was changed: its SHA-256 is not the one in bundle.json"),
        (need_a_library, "processing.py needs a library"),
        (lose_its_operations, "bundle.json has no 'operations': copy the whole bundle again"),
        (cut_bundle_json, "is not JSON ("),
        (list_bundle_json, "bundle.json is not what a bundle has: copy the whole bundle"),
        (cut_the_graph, "cannot open model.onnx (Load model from"),
    ],
)
def test_a_tampered_bundle_is_refused_by_its_own_check(
    bundle: Path, tamper: Callable[[Path], None], complaint: str
) -> None:
    tamper(bundle)
    done = python(bundle, "bundle.py")
    assert done.returncode == 5 and complaint in done.stderr and len(done.stderr.splitlines()) == 1


# -------------------------------------------------------------------------------------------------- serving


def test_the_readmes_python(bundle: Path, answers: list[float]) -> None:
    (bundle.parent / "way1.py").write_text(snippets(bundle)[0])
    done = python(bundle, "../way1.py")
    assert done.stderr == "" and f"{answers[0]:.4f}" in done.stdout


def test_tritons_configuration_has_every_input(bundle: Path) -> None:
    text = (bundle / "model_repository/digits/config.pbtxt").read_text()
    assert '{ name: "body" data_type: TYPE_FP32 dims: [ 4 ] },' in text
    assert '{ name: "serum" data_type: TYPE_FP32 dims: [ 6 ] }' in text
    # One number a row: "reshape" in Triton's user guide, model_configuration.
    assert '{ name: "progression" data_type: TYPE_FP32 dims: [ 1 ] reshape: { shape: [ ] } }' in text


def test_another_runtime_is_checked_by_its_own_loader(
    deploy: Callable[..., Deployable], run_stage: Callable[..., Any]
) -> None:
    bundle = run_stage(bundling.run, BundleConfig(), **deploy(Eager()).with_others())
    assert bundle.spec.verified == ("the golden samples of every operation, to 0",)
    assert "bundle.py" not in bundle.manifest.files


# ------------------------------------------------------------------------------------------- several graphs


def test_each_operation_has_its_graph_and_golden_samples(split: Path) -> None:
    told = json.loads((split / "bundle.json").read_text())
    assert {one["name"]: one["file"] for one in told["operations"]} == {
        "encode": "engine/encoder.onnx",
        "decode": "engine/decoder.onnx",
    }
    assert told["operations"][1]["golden"] == {
        "state": "golden/golden_decode_state.npy",
        "progression": "golden/golden_decode_progression.npy",
    }
    done = python(split, "bundle.py")
    assert (done.returncode, done.stderr) == (0, "")
    readme = (split / "README.md").read_text()
    assert "no model repository for NVIDIA Triton" in readme and "--operation NAME" in readme
    assert not list(split.rglob("config.pbtxt")) and not (split / "triton_repository.py").exists()


def test_an_operation_is_asked_by_its_name(split: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "state.npz", state=np.load(split / "golden/golden_decode_state.npy"))
    done = python(split, "bundle.py", str(tmp_path / "state.npz"), "--operation", "decode")
    expected = np.load(split / "golden/golden_decode_progression.npy").tolist()
    assert json.loads(done.stdout) == {"progression": pytest.approx(expected)}
    done = python(split, "bundle.py", str(tmp_path / "state.npz"), "--operation", "dream")
    assert done.stderr == "error: there is no operation 'dream'; there are encode, decode\n"


# ---------------------------------------------------------------------------------------------- hpml bench


@pytest.mark.parametrize(("operation", "names"), [("", ["body", "serum"]), ("decode", ["state"])])
def test_hpml_bench_measures_any_operation(split: Path, operation: str, names: list[str]) -> None:
    subject = BundleSubject(folder=split, operation=operation)
    subject = subject.model_copy(update={"inputs": subject.signature({}).inputs})
    assert [tensor.name for tensor in subject.inputs] == names
    opened = subject.open(threads=1)
    subject.check(opened)
    feeds = opened.request({tensor.array: tensor.draw(3, seed=0) for tensor in subject.inputs})
    [answer] = opened.predict(feeds).values()
    assert len(answer) == 3
    with pytest.raises(ConfigInvalid, match="has no operation 'dream'"):
        BundleSubject(folder=split, operation="dream").open(threads=1)


def test_hpml_bench_opens_no_graph_without_a_digest(split: Path, tmp_path: Path) -> None:
    shutil.copytree(split, tmp_path / "bundle")
    (tmp_path / "evil.onnx").write_bytes(b"")
    engine = json.loads((split / "bundle.json").read_text())["engine"]
    engine["graphs"]["decoder"] = "../../evil.onnx"
    edit(tmp_path / "bundle/bundle.json", engine=engine)
    with pytest.raises(StageFailed, match=r"engine/\.\./\.\./evil\.onnx has no digest"):
        BundleSubject(folder=tmp_path / "bundle").open(threads=1)


def test_processing_that_cannot_be_imported_alone_is_not_shipped(
    deployable: Deployable, run_stage: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packaging = Diabetes.packaging

    def with_pandas(task: Diabetes) -> Any:
        (tmp_path / "processing.py").write_text("import torch\n")
        made = packaging(task)
        made.processing = tmp_path / "processing.py"
        return made

    monkeypatch.setattr(Diabetes, "packaging", with_pandas)
    with pytest.raises(GateFailed, match=r"not work on its own: processing\.py needs a library"):
        run_stage(bundling.run, BundleConfig(), **deployable.with_others())
