"""What our pages are made of: tables, cells with intervals, pictures for a desktop and for a phone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from xml.etree.ElementTree import Element

from hpml.artifacts.interval import Interval
from hpml.reporting.format import ABSENT, bounds, plain
from hpml.reporting.markup import Child, node, to_html
from hpml.reporting.style import STYLE

# Nothing is loaded from anywhere and nothing runs, also if something hostile got past the escaping.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

WIDE_PX, HALF_PX, NARROW_PX = 952, 466, 350


def document(title: str, *sections: Child) -> str:
    """A whole HTML document."""
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("title", title),
        node("style", STYLE),
    )
    return to_html(node("html", head, node("body", node("main", sections)), lang="en"))


def interval_cell(
    interval: Interval | None, absent: str = "", *, scale: float = 1.0, places: int | None = None
) -> list[Child]:
    """The inside of a table's cell: a figure over its 95 % interval, or why there is none."""
    if interval is None:
        return [nowrap(ABSENT), node("small", absent) if absent else None]
    certain = interval.low == interval.high  # a ratio to itself
    return [
        nowrap(value_text(interval, scale, places)),
        None if certain else node("small", bounds(interval, scale=scale, places=places)),
    ]


def value_text(interval: Interval, scale: float = 1.0, places: int | None = None) -> str:
    """A figure without its interval, with three significant digits or with `places` decimals."""
    value = interval.value * scale
    return plain(value) if places is None else f"{value:,.{places}f}"


def keyed(name: str, class_: str) -> Element:
    """A name behind the dot of its colour."""
    return node(
        "span", node("span", "", class_=f"key {class_}"), node("span", breakable(name)), class_="keyed"
    )


def breakable(name: str) -> list[Child]:
    """A name that may be broken after the signs that join its parts."""
    parts: list[Child] = []
    for part in re.findall(r"[^/+.-]*[/+.-]|[^/+.-]+", name):
        parts += [node("wbr"), part] if parts else [part]
    return parts


def nowrap(text: str) -> Element:
    """Text on one line."""
    return node("span", text, class_="value")


def table(columns: Iterable[str], rows: Iterable[Element]) -> Element:
    """A table; its cells carry `data-label`, which a phone shows in place of the head."""
    head = node("tr", [node("th", name, class_="verdict" if name == "verdict" else None) for name in columns])
    return node("table", node("thead", head), node("tbody", rows))


def drawing(
    draw: Callable[[float], Element | None], caption: str = "", *, wide_px: float = WIDE_PX
) -> Element | None:
    """A picture drawn for a desktop and for a phone; the style sheet shows the one that suits."""
    wide, narrow = draw(wide_px), draw(NARROW_PX)
    if wide is None or narrow is None:
        return None
    return node(
        "figure",
        node("div", wide, class_="wide"),
        node("div", narrow, class_="narrow"),
        node("figcaption", caption) if caption else None,
    )


def legend(names: Iterable[tuple[str, str]]) -> Element:
    """Names behind the dots of their colours."""
    items = [node("li", keyed(name, class_)) for name, class_ in names]
    return node("ul", items, class_="legend")


def definitions(facts: Mapping[str, str]) -> Element:
    """Facts as terms with what they are."""
    rows = ((node("dt", key.replace("_", " ")), node("dd", value or ABSENT)) for key, value in facts.items())
    return node("dl", *rows)
