"""A piece of a page as elements."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, fromstring


def compact(html: str) -> str:
    """Without the white space that a browser does not show: between blocks, and more than a space in text."""
    return re.sub(r"\s+", " ", re.sub(r">\s+<", "><", html)).strip()


def parsed(html: str) -> Element:
    """One element and what is in it. It fails if a tag is not closed, or text is not escaped."""
    return fromstring(compact(html).replace("<wbr>", "<wbr/>"))
