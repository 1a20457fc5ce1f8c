"""How often 95 % intervals hold the truth: `python -m tests.measure_coverage` prints the tables of the docs.

Latencies are drawn from streams whose quantiles and means are known exactly, in rounds as the benchmark has
them, and the benchmark's own functions make the intervals. It takes half a minute on one core.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import numpy as np

from hpml.artifacts.interval import Interval
from hpml.measuring.statistics import median, quantile, rate

BETWEEN_LAUNCHES = 0.02  # standard deviation of what an engine's launch does to its level, on the logarithm
LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
FIGURES = (*LEVELS, "ratio of p50", "throughput")
WANTED = (0.92, 0.98)


@dataclass(frozen=True)
class Shape:
    """How a run is divided. Where an engine is launched more than once, launches differ."""

    rounds: int
    requests: int
    launches: int = 1

    def __str__(self) -> str:
        several = f", {self.launches} launches" if self.launches > 1 else ""
        return f"{self.rounds} x {self.requests}{several}"

    @property
    def rounds_of_launches(self) -> tuple[int, ...]:
        """As the benchmark says it; empty for one launch."""
        return (self.rounds // self.launches,) * self.launches if self.launches > 1 else ()

    @property
    def between_launches(self) -> float:
        """The standard deviation of what a launch does to the logarithm."""
        return BETWEEN_LAUNCHES if self.launches > 1 else 0.0


DEFAULT_SHAPE = Shape(40, 50)  # of the benchmark's default config, as if it had one launch
LAUNCHED_SHAPE = Shape(40, 50, launches=5)  # as it is
SHAPES = (DEFAULT_SHAPE, LAUNCHED_SHAPE, Shape(10, 200), Shape(6, 120))

Normals = list[tuple[float, float, float]]  # weight, mean, standard deviation: a mixture of normals
Draw = Callable[[np.random.Generator, int, int], np.ndarray]


@dataclass(frozen=True)
class Stream:
    """Logarithms of latencies. draw(rng, rounds, requests) makes some, (rounds, requests).

    marginal(rounds): how one of them is distributed, whichever it is, in a run of so many rounds.
    """

    draw: Draw
    marginal: Callable[[int], Normals]

    def quantile(self, level: float, shape: Shape) -> float:
        """The latency that a share of `level` is not above: the root of the mixture's distribution."""
        normals, low, high = self._launched(shape), -10.0, 10.0
        for _ in range(80):
            middle = (low + high) / 2
            below = sum(weight * NormalDist(mean, sd).cdf(middle) for weight, mean, sd in normals)
            low, high = (middle, high) if below < level else (low, middle)
        return float(np.exp(high))

    def mean(self, shape: Shape) -> float:
        """The mean latency."""
        return float(sum(weight * np.exp(mean + sd**2 / 2) for weight, mean, sd in self._launched(shape)))

    def _launched(self, shape: Shape) -> Normals:
        launches_sd = shape.between_launches
        return [
            (weight, mean, float(np.hypot(sd, launches_sd)))
            for weight, mean, sd in self.marginal(shape.rounds)
        ]

    def draw_run(self, rng: np.random.Generator, shape: Shape) -> np.ndarray:
        """Latencies (rounds, requests) of a run of this shape."""
        log_ms = self.draw(rng, shape.rounds, shape.requests)
        levels = rng.normal(0, shape.between_launches, shape.launches)
        return np.exp(log_ms + np.repeat(levels, shape.rounds // shape.launches)[:, None])


# ------------------------------------------------------------------------------------------------ the streams


def _gaussian(
    rng: np.random.Generator,
    rounds: int,
    requests: int,
    *,
    within: float,
    between: float = 0.0,
    ar: float = 0.0,
) -> np.ndarray:
    """Normal: sd `within` a round, where each request depends on the last by `ar`, and `between` rounds."""
    noise = rng.normal(size=(rounds, requests))
    for index in range(1, requests if ar else 0):
        noise[:, index] = ar * noise[:, index - 1] + np.sqrt(1 - ar**2) * noise[:, index]
    return within * noise + between * rng.normal(size=(rounds, 1))


def gaussian(within: float, between: float = 0.0, ar: float = 0.0) -> Stream:
    """Lognormal latencies with what rounds and neighbours have in common."""
    spread = float(np.hypot(within, between))
    draw = partial(_gaussian, within=within, between=between, ar=ar)
    return Stream(draw, lambda rounds: [(1.0, 0.0, spread)])


def bimodal(share: float, factor: float, within: float) -> Stream:
    """A `share` of the requests, each by chance, takes `factor` times as long: a gap between two modes."""

    def draw(rng: np.random.Generator, rounds: int, requests: int) -> np.ndarray:
        slow = rng.random((rounds, requests)) < share
        return rng.normal(0, within, (rounds, requests)) + np.log(factor) * slow

    return Stream(draw, lambda rounds: [(1 - share, 0.0, within), (share, float(np.log(factor)), within)])


def bursts(begins: float, length: int, factor: float, within: float) -> Stream:
    """With the chance `begins` a request is the first of `length` that take `factor` times as long."""
    share = 1 - (1 - begins) ** length

    def draw(rng: np.random.Generator, rounds: int, requests: int) -> np.ndarray:
        first = rng.random((rounds, requests + length - 1)) < begins
        slow = np.lib.stride_tricks.sliding_window_view(first, length, axis=1).any(axis=2)
        return rng.normal(0, within, (rounds, requests)) + np.log(factor) * slow

    return Stream(draw, lambda rounds: [(1 - share, 0.0, within), (share, float(np.log(factor)), within)])


def drifting(by: float, within: float) -> Stream:
    """The level rises steadily by the share `by` over the run."""

    def levels(rounds: int) -> np.ndarray:
        return np.log1p(by * np.linspace(0, 1, rounds))

    def draw(rng: np.random.Generator, rounds: int, requests: int) -> np.ndarray:
        return levels(rounds)[:, None] + rng.normal(0, within, (rounds, requests))

    return Stream(draw, lambda rounds: [(1 / rounds, float(level), within) for level in levels(rounds)])


STREAMS = {
    "lognormal": gaussian(0.25),
    "lognormal, rounds differ": gaussian(0.25, between=0.05),
    "lognormal, rounds differ much": gaussian(0.05, between=0.025),
    "bimodal": bimodal(0.15, 1.6, 0.05),
    "bursts": bursts(0.006, 5, 1.6, 0.05),
    "autocorrelated (0.6)": gaussian(0.25, ar=0.6),
    "autocorrelated (0.6), rounds differ": gaussian(0.25, between=0.05, ar=0.6),
    "autocorrelated (0.8), rounds differ": gaussian(0.25, between=0.05, ar=0.8),
    "drifting by 10 %, noisy": drifting(0.10, 0.25),
    "drifting by 3 %, quiet": drifting(0.03, 0.05),
    "drifting by 10 %, quiet": drifting(0.10, 0.05),
}


# ---------------------------------------------------------------------------------------------- what is held


def coverage(name: str, shape: Shape, draws: int, *, told: bool = True) -> dict[str, float]:
    """The share of `draws` in which the interval of each figure holds the truth. told: of the launches."""
    stream = STREAMS[name]
    truths = [stream.quantile(level, shape) for level in LEVELS.values()]
    truths += [2.0, 1 / stream.mean(shape)]
    rng = _generator(name, shape)
    launches = shape.rounds_of_launches if told else ()
    held = np.zeros(len(FIGURES))
    for _ in range(draws):
        found = _intervals(stream, rng, shape, launches)
        held += [one.low <= truth <= one.high for one, truth in zip(found, truths, strict=True)]
    return dict(zip(FIGURES, (held / draws).tolist(), strict=True))


def _intervals(
    stream: Stream, rng: np.random.Generator, shape: Shape, launches: Sequence[int]
) -> list[Interval]:
    """The benchmark's interval of each figure.

    For the ratio, another engine takes twice as long, and both meet what disturbs whole rounds by 10 %.
    """
    latency_ms, other_ms = stream.draw_run(rng, shape), 2 * stream.draw_run(rng, shape)
    disturbed = np.exp(rng.normal(0, 0.1, shape.rounds))
    return [
        *(quantile(latency_ms, level, launches) for level in LEVELS.values()),
        median(
            (np.median(other_ms, axis=1) * disturbed) / (np.median(latency_ms, axis=1) * disturbed), launches
        ),
        rate(1.0, latency_ms, launches),
    ]


def _generator(name: str, shape: Shape) -> np.random.Generator:
    """The same draws whenever the stream and the shape are the same."""
    return np.random.default_rng([zlib.crc32(name.encode()), shape.rounds, shape.requests, shape.launches])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=1000)
    draws = parser.parse_args().draws
    print(f"Draws of {draws:,} in which the 95 % interval holds the truth, %. Bold: not within 92-98.\n")
    print(_row(["stream", "rounds x requests", *FIGURES]))
    print("|---|---|" + "---|" * len(FIGURES))
    for shape in SHAPES:
        for name in STREAMS:
            shares = coverage(name, shape, draws).values()
            shown = [
                f"{100 * share:.1f}" if WANTED[0] <= share <= WANTED[1] else f"**{100 * share:.1f}**"
                for share in shares
            ]
            print(_row([name, str(shape), *shown]), flush=True)


if __name__ == "__main__":
    main()
