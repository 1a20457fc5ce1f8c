"""What an engine costs beside the time of a request: its start, its memory, its energy, its price."""

from __future__ import annotations

from collections.abc import Sequence

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import (
    ConcurrencyFigures,
    EngineSettings,
    ResourceFigures,
    ScenarioFigures,
    Throughput,
)
from hpml.core.contract import Config


class LaunchRecord(Config):
    """What the launches of one engine told. Milliseconds, one entry a launch. Memory 0: not known.

    device: "cpu", "cuda", or "remote", a server's, of which only the time of its answers is measured.
    """

    device: str = "cpu"
    settings: EngineSettings | None = None  # None of versions before
    cold_start_ms: tuple[float, ...] = ()
    load_ms: tuple[float, ...] = ()
    peak_rss_bytes: int = 0
    device_memory_bytes: int | None = None
    energy_mj_per_request: tuple[float, ...] = ()
    energy_source: str = ""
    scenarios: tuple[ScenarioFigures, ...] = ()
    concurrency: tuple[ConcurrencyFigures, ...] = ()


def resource_figures(
    told: LaunchRecord, throughput: Sequence[Throughput], price_per_hour: float | None
) -> ResourceFigures:
    """The figures of one engine. A figure of which there are fewer than two values is None."""
    best = max((item.rows_per_s for item in throughput), key=lambda rate: rate.value, default=None)
    return ResourceFigures(
        cold_start_ms=_mean(told.cold_start_ms),
        load_ms=_mean(told.load_ms),
        peak_rss_bytes=told.peak_rss_bytes or None,
        device_memory_bytes=told.device_memory_bytes,
        energy_mj_per_request=_mean(told.energy_mj_per_request),
        energy_source=told.energy_source,
        price_per_million=_price(best, price_per_hour),
    )


def _mean(values: Sequence[float]) -> Interval | None:
    from hpml.measuring.statistics import geometric_mean  # numpy: the client has none

    return geometric_mean(values) if len(values) > 1 else None


def _price(rows_per_s: Interval | None, price_per_hour: float | None) -> Interval | None:
    """Of a million images at that rate."""
    if rows_per_s is None or price_per_hour is None:
        return None
    per_million = price_per_hour / 3600 * 1e6
    return Interval(
        value=per_million / rows_per_s.value,
        low=per_million / rows_per_s.high,
        high=per_million / rows_per_s.low,
    )
