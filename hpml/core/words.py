"""Many names in a message."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 10


def counted(names: Sequence[str], unit: str, shown: int = SHOWN) -> str:
    """How many there are, and the first of them: "2 files: a.txt, b.txt"."""
    some = first([printable(name) for name in names], shown, ", ")
    return f"{len(names)} {unit}{'s' if len(names) > 1 else ''}: {some}"


def first(names: Sequence[str], shown: int, between: str) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return between.join(names[:shown]) + more


def printable(text: str) -> str:
    return text if text.isprintable() else ascii(text)
