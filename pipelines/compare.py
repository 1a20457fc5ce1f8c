"""`hpml compare A B`: what changed between two measurements, of runs or of benches."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.artifacts import write_text_atomic
from components.benchmark.record import RECORD, read_record
from components.errors import GateFailed, UsageError
from components.measurements import EngineFigures, Interval, MeasurementsSpec
from components.page.bench import Row, compare_page, ratio_in_words
from components.page.format import plain
from pipelines import bench_tables, run_record
from pipelines.run_record import FINISHED
from pipelines.store import Store

MARGIN = 0.02  # within it two figures are as good as equal: fresh processes of one engine differ by as much
_HARDWARE = ("cpu", "cpu_flags", "cpus", "gpus", "cpu_governor", "memory_limit", "kernel", "python")
_NOTE = (
    "Ratios of figures that were not measured together: their intervals are put together as those of "
    f"independent figures (MOVER). Tied: the whole interval is within {MARGIN:.0%} of 1; faster or slower: "
    "it does not hold 1; undecided: it holds 1 and more. What changed on the machine between the two is in "
    "the ratio as well: one hpml bench of both gives a closer answer."
)


@dataclass(frozen=True)
class Side:
    """One of the two measurements. libraries: their versions, as far as known."""

    name: str
    measurements: MeasurementsSpec
    libraries: Mapping[str, str]


@dataclass(frozen=True)
class Comparison:
    """What changed from `before` to `after`. differences: why the two may not be comparable."""

    before: Side
    after: Side
    rows: tuple[Row, ...]
    accuracies: dict[str, Interval]  # change of top-1, 0.01 is one point
    differences: tuple[str, ...]
    unmatched: tuple[str, ...]  # engines of one side only


def compare(home: Path, before: str, after: str) -> Comparison:
    """Compare two measurements, each a run's id, "latest", or the folder or bench.json of a bench.

    Raises UsageError if one of them is none of these, or if they have no engine in common, and GateFailed if
    one is invalid.
    """
    sides = _side(home, before), _side(home, after)
    engines = [_measured(side.measurements) for side in sides]
    common = [name for name in engines[0] if name in engines[1]]
    if not common:
        raise UsageError(
            f"{before} and {after} have no engine in common",
            why=f"one has {', '.join(engines[0])}, the other {', '.join(engines[1])}",
        )
    rows = [row for name in common for row in _rows(name, engines[0][name], engines[1][name])]
    accuracies = {
        name: change
        for name in common
        if (change := _difference(engines[0][name].accuracy_top1, engines[1][name].accuracy_top1))
    }
    unmatched = sorted((engines[0].keys() | engines[1].keys()) - set(common))
    return Comparison(*sides, tuple(rows), accuracies, tuple(_differences(*sides)), tuple(unmatched))


def _measured(measurements: MeasurementsSpec) -> dict[str, EngineFigures]:
    return {name: engine for name, engine in measurements.engines.items() if engine.status == "measured"}


def _side(home: Path, name: str) -> Side:
    path = Path(name)
    if (path / RECORD).is_file() or path.is_file():
        record = read_record(path)
        side = Side(name, record.measurements, record.libraries)
    else:
        side = _run(home, name)
    if side.measurements.invalid:
        raise GateFailed(f"{name} is INVALID and has no figures", why=side.measurements.invalid)
    return side


def _run(home: Path, name: str) -> Side:
    record = run_record.load(home, name)
    for step in record.steps.values():
        if step.stage == "benchmark" and step.status in FINISHED:
            artifact = Store(home).open(step.digest)
            return Side(name, artifact.spec, artifact.manifest.lineage.libraries)
    raise UsageError(f"run {record.id} has no measurements", why=f"it is {record.status}")


# ------------------------------------------------------------------------------------------------ the figures


def _rows(name: str, before: EngineFigures, after: EngineFigures) -> Iterator[Row]:
    if before.latency_ms_p50 and after.latency_ms_p50:
        faster = ratio(before.latency_ms_p50, after.latency_ms_p50)
        yield Row(name, "p50, ms", before.latency_ms_p50, after.latency_ms_p50, faster, verdict(faster))
    rates = {item.batch: item.images_per_s for item in before.throughput}
    for item in after.throughput:
        if item.batch in rates:
            faster = ratio(item.images_per_s, rates[item.batch])
            figure = f"samples/s at {item.batch}"
            yield Row(name, figure, rates[item.batch], item.images_per_s, faster, verdict(faster))


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
    """The change of an accuracy, its interval by the same method without the logarithm."""
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
    for told, mine, theirs in (
        ("", {key: one.environment.get(key) for key in _HARDWARE}, other.environment),
        ("version of ", before.libraries, after.libraries),
    ):
        for key in sorted(mine.keys() & theirs.keys()):
            if mine[key] is not None and mine[key] != theirs[key]:
                yield f"{told}{key.replace('_', ' ')}: {mine[key]}, then {theirs[key]}"


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
    """What cannot be judged by `allowed`: figures whose intervals hold it, and engines of one side only."""
    limit = 1 / (1 + allowed)
    between = [_slower_in_words(row) for row in found.rows if row.ratio.low < limit <= row.ratio.high]
    return [f"{said}, allowed {100 * allowed:g} %" for said in between] + _unmatched_in_words(found)


def refuse_slower(found: Comparison, allowed: float) -> None:
    """Raise GateFailed if a figure is slower by more than `allowed` (0.05: takes 1.05 times as long or more).

    It has to be established: the whole interval of the ratio is beyond it.
    """
    limit = 1 / (1 + allowed)
    worse = sorted((row for row in found.rows if row.ratio.high < limit), key=lambda row: row.ratio.value)
    if worse:
        more = f"; and {len(worse) - 3} more" if len(worse) > 3 else ""
        raise GateFailed(
            f"{found.after.name} is slower than {found.before.name} by more than {100 * allowed:g} %",
            why="; ".join(_slower_in_words(row) for row in worse[:3]) + more,
        )


def _slower_in_words(row: Row) -> str:
    """By how much longer the second takes: "int8/onnx p50 12.0 % slower (8.1 to 16.2)"."""
    value, low, high = (100 * (1 / ratio - 1) for ratio in (row.ratio.value, row.ratio.high, row.ratio.low))
    return f"{row.engine} {row.figure.removesuffix(', ms')} {value:.1f} % slower ({low:.1f} to {high:.1f})"


# -------------------------------------------------------------------------------------------- how it is told


def show(found: Comparison, output: str) -> None:
    """Print the comparison on stdout, warnings first."""
    if output == "json":
        print(json.dumps(_as_json(found), indent=2))
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
        for sentence in (*_accuracy_in_words(found), *_unmatched_in_words(found), _NOTE):
            bench_tables.say(sentence)


def write_page(found: Comparison, file: Path) -> None:
    """Write the comparison as a page, whole or not at all."""
    names = found.before.name, found.after.name
    notes = [*_accuracy_in_words(found), *_unmatched_in_words(found), _NOTE]
    title = f"{names[1]} against {names[0]}"
    write_text_atomic(
        file, compare_page(title, found.rows, names=names, warnings=warnings(found), notes=notes)
    )


def warnings(found: Comparison) -> list[str]:
    """What makes the ratios doubtful."""
    if not found.differences:
        return []
    return ["WARNING: not measured under the same conditions, so the ratios are of these as well:"] + [
        f"  {difference}" for difference in found.differences
    ]


def _accuracy_in_words(found: Comparison) -> list[str]:
    return [
        f"top-1 of {name}: {change.value * 100:+.2f} points "
        f"({change.low * 100:+.2f} to {change.high * 100:+.2f})"
        for name, change in found.accuracies.items()
    ]


def _unmatched_in_words(found: Comparison) -> list[str]:
    return [f"in one of the two only: {', '.join(found.unmatched)}"] if found.unmatched else []


def _as_json(found: Comparison) -> dict[str, Any]:
    return {
        "before": found.before.name,
        "after": found.after.name,
        "margin": MARGIN,
        "differences": found.differences,
        "rows": [
            {key: value.model_dump() if isinstance(value, Interval) else value for key, value in _fields(row)}
            for row in found.rows
        ],
        "accuracy_top1_change": {name: change.model_dump() for name, change in found.accuracies.items()},
        "unmatched": found.unmatched,
    }


def _fields(row: Row) -> Iterator[tuple[str, Any]]:
    for name in Row.__dataclass_fields__:
        yield name, getattr(row, name)


def _markdown(found: Comparison) -> str:
    lines = [f"> {warning}" for warning in warnings(found)]
    lines += ["", "| engine | figure | before | after | ratio | verdict |", "|---|---|--:|--:|--:|---|"]
    for row in found.rows:
        cells = [row.engine, row.figure, plain(row.before.value), plain(row.after.value)]
        cells = [
            bench_tables.printable(cell).replace("|", "\\|") for cell in (*cells, ratio_in_words(row.ratio))
        ]
        lines.append(f"| {' | '.join(cells)} | {row.verdict} |")
    lines += [
        "",
        *(f"- {line}" for line in (*_accuracy_in_words(found), *_unmatched_in_words(found))),
        "",
        _NOTE,
    ]
    return bench_tables.printable("\n".join(lines).strip())
