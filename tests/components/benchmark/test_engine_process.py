"""An engine's process: it is the right engine, sleeps when idle, and never dies or lingers unnoticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact, copy_files, open_artifact, seal_artifact
from hpml.core import memory
from hpml.core.errors import StageFailed
from hpml.measuring.process.engine_process import EngineProcess
from hpml.measuring.subjects import EngineSubject, OnnxSubject
from hpml.measuring.subjects.tensors import write_arrays
from tests.small_subjects import write_endless, write_glutton

Engines = dict[str, Artifact[EngineSpec]]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[EngineProcess]:
    with EngineProcess("fp32/onnx", tmp_path / "engine.log", reply_limit_s=120) as started:
        yield started


@pytest.fixture
def inputs(inputs_of: Callable[[int], Path]) -> Path:
    """Validation images as all engines take them."""
    return inputs_of(64)


def _load(process: EngineProcess, engine: Artifact[EngineSpec], inputs: Path) -> dict[str, Any]:
    return process.ask(
        "load",
        "loading",
        subject=EngineSubject(folder=engine.path).model_dump(mode="json"),
        inputs=str(inputs),
        batch_sizes=[1, 8],
        threads=2,
    )


def _altered(engine: Artifact[EngineSpec], place: Path, name: str, content: bytes) -> Artifact[EngineSpec]:
    """A well-sealed copy of `engine` with other bytes in the file `name`."""
    place.mkdir()
    copy_files(engine, place)
    (place / name).unlink()
    (place / name).write_bytes(content)
    seal_artifact(place, spec=engine.spec, metrics={}, lineage=engine.manifest.lineage)
    return open_artifact(place, kind="engine")


def _npy(array: np.ndarray, place: Path) -> bytes:
    np.save(place / "array.npy", array)
    return (place / "array.npy").read_bytes()


def test_it_times_requests_at_a_cost_of_microseconds(
    process: EngineProcess, digits_engines: Engines, inputs: Path
) -> None:
    loaded = _load(process, digits_engines["fp32/onnx"], inputs)
    timed = process.ask("time", "being timed", batch=8, requests=25)
    assert len(timed["started_ns"]) == len(timed["finished_ns"]) == 25
    assert all(begun < done for begun, done in zip(timed["started_ns"], timed["finished_ns"], strict=True))
    assert len(timed["readings"]) >= 2
    assert 0 < loaded["harness_us_per_request"] < 50  # some 0.2; the bound is for a machine that is torn away


@pytest.mark.parametrize("name", ["fp32/eager", "fp32/onnx"])
def test_an_idle_engine_does_not_spin(
    process: EngineProcess, digits_engines: Engines, inputs: Path, name: str
) -> None:
    _load(process, digits_engines[name], inputs)
    process.ask("time", "being timed", batch=8, requests=50)
    before_s = _cpu_seconds(process.pid)
    time.sleep(1)
    assert _cpu_seconds(process.pid) - before_s <= 0.05


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_engine_that_says_something_else_is_not_timed(
    process: EngineProcess, digits_engines: Engines, inputs: Path, tmp_path: Path
) -> None:
    engine = digits_engines["fp32/onnx"]
    golden = np.load(engine.file("golden_logits.npy"))
    wrong = _altered(engine, tmp_path / "wrong", "golden_logits.npy", _npy(np.roll(golden, 1, 1), tmp_path))
    with pytest.raises(
        StageFailed, match=r"'fp32/onnx' failed while loading.*golden outputs.*of the largest"
    ):
        _load(process, wrong, inputs)


def test_an_engine_with_other_classes_is_not_timed(
    process: EngineProcess, digits_engines: Engines, inputs: Path, tmp_path: Path
) -> None:
    engine = digits_engines["fp32/onnx"]
    golden = np.load(engine.file("golden_logits.npy"))
    wrong = _altered(engine, tmp_path / "wrong", "golden_logits.npy", _npy(golden[:, :7], tmp_path))
    with pytest.raises(StageFailed, match=r"golden outputs.*shape"):
        _load(process, wrong, inputs)


def test_golden_outputs_that_are_not_numbers_are_refused(
    process: EngineProcess, digits_engines: Engines, inputs: Path, tmp_path: Path
) -> None:
    engine = digits_engines["fp32/onnx"]
    golden = np.full_like(np.load(engine.file("golden_logits.npy")), np.nan)
    wrong = _altered(engine, tmp_path / "wrong", "golden_logits.npy", _npy(golden, tmp_path))
    with pytest.raises(StageFailed, match="golden outputs"):
        _load(process, wrong, inputs)


def test_an_engine_that_does_not_load_is_named(
    process: EngineProcess, digits_engines: Engines, inputs: Path, tmp_path: Path
) -> None:
    engine = digits_engines["fp32/onnx"]
    half = engine.file(engine.spec.file).read_bytes()[: engine.spec.size_bytes // 2]
    broken = _altered(engine, tmp_path / "broken", engine.spec.file, half)
    with pytest.raises(StageFailed, match="the engine 'fp32/onnx' failed while loading: "):
        _load(process, broken, inputs)


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL"])
def test_a_crash_is_named(process: EngineProcess, digits_engines: Engines, inputs: Path, name: str) -> None:
    _load(process, digits_engines["fp32/onnx"], inputs)
    process.send("time", "being timed at batch 1", batch=1, requests=1_000_000)
    os.kill(process.pid, signal.Signals[name])
    with pytest.raises(
        StageFailed, match=f"'fp32/onnx' failed while being timed at batch 1: .* killed by {name}"
    ):
        process.receive()
    with pytest.raises(StageFailed, match=name):
        process.ask("time", "being timed at batch 8", batch=8, requests=1)


def test_what_the_process_said_last_is_told(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with EngineProcess("fp32/onnx", log) as process:
        log.write_text("loading\nout of registers on this GPU\n\n")
        os.kill(process.pid, signal.SIGABRT)
        with pytest.raises(StageFailed, match=r"SIGABRT; it said last: out of registers on this GPU$"):
            process.receive()


def test_an_engine_that_hangs_is_named(tmp_path: Path) -> None:
    with EngineProcess("fp32/onnx", tmp_path / "engine.log", reply_limit_s=0.2) as process:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(
            StageFailed,
            match=r"'fp32/onnx' failed while starting: it did not answer within its limit of 0\.2 s",
        ):
            process.receive()
    assert not Path(f"/proc/{process.pid}").exists()


def _load_file(process: EngineProcess, file: Path, place: Path) -> None:
    write_arrays(place / "x.npz", {"0:float32:4": np.ones((1, 4), np.float32)})
    subject = OnnxSubject(file=file)
    subject = subject.model_copy(update={"inputs": subject.signature({}).inputs})
    told = subject.model_dump(mode="json")
    arguments = {"inputs": str(place / "x.npz"), "batch_sizes": [1], "threads": 1}
    process.ask("load", "loading", subject=told, **arguments)


def test_a_loop_that_never_ends_is_ended(tmp_path: Path) -> None:
    file = write_endless(tmp_path / "endless.onnx")
    refused = pytest.raises(
        StageFailed, match=r"'endless' failed while loading: .* within its limit of 3 s and was stopped"
    )
    with EngineProcess("endless", tmp_path / "engine.log", reply_limit_s=3) as process, refused:
        _load_file(process, file, tmp_path)
    assert not Path(f"/proc/{process.pid}").exists()


def test_an_engine_that_takes_too_much_memory_is_refused_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1_250_000_000)
    file = write_glutton(tmp_path / "glutton.onnx", size_bytes=2 * 10**9)
    refused = pytest.raises(StageFailed, match=r"'glutton' failed while loading: .*may take 1 GB")
    with EngineProcess("glutton", tmp_path / "engine.log") as process, refused:
        _load_file(process, file, tmp_path)


def test_an_interrupt_of_the_whole_group_leaves_the_engine_to_its_parent(
    process: EngineProcess, digits_engines: Engines, inputs: Path
) -> None:
    _load(process, digits_engines["fp32/onnx"], inputs)
    os.kill(process.pid, signal.SIGINT)
    assert len(process.ask("time", "being timed", batch=1, requests=3)["started_ns"]) == 3


def test_no_engine_outlives_a_killed_stage(tmp_path: Path) -> None:
    parent = (
        "import os, pathlib, sys, time\n"
        "from hpml.measuring.process.engine_process import EngineProcess\n"
        "process = EngineProcess('fp32/onnx', pathlib.Path(sys.argv[1]))\n"
        "try: process.ask('load', 'loading')\n"  # answered with an error: by now the worker is set up
        "except Exception: pass\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    stage = subprocess.Popen(
        [sys.executable, "-c", parent, str(tmp_path / "engine.log")], stdout=subprocess.PIPE, text=True
    )
    assert stage.stdout is not None
    pid = int(stage.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    stage.kill()
    stage.wait()
    stage.stdout.close()
    for _ in range(100):
        if not _runs(pid):
            return
        time.sleep(0.1)
    pytest.fail("the engine's process outlived its parent")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
