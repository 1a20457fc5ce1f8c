"""What tests cost, as a plugin of pytest: `make test-durations` prints the table of docs/testing.md.

CPU time is that of pytest and of all processes that descend from it. It is much the same on a busy machine,
which the time by the clock is not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

SHOWN = 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """Of one test, with the fixtures that were made for it."""

    clock_s: float
    cpu_s: float
    test: str


_costs: list[Cost] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    clock_s, cpu_s = time.monotonic(), _cpu_s()
    try:
        return (yield)  # type: ignore[return-value]
    finally:
        _costs.append(Cost(time.monotonic() - clock_s, _cpu_s() - cpu_s, item.nodeid))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    write = terminalreporter.write_line
    write(f"\n{len(_costs)} tests, {sum(cost.cpu_s for cost in _costs):.0f} s of CPU\n")
    write("| test | s | s of CPU |")
    write("|---|--:|--:|")
    for cost in sorted(_costs, reverse=True)[:SHOWN]:
        write(f"| `{cost.test.removeprefix('tests/')}` | {cost.clock_s:.1f} | {cost.cpu_s:.1f} |")


def _cpu_s() -> float:
    """Of this process, of those it waited for, and of those that still run below it."""
    own = os.times()
    return sum(own[:4]) + sum(_cpu_s_of(pid) for pid in _descendants("self"))


def _descendants(pid: str) -> Iterator[str]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it ended
            for child in (task / "children").read_text().split():
                yield child
                yield from _descendants(child)


def _cpu_s_of(pid: str) -> float:
    """With what it waited for."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(field) for field in fields[11:15]) / _TICKS_PER_S
    return 0.0
