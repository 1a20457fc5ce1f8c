"""`hpml compare A B`: what changed between two measurements, of runs or of benches."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic_core import to_jsonable_python

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec
from hpml.artifacts.metric import MetricFacts
from hpml.core.atomic_files import write_text_atomic
from hpml.core.errors import GateFailed, UsageError
from hpml.measuring.goals import COMPLETION
from hpml.measuring.state_mixture import latency_in, matched, same_mixture, share
from hpml.pipelines.bench.record import RECORD, read_record
from hpml.pipelines.command_pages.bench import Row, compare_page, ratio_in_words
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.run_record import FINISHED
from hpml.pipelines.engine.store import Store
from hpml.pipelines.terminal import bench_tables
from hpml.reporting.format import plain
from hpml.reporting.measurement_tables import settings_of, why_absent

MARGIN = 0.02  # within it two figures are as good as equal: fresh processes of one engine differ by as much
_HARDWARE = ("cpu", "cpu_flags", "cpus", "gpus", "cpu_governor", "memory_limit", "kernel", "python")
_NOTE = (
    "Ratios of figures that were not measured together: their intervals are put together as those of "
    f"independent figures (MOVER). Tied: the whole interval is within {MARGIN:.0%} of 1; faster or slower: "
    "it does not hold 1; undecided: it holds 1 and more; not alike: in one of the two the CPUs were near to "
    "each other for more of the time, and the ratio is of that as well. What changed on the machine between "
    "the two is in the ratio, too: one hpml bench of both gives a closer answer."
)


@dataclass(frozen=True)
class Side:
    """One of the two measurements. libraries: their versions, as far as known."""

    name: str
    measurements: MeasurementsSpec
    libraries: Mapping[str, str]


@dataclass(frozen=True)
class Comparison:
    """What changed from `before` to `after`.

    differences: why the two may not be comparable. not_measured: what has no latency on a side, and why.
    """

    before: Side
    after: Side
    rows: tuple[Row, ...]
    metric: MetricFacts
    qualities: dict[str, Interval]  # change of the metric; of a share, 0.01 is one point
    differences: tuple[str, ...]
    unmatched: tuple[str, ...]  # engines of one side only
    not_measured: tuple[str, ...] = ()


def compare(home: Path, before: str, after: str) -> Comparison:
    """Compare two measurements, each a run's id, "latest", or the folder or bench.json of a bench.

    Raises UsageError if one of them is none of these, or if they have no engine in common.
    """
    sides = _side(home, before), _side(home, after)
    first, second = (side.measurements.operation for side in sides)
    if first != second:
        raise UsageError(
            f"{before} and {after} cannot be compared",
            why=f"the figures of one are of the operation {first}, those of the other of {second}",
        )
    engines = [_built(side.measurements) for side in sides]
    common = [name for name in engines[0] if name in engines[1]]
    if not common:
        raise UsageError(f"{before} and {after} have no engine in common", why=_engines_of_both(*sides))
    rows = [
        replace(row, figure=f"{operation} {row.figure}".strip())
        for operation, one, other in _operations(*(side.measurements for side in sides))
        for name in one.engines
        if name in common and name in other.engines
        for row in _rows(name, one, other)
    ]
    metric = sides[1].measurements.metrics[0]
    qualities = {
        name: change
        for name in common
        if (change := _difference(*(of_side[name].quality.get(metric.name) for of_side in engines)))
    }
    unmatched = sorted((engines[0].keys() | engines[1].keys()) - set(common))
    absent = [
        f"{name} in {side.name}: {why}"
        for side in sides
        for name in common
        if (why := why_absent(side.measurements.engines[name], "latency_ms_p50"))
    ]
    return Comparison(
        *sides, tuple(rows), metric, qualities, tuple(_differences(*sides)), tuple(unmatched), tuple(absent)
    )


def _operations(
    before: MeasurementsSpec, after: MeasurementsSpec
) -> Iterator[tuple[str, MeasurementsSpec, MeasurementsSpec]]:
    """Both for each operation that both have, with the engines' figures in that; "" is that of the goals."""
    yield "", before, after
    for name in before.operations:
        if name in after.operations:
            one, other = (
                side.model_copy(update={"engines": side.operations[name].engines}) for side in (before, after)
            )
            yield name, one, other


