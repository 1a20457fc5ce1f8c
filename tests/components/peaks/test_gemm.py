"""The products are right, come from the library that they name, and a slow one is not waited for."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from hpml.components.peaks import gpu, onnx_gemm
from hpml.components.peaks.gemm import Series, torch_series
from hpml.components.peaks.onnx_gemm import onnx_series
from hpml.components.peaks.rounds import prepare

SERIES = [*torch_series(1), *onnx_series(1)]


@pytest.mark.parametrize("series", SERIES, ids=lambda series: f"{series.precision} {series.library}")
def test_every_library_has_a_rate_in_every_precision_or_says_why_not(series: Series) -> None:
    probes = list(series.probes([32, 64]))
    assert [probe.point.size for probe in probes] == [32, 64]  # type: ignore[union-attr]
    timed, reasons = prepare(probes)
    assert set(timed) | set(reasons) == {0, 1}
    assert all(reason.startswith(("not supported: ", "too slow: ")) for reason in reasons.values())
    assert all(0.001 < item.rate() < 1e6 for item in timed.values())


def test_the_libraries_are_those_that_the_runtimes_use() -> None:
    assert {(series.precision, series.library) for series in SERIES} >= {
        ("fp32", "onnxruntime (MLAS)"),
        ("int8", "onnxruntime (MLAS) U8S8"),
        ("int8", "onnxruntime (MLAS) S8S8"),
    }
    assert {series.precision for series in SERIES if series.library.startswith("torch")} == {
        "fp32",
        "bf16",
        "fp16",
    }
    assert len({(series.precision, series.library) for series in SERIES}) == len(SERIES)


@pytest.mark.parametrize(
    ("operator", "left", "right"),
    [
        ("MatMul", np.float32, np.float32),
        ("MatMulInteger", np.uint8, np.int8),
        ("MatMulInteger", np.int8, np.int8),
    ],
)
def test_an_onnx_product_is_the_product(operator: str, left: type, right: type) -> None:
    session = onnx_gemm._session(operator, left, right, 64, 1)
    a, b = onnx_gemm._matrix(left, 64), onnx_gemm._matrix(right, 64)
    wide = np.float64 if left is np.float32 else np.int64
    (answer,) = session.run(None, {"a": a})
    assert np.allclose(answer, a.astype(wide) @ b.astype(wide), rtol=1e-4, atol=1e-4)


def test_what_would_take_too_long_is_not_begun() -> None:
    """By the rate of the size before: 2 ms at 64 is 64 ms and more at 256."""
    built: list[int] = []

    def build(size: int) -> object:
        built.append(size)
        return lambda: time.sleep(0.002 * (size / 64) ** 3)

    timed, reasons = prepare(list(Series("fp32", "slow", 1, build).probes([1024, 256, 64])))  # type: ignore[arg-type]
    assert built == [64] and list(timed) == [0]
    assert set(reasons) == {1, 2} and all(reason.startswith("too slow: ") for reason in reasons.values())


def test_a_product_runs_with_the_threads_of_its_point() -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            series = Series("fp32", "any", threads, lambda size: lambda: seen.append(torch.get_num_threads()))
            (timed,) = prepare(list(series.probes([64])))[0].values()
            seen.clear()
            torch.set_num_threads(3 - threads)  # what a point before may have left behind
            timed.seconds()
            assert seen == [threads]
    finally:
        torch.set_num_threads(before)


def test_without_a_gpu_it_says_so_in_words() -> None:
    assert bool(gpu.absent()) != torch.cuda.is_available()
    if gpu.absent():
        assert gpu.absent().startswith("not measured: torch ")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_a_gpu_has_bandwidths_and_products() -> None:
    probes = list(gpu.probes([256, 1024]))
    timed, reasons = prepare(probes)
    assert len(timed) > len(reasons)
    assert {probe.point.device for probe in probes} == {"cuda", "host-to-device", "device-to-host"}
    assert all(0.01 < item.rate() < 1e7 for item in timed.values())
