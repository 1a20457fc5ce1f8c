"""What is measured, as the artifacts carry it: figures of engines, ceilings of a machine, a diagnosis.

Every figure that a measurement gives is an `Interval`; where one is missing, something beside it says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import Field, model_validator

from components.contract import Config

ScenarioName = Literal["SingleStream", "MultiStream", "Offline", "Server"]


class Interval(Config):
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def overlaps(self, other: Interval) -> bool:
        """Whether the two intervals have a point in common."""
        return self.low <= other.high and other.low <= self.high

    def inverse(self) -> Interval:
        """Of one over the figure."""
        return Interval(value=1 / self.value, low=1 / self.high, high=1 / self.low)


# ------------------------------------------------------------------------------------------------- an engine


class Throughput(Config):
    """Images per second at one batch size."""

    batch: int
    images_per_s: Interval


class ConcurrencyFigures(Config):
    """A closed loop of `clients`, each of which sends its next request when it has the answer to its last."""

    clients: int
    requests_per_s: Interval | None = None
    latency_ms_p50: Interval | None = None
    latency_ms_p99: Interval | None = None
    unquoted: str = ""  # why there is no p99: "350 of 662 samples"
    reason: str = ""  # why there is no figure at all: "disturbed: ..."


class ScenarioFigures(Config):
    """One of MLPerf Inference's scenarios, by its definition; not an MLPerf result.

    metric: "latency_ms_p90" (SingleStream), "latency_ms_p99" (MultiStream: of a query of 8 samples),
    "samples_per_s" (Offline), "queries_per_s" (Server: the largest rate of Poisson arrivals whose p99 is
    within `latency_bound_ms`; the interval is the bracket of the bisection). `early_stopping_ms` is
    the bound that the percentile is below with 99 % confidence, for the latency metrics.
    """

    scenario: ScenarioName
    backend: Literal["ours", "loadgen"] = "ours"
    metric: str
    value: Interval | None = None
    reason: str = ""  # why there is none: "not enough samples: 50 of 64"
    queries: int = 0
    samples_per_query: int = 1
    batch: int | None = None  # Offline: how many samples the engine is given at once, its best
    latency_bound_ms: float | None = None
    early_stopping_ms: float | None = None


class ResourceFigures(Config):
    """What an engine costs beside the time of a request."""

    cold_start_ms: Interval | None = None  # from the start of a process to the first answer
    load_ms: Interval | None = None  # of that, opening the engine
    peak_rss_bytes: int | None = None
    device_memory_bytes: int | None = None  # None: it runs on the CPU
    energy_mj_per_request: Interval | None = None  # millijoules at batch 1, of the counter below
    energy_source: str = ""  # "RAPL package", "NVML"; or "not measured: this machine has no counter"
    price_per_million: Interval | None = None  # images at the best batch, from `price_per_hour`


class EngineSettings(Config):
    """How an engine was run: what its figures hold for, and what whoever serves it has to set.

    spinning: whether its waiting threads spin rather than sleep; None where its runtime has no such switch,
    or was left at its default. variant: which of `EngineSpec.variants`; "" is the engine as it was built.
    """

    threads: int = Field(ge=1)
    spinning: bool | None = None
    variant: str = ""

    def __str__(self) -> str:
        """In words: "2 threads, spinning, int8 activations"."""
        told = [f"{self.threads} thread{'s' if self.threads > 1 else ''}"]
        if self.spinning is not None:
            told.append("spinning" if self.spinning else "not spinning")
        if self.variant:
            told.append(self.variant.replace("-", " "))
        return ", ".join(told)


class CoreState(Config):
    """One of the distances between the CPUs that were seen while the engines were timed.

    Virtual CPUs are moved between the core complexes of their host. What two threads of an engine then take
    to hand each other a cache line differs several times, and so does the engine's latency.
    round_trip_ns: of a cache line between two CPUs, as the probe sees it; its loops in Python included.
    """

    name: str  # "near", "far", with more than two also "middle", "middle 2"
    round_trip_ns: Interval  # the median of the probes, and the middle 95 % of them
    share: float  # of the time of the rounds, kept or not
    seconds: float


class StateFigures(Config):
    """The figures of one engine at batch 1 while the cores were at one distance, from `rounds` rounds."""

    state: str  # the name of a `CoreState`
    rounds: int
    latency_ms_p50: Interval | None = None
    speedup_vs_reference: Interval | None = None
    speedup_vs_best_fp32: Interval | None = None
    reason: str = ""  # why a figure is None: "3 of 6 rounds"


class PairedRatio(Config):
    """How many times faster `engine` answers at batch 1 than `baseline`: p50 against p50, paired by round.

    speedup is over the mixture of states that was seen: the geometric mean of those of the states, weighted
    with their shares of the time. None, with the reason, where it is not known.
    """

    engine: str
    baseline: str
    rounds: int  # that hold both
    speedup: Interval | None = None
    states: dict[str, Interval] = Field(default_factory=dict)  # name of a CoreState -> in it alone
    reason: str = ""

    def inverse(self) -> PairedRatio:
        """The same, with the two exchanged."""
        return self.model_copy(
            update={
                "engine": self.baseline,
                "baseline": self.engine,
                "speedup": self.speedup.inverse() if self.speedup else None,
                "states": {name: ratio.inverse() for name, ratio in self.states.items()},
            }
        )


class PairedAccuracy(Config):
    """An engine against the reference on the very same test samples."""

    top1_change: Interval  # top-1 of the engine less that of the reference; -0.01 is one point lost
    mcnemar_p: float  # exact McNemar: how likely so uneven a split of the disagreements is if both are equal
    gained: int  # samples that only the engine gets right
    lost: int  # samples that only the reference gets right
    per_class: tuple[Interval, ...]  # top-1 of the engine on each class, in the order of class_names
    top1_agreement: float  # share of samples with the same class
    max_abs_logit_error: float


class EngineFigures(Config):
    """What was measured of one engine.

    status: "not measured" has its accuracy and its size, but no latency, as the machine was too busy.
    """

    status: Literal["measured", "not measured", "not built"]
    reason: str = ""  # why it was not measured or not built
    target: str
    precision: str
    methods: tuple[str, ...]
    size_bytes: int
    parameters: int
    macs: int
    accuracy_top1: Interval | None = None
    paired: PairedAccuracy | None = None  # None for the reference itself
    settings: EngineSettings | None = None  # that it was timed with; None of versions before
    latency_ms_p50: Interval | None = None  # batch 1, over the mixture of states that was seen
    latency_ms_p90: Interval | None = None
    latency_ms_p99: Interval | None = None
    states: tuple[StateFigures, ...] = ()  # the same order as those of `MeasurementsSpec`
    throughput: tuple[Throughput, ...] = ()
    speedup_vs_reference: Interval | None = None  # `PairedRatio.speedup`, the reference is torch eager
    speedup_vs_best_fp32: Interval | None = None  # against the fastest unmodified fp32 engine
    scenarios: tuple[ScenarioFigures, ...] = ()
    concurrency: tuple[ConcurrencyFigures, ...] = ()
    resources: ResourceFigures | None = None
    samples: int = 0  # undisturbed requests at batch 1, all rounds together
    unquoted: dict[str, str] = Field(default_factory=dict)  # figure -> why it is None: "350 of 662 samples"
    round_spread: float | None = None  # (largest - smallest p50 of a round) / p50 of all

    @property
    def variant(self) -> str:
        """Which of `EngineSpec.variants` these are of."""
        return self.settings.variant if self.settings else ""


class OutputFigures(Config):
    """One output of an engine beside the reference's, over the same requests at batch 1.

    Differences are over the numbers that are finite in both. max_rel_difference: the largest difference as a
    share of the largest number of the reference's output.
    """

    name: str
    reference_name: str = ""  # where the reference calls it otherwise
    reason: str = ""  # why it could not be compared
    numbers: int = 0  # in all requests together
    nan: int = 0  # of them
    infinite: int = 0
    max_abs_difference: float | None = None
    max_rel_difference: float | None = None
    top1_agreement: float | None = None  # of (1, classes): share of requests with the same class


class OutputComparison(Config):
    """What an engine answers beside what the reference does. reason: why they were not compared at all."""

    requests: int = 0
    outputs: tuple[OutputFigures, ...] = ()
    reason: str = ""


def _without(given: Any, *retired: str) -> Any:
    """The fields of a record, less those that only versions before wrote."""
    if not isinstance(given, dict):
        return given
    return {name: value for name, value in given.items() if name not in retired}


class Conditions(Config):
    """How quiet the machine was. What was disturbed is not in the figures."""

    slices: int = 0  # timed, of any engine
    dropped: int = 0  # of them, because they or another of their round were disturbed
    causes: dict[str, int] = Field(default_factory=dict)  # cause -> slices dropped for it
    cpu_pressure: float | None = None  # share of the time in which some task waited for a CPU, ours included
    gpu: dict[str, str] = Field(default_factory=dict)  # clocks and power over the run, in words
    unseen: str = ""  # why disturbances could not be seen here: then none was dropped

    @property
    def busy(self) -> str:
        """Why a figure has too few undisturbed rounds, in words."""
        quiet = f"{self.slices - self.dropped} of {self.slices} slices were quiet"
        return f"{'machine busy' if self.dropped else 'the time budget was over'} ({quiet})"

    @model_validator(mode="before")
    @classmethod
    def _without_retired(cls, given: Any) -> Any:
        return _without(given, "enforced", "probe_spread")


class MeasurementsSpec(Config):
    """The benchmark of all engines of a run.

    `samples.npz` has the raw latencies in milliseconds, float64 (rounds, requests), NaN where a request was
    disturbed: "fp32/onnx@8" are those of engine fp32/onnx at batch 8. "at_s@8" (rounds,) is when each round
    at batch 8 began, in seconds from the first, and "state@8" the index of its state, -1 for none.
    best_fp32 is the fastest engine of the unmodified network in fp32 other than the reference; empty if there
    is none, or no latency. states: nearest first; empty where one CPU was used or none was probed.
    incomplete: what is not measured and why; empty if nothing is missing.
    """

    kind: Literal["measurements"] = "measurements"
    reference: str
    best_fp32: str
    engines: dict[str, EngineFigures]
    pairs: tuple[PairedRatio, ...] = ()  # each two measured engines once
    states: tuple[CoreState, ...] = ()
    rounds: int
    rounds_of_launches: tuple[int, ...] = ()  # at batch 1, that each launch had; empty: one launch
    slice_ms: float = 0.0  # of one engine's requests in a round; 0: of versions before
    threads: int  # at most, of each engine; what each was timed with is in its `settings`
    seed: int
    environment: dict[str, str]
    harness_us_per_request: float = 0.0  # what timing itself costs, of the worst engine's process
    conditions: Conditions = Conditions()
    incomplete: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_versions_before(cls, given: Any) -> Any:
        if isinstance(given, dict) and "invalid" in given:
            given = {"incomplete": given["invalid"], **given}
        return _without(given, "invalid", "requests_per_round")

    def ratio(self, engine: str, baseline: str) -> PairedRatio | None:
        """How many times faster `engine` is than `baseline`; None if they were not paired."""
        for pair in self.pairs:
            if (pair.engine, pair.baseline) == (engine, baseline):
                return pair
            if (pair.engine, pair.baseline) == (baseline, engine):
                return pair.inverse()
        return None


# ------------------------------------------------------------------------------------------------ the machine


class BandwidthPoint(Config):
    """How fast memory is read and written with one working set.

    kernel: "triad" (a = b + s * c; 2 reads and 1 write), "dot" (2 reads), "copy" (1 read, 1 write).
    gb_per_s counts those bytes, 1e9 to the GB; None with a reason where it was not stable or possible.
    """

    device: str  # "cpu", "cuda", "host-to-device", "device-to-host"
    kernel: Literal["triad", "dot", "copy"]
    threads: int
    working_set_bytes: int
    level: str  # "L1", "L2", "L3", "DRAM"; "device" on a GPU; "host" for a copy between the two
    gb_per_s: Interval | None = None
    reason: str = ""
    fastest: float | None = None  # GB/s of its best round, where it is not stable

    @property
    def rate(self) -> Interval | None:
        """`gb_per_s`."""
        return self.gb_per_s


class GemmPoint(Config):
    """How fast a square matrix product of `size` runs; 2 * size ** 3 operations."""

    device: str
    precision: Literal["fp32", "fp16", "bf16", "int8"]
    library: str  # the one that a runtime really uses: "torch (oneDNN)", "onnxruntime (MLAS)"
    threads: int
    size: int
    gflop_per_s: Interval | None = None
    reason: str = ""
    fastest: float | None = None  # Gflop/s of its best round, where it is not stable

    @property
    def rate(self) -> Interval | None:
        """`gflop_per_s`."""
        return self.gflop_per_s


RatedPoint = TypeVar("RatedPoint", BandwidthPoint, GemmPoint)
_BEATEN = 1.1


def ceiling_of(points: Iterable[RatedPoint]) -> RatedPoint | None:
    """The stable point with the highest rate.

    None if there is none, or if a point that is not stable was a tenth faster in one of its rounds: what has
    been exceeded is no ceiling.
    """
    known = list(points)
    rates = [point.rate.value if point.rate else 0.0 for point in known]
    best = max(rates, default=0.0)
    beaten = any((point.fastest or 0.0) > _BEATEN * best for point in known)
    return known[rates.index(best)] if best and not beaten else None


class CoreDistances(Config):
    """How far the CPUs of a machine are from each other: a cache line's way from one to another and back.

    round_trips_ns: row i has those of the i-th CPU with each one before it, at first. states: nearest first.
    """

    cpus: tuple[int, ...]  # a sample, where there are many
    usable_cpus: int  # that it is of
    round_trips_ns: tuple[tuple[float, ...], ...] = ()
    states: tuple[CoreState, ...] = ()  # empty with one CPU
    changes: int = 0  # from one state to another
    seconds: float = 0.0  # that they were watched for


class CeilingsSpec(Config):
    """What the machine can do at most, per thread count. Points that are not stable are no ceilings."""

    kind: Literal["ceilings"] = "ceilings"
    hardware: dict[str, str]
    bandwidths: tuple[BandwidthPoint, ...]
    gemms: tuple[GemmPoint, ...]

    @property
    def not_stable(self) -> str:
        """The ceilings not known as the rounds of their points disagree: "1 thread: L2, int8; cuda: fp16"."""
        points: dict[tuple[str, str], list[Any]] = {}  # the same kind of point under each name
        for bandwidth in self.bandwidths:
            points.setdefault((_place(bandwidth), bandwidth.level), []).append(bandwidth)
        for gemm in self.gemms:
            points.setdefault((_place(gemm), gemm.precision), []).append(gemm)
        unknown: dict[str, list[str]] = {}
        for (place, name), alike in points.items():
            if ceiling_of(alike) is None and any(point.fastest for point in alike):
                unknown.setdefault(place, []).append(name)
        return "; ".join(f"{place}: {', '.join(names)}" for place, names in unknown.items())

    def arithmetic(self, precision: str, *, threads: int, device: str = "cpu") -> Interval | None:
        """The fastest GEMM (Gflop/s) of `precision` with `threads`, of any library; see `ceiling_of`."""
        found = ceiling_of(
            point
            for point in self.gemms
            if (point.precision, point.threads, point.device) == (precision, threads, device)
        )
        return found.rate if found else None

    def bandwidth(self, level: str, *, threads: int, device: str = "cpu") -> Interval | None:
        """The highest bandwidth (GB/s) of a level with `threads`, of any kernel; see `ceiling_of`."""
        found = ceiling_of(
            point
            for point in self.bandwidths
            if (point.level, point.threads, point.device) == (level, threads, device)
        )
        return found.rate if found else None

    def arithmetic_roof(self, precision: str, *, threads: int, device: str = "cpu") -> Roof | None:
        """`arithmetic`, or what stands in for it."""
        known = self.arithmetic(precision, threads=threads, device=device)
        alone = self.arithmetic(precision, threads=1, device=device)
        same = (point for point in self.gemms if (point.precision, point.device) == (precision, device))
        return _roof(known, alone, same, threads)

    def bandwidth_roof(self, level: str, *, threads: int, device: str = "cpu") -> Roof | None:
        """`bandwidth` of a level of the memory, or what stands in for it."""
        known = self.bandwidth(level, threads=threads, device=device)
        alone = self.bandwidth(level, threads=1, device=device)
        same = (point for point in self.bandwidths if (point.level, point.device) == (level, device))
        return _roof(known, alone, same, threads)


def _place(point: BandwidthPoint | GemmPoint) -> str:
    """Where it was measured: "2 threads" of the CPU, or the device."""
    return (
        f"{point.threads} thread{'s' if point.threads > 1 else ''}" if point.device == "cpu" else point.device
    )


class Roof(NamedTuple):
    """A rate that nothing is expected to exceed. stand_in: what it is if it is no stable ceiling."""

    rate: float
    stand_in: str = ""


def _roof(
    known: Interval | None, alone: Interval | None, points: Iterable[BandwidthPoint | GemmPoint], threads: int
) -> Roof | None:
    """The stable ceiling; else that of one thread times `threads`; else the fastest round there was."""
    if known:
        return Roof(known.value)
    if alone:
        return Roof(threads * alone.value, f"{threads} times that of one thread")
    rounds = (
        point.rate.value if point.rate else point.fastest or 0.0
        for point in points
        if point.threads == threads
    )
    fastest = max(rounds, default=0.0)
    return Roof(fastest, "its fastest round") if fastest else None


# ---------------------------------------------------------------------------------------------- the diagnosis


class LayerFigures(Config):
    """One layer of an engine: what it computes, what it moves, how long it takes."""

    name: str
    op: str  # as the runtime calls it: "Conv", "QLinearConv", "aten::convolution", "CaskConvolution"
    precision: Literal["fp32", "fp16", "bf16", "int8"]
    flops: int  # 2 per multiply-accumulate
    bytes: int  # weights, inputs and outputs, each once
    # a request, mean of the middle half; of ONNX Runtime less what its profiler adds: 0 if it is too short
    time_us: float
    bound: Literal["compute", "memory", "overhead"] | None = None  # None: the machine has no ceiling for it
    share_of_roof: float | None = None  # of what the roofs allow it; None where it does no arithmetic
    nodes: tuple[str, ...] = ()  # TensorRT's: the nodes of the ONNX graph that were fused into it
    formats: str = ""  # TensorRT's: the types and layouts of what goes in and out
    kernel: str = ""  # TensorRT's: the tactic that runs it


class Finding(Config):
    """One rule whose condition the measured facts meet."""

    rule: str
    sentence: str  # what was measured, in plain words with its figures
    remedy: str  # what to do about it; empty if nothing can be done


class EngineDiagnosis(Config):
    """Where the time of one engine goes, and why it is not faster."""

    status: Literal["diagnosed", "not diagnosed"]
    reason: str = ""  # why it was not
    device: Literal["cpu", "cuda"] = "cpu"  # whose ceilings it is under
    threads: int = 0  # that it was measured with; 0 of versions before: those of the whole
    batch: int = 1
    flops: int = 0
    bytes: int = 0
    time_us: float = 0.0  # p50 of the benchmark at this batch
    profiled_us: float = 0.0  # what the layers add up to
    roof_us: float | None = None  # the least that the machine's ceilings allow for all layers
    share_of_roof: float | None = None  # roof_us / time_us, if below 1
    bound: Literal["compute", "memory", "overhead"] | None = None
    layers: tuple[LayerFigures, ...] = ()
    verdict: str = ""  # one or two plain sentences
    findings: tuple[Finding, ...] = ()


class DiagnosisSpec(Config):
    """Why each engine of a run is not faster."""

    kind: Literal["diagnosis"] = "diagnosis"
    threads: int
    engines: dict[str, EngineDiagnosis]
    notes: tuple[str, ...] = ()  # what stands in for ceilings that were not stable
