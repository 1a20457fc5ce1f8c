"""The top-1 of each engine on each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from hpml.reporting.format import shorten
from hpml.reporting.svg import is_narrow, label, node, picture, row_name, text_width

_DARKEST = 0.4  # opacity under which the figure of a class can still be read
_NAME_CHARACTERS = 18  # of a class


def accuracy_by_class(
    top1: Mapping[str, Sequence[float]], names: Sequence[str], chosen: str | None, width: float
) -> Element:
    """A row an engine, a column a class, the colour stronger where more is wrong."""
    narrow = is_narrow(width)
    left, pitch = (0.0, 48.0) if narrow else (214.0, 30.0)
    column = (width - left) / len(names)
    texts = [shorten(name, _NAME_CHARACTERS) for name in names]
    upright = any(text_width(text) > column - 6 for text in texts)
    top = 10 + (max(map(text_width, texts)) if upright else 12)
    most_wrong = max(1 - share for shares in top1.values() for share in shares)
    drawn = [_heading(text, left + column * (at + 0.5), top - 8, upright) for at, text in enumerate(texts)]
    for row, (name, shares) in enumerate(top1.items()):
        base = top + pitch * row + (18 if narrow else 0)
        drawn.append(
            row_name(name, left, beside=base + 18, above=base - 5, narrow=narrow, strong=name == chosen)
        )
        for at, share in enumerate(shares):
            opacity = _DARKEST * (1 - share) / most_wrong if most_wrong else 0.0
            drawn += _cell(share, opacity, left + column * at, base, column)
    return picture(width, top + pitch * len(top1) + 4, "Top-1 of each engine on each class", drawn)


def _heading(text: str, x: float, y: float, upright: bool) -> Element:
    """The name of a class above its column, upwards where it is too long."""
    if not upright:
        return label(text, x, y, anchor="middle")
    return node("text", text=text, transform=f"translate({x + 4:.1f} {y:.1f}) rotate(-90)")


def _cell(share: float, opacity: float, x: float, y: float, width: float) -> list[Element]:
    shade = node(
        "rect", x=x + 1, y=y, width=width - 2, height=26, rx=2, class_="bar", fill_opacity=f"{opacity:.3f}"
    )
    return [shade, label(f"{100 * share:.0f}", x + width / 2, y + 17, anchor="middle")]
