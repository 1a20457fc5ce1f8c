"""Measure all points of a machine and say which of them are peaks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from functools import partial

import torch

from hpml.artifacts.peaks import BandwidthPoint, GemmPoint, PeaksSpec
from hpml.components.peaks import bandwidth, gpu
from hpml.components.peaks.config import PeaksConfig
from hpml.components.peaks.gemm import Series, torch_series
from hpml.components.peaks.memory_levels import MemoryLevels
from hpml.components.peaks.rounds import Point, Probe, figure, prepare, rates_by_round
from hpml.core import hardware, memory
from hpml.core.contract import Output, Result
from hpml.measuring.config import Quiet
from hpml.measuring.machine.watch import Slice, Watch

Measured = tuple[Point, list[float]]  # a point and its rate in each round

_ABSENT = "not measured: not installed"
_MEMORY_SHARE = 0.25  # of what is left, for the working sets


def measure(config: PeaksConfig, out: Output) -> Result[PeaksSpec]:
    """Measure and judge all points; see `hpml.components.peaks.stage.run`."""
    watch = Watch(Quiet())
    before = watch.snapshot()
    threads = sorted(set(config.threads or (1, out.threads)))
    cpus = sorted(os.sched_getaffinity(0))
    threads_before, precision_before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    with ExitStack() as restored:
        restored.callback(torch.set_num_threads, threads_before)
        restored.callback(torch.set_float32_matmul_precision, precision_before)
        measured = [one for group in _groups(config, threads, cpus, out) for one in group]
    points = [point for point, _ in measured]
    spec = PeaksSpec(
        hardware=_hardware(cpus[: max(threads)]),
        bandwidths=tuple(point for point in points if isinstance(point, BandwidthPoint)),
        gemms=tuple(point for point in points if isinstance(point, GemmPoint)),
    )
    samples = [{**_identity(point), "rates_per_round": rates} for point, rates in measured]
    (out.path / "samples.json").write_text(json.dumps(samples, indent=0))
    return Result(
        spec,
        _metrics(spec, threads),
        incomplete=_incomplete(spec, watch, watch.between(before, watch.snapshot())),
    )


def _incomplete(spec: PeaksSpec, watch: Watch, seen: Slice) -> str:
    """Which peaks a quiet machine may have; empty if there are none, or if it was quiet.

    Where rounds disagree on a quiet machine, that is how it is: its CPUs were near and far, say.
    """
    was_busy = seen.others > watch.limits.max_waited or watch.disturbances_outside(seen)
    return f"not stable on a busy machine: {spec.not_stable}" if was_busy and spec.not_stable else ""


def _groups(
    config: PeaksConfig, threads: Sequence[int], cpus: Sequence[int], out: Output
) -> Iterator[list[Measured]]:
    """The points of each number of threads, then the GPU's.

    One group after the other: the memory of one, several times the last cache, is free again for the next.
    """
    groups: list[AbstractContextManager[list[Probe]]] = [_cpu_probes(config, cpus[:n]) for n in threads]
    if not gpu.absent():
        groups.append(nullcontext(list(gpu.probes(config.gpu_gemm_sizes))))
    for index, group in enumerate(groups):
        deadline_s = time.monotonic() + config.time_budget_s / len(groups)
        done = partial(_progress, out, index * config.rounds, len(groups) * config.rounds)
        with group as probes:
            yield _measured(config, probes, deadline_s, done)


def _progress(out: Output, before: int, total: int, done: int) -> None:
    out.progress(before + done, total, "rounds")


def _measured(
    config: PeaksConfig, probes: Sequence[Probe], deadline_s: float, progress: Callable[[int], None]
) -> list[Measured]:
    timed, reasons = prepare(probes)
    rates = rates_by_round(timed, config, deadline_s=deadline_s, progress=progress)
    measured = []
    for index, probe in enumerate(probes):
        of_point = rates.get(index, [])
        point = _judged(probe.point, of_point, reasons.get(index, ""), config.max_spread)
        measured.append((point, of_point))
    return measured


@contextmanager
def _cpu_probes(config: PeaksConfig, cpus: Sequence[int]) -> Iterator[list[Probe]]:
    """Those of as many threads as `cpus`."""
    threads, limit_bytes = len(cpus), int(_MEMORY_SHARE * memory.available_bytes())
    levels = MemoryLevels.of(cpus)
    memory_bytes = bandwidth.largest_of_a_thread(levels, threads, limit_bytes)
    with closing(bandwidth.ThreadTeam(cpus, memory_bytes)) as team:
        series = (*torch_series(threads), *_onnx_series(threads))
        yield [
            *bandwidth.probes(team, levels, threads=threads, limit_bytes=limit_bytes),
            *(probe for one in series for probe in one.probes(config.gemm_sizes)),
        ]


def _onnx_series(threads: int) -> Iterator[Series]:
    """What ONNX Runtime multiplies with; none where it is not installed, as the facts of the hardware say."""
    if _onnxruntime() != _ABSENT:
        from hpml.components.peaks.onnx_gemm import onnx_series

        yield from onnx_series(threads)


def _onnxruntime() -> str:
    """Its version."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return _ABSENT
    return str(onnxruntime.__version__)


def _judged(point: Point, rates: Sequence[float], reason: str, max_spread: float) -> Point:
    """The point with its figure if it is stable, otherwise with the reason why it has none."""
    if not rates:
        return point.model_copy(update={"reason": reason})
    interval, unstable = figure(rates, max_spread=max_spread)
    if interval is None:
        return point.model_copy(update={"reason": unstable, "fastest": max(rates)})
    name = "gb_per_s" if isinstance(point, BandwidthPoint) else "gflop_per_s"
    return point.model_copy(update={name: interval})


def _identity(point: Point) -> dict[str, object]:
    return point.model_dump(mode="json", exclude={"gb_per_s", "gflop_per_s", "reason", "fastest"})


def _hardware(cpus: Sequence[int]) -> dict[str, str]:
    """What the figures hold for: the machine, its caches, the libraries."""
    return {
        **hardware.identity(),
        "caches": MemoryLevels.of(cpus).in_words(),
        "torch": torch.__version__,
        "onnxruntime": _onnxruntime(),
        "cuda": gpu.absent() or torch.cuda.get_device_name(0),
    }


def _metrics(spec: PeaksSpec, threads: Sequence[int]) -> dict[str, float]:
    """The peaks for the tracker: "dram_gb_per_s_2_threads", "int8_gflop_per_s_1_threads"."""
    found = {}
    for device, count in (*(("cpu", count) for count in threads), ("cuda", 1)):
        whose = f"{count}_threads" if device == "cpu" else "gpu"
        for level in ("L1", "L2", "L3", "DRAM", "device"):
            found[f"{level.lower()}_gb_per_s_{whose}"] = spec.bandwidth(level, threads=count, device=device)
        for precision in ("fp32", "fp16", "bf16", "int8"):
            rate = spec.arithmetic(precision, threads=count, device=device)
            found[f"{precision}_gflop_per_s_{whose}"] = rate
    return {name: interval.value for name, interval in found.items() if interval is not None}