def _built(measurements: MeasurementsSpec) -> dict[str, EngineFigures]:
    return {name: engine for name, engine in measurements.engines.items() if engine.status != "not built"}


def _engines_of_both(before: Side, after: Side) -> str:
    told = []
    for which, side in (("one", before), ("the other", after)):
        why = f" ({side.measurements.incomplete})" if side.measurements.incomplete else ""
        told.append(f"{which} has {', '.join(_built(side.measurements)) or 'none'}{why}")
    return ", ".join(told)


def _side(home: Path, name: str) -> Side:
    path = Path(name)
    if (path / RECORD).is_file() or path.is_file():
        record = read_record(path)
        return Side(name, record.measurements, record.libraries)
    run = run_record.load(home, name)
    for step in run.steps.values():
        if step.stage == "benchmark" and step.status in FINISHED:
            artifact = Store(home).open(step.digest)
            return Side(name, artifact.spec, artifact.manifest.lineage.libraries)
    raise UsageError(f"run {run.id} has no measurements", why=f"it is {run.status}")


# ------------------------------------------------------------------------------------------------ the figures


def _rows(name: str, before: MeasurementsSpec, after: MeasurementsSpec) -> list[Row]:
    """Like with like: p50 in each state that both saw, else over what they saw; throughput over that."""
    is_like = same_mixture(before.states, after.states)
    one, other = before.engines[name], after.engines[name]
    rows = []
    for state in matched(before.states, after.states):
        p50 = latency_in(one, state.before, before.states), latency_in(other, state.after, after.states)
        if p50[0] and p50[1]:
            rows.append(_row(name, f"p50 {state.name}".strip() + ", ms", p50[0], p50[1], is_like=True))
    if not rows and one.latency_ms_p50 and other.latency_ms_p50:
        rows.append(_row(name, "p50, ms", one.latency_ms_p50, other.latency_ms_p50, is_like=is_like))
    rates = {item.batch: item.rows_per_s for item in one.throughput}
    for item in other.throughput:
        if item.batch in rates:
            figure = f"samples/s at {item.batch}"
            rows.append(_row(name, figure, rates[item.batch], item.rows_per_s, is_like=is_like))
    return rows


def _row(engine: str, figure: str, before: Interval, after: Interval, *, is_like: bool) -> Row:
    """One figure of both sides: a time, for which the ratio is turned over, or a rate."""
    faster = ratio(before, after) if figure.endswith(", ms") else ratio(after, before)
    return Row(engine, figure, before, after, faster, verdict(faster) if is_like else "not alike", is_like)


def ratio(numerator: Interval, denominator: Interval) -> Interval:
    """`numerator` over `denominator`, measured independently of each other.

    The interval is put together from the two on the logarithm (MOVER: Zou and Donner 2008, "Construction of
    confidence limits about effect measures", Stat. Med. 27:1693), so that of 1 / ratio is it turned over.
    """
    value = numerator.value / denominator.value
    below = math.hypot(_log(numerator.value, numerator.low), _log(denominator.high, denominator.value))
    above = math.hypot(_log(numerator.high, numerator.value), _log(denominator.value, denominator.low))
    return Interval(value=value, low=value * math.exp(-below), high=value * math.exp(above))


def _log(larger: float, smaller: float) -> float:
    return math.log(larger / smaller)


def verdict(faster: Interval) -> str:
    """What a ratio says, above 1 being better. "undecided": shown neither to differ nor to be close."""
    if faster.low >= 1 / (1 + MARGIN) and faster.high <= 1 + MARGIN:
        return "tied"
    if faster.low > 1:
        return "faster"
    if faster.high < 1:
        return "slower"
    return "undecided"


