"""All that was measured of one engine, as the rules ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec
from hpml.components.diagnose.layers import Profile, Role
from hpml.components.diagnose.roofs import Bound, Device, LayerRoofline


@dataclass(frozen=True)
class Peer:
    """Another engine of the run that differs from this one by what was done to the network."""

    name: str
    spec: EngineSpec
    figures: EngineFigures

    @property
    def time_us(self) -> float:
        """Its p50 at batch 1."""
        assert self.figures.latency_ms_p50 is not None
        return 1e3 * self.figures.latency_ms_p50.value


@dataclass(frozen=True)
class Facts:
    """What is known of an engine.

    spec: what it was built as; of a bare file, which does not say it, the figures stand in. time_us: p50 of
    the benchmark at batch 1, with `threads` threads while the cores were in `states`, nearest first. device:
    what it runs on, whose peaks the layers are under. peaks: the fastest GEMM of each precision, Gflop/s.
    unit: what the rows of requests are called. sign_rates: of an int8 GEMM with signed and with unsigned
    activations, Gflop/s. lanes: fp32 numbers in a vector of this CPU; None on a GPU. unquantized: the engine
    of the same network before it was quantized; unpruned: that of the network before channels were removed,
    in the same precision; both on the same target.
    """

    name: str
    spec: EngineSpec | EngineFigures
    figures: EngineFigures
    profile: Profile
    layers: tuple[LayerRoofline, ...]
    time_us: float
    roof_us: float | None
    bound: Bound | None
    device: Device
    threads: int
    states: tuple[CoreState, ...]
    lanes: int | None
    peaks: Mapping[str, float]
    unit: str = "samples"
    sign_rates: tuple[float, float] | None = None
    unquantized: Peer | None = None
    unpruned: Peer | None = None

    @property
    def profiled_us(self) -> float:
        """What the layers add up to."""
        return sum(judged.layer.time_us for judged in self.layers)

    @property
    def whole_us(self) -> float:
        """What shares refer to: a request, or the layers where the profiler saw them take longer."""
        return max(self.time_us, self.profiled_us)

    @property
    def outside_us(self) -> float:
        """The time of a request in which no layer runs: dispatch, and the way in and out."""
        return max(0.0, self.time_us - self.profiled_us)

    @property
    def dispatch_us(self) -> float:
        """The time that goes into starting kernels, and into what lies between them."""
        return self.outside_us + sum(judged.excess_us for judged in self.tiny)

    def share(self, layers: Iterable[LayerRoofline]) -> float:
        """The share of the time that `layers` take."""
        return time_of(layers) / self.whole_us

    def of_role(self, role: Role) -> tuple[LayerRoofline, ...]:
        """Layers that are there for this."""
        return tuple(judged for judged in self.layers if judged.layer.role == role)

    @property
    def in_fp32(self) -> tuple[LayerRoofline, ...]:
        """Layers that compute in fp32."""
        return tuple(
            judged
            for judged in self.layers
            if judged.layer.precision == "fp32" and judged.layer.flops and judged.layer.role != "conversion"
        )

    @property
    def weighted(self) -> tuple[LayerRoofline, ...]:
        """Convolutions and products with weights."""
        return tuple(judged for judged in self.layers if judged.layer.channels.outputs)

    @property
    def is_compute_dominated(self) -> bool:
        """Whether the peaks give more of the time to arithmetic than to memory."""
        return sum(judged.compute_us or 0.0 for judged in self.layers) >= sum(
            judged.memory_us or 0.0 for judged in self.layers
        )

    @property
    def tiny(self) -> tuple[LayerRoofline, ...]:
        """Layers with so little work that starting them takes longer."""
        return tuple(judged for judged in self.layers if judged.is_tiny)


def why_not_measured(figures: EngineFigures | None, measured: MeasurementsSpec) -> str:
    """Why an engine has no latency at batch 1. figures: None of versions that had none of any engine then."""
    own = (figures.reason or figures.unquoted.get("latency_ms_p50", "")) if figures else ""
    return f"not measured: {own or measured.incomplete or 'it has no latency at batch 1'}"


def time_of(layers: Iterable[LayerRoofline]) -> float:
    """Microseconds that `layers` take."""
    return sum(judged.layer.time_us for judged in layers)
