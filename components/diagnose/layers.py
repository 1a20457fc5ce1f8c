"""What a profile of an engine holds, whatever runtime it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Precision = Literal["fp32", "fp16", "bf16", "int8"]
# What a layer without arithmetic is there for: to quantize or dequantize, or to lay its input out anew.
Role = Literal["", "conversion", "layout"]


class Channels(NamedTuple):
    """Of a convolution or a product with a weight matrix; zeros of all else."""

    inputs: int = 0
    outputs: int = 0
    groups: int = 1


@dataclass(frozen=True)
class Layer:
    """What one node of the graph that really runs computes and moves, and how long it takes.

    flops: 2 per multiply-accumulate, of the channels that the network has; a kernel may compute more to fill
    its vectors. time_us: a request's, see `typical_us`. nodes, formats, kernel: see `LayerFigures`.
    """

    name: str
    op: str
    precision: Precision
    flops: int
    weight_bytes: int
    activation_bytes: int  # inputs that are not weights, and outputs, each once
    time_us: float
    channels: Channels = field(default_factory=Channels)
    role: Role = ""
    nodes: tuple[str, ...] = ()
    formats: str = ""
    kernel: str = ""

    @property
    def bytes(self) -> int:
        """Weights, inputs and outputs, each once."""
        return self.weight_bytes + self.activation_bytes


@dataclass(frozen=True)
class Profile:
    """The layers of an engine in the order they run, and two comparisons, each timed in turns.

    one_thread_us and all_threads_us: a whole request without the profiler; None on a GPU. signed_us and
    unsigned_us: the same, on one thread, of an int8 engine as it is and with its activations shifted to
    uint8; None where they are uint8 already, and on a GPU. notes: what a reader of the layers should know.
    """

    layers: tuple[Layer, ...]
    one_thread_us: float | None = None
    all_threads_us: float | None = None
    signed_us: float | None = None
    unsigned_us: float | None = None
    notes: tuple[str, ...] = ()


def typical_us(durations_us: Sequence[float]) -> float:
    """The mean of the middle half: as robust as a median, and finer where a clock gives whole numbers."""
    ordered = sorted(durations_us)
    quarter = len(ordered) // 4
    middle = ordered[quarter : len(ordered) - quarter]
    return sum(middle) / len(middle)


def requests_within(seconds: float, request_ms: float, *, least: int, most: int) -> int:
    """How many requests of `request_ms` fit in `seconds`, between `least` and `most`."""
    return max(least, min(most, int(1000 * seconds / max(request_ms, 1e-3))))


def too_short(times_us: Sequence[float], runtime: str) -> tuple[str, ...]:
    """A note on the layers whose time is below what the profile of `runtime` counts in."""
    count = sum(time_us == 0 for time_us in times_us)
    if not count:
        return ()
    verb, times = (
        ("is", "its time is not known and counts")
        if count == 1
        else ("are", "their times are not known and count")
    )
    return (
        f"{count} of {len(times_us)} {'layer' if len(times_us) == 1 else 'layers'} {verb} too short for "
        f"{runtime}'s profile, which counts whole microseconds: {times} as outside the layers",
    )
