"""The bundle works on its own, and knows when it was tampered with."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from hpml.artifacts.bundle import BundleSpec
from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact, open_artifact, seal_artifact
from hpml.artifacts.measurements import EngineSettings
from hpml.components.bundle import stage as bundling
from hpml.components.bundle.config import BundleConfig
from hpml.core.errors import GateFailed, StageFailed
from hpml.tasks import task_of
from tests.components.bundle.conftest import chosen_and_registered, exported_int8, resealed

ENGINE = "model_repository/digits/1/model.onnx"

# As `python`, in a process that has numpy and onnxruntime and whose torch, or project, cannot be imported.
CLEAN = """\
import runpy, sys
for name in ("torch", "hpml", "onnx"):
    sys.modules[name] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, ".")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def python(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-c", CLEAN, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def snippets(bundle: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (bundle / "README.md").read_text(), flags=re.DOTALL)


@pytest.fixture
def golden_classes(bundle: Path, digits_data: Artifact[DatasetSpec]) -> str:
    """What a right snippet prints."""
    logits = np.load(bundle / "golden_logits.npy")
    return str([digits_data.spec.task["class_names"][row] for row in logits.argmax(axis=1)])


def test_what_is_in_the_bundle(deployed: Artifact[BundleSpec], deployable: Any) -> None:
    assert set(deployed.manifest.files) == {
        "README.md",
        "bundle.json",
        "bundle.py",
        "drift.json",
        "golden_images_nhwc.npy",
        "golden_logits.npy",
        "golden_x_nchw.npy",
        "model_repository/digits/1/model.onnx",
        "model_repository/digits/config.pbtxt",
        "preprocessing.json",
        "requirements.txt",
        "triton_repository.py",
    }
    assert deployed.spec.file == ENGINE and deployed.spec.engine_name == "variant"
    assert deployed.spec.engine_digest == deployable.version.spec.engine_digest
    assert "process without torch" in deployed.spec.verified[-1]
    manifest = json.loads(deployed.file("bundle.json").read_text())
    assert (manifest["model_name"], manifest["model_version"]) == ("digits", 1)
    assert manifest["inputs"] == [{"name": "x_nchw", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
    assert manifest["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, 10]}]
    assert set(manifest["files"]) == set(deployed.manifest.files) - {"bundle.json"}
    for name, digest in manifest["files"].items():
        assert deployed.manifest.files[name].sha256 == digest


def test_the_golden_images_are_of_the_validation_split(
    deployed: Artifact[BundleSpec], digits_data: Artifact[DatasetSpec]
) -> None:
    images_nhwc = np.load(deployed.file("golden_images_nhwc.npy"))
    of_the_split = task_of(digits_data.spec.task).stored(digits_data, "validation")["images"]
    spread = np.linspace(0, len(of_the_split) - 1, len(images_nhwc)).astype(int)
    assert np.array_equal(images_nhwc, of_the_split[spread])


def test_no_path_of_this_machine_is_in_it(deployed: Artifact[BundleSpec], deployable: Any) -> None:
    places = {
        str(Path(deployable.registry.removeprefix("sqlite:///")).parent.parent),
        str(Path(__file__).resolve().parents[3]),
        str(Path.home()),
        sys.prefix,
    }
    for name in deployed.manifest.files:
        content = deployed.file(name).read_bytes()
        for place in places:
            assert place.encode() not in content, f"{place} is in {name}"


# ------------------------------------------------------------------------------------------------- on its own


def test_it_checks_itself_somewhere_else_without_torch(bundle: Path) -> None:
    done = python(bundle, "bundle.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"max_abs_error": 0.0, "top1_agreement": 1.0}


def test_it_names_the_classes_of_images(bundle: Path, golden_classes: str) -> None:
    done = python(bundle, "bundle.py", "golden_images_nhwc.npy")
    assert str(done.stdout.split()) == golden_classes


def test_images_of_another_shape_are_refused(bundle: Path) -> None:
    np.save(bundle.parent / "images.npy", np.zeros((2, 9, 9, 1), np.uint8))
    done = python(bundle, "bundle.py", "../images.npy")
    assert done.returncode == 5 and done.stderr.startswith("error: the images are uint8 (2, 9, 9, 1)")


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def without_digest(bundle: Path, name: str) -> None:
    """As one who tampers thoroughly: the changed file gets its new digest into bundle.json."""
    import hashlib

    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["files"][name] = hashlib.sha256((bundle / name).read_bytes()).hexdigest()
    (bundle / "bundle.json").write_text(json.dumps(manifest))


def change_weights(bundle: Path) -> None:
    file = bundle / ENGINE
    flip(file, len(file.read_bytes()) // 2)


def truncate(bundle: Path) -> None:
    file = bundle / ENGINE
    file.write_bytes(file.read_bytes()[:-10])


def remove(bundle: Path) -> None:
    (bundle / "golden_x_nchw.npy").unlink()


def add_a_version(bundle: Path) -> None:
    shutil.copytree(bundle / "model_repository/digits/1", bundle / "model_repository/digits/2")


def link(bundle: Path) -> None:
    (bundle / ENGINE).rename(bundle.parent / "model.onnx")
    (bundle / ENGINE).symlink_to(bundle.parent / "model.onnx")


def list_a_file_outside(bundle: Path) -> None:
    (bundle.parent / "secret").write_text("")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    files = json.loads((bundle / "bundle.json").read_text())["files"]
    edit(bundle / "bundle.json", files=files | {"../secret": empty})


def change_the_mean(bundle: Path) -> None:
    edit(bundle / "preprocessing.json", mean=[0.9])
    without_digest(bundle, "preprocessing.json")


def change_answers(bundle: Path) -> None:
    logits = np.load(bundle / "golden_logits.npy")
    np.save(bundle / "golden_logits.npy", logits + 0.01)
    without_digest(bundle, "golden_logits.npy")


def not_a_number(bundle: Path) -> None:
    np.save(bundle / "golden_logits.npy", np.full((16, 10), np.nan, np.float32))
    without_digest(bundle, "golden_logits.npy")


def claim_other_shapes(bundle: Path) -> None:
    edit(bundle / "bundle.json", inputs=[{"name": "x_nchw", "datatype": "FP32", "shape": [-1, 3, 8, 8]}])


def pickled(bundle: Path) -> None:
    np.save(bundle / "golden_logits.npy", np.array([object()]), allow_pickle=True)
    without_digest(bundle, "golden_logits.npy")


@pytest.mark.parametrize(
    ("tamper", "complaint"),
    [
        (change_weights, f"{ENGINE} was changed"),
        (truncate, f"{ENGINE} was changed"),
        (remove, "golden_x_nchw.npy is missing"),
        (add_a_version, "model_repository/digits/2/model.onnx does not belong to the bundle"),
        (link, f"{ENGINE} is missing"),
        (list_a_file_outside, "../secret is missing"),
        (change_the_mean, "preprocessing.json does not turn the golden images into the golden inputs"),
        (change_answers, "a logit differs by 0.01"),
        (not_a_number, "a logit differs by nan"),
        (claim_other_shapes, "the inputs of the engine are {'x_nchw': [-1, 1, 8, 8]}"),
        (pickled, "allow_pickle=False"),
    ],
)
def test_a_tampered_bundle_is_refused_by_its_own_check(
    bundle: Path, tamper: Callable[[Path], None], complaint: str
) -> None:
    tamper(bundle)
    done = python(bundle, "bundle.py")
    assert done.returncode == 5 and done.stdout == ""
    assert done.stderr.startswith("error: ") and complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


# ------------------------------------------------------------------------------------ the README's three ways


def test_way_1_in_python(bundle: Path, golden_classes: str) -> None:
    (bundle.parent / "way1.py").write_text(snippets(bundle)[0])
    done = python(bundle, "../way1.py")
    assert (done.stdout.strip(), done.stderr) == (golden_classes, "")


@contextmanager
def open_inference_server(bundle: Path) -> Iterator[int]:
    """A server that answers what config.pbtxt says, as the protocol has it (v2, JSON); its port."""
    session = onnxruntime.InferenceSession(bundle / ENGINE, providers=["CPUExecutionProvider"])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            [tensor] = request["inputs"]
            assert self.path == "/v2/models/digits/infer" and tensor["datatype"] == "FP32"
            x = np.reshape(np.asarray(tensor["data"], np.float32), tensor["shape"])
            logits = session.run(["logits"], {tensor["name"]: x})[0]
            output = {
                "name": "logits",
                "datatype": "FP32",
                "shape": logits.shape,
                "data": logits.ravel().tolist(),
            }
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"model_name": "digits", "outputs": [output]}).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def test_way_2_asks_a_server(bundle: Path, golden_classes: str) -> None:
    with open_inference_server(bundle) as port:
        (bundle.parent / "way2.py").write_text(
            snippets(bundle)[1].replace("localhost:8000", f"127.0.0.1:{port}")
        )
        done = python(bundle, "../way2.py")
    assert (done.stdout.strip(), done.stderr) == (golden_classes, "")


def triton_model_config() -> Any:
    """The fields we write of inference.ModelConfig (triton-inference-server/common, model_config.proto)."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, bool, str]) -> None:
        described = file.message_type.add(name=name)
        for number, (key, kind, repeated, of) in enumerate(fields, 1):
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            described.field.add(name=key, number=number, type=kind, label=label, type_name=of or None)

    for name, values in (
        ("DataType", ("TYPE_INVALID", "TYPE_FP32")),
        ("Kind", ("KIND_AUTO", "KIND_GPU", "KIND_CPU")),
    ):
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    tensor = (
        ("name", field.TYPE_STRING, False, ""),
        ("data_type", field.TYPE_ENUM, False, ".inference.DataType"),
        ("dims", field.TYPE_INT64, True, ""),
    )
    message("ModelInput", *tensor)
    message("ModelOutput", *tensor)
    message(
        "ModelInstanceGroup",
        ("count", field.TYPE_INT32, False, ""),
        ("kind", field.TYPE_ENUM, False, ".inference.Kind"),
    )
    message("ModelDynamicBatching")
    message("ModelParameter", ("string_value", field.TYPE_STRING, False, ""))
    message(
        "ModelParameters",
        ("key", field.TYPE_STRING, False, ""),
        ("value", field.TYPE_MESSAGE, False, ".inference.ModelParameter"),
    )
    message("AllVersions")
    message(
        "ModelVersionPolicy",
        ("latest", field.TYPE_MESSAGE, False, ".inference.AllVersions"),
        ("all", field.TYPE_MESSAGE, False, ".inference.AllVersions"),
    )
    message(
        "ModelConfig",
        ("name", field.TYPE_STRING, False, ""),
        ("platform", field.TYPE_STRING, False, ""),
        ("default_model_filename", field.TYPE_STRING, False, ""),
        ("max_batch_size", field.TYPE_INT32, False, ""),
        ("input", field.TYPE_MESSAGE, True, ".inference.ModelInput"),
        ("output", field.TYPE_MESSAGE, True, ".inference.ModelOutput"),
        ("instance_group", field.TYPE_MESSAGE, True, ".inference.ModelInstanceGroup"),
        ("dynamic_batching", field.TYPE_MESSAGE, False, ".inference.ModelDynamicBatching"),
        ("version_policy", field.TYPE_MESSAGE, False, ".inference.ModelVersionPolicy"),
        ("parameters", field.TYPE_MESSAGE, True, ".inference.ModelParameters"),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))()


def test_way_2_the_model_repository_is_that_of_triton(bundle: Path) -> None:
    [model] = (bundle / "model_repository").iterdir()
    config = text_format.Parse((model / "config.pbtxt").read_text(), triton_model_config())
    assert config.name == model.name == "digits"
    assert config.platform == "onnxruntime_onnx" and config.max_batch_size == 64
    assert config.version_policy.HasField("all")
    assert (model / "1" / config.default_model_filename).is_file()
    session = onnxruntime.InferenceSession(model / "1" / config.default_model_filename)
    for told, found in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
        assert [(t.name, list(t.dims)) for t in told] == [(f.name, f.shape[1:]) for f in found]
        assert not isinstance(found[0].shape[0], int)  # the batch is free


@pytest.mark.slow  # imports mlflow; ways 1 and 2 are tried
def test_way_3_takes_the_engine_from_the_registry_if_it_is_this_one(bundle: Path, deployable: Any) -> None:
    (bundle.parent / "way3.py").write_text(snippets(bundle)[2])
    where = {"MLFLOW_TRACKING_URI": deployable.registry}
    done = subprocess.run(
        [sys.executable, "../way3.py"],
        cwd=bundle,
        capture_output=True,
        text=True,
        env={**os.environ, **where},
    )
    assert done.returncode == 0, done.stderr
    engine = Path(done.stdout.strip())
    assert engine.read_bytes() == (bundle / ENGINE).read_bytes()

    original = engine.read_bytes()
    try:
        flip(engine, 100)
        again = subprocess.run(
            [sys.executable, "../way3.py"],
            cwd=bundle,
            capture_output=True,
            text=True,
            env={**os.environ, **where},
        )
    finally:
        engine.write_bytes(original)
    assert again.returncode == 1 and "is not the engine of this bundle" in again.stderr


# ---------------------------------------------------------------------------------------------- the settings

# What a session of the bundle's script is given, told by the session that it makes.
OPTIONS = """
import json, sys, onnxruntime
make, key = onnxruntime.InferenceSession, "session.intra_op.allow_spinning"

def tell(file, options=None, **others):
    try:
        spinning = options.get_session_config_entry(key)
    except RuntimeError:
        spinning = None
    print(json.dumps([options.intra_op_num_threads, spinning]))
    return make(file, options, **others)

onnxruntime.InferenceSession = tell
"""


def options_of(bundle: Path, code: str) -> list[Any]:
    (bundle.parent / "options.py").write_text(OPTIONS + code)
    done = python(bundle, "../options.py")
    assert not done.stderr
    told: list[Any] = json.loads(done.stdout.splitlines()[0])
    return told


def test_the_engine_runs_with_the_settings_it_was_measured_with(bundle: Path) -> None:
    assert options_of(bundle, "from bundle import Model; Model()") == [2, "0"]
    assert options_of(bundle, "from bundle import Model; Model(threads=1, spinning=True)") == [1, "1"]
    assert options_of(bundle, snippets(bundle)[0]) == [2, "0"]
    readme = " ".join((bundle / "README.md").read_text().split())
    assert "| settings | 2 threads, not spinning |" in readme
    assert "gives the engine the 2 threads" in readme and "backend has no parameter for it" in readme
    config = (bundle / "model_repository/digits/config.pbtxt").read_text()
    [threads] = text_format.Parse(config, triton_model_config()).parameters
    assert (threads.key, threads.value.string_value) == ("intra_op_thread_count", "2")


def test_without_a_measurement_it_runs_with_the_runtimes_defaults(
    deployable_int8: Any, run_stage: Callable[..., Any]
) -> None:
    bundle = run_stage(bundling.run, BundleConfig(), **deployable_int8.with_others()).path
    assert options_of(bundle, "from bundle import Model; Model()") == [0, None]
    assert "| settings | not measured: those of its runtime's default |" in (bundle / "README.md").read_text()
    assert "SessionOptions" not in snippets(bundle)[0]
    assert "parameters" not in next(bundle.rglob("config.pbtxt")).read_text()


# --------------------------------------------------------------------------------------------- other engines


def test_an_int8_engine(deployable_int8: Any, run_stage: Callable[..., Any]) -> None:
    assert deployable_int8.engine.spec.precision == "int8"
    bundle = run_stage(bundling.run, BundleConfig(), **deployable_int8.with_others())
    done = python(bundle.path, "bundle.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert "int8" in bundle.file("README.md").read_text()


def test_of_an_engine_with_variants_the_measured_one_is_shipped(
    tmp_path: Path, small_model: Any, digits_data: Any, run_stage: Callable[..., Any]
) -> None:
    exported, registry = exported_int8(tmp_path, small_model, digits_data, "auto"), ""
    for version, variant in enumerate(("", "int8-activations"), 1):
        place = tmp_path / f"version {version}"
        place.mkdir()
        settings = EngineSettings(threads=1, variant=variant)
        found = chosen_and_registered(place, exported, digits_data, settings, registry)
        assert found.version.spec.version == version  # they are two models in the registry
        registry = found.registry
        bundle = run_stage(bundling.run, BundleConfig(), **found.with_others())
        told = json.loads(bundle.file("bundle.json").read_text())
        assert told["engine"]["identity"]["activations"] == ("int8" if variant else "uint8")
        assert (bundle.path / told["file"]).read_bytes() == (
            exported.path / variant / "model.onnx"
        ).read_bytes()
        assert len([name for name in bundle.manifest.files if name.endswith(".onnx")]) == 1


@pytest.mark.slow  # makes a bundle of torch's; that of ONNX Runtime is tried
def test_an_engine_of_another_runtime_is_checked_by_its_own_loader(
    deployable_eager: Any, run_stage: Callable[..., Any], golden_classes: str
) -> None:
    bundle = run_stage(bundling.run, BundleConfig(), **deployable_eager.with_others())
    assert bundle.spec.file == f"engine/{deployable_eager.engine.spec.file}"
    assert bundle.spec.verified[0] == "the preprocessing of the golden images"
    assert not {"bundle.py", "config.pbtxt"} & {Path(name).name for name in bundle.manifest.files}
    assert len(snippets(bundle.path)) == 2  # not the one for Triton
    (bundle.path.parent / "way1.py").write_text(snippets(bundle.path)[0])
    project = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(
        [sys.executable, "../way1.py"],
        cwd=bundle.path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": project},
    )
    assert (done.stdout.strip(), done.stderr) == (golden_classes, "")


def test_another_runtime_that_answers_otherwise_is_refused(
    deployable_eager: Any, run_stage: Callable[..., Any], tmp_path: Path
) -> None:
    def other_answers(place: Path) -> None:
        logits = np.load(place / "golden_logits.npy")
        np.save(place / "golden_logits.npy", logits + np.float32(0.01))

    engine = resealed(deployable_eager.engine, tmp_path / "changed", other_answers)
    with pytest.raises(GateFailed, match=r"answers otherwise .*: a logit differs by 0\.01, allowed 0\.001"):
        run_stage(bundling.run, BundleConfig(), **deployable_eager.with_others(engine=engine))


# --------------------------------------------------------------------------------------------------- refusals


def test_an_engine_that_does_not_answer_its_golden_inputs_is_refused(
    deployable: Any, run_stage: Callable[..., Any], tmp_path: Path
) -> None:
    def other_answers(place: Path) -> None:
        logits = np.load(place / "golden_logits.npy")
        np.save(place / "golden_logits.npy", logits[:, ::-1])

    engine = resealed(deployable.engine, tmp_path / "changed", other_answers)
    with pytest.raises(
        GateFailed, match=r"does not work on its own: the model answers otherwise .* logit differs"
    ):
        run_stage(bundling.run, BundleConfig(), **deployable.with_others(engine=engine))


def test_golden_inputs_that_are_no_images_are_refused(
    deployable: Any, run_stage: Callable[..., Any], tmp_path: Path
) -> None:
    def noise(place: Path) -> None:
        x_nchw = np.load(place / "golden_x_nchw.npy")
        np.save(place / "golden_x_nchw.npy", x_nchw + np.float32(0.01))

    engine = resealed(deployable.engine, tmp_path / "changed", noise)
    with pytest.raises(GateFailed, match="golden inputs of the engine are not normalised images"):
        run_stage(bundling.run, BundleConfig(), **deployable.with_others(engine=engine))


def test_a_version_of_another_engine_is_refused(
    deployable: Any, run_stage: Callable[..., Any], tmp_path: Path
) -> None:
    place = tmp_path / "version"
    place.mkdir()
    spec = deployable.version.spec.model_copy(update={"engine_digest": "another"})
    seal_artifact(place, spec=spec, metrics={}, lineage=deployable.version.manifest.lineage)
    version = open_artifact(place, kind="registration")
    with pytest.raises(StageFailed, match="version 1 of digits is not the chosen engine"):
        run_stage(bundling.run, BundleConfig(), **deployable.with_others(version=version))


def test_the_same_engine_gives_the_same_bundle(
    deployed: Artifact[BundleSpec], deployable: Any, run_stage: Callable[..., Any]
) -> None:
    again = run_stage(bundling.run, BundleConfig(), **deployable.with_others())
    assert again.digest == deployed.digest
