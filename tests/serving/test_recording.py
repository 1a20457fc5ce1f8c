"""Requests in a file: written within bounds by a server that is asked, read again by whoever replays them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.operation import Operation, TensorSpec
from hpml.core.errors import UsageError
from hpml.measuring.subjects.bundle import BundleSubject
from hpml.serving import recording
from hpml.serving.batching import Batcher
from hpml.serving.prometheus import Metrics
from hpml.serving.recording import Recorder, read_requests
from tests.serving.small_bundles import OPERATION, write_bundle
from tests.serving.test_batching import Doubling, rows
from tests.serving.test_server import X, bundle, serving

__all__ = ["bundle"]  # the fixture

LINE = '{"inputs":[{"name":"x_nchw","datatype":"FP32","shape":[1,1,4,4],"data":[' + "0.5," * 15 + "0.1]}]}\n"


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    """Of an engine that takes pictures of 4x4."""
    return BundleSubject(folder=write_bundle(tmp_path / "small")).facts().engine


@pytest.fixture(autouse=True)
def _all_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_EVERY_S", 0.0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


def recorder(file: Path, said: list[str] | None = None, **bounds: int) -> Recorder:
    told = {"most_requests": 100, "most_bytes": 10**6, **bounds}
    return Recorder(file, tell=(said if said is not None else []).append, **told)


def record(recorder: Recorder, *arrays: np.ndarray) -> None:
    """One after the other, and close it."""
    for x_nchw in arrays:
        recorder.add(OPERATION, "predict", {"x_nchw": x_nchw})
        while recorder._waiting.qsize():
            time.sleep(0.001)
    recorder.close()


def read(
    file: Path, spec: EngineSpec, *, max_rows: int = 64, tell: Callable[[str], None] = print
) -> list[Any]:
    return list(read_requests(file, spec, max_rows=max_rows, tell=tell))


def picture(value: float, rows: int = 1) -> np.ndarray:
    return np.full((rows, 1, 4, 4), value, np.float32)


# ------------------------------------------------------------------------------------------------ writing


def test_what_was_recorded_is_read_to_the_last_bit(file: Path, spec: EngineSpec) -> None:
    noise = np.random.default_rng(0).standard_normal((3, 1, 4, 4)).astype(np.float32)
    record(recorder(file), picture(0.1), noise, noise[:, :, ::-1])
    found = [feeds["x_nchw"] for feeds in read(file, spec)]
    assert all(map(np.array_equal, found, (picture(0.1), noise, noise[:, :, ::-1])))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("float16", [0.1, -2]),
        ("int64", [2**62, -1]),
        ("int32", [1, 2]),
        ("bool", [True, False]),
        ("int64", []),
    ],
)
def test_every_type_is_read_as_it_was_written(
    file: Path, spec: EngineSpec, dtype: Any, values: list[float]
) -> None:
    inputs = (TensorSpec(name="x", dtype=dtype, shape=("batch", "length")),)
    operation = Operation(inputs=inputs, outputs=OPERATION.outputs)
    array = np.array([values], dtype)
    made = recorder(file)
    made.add(operation, "predict", {"x": array})
    made.close()
    (found,) = read(file, spec.model_copy(update={"operations": (operation,)}))
    assert found["x"].dtype == array.dtype and np.array_equal(found["x"], array)


def test_it_ends_at_its_bounds_and_says_so(file: Path) -> None:
    said: list[str] = []
    record(recorder(file, said, most_requests=2), *[picture(0)] * 5)
    assert len(file.read_bytes().splitlines()) == 2
    assert said == [f"no more requests are recorded in {file}: it has 2; that is as much as it may hold"]
    size_bytes = file.stat().st_size
    record(recorder(file, said, most_bytes=size_bytes + 10), picture(0))
    assert file.stat().st_size == size_bytes


def test_of_many_in_one_moment_one_is_recorded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_EVERY_S", 3600)
    record(recorder(file), *[picture(0)] * 5)
    assert len(file.read_bytes().splitlines()) == 1


def test_one_that_is_too_long_is_left_out_and_said_once(
    file: Path, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(recording, "MOST_LINE_BYTES", 500)
    record(recorder(file, said), picture(0, 9), picture(1), picture(0.12345, 5))
    assert [len(feeds["x_nchw"]) for feeds in read(file, spec)] == [1]
    assert len(said) == 1 and "are not recorded" in said[0]


def test_a_killed_servers_file_is_read_and_goes_on(file: Path, spec: EngineSpec) -> None:
    record(recorder(file), picture(1), picture(2))
    whole = file.read_bytes()
    for cut in (1, 30, 2 + len(LINE) // 2):
        file.write_bytes(whole + whole[:cut])
        said: list[str] = []
        assert len(read(file, spec, tell=said.append)) == 2
        assert said == [f"the last line of {file} is cut off, and left out"]
    record(recorder(file), picture(3))
    assert [feeds["x_nchw"][0, 0, 0, 0] for feeds in read(file, spec)] == [1, 2, 3]


def test_a_full_disk_ends_it_with_a_file_of_whole_lines(
    file: Path, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    made, write = recorder(file, said), os.write
    made.add(OPERATION, "predict", {"x_nchw": picture(1)})
    while not file.stat().st_size:
        time.sleep(0.001)
    monkeypatch.setattr(recording.os, "write", lambda number, line: write(number, line[:20]))
    record(made, picture(2), picture(3))
    monkeypatch.undo()
    assert len(read(file, spec)) == 1
    assert len(said) == 1 and "No space left" in said[0]


def test_only_answers_of_the_first_operation_are_kept(file: Path) -> None:
    inputs = (TensorSpec(name="x", shape=("batch", 1)),)
    first, made = Operation(inputs=inputs, outputs=inputs), recorder(file)

    async def use() -> None:
        batcher = Batcher(
            Doubling(),  # type: ignore[arg-type]
            max_rows=8,
            max_queue_s=60,
            metrics=Metrics(),
            record=partial(made.add, first),
        )
        for operation, number in (("predict", 1), ("other", 2), ("predict", 13)):
            await asyncio.wait([batcher.ask(operation, rows(number))])
        await asyncio.to_thread(batcher.close)

    asyncio.run(use())
    made.close()
    assert [json.loads(line)["inputs"][0]["data"] for line in file.read_bytes().splitlines()] == [[1.0]]


def link(file: Path) -> None:
    file.symlink_to(file.with_name("elsewhere"))


def open_to_others(file: Path) -> None:
    file.touch(0o644)
    file.chmod(0o644)


def notes(file: Path) -> None:
    file.write_text("notes\nof somebody")
    file.chmod(0o600)


def pipe(file: Path) -> None:
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (link, "a link"),
        (Path.mkdir, "directory"),
        (open_to_others, "chmod 600"),
        (notes, "something else is in it"),
        (pipe, "no regular file"),
    ],
)
def test_a_file_that_is_not_for_it_is_left_alone(file: Path, make: Any, why: str) -> None:
    make(file)
    with pytest.raises(UsageError, match=why):
        recorder(file)
    assert make is not notes or file.read_text() == "notes\nof somebody"


def test_a_file_of_somebody_else_is_left_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder(file).close()
    monkeypatch.setattr(recording.os, "geteuid", lambda: file.stat().st_uid + 1)
    with pytest.raises(UsageError, match="another user's"):
        recorder(file)


def test_two_servers_do_not_share_a_file(file: Path) -> None:
    made = recorder(file)
    with pytest.raises(UsageError, match="another server records there"):
        recorder(file)
    made.close()


# ------------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{\n", "not JSON"),
        ("\n", "not JSON"),
        ("[" * 5000 + "\n", "not JSON"),
        (LINE.replace("[1,1,4,4]", "[1,1,2,8]"), r"has the shape \[1, 1, 2, 8\], the model takes"),
        (LINE.replace("FP32", "INT64"), "datatype INT64, not FP32"),
        (LINE.replace("x_nchw", "picture"), "the inputs are picture; the model takes x_nchw"),
        (LINE.replace("0.1]", "1e300]"), "too large for FP32"),
        (LINE.replace("[1,1,4,4]", "[2,1,4,4]"), "16 numbers, its shape is"),
        (LINE.replace('"data":', '"parameters":{"binary_data_size":64},"data":'), "body ends before"),
        (LINE.replace("[1,1,4,4]", "[0,1,4,4]").replace("0.5," * 15 + "0.1", ""), "0 rows"),
        (LINE.strip().replace("FP32", "FP16"), "datatype FP16"),  # the last line, and whole
    ],
)
def test_a_line_that_does_not_fit_is_named(file: Path, spec: EngineSpec, line: str, why: str) -> None:
    file.write_text(LINE + line)
    with pytest.raises(UsageError, match=rf"line 2 of .* is no request to this model: .*{why}"):
        read(file, spec)


def test_a_request_of_more_rows_than_the_server_takes_is_named(file: Path, spec: EngineSpec) -> None:
    record(recorder(file), picture(1), picture(1, 9))
    assert len(read(file, spec, max_rows=9)) == 2
    with pytest.raises(UsageError, match=r"line 2 .* has 9 rows, 1 to 8"):
        read(file, spec, max_rows=8)


def test_a_file_without_bounds_is_refused(
    file: Path, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with file.open("wb") as sparse:
        sparse.truncate(64_000_001)
    with pytest.raises(UsageError, match="more than 64 MB"):
        read(file, spec)
    with file.open("wb") as sparse:
        sparse.truncate(9_000_000)
    with pytest.raises(UsageError, match="line 1 has more than 8 MB"):
        read(file, spec)
    monkeypatch.setattr(recording, "MOST_RECORDED_REQUESTS", 2)
    file.write_text(LINE * 3)
    with pytest.raises(UsageError, match="more than 2"):
        read(file, spec)


@pytest.mark.parametrize(
    ("make", "why"), [(Path.touch, "there is none"), (Path.mkdir, "a folder"), (pipe, "a named pipe")]
)
def test_what_holds_no_requests_is_refused(file: Path, spec: EngineSpec, make: Any, why: str) -> None:
    make(file)
    with pytest.raises(UsageError, match=why):
        read(file, spec)
    with pytest.raises(UsageError, match="does not exist"):
        read(file.with_name("absent"), spec)


# ----------------------------------------------------------------------------------------------- a server


@pytest.fixture
def png(tmp_path: Path) -> bytes:
    Image.new("L", (4, 4), 128).save(tmp_path / "grey.png")
    return (tmp_path / "grey.png").read_bytes()


def test_a_server_records_whichever_way_it_is_asked_until_it_is_killed(
    bundle: Path, file: Path, png: bytes
) -> None:
    spec = BundleSubject(folder=bundle).facts().engine
    with serving(str(bundle), "--record", str(file)) as address:
        assert address.process.stderr
        assert "personal data" in address.process.stderr.readline()
        assert address.infer(binary=True)[0] == 200
        wait_for_lines(file, 1)
        assert address.infer(np.full((1, 1, 4, 4), np.nan, np.float32), binary=True)[0] == 400
        assert address.ask("POST", "/v1/classify", png, {"Content-Type": "image/png"})[0] == 200
        wait_for_lines(file, 2)
        address.process.send_signal(signal.SIGKILL)
    first, second = (feeds["x_nchw"] for feeds in read(file, spec))
    assert np.array_equal(first, X)
    assert np.allclose(second, (128 / 255 - 0.5) / 0.25, atol=1e-6)


def wait_for_lines(file: Path, count: int) -> None:
    until_s = time.monotonic() + 20
    while file.read_bytes().count(b"\n") < count:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    time.sleep(0.11)  # the next one is kept, too


def test_bounds_without_a_file_are_refused(hpml: Any, bundle: Path) -> None:
    answer = hpml("serve", str(bundle), "--record-requests", "5")
    assert answer.returncode == 2 and "need a file to record" in answer.stderr
