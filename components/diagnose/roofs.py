"""The roofline model on measured peaks: the least time that a layer can take on this machine.

After S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model for
multicore architectures", CACM 52 (2009), with one slope for each level of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpml.artifacts.peaks import PeaksSpec, Roof
from hpml.components.diagnose.layers import Layer

Bound = Literal["compute", "memory", "overhead"]
Device = Literal["cpu", "cuda"]

# Where the roofs explain less of the time than this, something else takes most of it.
EXPLAINED = 0.5
# Work that the peaks allow to be done in less: starting a kernel and waking its threads takes as long.
_TINY_US = 2.0


@dataclass(frozen=True)
class LayerRoofline:
    """A layer under the roofs. compute_us, memory_us: the least time for its FLOPs, and for its bytes.

    They are None where the machine has no stable peak for it.
    """

    layer: Layer
    compute_us: float | None
    memory_us: float | None

    @property
    def roof_us(self) -> float | None:
        """The least time that the peaks allow."""
        if self.compute_us is None or self.memory_us is None:
            return None
        return max(self.compute_us, self.memory_us)

    @property
    def share_of_roof(self) -> float | None:
        """See `share_of_roof`; None also where it does no arithmetic."""
        return share_of_roof(self.roof_us, self.layer.time_us) if self.layer.flops else None

    @property
    def is_above_roof(self) -> bool:
        """Whether it was faster than the peaks allow: then they are too low to be its peaks."""
        if self.roof_us is None or not self.layer.flops or not self.layer.time_us:
            return False
        return self.roof_us > self.layer.time_us

    @property
    def bound(self) -> Bound | None:
        """What it spends its time on; None where that is too short to be told."""
        if not self.layer.time_us:
            return None
        return bound_of(self.compute_us, self.memory_us, self.roof_us, self.layer.time_us)

    @property
    def is_tiny(self) -> bool:
        """Whether it has so little work that starting it takes longer."""
        return self.bound == "overhead" and (self.roof_us or 0.0) < _TINY_US

    @property
    def excess_us(self) -> float:
        """The time beyond what the peaks allow; all of it where they are unknown."""
        return max(0.0, self.layer.time_us - (self.roof_us or 0.0))


def share_of_roof(roof_us: float | None, time_us: float) -> float | None:
    """The least time that the peaks allow as a share of the measured one.

    None where one is unknown, and above 1: what was faster than a peak shows that the peak is too low.
    """
    if roof_us is None or not time_us or roof_us > time_us:
        return None
    return roof_us / time_us


def bound_of(
    compute_us: float | None, memory_us: float | None, roof_us: float | None, time_us: float
) -> Bound | None:
    """Whether arithmetic or memory explains a time, or neither explains half of it."""
    if compute_us is None or memory_us is None or roof_us is None:
        return None
    if roof_us < EXPLAINED * time_us:
        return "overhead"
    return "compute" if compute_us >= memory_us else "memory"


class Roofs:
    """The peaks of this machine's CPU with `threads` threads, or of its GPU.

    Where one was not stable something stands in for it, and `notes` say what.
    """

    def __init__(self, peaks: PeaksSpec, *, threads: int, device: Device = "cpu") -> None:
        self.device = device
        self._peaks, self._threads = peaks, threads if device == "cpu" else 1
        # Sorted by size, so that the first that holds some bytes is the smallest.
        self._levels = sorted(
            (point.working_set_bytes, point.level) for point in peaks.bandwidths if point.device == device
        )

    def _arithmetic(self, precision: str) -> Roof | None:
        return self._peaks.arithmetic_roof(precision, threads=self._threads, device=self.device)

    def _bandwidth(self, level: str) -> Roof | None:
        return self._peaks.bandwidth_roof(level, threads=self._threads, device=self.device)

    def gflop_per_s(self, precision: str) -> float | None:
        """The fastest measured matrix product."""
        roof = self._arithmetic(precision)
        return roof.rate if roof else None

    def gb_per_s(self, working_set_bytes: int) -> float | None:
        """The bandwidth of the smallest level of the memory in which so many bytes were measured.

        If that is unknown, of the nearest faster level.
        """
        faster = [name for size, name in self._levels if size < working_set_bytes]
        fitting = [name for size, name in self._levels if size >= working_set_bytes][:1]
        roofs = map(self._bandwidth, (*fitting, *dict.fromkeys(reversed(faster))))
        return next((roof.rate for roof in roofs if roof), None)

    def sign_rates(self) -> tuple[float, float] | None:
        """Gflop/s of int8 products with signed and with unsigned activations; None unless both are known."""
        rates: dict[str, float] = {}
        for point in self._peaks.gemms:
            sign = point.library.rpartition(" ")[2]
            ours = (point.device, point.threads) == (self.device, self._threads)
            if sign in ("S8S8", "U8S8") and ours and point.gflop_per_s:
                rates[sign] = max(rates.get(sign, 0.0), point.gflop_per_s.value)
        return (rates["S8S8"], rates["U8S8"]) if len(rates) == 2 else None

    def notes(self) -> tuple[str, ...]:
        """What a reader of the shares should know: what stands in for peaks that were not stable."""
        whose = self._whose()
        roofs = {
            f"{precision} arithmetic": self._arithmetic(precision)
            for precision in (("fp32", "int8") if self.device == "cpu" else ("fp32", "fp16", "int8"))
        } | {
            f"{level} bandwidth": self._bandwidth(level)
            for level in dict.fromkeys(name for _, name in self._levels)
        }
        unknown = [what for what, roof in roofs.items() if roof is None]
        notes = [f"peaks of {whose} not known: {', '.join(unknown)}"] if unknown else []
        for stand_in in dict.fromkeys(roof.stand_in for roof in roofs.values() if roof and roof.stand_in):
            which = [what for what, roof in roofs.items() if roof and roof.stand_in == stand_in]
            notes.append(f"peaks of {whose} not stable, so {stand_in} stands in: {', '.join(which)}")
        if self.device == "cuda":
            notes.append(
                "the peaks of the GPU are those of its memory, not of its caches: "
                "a layer that finds its data in a cache may be above its peak"
            )
        return tuple(notes)

    def _whose(self) -> str:
        if self.device == "cuda":
            return "the GPU"
        return "one thread" if self._threads == 1 else f"{self._threads} threads"

    def judge(self, layer: Layer, *, all_weight_bytes: int) -> LayerRoofline:
        """`layer` under the roofs, of an engine whose weights have `all_weight_bytes`.

        Activations come from the level that holds those of the layer: the layer before has just written
        them. Weights come from the level that holds the weights of the whole engine: between two uses of
        one, all others are read.
        """
        peak = self.gflop_per_s(layer.precision)
        compute_us = layer.flops / peak / 1e3 if peak else 0.0 if not layer.flops else None
        near = self.gb_per_s(layer.activation_bytes)
        far = self.gb_per_s(all_weight_bytes + layer.activation_bytes)
        memory_us = None
        if near and far:
            memory_us = layer.activation_bytes / near / 1e3 + layer.weight_bytes / far / 1e3
        return LayerRoofline(layer, compute_us, memory_us)


def total(times_us: list[float | None]) -> float | None:
    """The sum, or None where one is unknown."""
    known = [time_us for time_us in times_us if time_us is not None]
    return sum(known) if len(known) == len(times_us) else None


def model_bound(layers: tuple[LayerRoofline, ...], time_us: float) -> Bound | None:
    """What binds a whole engine: of the time that the roofs explain, the larger part."""
    roof_us = total([judged.roof_us for judged in layers])
    by_arithmetic = sum(
        judged.roof_us or 0.0 for judged in layers if (judged.compute_us or 0.0) >= (judged.memory_us or 0.0)
    )
    return bound_of(by_arithmetic, (roof_us or 0.0) - by_arithmetic, roof_us, time_us)
