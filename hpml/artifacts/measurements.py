"""What is measured of engines, with intervals; where a figure is missing, something beside it says why."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.interval import Interval
from hpml.artifacts.metric import ACCURACY_TOP1, MetricFacts
from hpml.core.contract import Config, renamed

ScenarioName = Literal["SingleStream", "MultiStream", "Offline", "Server"]


class Throughput(Config):
    """Rows, such as images, per second at one batch size."""

    batch: int
    rows_per_s: Interval

    @model_validator(mode="before")
    @classmethod
    def _of_versions_before(cls, given: Any) -> Any:
        return renamed(given, images_per_s="rows_per_s")


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
    price_per_million: Interval | None = None  # rows at the best batch, from `price_per_hour`


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


class PairedQuality(Config):
    """An engine against the reference on the very same rows.

    change: of each metric, a share in points (-0.01 is one point lost), others as a share of the reference's.
    """

    change: dict[str, Interval]
    # Where the metric is whether each row is right: how likely so uneven a split of the disagreements is if
    # both are equally good (McNemar's exact test), and the rows that only the engine, or the reference, gets.
    mcnemar_p: float | None = None
    gained: int = 0
    lost: int = 0
    groups: tuple[Interval, ...] = ()  # the metric of the engine on the rows of each class
    agreement: float | None = None  # share of decisions that are the reference's
    max_abs_error: float | None = None  # of the outputs that are kept

    @model_validator(mode="before")
    @classmethod
    def _of_versions_before(cls, given: Any) -> Any:
        if isinstance(given, dict) and "top1_change" in given:
            given = {**given, "change": {ACCURACY_TOP1.name: given["top1_change"]}}
            del given["top1_change"]
        return renamed(
            given,
            per_class="groups",
            top1_agreement="agreement",
            max_abs_logit_error="max_abs_error",
        )


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
    quality: dict[str, Interval] = Field(default_factory=dict)  # by metric; empty where it is not known
    paired: PairedQuality | None = None  # None for the reference itself
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

    @model_validator(mode="before")
    @classmethod
    def _of_versions_before(cls, given: Any) -> Any:
        if isinstance(given, dict) and "accuracy_top1" in given:
            accuracy = given["accuracy_top1"]
            given = {**given, "quality": {} if accuracy is None else {ACCURACY_TOP1.name: accuracy}}
            del given["accuracy_top1"]
        return given

    @property
    def variant(self) -> str:
        """Which of `EngineSpec.variants` these are of."""
        return self.settings.variant if self.settings else ""


class OperationFigures(Config):
    """What was measured in an operation that goals do not judge, of each engine that was built.

    unit, units_per_row: what a row of a request counts for in rates, 128 tokens of a prompt for example.
    """

    engines: dict[str, EngineFigures]
    unit: str
    units_per_row: float = 1.0

    def of(self, engine: str) -> OperationFigures:
        """Those of one engine alone."""
        return self.model_copy(update={"engines": {engine: self.engines[engine]}})


TOLERANCE = 0.01  # of outputs, where nobody says another

Verdict = Literal["same", "differs", "not finite", "not compared"]


class OutputFigures(Config):
    """One output of an engine beside the reference's, over the same requests at one batch size.

    Differences are over the numbers that are finite in both. max_rel_difference: the largest difference as a
    share of the largest number of the reference's output.
    """

    name: str
    reference_name: str = ""  # where the reference calls it otherwise
    batch: int = 1
    reason: str = ""  # why it could not be compared
    numbers: int = 0  # in all requests together
    nan: int = 0  # of them
    infinite: int = 0
    not_finite_alone: int = 0  # NaN or infinite where the reference's are not so, or the other way round
    is_whole: bool = False  # whole numbers, such as classes: they are the same or not
    max_abs_difference: float | None = None
    max_rel_difference: float | None = None
    top1_agreement: float | None = None  # of (batch, classes): share of samples with the same class

    def verdict(self, tolerance: float) -> Verdict:
        """Whether it is what the reference answers, to within `tolerance` of its largest number.

        NaN and infinity have to be where the reference has them; whole numbers have to be the same.
        """
        if self.reason:
            return "not compared"
        if self.not_finite_alone:
            return "not finite" if self.nan or self.infinite else "differs"
        if self.max_abs_difference is None:  # no finite number in either
            return "not finite" if self.numbers else "same"
        if self.is_whole or self.max_rel_difference is None:
            return "differs" if self.max_abs_difference else "same"
        return "same" if self.max_rel_difference <= tolerance else "differs"


class OutputComparison(Config):
    """What an engine answers beside what the reference does. reason: why they were not compared at all.

    requests: at batch 1. batched: of other batch sizes, batch size -> requests.
    """

    requests: int = 0
    batched: dict[int, int] = Field(default_factory=dict)
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
    Of a further operation, an engine is called "ENGINE::OPERATION" there and in `pairs`.
    best_fp32 is the fastest engine of the unmodified network in fp32 other than the reference; empty if there
    is none, or no latency. states: nearest first; empty where one CPU was used or none was probed.
    incomplete: what is not measured and why; empty if nothing is missing.
    """

    kind: Literal["measurements"] = "measurements"
    reference: str
    best_fp32: str
    engines: dict[str, EngineFigures]
    # Of the task, the one that goals go by unless they say otherwise first.
    metrics: tuple[MetricFacts, ...] = (ACCURACY_TOP1,)
    unit: str = "images"  # what the rows of requests are called
    operation: str = "predict"  # that `engines` is about
    operations: dict[str, OperationFigures] = Field(default_factory=dict)  # further ones, by name
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
