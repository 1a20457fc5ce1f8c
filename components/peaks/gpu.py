"""The peaks of an NVIDIA GPU through torch, by CUDA events: its memory, its products, copies to and fro.

A go is many operations between two events, so that the time of launching one is hidden behind the one before
it; the products of small matrices are bound by launching, as they are in a network that runs eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from hpml.artifacts.peaks import BandwidthPoint, GemmPoint
from hpml.components.peaks.bandwidth import ARRAYS
from hpml.components.peaks.gemm import Precision
from hpml.components.peaks.rounds import NotMeasurable, Probe, Timed

_GO_S = 0.002  # one go takes at least
_WARM_UPS = 3
_HOST_COPIES_BYTES = (2**20, 2**24, 2**28)
_BEYOND_L2 = 4  # times the L2 cache reaches the memory of the device, as in STREAM's rule
_SMALLEST_BYTES = 2**28

Work = Callable[[], object]


def absent() -> str:
    """Why there is no GPU to measure; empty if there is one."""
    if torch.version.cuda is None:
        return "not measured: torch was built without CUDA"
    return "" if torch.cuda.is_available() else "not measured: torch finds no NVIDIA GPU"


def probes(gemm_sizes: Sequence[int]) -> Iterator[Probe]:
    """All probes of the first GPU. `threads` of their points is 1: one thread of the host launches."""
    torch.set_float32_matmul_precision("highest")  # no TF32: fp32 is to mean fp32
    yield from _copies_between_host_and_device()
    yield from _bandwidths()
    yield from _gemms(gemm_sizes)


def _timed(work: Work, amount: float) -> Timed:
    """Repeats `work` so often that a go takes its time."""
    begin, end = (torch.Event(device="cuda", enable_timing=True) for _ in range(2))

    def seconds(repeats: int) -> float:
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    once_s = min(seconds(1) for _ in range(_WARM_UPS))
    repeats = math.ceil(_GO_S / max(once_s, 1e-6))
    return Timed(lambda: seconds(repeats), repeats * amount)


# -------------------------------------------------------------------------------------------------- bandwidth


def _copies_between_host_and_device() -> Iterator[Probe]:
    for device in ("host-to-device", "device-to-host"):
        for size in _HOST_COPIES_BYTES:
            point = BandwidthPoint(
                device=device, kernel="copy", threads=1, working_set_bytes=size, level="host"
            )
            yield Probe(point, lambda point=point: _host_copy(point))  # type: ignore[misc]


def _host_copy(point: BandwidthPoint) -> Timed:
    """A copy from or to pinned memory; every byte crosses the bus once, and once is how it is counted."""
    host = torch.ones(point.working_set_bytes, dtype=torch.uint8).pin_memory()
    device = torch.ones(point.working_set_bytes, dtype=torch.uint8, device="cuda")
    target, source = (device, host) if point.device == "host-to-device" else (host, device)
    return _timed(lambda: target.copy_(source, non_blocking=True), point.working_set_bytes)


def _bandwidths() -> Iterator[Probe]:
    properties = torch.cuda.get_device_properties(0)
    smallest = max(_SMALLEST_BYTES, _BEYOND_L2 * int(getattr(properties, "L2_cache_size", 0)))
    for size in (smallest, 4 * smallest):
        for kernel in ARRAYS:
            point = BandwidthPoint(
                device="cuda", kernel=kernel, threads=1, working_set_bytes=size, level="device"
            )
            yield Probe(point, lambda point=point: _kernel(point))  # type: ignore[misc]


def _kernel(point: BandwidthPoint) -> Timed:
    arrays = ARRAYS[point.kernel]
    free_bytes, _ = torch.cuda.mem_get_info()
    if point.working_set_bytes > free_bytes // 2:
        raise NotMeasurable(f"too large: more than half of the {free_bytes / 1e9:.1f} GB that are free")
    length = point.working_set_bytes // 4 // arrays
    a, b, c = (torch.ones(length if index < arrays else 0, device="cuda") for index in range(3))
    works: dict[str, Work] = {
        "triad": lambda: torch.add(b, c, alpha=3.0, out=a),
        "dot": lambda: torch.dot(a, b),
        "copy": lambda: a.copy_(b),
    }
    return _timed(works[point.kernel], 4 * arrays * length)


# --------------------------------------------------------------------------------------------------- products


def _gemms(sizes: Sequence[int]) -> Iterator[Probe]:
    dtypes: dict[Precision, torch.dtype] = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "int8": torch.int8,
    }
    for precision, dtype in dtypes.items():
        for size in sorted(sizes):
            point = GemmPoint(
                device="cuda", precision=precision, library="torch (cuBLAS)", threads=1, size=size
            )
            yield Probe(point, lambda size=size, dtype=dtype: _gemm(size, dtype))  # type: ignore[misc]


def _gemm(size: int, dtype: torch.dtype) -> Timed:
    if dtype == torch.int8:
        a, b = (torch.randint(-64, 64, (size, size), dtype=dtype, device="cuda") for _ in range(2))
        return _timed(lambda: torch._int_mm(a, b), 2 * size**3)
    if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise NotMeasurable("not supported: this GPU has no bf16")
    x, y, out = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(3))
    return _timed(lambda: torch.mm(x, y, out=out), 2 * size**3)