def _difference(before: Interval | None, after: Interval | None) -> Interval | None:
    """The change of a quality, its interval by the same method without the logarithm."""
    if before is None or after is None:
        return None
    below = math.hypot(after.value - after.low, before.high - before.value)
    above = math.hypot(after.high - after.value, before.value - before.low)
    change = after.value - before.value
    return Interval(value=change, low=change - below, high=change + above)


def _differences(before: Side, after: Side) -> Iterator[str]:
    """What else differs between the two: hardware, threads, versions."""
    one, other = before.measurements, after.measurements
    if one.threads != other.threads:
        yield f"threads: {one.threads}, then {other.threads}"
    for name in sorted(one.engines.keys() & other.engines.keys()):
        then, now = (settings_of(side.engines[name]) for side in (one, other))
        if then and now and then != now:
            yield f"settings of {name}: {then}, then {now}"
    if not same_mixture(one.states, other.states):
        how = "; p50 is compared in each state" if matched(one.states, other.states) else ""
        yield f"the cores were {_seen(one.states)}, then {_seen(other.states)}{how}"
    for told, mine, theirs in (
        ("", {key: one.environment.get(key) for key in _HARDWARE}, other.environment),
        ("version of ", before.libraries, after.libraries),
    ):
        for key in sorted(mine.keys() & theirs.keys()):
            if mine[key] is not None and mine[key] != theirs[key]:
                yield f"{told}{key.replace('_', ' ')}: {mine[key]}, then {theirs[key]}"


def _seen(states: Sequence[CoreState]) -> str:
    """ "near 35 % of the time (205 ns), far 65 % (490 ns)"."""
    return ", ".join(
        f"{state.name or 'at one distance'} {share(state)} ({state.round_trip_ns.value:.0f} ns)"
        for state in states
    )


# ------------------------------------------------------------------------------------------------- the gate


def parse_share(text: str) -> float:
    """The share in "5%" or "0.05".

    Raises UsageError for anything but a share below 100 %: "5" is more likely to mean 5 % than 500 %.
    """
    number, percent, rest = text.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = math.nan
    if rest or not 0 <= share < 1:
        raise UsageError(
            f"{text!r} is not a share below 100 %", fix='give it as 5% or 0.05: --fail-slower "5%"'
        )
    return share


def undecided(found: Comparison, allowed: float) -> list[str]:
    """What cannot be judged by `allowed`: figures whose intervals hold it, and engines of one side only.

    And figures over other mixtures of the states of the cores: what differs there is the mixture.
    """
    limit = 1 / (1 + allowed)
    like = [row for row in found.rows if row.is_like]
    between = [
        f"{_slower_in_words(row)}, allowed {100 * allowed:g} %"
        for row in like
        if row.ratio.low < limit <= row.ratio.high
    ]
    unlike = [f"{row.engine} {row.figure}" for row in found.rows if not row.is_like]
    if unlike:
        between.append(f"{unlike[0]} and {len(unlike) - 1} more: over other mixtures of the cores' states")
    return between + _unmatched_in_words(found)


def refuse_slower(found: Comparison, allowed: float) -> None:
    """Raise GateFailed if a figure is slower by more than `allowed` (0.05: takes 1.05 times as long or more).

    It has to be established: the whole interval of the ratio is beyond it, like with like. So do engines
    that are not measured on a side: a gate lets nothing pass that it has not seen.
    """
    limit = 1 / (1 + allowed)
    like = [row for row in found.rows if row.is_like]
    worse = sorted((row for row in like if row.ratio.high < limit), key=lambda row: row.ratio.value)
    if worse:
        more = f"; and {len(worse) - 3} more" if len(worse) > 3 else ""
        raise GateFailed(
            f"{found.after.name} is slower than {found.before.name} by more than {100 * allowed:g} %",
            why="; ".join(_slower_in_words(row) for row in worse[:3]) + more,
        )
    if found.not_measured:
        raise GateFailed(
            f"whether {found.after.name} is slower than {found.before.name} is not known",
            why="; ".join(found.not_measured),
            fix=f"{COMPLETION} goes on measuring a run; measure a bench again",
        )


