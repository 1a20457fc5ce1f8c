"""Cron expressions, checked before a server is asked to take one."""

from __future__ import annotations

import re

from hpml.core.errors import UsageError

_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_FIELDS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("second", 0, 59, ()),
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("day of the week", 0, 6, _WEEKDAYS),
)


def fields(cron: str) -> list[str]:
    """The five fields of a cron expression, or six if it begins with the seconds.

    Raises UsageError that names the field which is wrong.
    """
    texts = cron.split()
    if len(texts) not in (5, 6):
        raise UsageError(
            f"{cron!r} has {len(texts)} fields, a cron expression has five",
            fix="minute hour day month weekday, such as '0 3 * * 1-5'; or six, with the seconds first",
        )
    for text, (name, low, high, words) in zip(texts, _FIELDS[-len(texts) :], strict=True):
        if not all(_is_item(item, low, high, words) for item in text.upper().split(",")):
            raise UsageError(f"{text!r} in {cron!r} is no {name}", why=f"these go from {low} to {high}")
    return texts


def _is_item(item: str, low: int, high: int, words: tuple[str, ...]) -> bool:
    """Whether `item` is *, ?, N or N-M, with or without a step: */15. N may be one of `words`."""
    match = re.fullmatch(r"(?:\*|\?|(\w+)(?:-(\w+))?)(?:/[1-9]\d*)?", item, re.ASCII)
    if not match:
        return False
    numbers = [_number(end, low, words) for end in match.groups() if end is not None]
    return all(low <= number <= high for number in numbers) and numbers == sorted(numbers)


def _number(text: str, low: int, words: tuple[str, ...]) -> int:
    if text in words:
        return low + words.index(text)
    return int(text) if text.isdecimal() else -1
