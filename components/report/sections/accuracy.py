"""What happened to the accuracy: each engine against the reference on the same samples, and by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from xml.etree.ElementTree import Element

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, PairedAccuracy
from hpml.components.report.content import Content
from hpml.reporting.elements import drawing, interval_cell, keyed, nowrap, table
from hpml.reporting.format import ABSENT, percent, plain, shorten
from hpml.reporting.markup import Child, node
from hpml.reporting.svg import label, picture, text_width

_SIGNIFICANT = 0.05  # of McNemar's test
_ALL_CLASSES = 12  # so many are shown; of more only the worst
_WORST_CLASSES = 10
_DARKEST = 0.4  # opacity under which the figure of a class can still be read
_NAME_CHARACTERS = 18  # of a class
_PHONE_PX = 500  # up to it, the names of the engines stand above their rows


def accuracy_detail_section(content: Content, classes: dict[str, str]) -> Element | None:
    """The section of the report; None where no engine was compared. classes: the colour of each engine."""
    measured = {name: e for name, e in content.measurements.engines.items() if e.accuracy_top1}
    paired = {name: engine.paired for name, engine in measured.items() if engine.paired is not None}
    if not paired:
        return None
    rows = content.data.splits["test"].rows
    columns = ("engine", "top-1, %", "change, points", "same class", "largest logit error", "verdict")
    return node(
        "section",
        node("h2", "What happened to the accuracy"),
        table(
            columns, [_row(columns, name, engine, classes[name], rows) for name, engine in measured.items()]
        ),
        node(
            "p",
            f"Change, agreement and error are against {content.measurements.reference}, on the same {rows:,} "
            "test samples; under a change its 95 % interval (Tango's, for pairs). A difference is one that "
            f"McNemar's exact test finds with p below {_SIGNIFICANT}.",
            class_="note",
        ),
        _by_class(content, classes, paired),
    )


# ------------------------------------------------------------------------------------------------- the table


def _row(columns: Sequence[str], name: str, engine: EngineFigures, class_: str, rows: int) -> Element:
    paired = engine.paired
    cells: list[list[Child]] = [
        [keyed(name, class_)],
        interval_cell(engine.accuracy_top1, scale=100, places=1),
        _change_cell(paired.top1_change) if paired else [nowrap(ABSENT)],
        [nowrap(percent(paired.top1_agreement) if paired else ABSENT)],
        [nowrap(plain(paired.max_abs_logit_error, significant=2) if paired else ABSENT)],
    ]
    shown = [node("td", cell, data_label=column) for column, cell in zip(columns, cells, strict=False)]
    words, counted = _verdict(paired, rows) if paired else ("the reference", "")
    shown.append(node("td", words, node("small", counted), class_="verdict", data_label=columns[-1]))
    return node("tr", shown)


def _change_cell(change: Interval) -> list[Child]:
    return [nowrap(_points(change.value)), node("small", f"{_points(change.low)} to {_points(change.high)}")]


def _points(share: float) -> str:
    """A difference of shares in points, with its sign."""
    text = f"{100 * share:+.2f}".replace("-", "−")  # noqa: RUF001
    return "0.00" if text[1:] == "0.00" else text


def _verdict(paired: PairedAccuracy, rows: int) -> tuple[str, str]:
    """What the disagreements show, in words, and how many there are."""
    counted = f"{paired.gained:,} gained, {paired.lost:,} lost, {_probability(paired.mcnemar_p)}"
    if paired.gained == paired.lost == 0:
        return f"right on the same {rows:,} samples", ""
    if paired.mcnemar_p >= _SIGNIFICANT:
        return f"no difference that {rows:,} samples can show", counted
    return ("better" if paired.gained > paired.lost else "worse") + " than the reference", counted


def _probability(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


# -------------------------------------------------------------------------------------------------- by class


def _by_class(content: Content, classes: dict[str, str], paired: Mapping[str, PairedAccuracy]) -> list[Child]:
    counts = content.data.splits["test"].class_counts
    known = [index for index, count in enumerate(counts) if count]
    shown = _shown_classes(known, paired)
    which = "" if len(shown) == len(known) else f", the {len(shown)} worst of {len(known)}"
    half_width = median(
        (one.per_class[at].high - one.per_class[at].low) / 2 for one in paired.values() for at in shown
    )
    caption = (
        f"Top-1 of each class in percent{which}. The stronger the colour, the more is wrong. A class has "
        f"few samples: a figure is uncertain by about {plain(100 * half_width, significant=1)} points."
    )
    names = [content.data.class_names[at] for at in shown]
    top1 = {name: [one.per_class[at].value for at in shown] for name, one in paired.items()}
    return [
        node("h3", "By class"),
        drawing(lambda width: _heat(top1, names, width, content.decision.chosen), caption),
    ]


def _shown_classes(known: Sequence[int], paired: Mapping[str, PairedAccuracy]) -> list[int]:
    """All classes, or where they are many those on which some engine is worst; in the order of the data."""
    if len(known) <= _ALL_CLASSES:
        return list(known)
    worst_first = sorted(known, key=lambda at: min(one.per_class[at].value for one in paired.values()))
    return sorted(worst_first[:_WORST_CLASSES])


def _heat(
    top1: Mapping[str, Sequence[float]], names: Sequence[str], width: float, chosen: str | None
) -> Element:
    """A row an engine, a column a class, the colour stronger where more is wrong."""
    narrow = width <= _PHONE_PX
    left, pitch = (0.0, 48.0) if narrow else (214.0, 30.0)
    column = (width - left) / len(names)
    texts = [shorten(name, _NAME_CHARACTERS) for name in names]
    upright = any(text_width(text) > column - 6 for text in texts)
    top = 10 + (max(text_width(text) for text in texts) if upright else 12)
    most_wrong = max(1 - share for shares in top1.values() for share in shares)
    drawn = [_heading(text, left + column * (at + 0.5), top - 8, upright) for at, text in enumerate(texts)]
    for row, (name, shares) in enumerate(top1.items()):
        base = top + pitch * row + (18 if narrow else 0)
        class_ = "name strong" if name == chosen else "name"
        if narrow:
            drawn.append(label(shorten(name, 44), left, base - 5, class_))
        else:
            drawn.append(label(shorten(name, 30), left - 14, base + 18, class_, anchor="end"))
        for at, share in enumerate(shares):
            opacity = _DARKEST * (1 - share) / most_wrong if most_wrong else 0.0
            drawn += _cell(share, opacity, left + column * at, base, column)
    return picture(width, top + pitch * len(top1) + 4, "Top-1 of each engine on each class", drawn)


def _heading(text: str, x: float, y: float, upright: bool) -> Element:
    """The name of a class above its column, upwards where it is too long."""
    if not upright:
        return label(text, x, y, anchor="middle")
    return node("text", text, transform=f"translate({x + 4:.1f} {y:.1f}) rotate(-90)")


def _cell(share: float, opacity: float, x: float, y: float, width: float) -> list[Element]:
    shade = node(
        "rect", x=x + 1, y=y, width=width - 2, height=26, rx=2, class_="bar", fill_opacity=f"{opacity:.3f}"
    )
    return [shade, label(f"{100 * share:.0f}", x + width / 2, y + 17, anchor="middle")]