def _slower_in_words(row: Row) -> str:
    """By how much longer the second takes: "int8/onnx p50 12.0 % slower (8.1 to 16.2)"."""
    value, low, high = (100 * (1 / ratio - 1) for ratio in (row.ratio.value, row.ratio.high, row.ratio.low))
    return f"{row.engine} {row.figure.removesuffix(', ms')} {value:.1f} % slower ({low:.1f} to {high:.1f})"


# -------------------------------------------------------------------------------------------- how it is told


def show(found: Comparison, output: str) -> None:
    """Print the comparison on stdout, warnings first."""
    if output == "json":
        fields = {
            "before": found.before.name,
            "after": found.after.name,
            "margin": MARGIN,
            "differences": found.differences,
            "rows": found.rows,
            f"{found.metric.name}_change": found.qualities,
            "unmatched": found.unmatched,
            "not_measured": found.not_measured,
        }
        print(json.dumps(to_jsonable_python(fields), indent=2))
    elif output == "markdown":
        print(_markdown(found))
    else:
        for warning in warnings(found):
            bench_tables.say(warning)
        bench_tables.print_figures(
            ("engine", "before", "after", "ratio", "verdict"),
            [
                (
                    f"{row.engine}\n{row.figure}",
                    *(bench_tables.figure(one) for one in (row.before, row.after, row.ratio)),
                    row.verdict,
                )
                for row in found.rows
            ],
            right=(1, 2, 3),
        )
        for sentence in _notes(found):
            bench_tables.say(sentence)


def write_page(found: Comparison, file: Path) -> None:
    """Write the comparison as a page, whole or not at all."""
    names = found.before.name, found.after.name
    title = f"{names[1]} against {names[0]}"
    write_text_atomic(
        file, compare_page(title, found.rows, names=names, warnings=warnings(found), notes=_notes(found))
    )


def warnings(found: Comparison) -> list[str]:
    """What makes the ratios doubtful."""
    warning = "WARNING: not measured under the same conditions, so the ratios are of these as well:"
    return [warning, *(f"  {difference}" for difference in found.differences)] if found.differences else []


def _notes(found: Comparison) -> list[str]:
    """What stands below the table."""
    return [*found.not_measured, *_quality_in_words(found), *_unmatched_in_words(found), _NOTE]


def _quality_in_words(found: Comparison) -> list[str]:
    metric = found.metric
    unit = " points" if metric.is_share else ""
    return [
        f"{metric.label} of {name}: {change.value * metric.scale:+.2f}{unit} "
        f"({change.low * metric.scale:+.2f} to {change.high * metric.scale:+.2f})"
        for name, change in found.qualities.items()
    ]


def _unmatched_in_words(found: Comparison) -> list[str]:
    return [f"in one of the two only: {', '.join(found.unmatched)}"] if found.unmatched else []


def _markdown(found: Comparison) -> str:
    lines = [f"> {warning}" for warning in warnings(found)]
    lines += ["", "| engine | figure | before | after | ratio | verdict |", "|---|---|--:|--:|--:|---|"]
    for row in found.rows:
        figures = plain(row.before.value), plain(row.after.value), ratio_in_words(row.ratio)
        cells = [cell.replace("|", "\\|") for cell in (row.engine, row.figure, *figures)]
        lines.append(f"| {' | '.join(cells)} | {row.verdict} |")
    lines += ["", *(f"- {line}" for line in _notes(found)[:-1]), "", _NOTE]
    return bench_tables.printable("\n".join(lines).strip())
