"""Whether what was seen of a canary lets it take over. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from hpml.core.contract import Config
from hpml.serving.rollout.figures import ReplayFigures, SmokeFigures

_COMPARED = {"decisions": "decisions are the same", "rows": "rows agree within the engine's tolerance"}


class SmokeLimits(Config):
    """What a canary is held to, and for how long it is asked.

    p50_factor, p99_factor: how many times the stable server's latency, seen in the same window by the same
    client, the canary's may be. benchmark_factor: how many times the registered p50 of the engine, and
    cold_ms more, a run of it may take on average, on the CPU that it was measured on. replay_agreement: the
    least share of answers to replayed requests in which it has to agree with the stable version; None: any.
    """

    seconds: float = Field(default=10.0, ge=1, le=3600)
    p50_factor: float = Field(default=1.25, ge=1)
    p99_factor: float = Field(default=2.0, ge=1)
    benchmark_factor: float = Field(default=2.0, ge=1)
    cold_ms: float = (
        0.2  # what an engine takes longer that sleeps between requests than in a benchmark's loop
    )
    replay_agreement: float | None = Field(default=None, ge=0, le=1)


@dataclass(frozen=True)
class Benchmark:
    """The registered p50 of an engine at batch 1, and the CPU that it was measured on."""

    latency_ms_p50: float
    cpu: str


@dataclass(frozen=True)
class SmokeVerdict:
    """problems: why the canary may not take over, in words. notes: what was not compared, and why, and what
    came of replayed requests."""

    problems: tuple[str, ...]
    notes: tuple[str, ...]


def judge(figures: SmokeFigures, limits: SmokeLimits, benchmark: Benchmark | None) -> SmokeVerdict:
    """Hold `figures` to `limits`, by the values of their intervals, as goals are."""
    problems, notes = [*figures.failures, *figures.disagreements], []
    if figures.canary and figures.stable and figures.p50_ratio:
        ratio = figures.p50_ratio
        if ratio.value > limits.p50_factor:
            problems.append(
                f"p50 is {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) times the stable version's,"
                f" {limits.p50_factor:g} is allowed"
            )
        tail = figures.canary.latency_ms_p99 / figures.stable.latency_ms_p99
        if tail > limits.p99_factor:
            problems.append(f"p99 is {tail:.2f} times the stable version's, {limits.p99_factor:g} is allowed")
    elif figures.canary:
        notes.append("latency is compared with no stable version: there is none")
    problem, note = _against_benchmark(figures, limits, benchmark)
    problems, notes = [*problems, problem], [*notes, note]
    if figures.replay:
        is_compared = figures.stable is not None
        problems += _problems_of_replay(figures.replay, limits.replay_agreement if is_compared else None)
        notes.append(_in_words(figures.replay, is_compared=is_compared))
    return SmokeVerdict(tuple(filter(None, problems)), tuple(filter(None, notes)))


def _problems_of_replay(replay: ReplayFigures, least: float | None) -> list[str]:
    """least: agreement; None: any."""
    found = [f"replayed {failure}" for failure in replay.failures]
    if least is None:
        return found
    if replay.agreement is None:
        found.append("no replayed request was answered by both versions, so their agreement is not known")
    elif replay.agreement < least:
        found.append(
            f"the answers to replayed requests agree in {replay.agreement:.2%}, {least:.2%} are needed"
        )
    return found


def _in_words(replay: ReplayFigures, *, is_compared: bool) -> str:
    told = f"{replay.sent:,} of {replay.recorded:,} recorded requests were replayed"
    if replay.canary:
        told += f", p50 {replay.canary.latency_ms_p50:.3g} ms"
    if not is_compared:
        return f"{told}, and compared with no stable version: there is none"
    if replay.stable:
        told += f", the stable version's {replay.stable.latency_ms_p50:.3g} ms"
    if replay.unanswered_by_stable:
        told += f"; the stable version did not answer {replay.unanswered_by_stable:,}"
    if replay.agreement is None:
        return f"{told}; agreement is not known"
    return f"{told}; {replay.agreement:.2%} of {replay.compared:,} {_COMPARED[replay.compared_by]}"


def _against_benchmark(
    figures: SmokeFigures, limits: SmokeLimits, benchmark: Benchmark | None
) -> tuple[str, str]:
    """A problem, or why it is not known whether there is one."""
    if figures.engine_ms_mean is None:
        return "", ""
    if benchmark is None:
        return "", "not compared with the benchmark: the bundle has no latency, or not the CPU it is of"
    if benchmark.cpu != figures.hardware:
        return "", f"not compared with the benchmark: that was on {benchmark.cpu}, this on {figures.hardware}"
    factor = figures.engine_ms_mean / benchmark.latency_ms_p50
    if figures.engine_ms_mean <= limits.benchmark_factor * benchmark.latency_ms_p50 + limits.cold_ms:
        return "", ""
    return (
        f"a run of the engine takes {figures.engine_ms_mean:.3g} ms on average, {factor:.2f} times its"
        f" registered p50; {limits.benchmark_factor:g} times and {limits.cold_ms:g} ms are allowed",
        "",
    )
