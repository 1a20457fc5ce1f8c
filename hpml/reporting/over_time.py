"""Latency over the time of a run: p50 of each round, coloured by the state that the cores were in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from hpml.artifacts.core_state import CoreState
from hpml.measuring.state_mixture import share
from hpml.reporting.colours import COLOURS
from hpml.reporting.format import shorten
from hpml.reporting.svg import Scale, is_narrow, label, line, node, padded, picture, tick_labels, x_axis

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PAUSE_S = 20.0  # without a round for longer, measuring had stopped: the time is cut out
_MOST_DOTS = 3000  # of a picture
_UNKNOWN = "k0"  # the colour of rounds whose state is not known
_MINUTES_FROM_S = 180.0


@dataclass(frozen=True)
class LatencyOverTime:
    """When each round at batch 1 began, the index of its state (-1: not known), and each engine's p50 in it.

    p50_ms is NaN where an engine has no figure in a round. All arrays are (rounds,), in any order.
    """

    at_s: NDArray[np.float64]
    state: NDArray[np.int64]
    p50_ms: Mapping[str, NDArray[np.float64]]


def latency_over_time(
    samples: Mapping[str, NDArray[np.float64]], engines: Iterable[str]
) -> LatencyOverTime | None:
    """Of arrays named as in `samples.npz` (see `MeasurementsSpec`); None where they do not say when."""
    import numpy as np

    names = [name for name in engines if f"{name}@1" in samples]
    if "at_s@1" not in samples or "state@1" not in samples or not names:
        return None
    p50_ms = {name: _p50(samples[f"{name}@1"]) for name in names}
    return LatencyOverTime(np.asarray(samples["at_s@1"]), np.asarray(samples["state@1"]), p50_ms)


def read_over_time(file: Path, engines: Iterable[str]) -> LatencyOverTime | None:
    """Of a `samples.npz` that is known to be whole; None where it does not say when."""
    import numpy as np

    with np.load(file, allow_pickle=False) as arrays:
        return latency_over_time(
            {name: arrays[name] for name in arrays.files if name.endswith("@1")}, engines
        )


def _p50(latency_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each row, of what is not NaN in it."""
    import numpy as np

    known = np.isfinite(latency_ms).any(axis=1)
    p50 = np.full(len(latency_ms), np.nan)
    p50[known] = np.nanmedian(latency_ms[known], axis=1)
    return p50


def state_classes(seen: LatencyOverTime, states: Sequence[CoreState]) -> dict[str, str]:
    """The CSS class of the colour of each state, by what the legend says of it."""
    classes = {
        f"cores {state.name}, {share(state)} of the time": _state_class(at) for at, state in enumerate(states)
    }
    return classes | ({"distance not known": _UNKNOWN} if (seen.state < 0).any() else {})


def _state_class(index: int) -> str:
    return f"k{index % COLOURS + 1}" if index >= 0 else _UNKNOWN


def drawn_every(seen: LatencyOverTime) -> int:
    """One round in so many is drawn."""
    return max(1, math.ceil(len(seen.at_s) * len(seen.p50_ms) / _MOST_DOTS))


def over_time_picture(
    seen: LatencyOverTime, states: Sequence[CoreState], classes: Mapping[str, str], width: float
) -> Element | None:
    """A row an engine over a common axis of time; None where there are no rounds."""
    import numpy as np

    shown = {name: p50_ms for name, p50_ms in seen.p50_ms.items() if np.isfinite(p50_ms).any()}
    if not shown:
        return None
    at_s, pauses_s = without_pauses(seen)
    narrow = is_narrow(width)
    pitch, left = (92.0, 48.0) if narrow else (78.0, 262.0)
    bottom = 8 + pitch * len(shown)
    last_s = float(at_s.max()) or 1.0
    unit, unit_s = ("min", 60.0) if last_s >= _MINUTES_FROM_S else ("s", 1.0)
    x = Scale(0.0, last_s / unit_s * 1.01, left, width - 12)
    drawn = x_axis(x, 4, bottom, f"time of measuring, {unit}")
    drawn += [line(x(at / unit_s), 4, x(at / unit_s), bottom, "floor") for at in pauses_s]
    of_state = {int(index): _state_class(int(index)) for index in np.unique(seen.state)}
    for row, (name, p50_ms) in enumerate(shown.items()):
        top = 8 + pitch * row
        if row:
            drawn.append(line(4, top, width - 12, top, "rule"))
        y = _row_scale(p50_ms, top + (24 if narrow else 8), top + pitch - 8)
        drawn += _row_axis(name, y, x, narrow)
        for index, class_ in of_state.items():
            chosen = (seen.state == index) & np.isfinite(p50_ms)
            chosen[np.arange(len(chosen)) % drawn_every(seen) > 0] = False
            drawn += _dots(
                [x(value / unit_s) for value in at_s[chosen].tolist()],
                [y(min(max(value, y.low), y.high)) for value in p50_ms[chosen].tolist()],
                class_ if len(states) > 1 else classes[name],
            )
    return picture(width, bottom + 44, "p50 of each engine in each round, over the time of the run", drawn)


def without_pauses(seen: LatencyOverTime) -> tuple[NDArray[np.float64], list[float]]:
    """When each round began, less the pauses of the measuring; and where these were, in the same seconds."""
    import numpy as np

    order = np.argsort(seen.at_s, kind="stable")
    gaps = np.diff(seen.at_s[order], prepend=seen.at_s[order][:1])
    paused = gaps > _PAUSE_S
    gaps[paused] = 1.0
    at_s = np.empty_like(seen.at_s)
    at_s[order] = np.cumsum(gaps)
    return at_s, (np.cumsum(gaps)[paused] - 0.5).tolist()


def _row_scale(p50_ms: NDArray[np.float64], top: float, bottom: float) -> Scale:
    """All but the slowest and the fastest hundredth, which stand at the edge."""
    import numpy as np

    low, high = np.nanquantile(p50_ms, (0.01, 0.99))
    return padded([float(low), float(high)], bottom, top, log=True)


def _row_axis(name: str, y: Scale, x: Scale, narrow: bool) -> list[Element]:
    """The name of a row, left of it or above, its grid lines and its milliseconds."""
    ticks = y.ticks(3)
    texts = zip(ticks, tick_labels(y, ticks), strict=True)
    return [
        *(line(x.start, y(tick), x.end, y(tick), "grid") for tick in ticks),
        *(label(text, x.start - 6, y(tick) + 4, "small", anchor="end") for tick, text in texts),
        label(f"{shorten(name, 40)}, ms", 4, y.end - 8, "name")
        if narrow
        else label(f"{shorten(name, 28)}, ms", x.start - 48, (y.start + y.end) / 2 + 4, "name", anchor="end"),
    ]


def _dots(at_x: Sequence[float], at_y: Sequence[float], class_: str) -> list[Element]:
    """Dots as one path: strokes of no length with round ends, a tenth of the bytes of circles."""
    steps = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in zip(at_x, at_y, strict=True))
    return [node("path", d=steps, class_=f"dots {class_}")] if steps else []
