"""Measurements as a machine would have given them: of two states of the cores, and with too little quiet."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import (
    Conditions,
    EngineFigures,
    EngineSettings,
    MeasurementsSpec,
    OperationFigures,
    PairedRatio,
    StateFigures,
    Throughput,
)

BUSY = "machine busy (26 of 645 slices were quiet)"
SHARES = {"near": 0.35, "far": 0.65}
ROUND_TRIPS_NS = {"near": 205.0, "far": 490.0}

# Milliseconds at batch 1 near and far, top-1, bytes, settings: the quickstart on two virtual CPUs.
_ENGINES: dict[str, tuple[float, float, float, int, EngineSettings]] = {
    "fp32/eager": (1.17, 2.02, 0.981, 2_820_000, EngineSettings(threads=2)),
    "fp32/onnx": (0.199, 0.282, 0.981, 2_810_000, EngineSettings(threads=2, spinning=True)),
    "int8/onnx": (0.124, 0.219, 0.979, 760_000, EngineSettings(threads=2, spinning=True)),
    "pruned+distilled+int8/onnx": (0.073, 0.157, 0.973, 226_000, EngineSettings(threads=1, spinning=False)),
}
REFERENCE, BEST_FP32 = "fp32/eager", "fp32/onnx"


def around(value: float, share: float = 0.003) -> Interval:
    return Interval(value=value, low=value / (1 + share), high=value * (1 + share))


def exactly(value: float) -> Interval:
    return Interval(value=value, low=value, high=value)


def _mixed(near: float, far: float, shares: dict[str, float]) -> float:
    return math.exp(shares["near"] * math.log(near) + shares["far"] * math.log(far))


def _ratio(one: str, other: str, state: int) -> Interval:
    value = _ENGINES[other][state] / _ENGINES[one][state]
    return exactly(1.0) if one == other else around(value)


def _in_states(name: str) -> tuple[StateFigures, ...]:
    return tuple(
        StateFigures(
            state=state,
            rounds=200,
            latency_ms_p50=around(_ENGINES[name][at]),
            speedup_vs_reference=_ratio(name, REFERENCE, at),
            speedup_vs_best_fp32=_ratio(name, BEST_FP32, at),
        )
        for at, state in enumerate(SHARES)
    )


def engine(name: str, *, shares: dict[str, float] = SHARES, **others: Any) -> EngineFigures:
    """What two states of the cores give of one engine."""
    near, far, top1, size_bytes, settings = _ENGINES[name]
    p50_ms = _mixed(near, far, shares)
    eager, fp32 = (_mixed(*_ENGINES[beside][:2], shares) / p50_ms for beside in (REFERENCE, BEST_FP32))
    fields: dict[str, Any] = {
        "status": "measured",
        "target": name.rpartition("/")[2],
        "precision": "int8" if "int8" in name else "fp32",
        "methods": (),
        "size_bytes": size_bytes,
        "parameters": 700_000,
        "macs": 35_000_000,
        "quality": {"accuracy_top1": Interval(value=top1, low=top1 - 0.01, high=top1 + 0.008)},
        "settings": settings,
        "latency_ms_p50": around(p50_ms, 0.02),
        "latency_ms_p90": around(1.2 * far, 0.02),
        "latency_ms_p99": around(1.6 * far, 0.04),
        "states": _in_states(name),
        "throughput": tuple(
            Throughput(batch=batch, rows_per_s=around(900 * batch**0.3 / p50_ms, 0.02))
            for batch in (1, 8, 32)
        ),
        "speedup_vs_reference": exactly(1.0) if name == REFERENCE else around(eager, 0.02),
        "speedup_vs_best_fp32": exactly(1.0) if name == BEST_FP32 else around(fp32, 0.02),
        "samples": 12_000,
        "round_spread": 0.6,
    }
    return EngineFigures(**fields | others)


def untimed(name: str) -> EngineFigures:
    """An engine whose accuracy and size are known, and nothing of its speed."""
    known = engine(name)
    kept = ("target", "precision", "methods", "size_bytes", "parameters", "macs", "quality")
    return EngineFigures(
        status="not measured", reason=BUSY, **{field: getattr(known, field) for field in kept}
    )


def states(shares: dict[str, float] = SHARES) -> tuple[CoreState, ...]:
    return tuple(
        CoreState(
            name=name, round_trip_ns=around(ROUND_TRIPS_NS[name], 0.12), share=share, seconds=90 * share
        )
        for name, share in shares.items()
    )


def pairs(names: list[str], shares: dict[str, float] = SHARES) -> tuple[PairedRatio, ...]:
    """Each two engines once."""
    return tuple(
        PairedRatio(
            engine=one,
            baseline=other,
            rounds=400,
            speedup=around(_mixed(*_ENGINES[other][:2], shares) / _mixed(*_ENGINES[one][:2], shares), 0.005),
            states={state: _ratio(one, other, at) for at, state in enumerate(shares)},
        )
        for index, one in enumerate(names)
        for other in names[index + 1 :]
    )


def spec(engines: dict[str, EngineFigures], **fields: Any) -> MeasurementsSpec:
    told: dict[str, Any] = {
        "reference": REFERENCE,
        "best_fp32": BEST_FP32,
        "engines": engines,
        "rounds": 400,
        "slice_ms": 25.0,
        "threads": 2,
        "seed": 0,
        "environment": {"cpu": "AMD EPYC", "cpu_flags": "avx2 avx512f avx512_vnni"},
        "harness_us_per_request": 0.4,
        "conditions": Conditions(
            slices=2300, dropped=300, causes={"its threads waited for a CPU": 300}, cpu_pressure=0.03
        ),
    }
    return MeasurementsSpec(**told | fields)


def two_states(shares: dict[str, float] = SHARES, **fields: Any) -> MeasurementsSpec:
    """All engines, measured while the host moved the CPUs."""
    engines = {name: engine(name, shares=shares) for name in _ENGINES}
    return spec(engines, **{"states": states(shares), "pairs": pairs(list(engines), shares), **fields})


def one_state(**fields: Any) -> MeasurementsSpec:
    """All engines, measured on a machine whose CPUs stay where they are."""
    engines = {name: engine(name, states=()) for name in _ENGINES}
    return spec(engines, **{"pairs": pairs(list(engines)), **fields})


def too_busy(**fields: Any) -> MeasurementsSpec:
    """All engines, none of them timed."""
    conditions = Conditions(slices=645, dropped=619, causes={"its threads waited for a CPU": 619})
    return spec(
        {name: untimed(name) for name in _ENGINES},
        **{"best_fp32": "", "conditions": conditions, "incomplete": f"latency: {BUSY}", **fields},
    )


def two_operations(**fields: Any) -> MeasurementsSpec:
    """A language model's: `decode`, and `prefill` of 128 tokens, where one engine was not timed."""
    first, *others = _ENGINES
    prefill = {name: engine(name, states=()) for name in (first, *others[:-1])}
    prefill[others[-1]] = untimed(others[-1])
    operation = OperationFigures(engines=prefill, unit="tokens", units_per_row=128)
    return one_state(operation="decode", unit="tokens", operations={"prefill": operation}, **fields)


def samples(rounds: int = 400, *, pause_s: float = 0.0) -> dict[str, np.ndarray]:
    """`samples.npz` of batch 1, with when each round was and in which state the cores were."""
    rng = np.random.default_rng(3)
    at_s = np.arange(rounds) * 0.22
    at_s[rounds // 2 :] += pause_s
    state = (np.sin(np.arange(rounds) / 17) > -0.4).astype(np.int64)
    arrays = {"at_s@1": at_s, "state@1": state}
    for name, (near, far, *_) in _ENGINES.items():
        p50_ms = np.where(state == 0, near, far) * np.exp(rng.normal(0, 0.01, rounds))
        arrays[f"{name}@1"] = p50_ms[:, None] * np.exp(rng.normal(0, 0.04, (rounds, 20)))
        arrays[f"{name}@1"][rng.random(rounds) < 0.1] = np.nan
    return arrays
