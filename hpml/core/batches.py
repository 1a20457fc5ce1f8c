"""Many rows, some at a time."""

from __future__ import annotations

from collections.abc import Iterator


def batches(rows: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size` rows that cover `rows`."""
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))
