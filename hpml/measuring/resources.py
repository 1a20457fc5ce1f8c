"""What an engine costs beside the time of a request: its start, its memory, its energy, its price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import TYPE_CHECKING

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import ResourceFigures, Throughput
from hpml.measuring.statistics import CONFIDENCE, student_t

if TYPE_CHECKING:
    from hpml.measuring.bench import Launches


@dataclass(frozen=True)
class Energy:
    """Millijoules a request at batch 1, one value a slice, and the counter; or why there is none."""

    mj_per_request: tuple[float, ...]
    source: str


def resource_figures(
    launches: Launches, energy: Energy | None, throughput: Sequence[Throughput], price_per_hour: float | None
) -> ResourceFigures:
    """The figures of one engine. A figure of which there are fewer than two values is None."""
    best = max((item.images_per_s for item in throughput), key=lambda rate: rate.value, default=None)
    return ResourceFigures(
        cold_start_ms=over_launches(launches.cold_start_ms),
        load_ms=over_launches(launches.load_ms),
        peak_rss_bytes=launches.peak_rss_bytes or None,
        device_memory_bytes=launches.device_memory_bytes,
        energy_mj_per_request=over_launches(energy.mj_per_request) if energy else None,
        energy_source=energy.source if energy else "",
        price_per_million=_price(best, price_per_hour),
    )


def over_launches(values: Sequence[float]) -> Interval | None:
    """The geometric mean of independent values with Student's 95 % interval, on the logarithm."""
    if len(values) < 2:
        return None
    logs = [math.log(value) for value in values]
    half = student_t(0.5 + CONFIDENCE / 2, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    centre = mean(logs)
    return Interval(value=math.exp(centre), low=math.exp(centre - half), high=math.exp(centre + half))


def _price(images_per_s: Interval | None, price_per_hour: float | None) -> Interval | None:
    """Of a million images at that rate."""
    if images_per_s is None or price_per_hour is None:
        return None
    per_million = price_per_hour / 3600 * 1e6
    return Interval(
        value=per_million / images_per_s.value,
        low=per_million / images_per_s.high,
        high=per_million / images_per_s.low,
    )
