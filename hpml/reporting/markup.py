"""HTML and SVG as a tree of elements: text and attributes are escaped when it is written, always."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring

Child = Element | str | None


def node(tag: str, *children: Child | Iterable[Child], **attributes: str | float | None) -> Element:
    """An element. Text and elements may be mixed; None is left out, of children as of attributes.

    An attribute is spelt with `_` for `-`, and with one more at its end where Python has the word already
    (`class_`). Numbers are written with at most two decimals.
    """
    element = Element(tag)
    for name, value in attributes.items():
        if value is not None:
            element.set(
                name.rstrip("_").replace("_", "-"), value if isinstance(value, str) else number(value)
            )
    for child in children:
        append(element, child)
    return element


def append(parent: Element, child: Child | Iterable[Child]) -> None:
    """Put `child` after what `parent` has already."""
    if child is None:
        return
    if isinstance(child, Element):
        parent.append(child)
    elif isinstance(child, str):
        last = parent[-1] if len(parent) else None
        if last is None:
            parent.text = (parent.text or "") + child
        else:
            last.tail = (last.tail or "") + child
    else:
        for item in child:
            append(parent, item)


def number(value: float) -> str:
    """A coordinate: at most two decimals, no trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def to_html(root: Element) -> str:
    """The whole document."""
    return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"
