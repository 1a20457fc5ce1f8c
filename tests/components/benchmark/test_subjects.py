"""Everything that `hpml bench` can measure, opened for real, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, get_args

import numpy as np
import onnx
import pytest
from pydantic import TypeAdapter

from hpml.artifacts.bundle import BundleSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.evaluation import EvaluationSpec
from hpml.artifacts.folder import Artifact, open_artifact, seal_artifact
from hpml.artifacts.measurements import EngineFigures, EngineSettings
from hpml.artifacts.registration import RegistrationSpec
from hpml.components.bundle import stage as bundling
from hpml.components.bundle.config import BundleConfig
from hpml.core import hardware
from hpml.core.errors import ConfigInvalid, HpmlError, StageFailed, Unavailable
from hpml.measuring.goals import DECISION_FILE, DecisionRecord, Goals, Verdict
from hpml.measuring.process.engine_process import EngineProcess
from hpml.measuring.subjects import (
    AnySubject,
    BundleSubject,
    OnnxSubject,
    ServerSubject,
    TorchSubject,
)
from hpml.measuring.subjects.server import parse_url
from hpml.measuring.subjects.tensors import FromOutside, Tensor, parse_input, write_arrays
from hpml.targets.onnx_session import session_options
from tests.small_subjects import (
    MODEL_OF_THE_USER,
    InferenceServer,
    inference_server,
    write_image_model,
    write_text_model,
    write_thief,
)


def described(subject: FromOutside, **sizes: int) -> Any:
    """The subject with its inputs."""
    return subject.model_copy(update={"inputs": subject.signature(sizes).inputs})


def arrays_of(subject: FromOutside, rows: int = 4) -> dict[str, Any]:
    return {tensor.array: tensor.draw(rows, seed=0) for tensor in subject.inputs}


def open_in_a_worker(subject: FromOutside, tmp_path: Path) -> str:
    """The device it runs on, as a process of `hpml bench` tells; it has answered there once."""
    inputs = tmp_path / "inputs.npz"
    write_arrays(inputs, arrays_of(subject, rows=8))
    with EngineProcess("it", tmp_path / "it.log") as process:
        told = process.ask(
            "load",
            "loading",
            subject=subject.model_dump(mode="json"),
            inputs=str(inputs),
            batch_sizes=[1, 4],
            threads=1,
        )
    return str(told["device"])


# ------------------------------------------------------------------------------------------------ inputs


def test_every_subject_is_found_by_its_name() -> None:
    kinds = get_args(get_args(AnySubject)[0])
    names = [kind.model_fields["subject"].default for kind in kinds]
    assert names == ["engine", "bundle", "onnx", "torch", "server"]
    told = {"subject": "onnx", "file": "m.onnx"}
    assert TypeAdapter(AnySubject).validate_python(told) == OnnxSubject(file=Path("m.onnx"))


@pytest.mark.parametrize(
    ("text", "dtype", "shape"),
    [("3x32x32", "float32", (3, 32, 32)), ("128:int64", "int64", (128,)), ("1:bool", "bool", (1,))],
)
def test_inputs_are_described_in_words(text: str, dtype: str, shape: tuple[int, ...]) -> None:
    tensor = parse_input(text, 2)
    assert (tensor.dtype, tensor.shape, tensor.position) == (dtype, shape, 2)
    drawn = tensor.draw(5, seed=1)
    assert drawn.shape == (5, *shape) and drawn.dtype == dtype


@pytest.mark.parametrize("text", ["", "3x", "axb", "3x32:complex64", "-1x3", "3 x 4"])
def test_what_describes_no_input_is_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid, match="no shape of an input"):
        parse_input(text, 0)


def test_subjects_that_take_the_same_get_the_same_numbers() -> None:
    mine = Tensor(name="x", position=0, dtype="float32", shape=(3, 4))
    other = mine.model_copy(update={"name": "input"})
    assert mine.array == other.array
    assert (mine.draw(3, seed=7) == other.draw(3, seed=7)).all()
    assert (mine.draw(3, seed=7) != mine.draw(3, seed=8)).any()
    assert mine.array != mine.model_copy(update={"position": 1}).array
    integers = Tensor(name="ids", position=0, dtype="int64", shape=(100,)).draw(2, seed=0)
    assert set(np.unique(integers)) == {0, 1}


def test_arrays_may_have_any_name(tmp_path: Path) -> None:
    arrays = {"file": np.ones(3), "allow_pickle": np.zeros(2), "a/b:0": np.arange(4)}
    write_arrays(tmp_path / "a.npz", arrays)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as read:
        assert {name: read[name].tolist() for name in read.files} == {
            name: array.tolist() for name, array in arrays.items()
        }


# -------------------------------------------------------------------------------------------------- ONNX


def test_an_onnx_file_with_two_inputs(tmp_path: Path) -> None:
    subject = described(OnnxSubject(file=write_text_model(tmp_path / "text.onnx")), seq=16)
    assert [(t.name, t.dtype, t.shape) for t in subject.inputs] == [
        ("ids", "int64", (16,)),
        ("mask", "float32", (16,)),
    ]
    opened = subject.open(threads=1)
    arrays = arrays_of(subject, rows=3)
    [pooled] = opened.predict(opened.request(arrays))
    assert pooled.shape == (3, 8) and opened.device == "cpu"
    known = subject.known()
    assert known["size_bytes"] == (tmp_path / "text.onnx").stat().st_size
    assert known["parameters"] == 2 * 8 + 2
    assert open_in_a_worker(subject, tmp_path) == "cpu"


@pytest.mark.parametrize(("sequence", "named"), [("seq", "'seq'"), (None, "'ids.1'")])
def test_an_open_size_has_to_be_given(tmp_path: Path, sequence: str | None, named: str) -> None:
    subject = OnnxSubject(file=write_text_model(tmp_path / "text.onnx", sequence=sequence))
    with pytest.raises(ConfigInvalid, match=f"leaves the size of {named} open.*--dim"):
        subject.signature({})


def test_a_fixed_batch_is_told(tmp_path: Path) -> None:
    free = OnnxSubject(file=write_image_model(tmp_path / "free.onnx"))
    fixed = OnnxSubject(file=write_image_model(tmp_path / "fixed.onnx", batch=1))
    assert (free.signature({}).batch, fixed.signature({}).batch) == (None, 1)


@pytest.mark.parametrize("content", [b"", b"not protobuf at all", b"\x00" * 100])
def test_a_file_that_is_no_onnx_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.onnx").write_bytes(content)
    with pytest.raises(ConfigInvalid, match="is not an ONNX file"):
        OnnxSubject(file=tmp_path / "m.onnx").signature({})


@pytest.mark.parametrize("location", ["../secret.bin", "{tmp}/secret.bin", "link.bin"])
def test_weights_outside_the_files_folder_are_not_read(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(64))
    file = write_thief(tmp_path / "m" / "thief.onnx", location=location.format(tmp=tmp_path))
    (tmp_path / "m" / "link.bin").symlink_to("../secret.bin")
    subject = OnnxSubject(file=file)
    with pytest.raises(ConfigInvalid, match="outside its folder"):
        subject.signature({})
    with pytest.raises(StageFailed, match="cannot load"):
        subject.open(threads=1)


def test_what_onnx_runtime_cannot_open_is_refused_before_it_tries(tmp_path: Path) -> None:
    """By `hpml bench` and `hpml diagnose` as by `hpml quantize`."""
    model = onnx.load(write_image_model(tmp_path / "m.onnx"))
    model.graph.initializer[0].dims[:] = [10**9, 10**9]
    (tmp_path / "huge.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ConfigInvalid, match=r"'w' is said to hold 1000000000 x 1000000000 numbers"):
        OnnxSubject(file=tmp_path / "huge.onnx").signature({})
    model = onnx.load(tmp_path / "m.onnx")
    model.graph.node[0].domain = "theirs"
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(ConfigInvalid, match=r"needs a library of its own: .*theirs:Flatten"):
        OnnxSubject(file=tmp_path / "m.onnx").signature({})
    with pytest.raises(ConfigInvalid, match="is not an ONNX file: it is a device"):
        OnnxSubject(file=Path("/dev/zero")).signature({})


def test_weights_inside_the_files_folder_are_read_and_count(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(64))
    subject = described(OnnxSubject(file=write_thief(tmp_path / "m.onnx", location="w.bin")))
    opened = subject.open(threads=1)
    assert opened.predict(opened.request(arrays_of(subject)))[0].shape == (4, 4)
    assert subject.known()["size_bytes"] == (tmp_path / "m.onnx").stat().st_size + 64


def test_a_module_that_does_not_fit_into_memory_is_refused_before_it_is_made(user_module: Path) -> None:
    subject = TorchSubject(
        path="their_model_for_bench:of_width", arguments={"width": 10**12}, import_paths=(user_module,)
    )
    with pytest.raises(ConfigInvalid, match=r"of_width does not fit into memory: it asks for a tensor of"):
        subject.open(threads=1)


def test_an_engine_for_a_gpu_is_refused_without_one(tmp_path: Path) -> None:
    subject = described(OnnxSubject(file=write_image_model(tmp_path / "m.onnx"), device="cuda"))
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    with pytest.raises(StageFailed, match="runs on CPUs only"):
        subject.open(threads=1)


# ------------------------------------------------------------------------------------------------- torch


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the user's own module `their_model_for_bench`."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "their_model_for_bench.py").write_text(MODEL_OF_THE_USER)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "their_model_for_bench", raising=False)
    return tmp_path / "code"


def torch_subject(folder: Path, name: str, *inputs: str) -> Any:
    tensors = tuple(parse_input(text, index) for index, text in enumerate(inputs))
    path = f"their_model_for_bench:{name}"
    return TorchSubject(path=path, import_paths=(folder,), inputs=tensors)


def test_a_torch_module_by_its_import_path(user_module: Path, tmp_path: Path) -> None:
    subject = torch_subject(user_module, "small", "3x4x4")
    assert subject.signature({}).inputs == subject.inputs
    assert open_in_a_worker(subject, tmp_path) == "cpu"


def test_a_torch_module_with_two_inputs(user_module: Path) -> None:
    subject = torch_subject(user_module, "two_inputs", "3x4x4", "7:int64")
    opened = subject.open(threads=1)
    opened.predict(opened.request(arrays_of(subject, rows=3)))
    [seen] = sys.modules["their_model_for_bench"].SEEN
    assert seen == [((3, 3, 4, 4), "torch.float32"), ((3, 7), "torch.int64")]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("small", "nothing says what"),
        ("absent", "has no attribute 'absent'"),
        ("not_a_module", "returned a int, not a torch.nn.Module"),
        ("broken", "RuntimeError: no such weights"),
    ],
)
def test_what_is_no_torch_module_is_refused(user_module: Path, name: str, why: str) -> None:
    inputs = () if name == "small" else ("3x4x4",)
    subject = torch_subject(user_module, name, *inputs)
    with pytest.raises(HpmlError, match=why):
        subject.signature({})
        subject.open(threads=1)


# ------------------------------------------------------------------------------------------------ bundle


@pytest.fixture(scope="session")
def deployed(
    digits_engines: dict[str, Artifact[EngineSpec]],
    tmp_path_factory: pytest.TempPathFactory,
    run_stage_once: Any,
) -> Artifact[BundleSpec]:
    """A bundle by the stage bundle. Not to be changed."""
    place = tmp_path_factory.mktemp("deployable")
    engine = digits_engines["fp32/onnx"]
    lineage = engine.manifest.lineage
    figures = EngineFigures(
        status="measured", target="onnx", precision="fp32", methods=(), size_bytes=1, parameters=1, macs=1
    )
    decision = DecisionRecord(
        goals=Goals(),
        chosen="fp32/onnx",
        reason="",
        engine_digest=engine.digest,
        measurements_digest="",
        figures=figures,
        reference_figures=figures,
        verdicts={"fp32/onnx": Verdict("chosen", "")},
    )
    shutil.copytree(engine.path, place / "engine", ignore=shutil.ignore_patterns("manifest.json"))
    (place / "engine" / DECISION_FILE).write_text(decision.model_dump_json())
    seal_artifact(place / "engine", spec=engine.spec, metrics={}, lineage=lineage)
    version = RegistrationSpec(
        registry="",
        model_name="digits",
        version=1,
        aliases=(),
        engine_digest=engine.digest,
        champion_reason="",
    )
    (place / "version").mkdir()
    seal_artifact(place / "version", spec=version, metrics={}, lineage=lineage)
    tested = EvaluationSpec(test_split="once", engine="fp32/onnx", engine_digest=engine.digest)
    (place / "tested").mkdir()
    seal_artifact(place / "tested", spec=tested, metrics={}, lineage=lineage)
    return run_stage_once(
        bundling.run,
        BundleConfig(),
        engine=open_artifact(place / "engine", kind="engine"),
        version=open_artifact(place / "version", kind="registration"),
        evaluation=open_artifact(place / "tested", kind="evaluation"),
    )


@pytest.fixture
def bundle(deployed: Artifact[BundleSpec], tmp_path: Path) -> Path:
    """A copy of it, to do with as one likes."""
    shutil.copytree(deployed.path, tmp_path / "bundle")
    return tmp_path / "bundle"


def test_a_bundle(bundle: Path, tmp_path: Path) -> None:
    subject = described(BundleSubject(folder=bundle))
    assert subject.inputs[0].shape == (1, 8, 8)
    assert subject.known()["precision"] == "fp32" and subject.known()["macs"] > 0
    assert open_in_a_worker(subject, tmp_path) == "cpu"


def edit(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    told = json.loads((bundle / "bundle.json").read_text())
    change(told)
    (bundle / "bundle.json").write_text(json.dumps(told))


def change_the_engine(bundle: Path) -> None:
    file = next(bundle.rglob("*.onnx"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_bundle_of_format_1(bundle: Path, tmp_path: Path) -> None:
    """As it was written before there were tasks and operations."""

    def as_before(told: dict[str, Any]) -> None:
        for name in ("operations", "task_files", "tested"):
            del told[name]
        told["format"] = 1
        engine = told["engine"]
        for name in ("operations", "quality", "agreement", "generation_agreement", "graphs"):
            del engine[name]
        task = engine.pop("task")
        facts = {name: task[name] for name in ("mean", "std", "pictures")}
        engine["class_names"] = task["class_names"]
        engine["input"] = {"name": "x_nchw", "shape_chw": [1, 8, 8], **facts}
        engine |= {"accuracy_top1": 0.97, "top1_agreement": 1.0}

    edit(bundle, as_before)
    subject = described(BundleSubject(folder=bundle))
    assert open_in_a_worker(subject, tmp_path) == "cpu"
    opened = subject.open(threads=1)
    np.save(bundle / "golden_logits.npy", np.load(bundle / "golden_logits.npy") + 1)
    with pytest.raises(StageFailed, match="golden outputs: a number of logits differs by 1"):
        subject.check(opened)


def add_a_file(bundle: Path) -> None:
    (bundle / "model_repository" / "extra.onnx").write_bytes(b"")


def remove_a_file(bundle: Path) -> None:
    (bundle / "README.md").unlink()


def point_outside(bundle: Path) -> None:
    edit(bundle, lambda told: told.update(file="../elsewhere.onnx"))


def list_a_file_outside(bundle: Path) -> None:
    edit(bundle, lambda told: told["files"].update({"../elsewhere.onnx": "0" * 64}))


def golden_outside(bundle: Path) -> None:
    edit(bundle, lambda told: told["operations"][0]["golden"].update(x_nchw="/etc/hostname"))


def name_another_target(bundle: Path) -> None:
    edit(bundle, lambda told: told["engine"].update(target={"target": "eager"}))


def be_no_json(bundle: Path) -> None:
    (bundle / "bundle.json").write_text("{")


def be_another_json(bundle: Path) -> None:
    (bundle / "bundle.json").write_text("[1, 2]")


@pytest.mark.parametrize(
    ("tamper", "why"),
    [
        (change_the_engine, "model.onnx was changed: its SHA-256 is not"),
        (add_a_file, "extra.onnx does not belong"),
        (remove_a_file, "README.md is missing"),
        (point_outside, "elsewhere.onnx has no digest"),
        (list_a_file_outside, "elsewhere.onnx is missing"),
        (golden_outside, "/etc/hostname has no digest"),
        (name_another_target, "no engine of ONNX Runtime's"),
        (be_no_json, "cannot be read"),
        (be_another_json, "cannot be read"),
    ],
    ids=lambda item: getattr(item, "__name__", ""),
)
def test_a_bundle_that_was_changed_is_refused_before_it_is_loaded(
    bundle: Path, tamper: Callable[[Path], None], why: str
) -> None:
    tamper(bundle)
    with pytest.raises((StageFailed, ConfigInvalid), match=why):
        BundleSubject(folder=bundle).open(threads=1)


def test_a_bundle_of_another_runtime_is_refused_before_a_worker_starts(bundle: Path) -> None:
    name_another_target(bundle)
    with pytest.raises(ConfigInvalid, match="no engine of ONNX Runtime's"):
        BundleSubject(folder=bundle).signature({})


def test_a_bundle_that_answers_otherwise_is_refused(bundle: Path) -> None:
    subject = described(BundleSubject(folder=bundle))
    opened = subject.open(threads=1)
    np.save(bundle / "golden_logits.npy", np.load(bundle / "golden_logits.npy") + 1)
    with pytest.raises(StageFailed, match="golden outputs: a number of logits differs by 1"):
        subject.check(opened)


def test_a_bundle_is_measured_as_it_says(bundle: Path) -> None:
    subject = BundleSubject(folder=bundle)
    assert subject.candidates(2) == (EngineSettings(threads=2),)  # it says nothing: one candidate
    said = EngineSettings(threads=2, spinning=False)
    edit(bundle, lambda told: told.update(settings=said.model_dump()))
    assert subject.candidates(8) == (said,)
    assert subject.candidates(1) == (EngineSettings(threads=1),)  # it may not have as many


# ---------------------------------------------------------------------------------------------- settings


def test_onnx_runtime_is_tried_with_fewer_threads_and_without_spinning(tmp_path: Path) -> None:
    subject = OnnxSubject(file=tmp_path / "any.onnx")
    assert [str(settings) for settings in subject.candidates(2)] == [
        "2 threads, spinning",
        "2 threads, not spinning",
        "1 thread",
    ]
    assert EngineSettings(threads=4, spinning=True) in subject.candidates(8)
    assert [settings.threads for settings in subject.candidates(1)] == [1]
    assert len(OnnxSubject(file=tmp_path / "any.onnx", device="cuda").candidates(8)) == 1


def test_each_build_of_a_file_is_tried(tmp_path: Path) -> None:
    signed = tmp_path / "signed.onnx"
    subject = OnnxSubject(file=tmp_path / "any.onnx", variants={"signed": signed})
    assert [settings.variant for settings in subject.candidates(1)] == ["", "signed"]
    assert subject.of_variant("").file == subject.file and subject.of_variant("signed").file == signed


@pytest.mark.parametrize(("spinning", "entry"), [(None, None), (True, "1"), (False, "0")])
def test_spinning_is_left_to_onnx_runtime_unless_it_is_said(spinning: bool | None, entry: str | None) -> None:
    options = session_options(2, spinning)
    assert options.intra_op_num_threads == 2
    if entry is None:
        with pytest.raises(RuntimeError):
            options.get_session_config_entry("session.intra_op.allow_spinning")
    else:
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == entry


def test_torch_has_a_thread_a_core_as_users_run_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(siblings)
    monkeypatch.setattr(hardware, "_CPUS", tmp_path)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(hardware.cgroup, "cpu_quota", lambda: None)
    subject = TorchSubject(path="any:thing")
    assert subject.candidates(4) == (EngineSettings(threads=2),)
    assert subject.candidates(1) == (EngineSettings(threads=1),)
    monkeypatch.setattr(hardware, "_CPUS", tmp_path / "not told")
    assert subject.candidates(4) == (EngineSettings(threads=4),)


# ------------------------------------------------------------------------------------------------ server


def at(server: InferenceServer, **fields: Any) -> ServerSubject:
    return ServerSubject(url=server.url, model="sum", **fields)


@pytest.mark.parametrize("extensions", [(), ("classification", "binary_tensor_data")])
def test_a_server_is_asked_by_the_protocol(extensions: tuple[str, ...]) -> None:
    with inference_server(extensions=extensions) as server:
        subject = described(at(server))
        assert subject.inputs == (Tensor(name="x", position=0, dtype="float32", shape=(3, 4, 4)),)
        opened = subject.open(threads=1)
        subject.check(opened)
        arrays = arrays_of(subject, rows=2)
        asked_before = len(server.seen)
        answers = [json.loads(opened.predict(opened.request(arrays))) for _ in range(3)]
        [output] = answers[0]["outputs"]
        [x] = arrays.values()
        assert np.allclose(output["data"], x.reshape(2, -1).sum(axis=1), rtol=1e-5)
        assert opened.device == "remote" and len(server.seen) == asked_before + 3
        assert server.connections == 2  # the signature's, and one for all requests
        is_binary = "Inference-Header-Content-Length" in server.seen[-1][1]
        assert is_binary == bool(extensions)


def test_a_server_in_a_worker(tmp_path: Path) -> None:
    with inference_server() as server:
        assert open_in_a_worker(described(at(server)), tmp_path) == "remote"


def test_clients_of_a_closed_loop_have_a_connection_each() -> None:
    with inference_server() as server:
        subject = described(at(server))
        opened = subject.open(threads=1)
        request = opened.request(arrays_of(subject))
        with ThreadPoolExecutor(4) as clients:
            together = Barrier(4)
            answers = set(clients.map(lambda _: (together.wait(), opened.predict(request))[1], range(4)))
        assert opened.thread_safe and len(answers) == 1
        assert server.connections == 2 + 4


def test_a_connection_that_the_server_closed_is_opened_again() -> None:
    with inference_server(close_after_each=True) as server:
        subject = described(at(server))
        opened = subject.open(threads=1)
        for _ in range(3):
            opened.predict(opened.request(arrays_of(subject)))
        assert server.connections >= 4


def test_a_server_that_is_not_there() -> None:
    with inference_server() as server:
        subject = at(server)
    with pytest.raises(Unavailable, match="does not answer: ConnectionRefusedError"):
        subject.signature({})


def test_a_server_that_takes_too_long() -> None:
    with (
        inference_server(delay_s=1.0) as server,
        pytest.raises(Unavailable, match=r"did not answer for 0.1 s"),
    ):
        at(server, timeout_s=0.1).signature({})


def test_a_model_that_the_server_does_not_have() -> None:
    with inference_server() as server:
        subject = ServerSubject(url=server.url, model="../../other")
        with pytest.raises(Unavailable, match=r"status 404.*unknown model"):
            subject.signature({})
        assert server.seen[-1][0] == "/v2/models/..%2F..%2Fother"


def test_a_request_that_the_server_refuses() -> None:
    with inference_server() as server:
        subject = described(at(server))
        opened = subject.open(threads=1)
        server.shape = (-1, 5)
        with pytest.raises(Unavailable, match=r"status 400.*unexpected shape"):
            opened.predict(opened.request(arrays_of(subject)))


@pytest.mark.parametrize("status", [301, 307, 500, 204])
def test_only_200_is_an_answer_and_redirects_are_not_followed(status: int) -> None:
    with inference_server(answer=lambda _: (status, b"")) as server:
        with pytest.raises(Unavailable, match=f"status {status}"):
            at(server).signature({})
        assert len(server.seen) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[1]",
        b"{}",
        b'{"inputs": []}',
        b'{"inputs": "xy"}',
        b'{"inputs": [{"name": "x"}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": 3}]}',
        b"[" * 100_000,
        b"\xff\xfe\x00",
    ],
)
def test_metadata_that_is_garbage_is_refused(body: bytes) -> None:
    refused = pytest.raises(Unavailable, match=r"does not (answer by the protocol|say what it takes)")
    with inference_server(answer=lambda _: (200, body)) as server, refused:
        at(server).signature({})


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        ({"datatype": "BYTES", "shape": [-1, 3]}, "takes 'x' as BYTES"),
        ({"datatype": "FP32", "shape": []}, "without dimensions"),
        ({"datatype": "FP32", "shape": [-1, -1]}, r"size of 'x.1' open"),
        ({"datatype": "FP32", "shape": [-1, 10**12]}, "bytes a sample"),
    ],
)
def test_inputs_that_cannot_be_made_are_refused(tensor: dict[str, Any], why: str) -> None:
    body = json.dumps({"inputs": [{"name": "x", **tensor}]}).encode()
    with inference_server(answer=lambda _: (200, body)) as server, pytest.raises(ConfigInvalid, match=why):
        at(server).signature({})


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"outputs": []}', b'{"outputs": 3}', b'{"outputs": [1]}', b"[" * 99_999]
)
def test_an_answer_that_is_garbage_is_refused(body: bytes) -> None:
    with inference_server() as server:
        subject = described(at(server))
        opened = subject.open(threads=1)
        server.answer = lambda path: (200, body) if path.endswith("/infer") else None
        with pytest.raises(Unavailable, match="does not answer by the protocol"):
            subject.check(opened)


def test_an_answer_that_is_too_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpml.measuring.subjects.server._LARGEST_ANSWER", 1024 * 1024)
    refused = pytest.raises(Unavailable, match="answers with more than 1 MiB")
    with inference_server(answer=lambda _: (200, bytes(2 * 1024 * 1024))) as server, refused:
        at(server).signature({})


def test_the_terminal_is_not_steered_by_a_server() -> None:
    answer = (500, b"\x1b[2J\x1b]0;owned\x07")
    with inference_server(answer=lambda _: answer) as server, pytest.raises(Unavailable) as caught:
        at(server).signature({})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("url", "model", "place", "name", "version"),
    [
        ("http://host:8000/v2/models/m", "", "http://host:8000", "m", ""),
        ("https://host/v2/models/m/versions/3/infer", "", "https://host", "m", "3"),
        ("http://host:8000", "m", "http://host:8000", "m", ""),
        ("http://[::1]:80/v2/models/a%20b", "", "http://[::1]:80", "a b", ""),
    ],
)
def test_addresses_of_servers(url: str, model: str, place: str, name: str, version: str) -> None:
    subject = parse_url(url, model)
    assert (subject.url, subject.model, subject.version) == (place, name, version)


@pytest.mark.parametrize(
    "url",
    [
        "http://host",
        "ftp://host/v2/models/m",
        "file:///etc/passwd",
        "http://me:secret@host/v2/models/m",
        "http://host/v2/models/m?token=secret",
        "http://host/other/place",
        "http://host:99999/v2/models/m",
        "http:///v2/models/m",
    ],
)
def test_addresses_that_are_refused_and_no_password_is_told(url: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)
