"""Requests that come whether or not those before are answered: Poisson arrivals at shares of the capacity.

A part of `tests.measure_serving`. How long a request takes counts from when it was due, so that a server that
is slow does not slow down who asks it. What the limits of `judged` are is said there.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

import numpy as np
import uvloop

from hpml.reporting.svg import Scale, axes, label, line, node, path, picture

SHARES = (0.5, 0.9, 1.5)  # of the capacity
_CONNECTIONS = 256
# Connections that ask anew as soon as they are answered: what they get is the capacity. No more than may
# wait: who is refused asks again at once, and refusing takes the server's time.
_CLOSED = 8
_GIVE_UP_S = 30.0
_LATE_MS = 10.0  # a client that sends later than this is what was measured
_STYLE = """
text { font: 12px sans-serif; fill: #333 }
path { fill: none; stroke-width: 2 }
.grid { stroke: #ddd } .bound { stroke: #999; stroke-dasharray: 4 3 }
.load0 { stroke: #1b7f5c } .load1 { stroke: #1f5fbf } .load2 { stroke: #c0392b }
"""


@dataclass
class Load:
    """What came of requests at a share of what the server could do just before. seconds: for which they came.

    accepted_ms, refused_ms: of what was answered with 200, and with 429. late_ms: how late each was sent.
    lost: what had no answer, or another.
    """

    share: float
    capacity_per_s: float
    seconds: float
    accepted_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    lost: int = 0

    @property
    def sent(self) -> int:
        return len(self.late_ms)

    @property
    def shed(self) -> float:
        """The share of requests that were refused."""
        return len(self.refused_ms) / max(1, self.sent)

    @property
    def goodput_per_s(self) -> float:
        return len(self.accepted_ms) / self.seconds


def _ms(values: Iterable[float], quantile: float) -> float:
    known = list(values)
    return float(np.quantile(known, quantile)) if known else 0.0


class _Connection(asyncio.Protocol):
    """Sends a request at a time. done: is told the status, 0 for none, and when the request was due."""

    def __init__(self, request: bytes, done: Callable[[_Connection, int, float], None]) -> None:
        self._request, self._done = request, done
        self._received, self._due_s = b"", -1.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def send(self, due_s: float) -> None:
        self._due_s = due_s
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        lengths = [row for row in head.lower().split(b"\r\n") if row.startswith(b"content-length:")]
        if len(body) >= int(lengths[0].split(b":")[1]):
            self._received = b""
            self._end(int(head[9:12]))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(0)

    def _end(self, status: int) -> None:
        due_s, self._due_s = self._due_s, -1.0
        if due_s >= 0:
            self._done(self, status, due_s)

    def close(self) -> None:
        self._transport.close()


async def _connections(
    port: int, request: bytes, count: int, done: Callable[[_Connection, int, float], None]
) -> list[_Connection]:
    loop = asyncio.get_running_loop()
    opened = [
        await loop.create_connection(lambda: _Connection(request, done), "127.0.0.1", port)
        for _ in range(count)
    ]
    return [connection for _, connection in opened]


async def _capacity_per_s(port: int, request: bytes, seconds: float) -> float:
    answered, until_s = 0, time.perf_counter() + seconds

    def again(connection: _Connection, status: int, due_s: float) -> None:
        nonlocal answered
        answered += status == 200
        if time.perf_counter() < until_s:
            connection.send(0.0)

    connections = await _connections(port, request, _CLOSED, again)
    for connection in connections:
        connection.send(0.0)
    await asyncio.sleep(seconds)
    per_s = answered / seconds
    await asyncio.sleep(0.5)
    for connection in connections:
        connection.close()
    return per_s


async def _send(port: int, request: bytes, load: Load, chance: np.random.Generator) -> None:
    """Send at the times of a Poisson process, and note what comes of it in `load`.

    They are as many as are expected of it, so that a share of the capacity is that share: given their number,
    its times are those of uniform ones in order.
    """
    idle: deque[_Connection] = deque()

    def done(connection: _Connection, status: int, due_s: float) -> None:
        took_ms = (time.perf_counter() - due_s) * 1e3
        if status in (200, 429):
            (load.accepted_ms if status == 200 else load.refused_ms).append(took_ms)
        else:
            load.lost += 1
        if status:
            idle.append(connection)

    connections = await _connections(port, request, _CONNECTIONS, done)
    idle.extend(connections)
    due_s = np.sort(chance.uniform(0.0, load.seconds, round(load.share * load.capacity_per_s * load.seconds)))
    begun_s = time.perf_counter()
    for at_s in begun_s + due_s:
        while (wait_s := at_s - time.perf_counter()) > 0 or not idle:
            await asyncio.sleep(max(wait_s, 0.0005))
        load.late_ms.append((time.perf_counter() - at_s) * 1e3)
        idle.popleft().send(at_s)
    give_up_s = time.perf_counter() + _GIVE_UP_S
    while len(idle) < len(connections) and time.perf_counter() < give_up_s:
        await asyncio.sleep(0.01)
    load.lost = load.sent - len(load.accepted_ms) - len(load.refused_ms)
    for connection in connections:
        connection.close()


def measured_loads(port: int, request: bytes, seconds: float, seed: int) -> list[Load]:
    """What came of each share of the capacity, which is measured before each: machines change their speed."""
    chance = np.random.default_rng(seed)

    async def measure() -> list[Load]:
        loads = []
        for share in SHARES:
            # The best of three: what else a machine does makes it less, never more.
            capacities_per_s = [await _capacity_per_s(port, request, seconds / 12) for _ in range(3)]
            loads.append(Load(share, max(capacities_per_s), seconds))
            await _send(port, request, loads[-1], chance)
            await asyncio.sleep(0.5)
        return loads

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure())


def judged(load: Load, max_queue_ms: float) -> str:
    """What is not as it has to be; "" if nothing.

    No request may be lost. At half of the capacity none may be refused, and the slowest 1 % take at most the
    bound of the queue; at 0.9 of it at most 1 % may be refused; beyond it at least 0.9 of it is answered, and
    99 % of the others are refused within 50 ms.
    """
    if _ms(load.late_ms, 0.99) > _LATE_MS:
        return f"not judged: the client sent {_ms(load.late_ms, 0.99):.0f} ms late"
    found = [f"{load.lost} lost"] if load.lost else []
    if load.share <= 0.5 and load.refused_ms:
        found.append(f"{len(load.refused_ms)} refused, none may be")
    if load.share <= 0.5 and (p99_ms := _ms(load.accepted_ms, 0.99)) > max_queue_ms:
        found.append(f"p99 is {p99_ms:.0f} ms, {max_queue_ms:.0f} are allowed")
    if 0.5 < load.share < 1 and load.shed > 0.01:
        found.append(f"{load.shed:.1%} refused, 1 % may be")
    if load.share > 1 and (good := load.goodput_per_s / load.capacity_per_s) < 0.9:
        found.append(f"goodput is {good:.2f} of the capacity, 0.9 is needed")
    if load.share > 1 and (p99_ms := _ms(load.refused_ms, 0.99)) >= 50:
        found.append(f"a 429 takes {p99_ms:.0f} ms, less than 50 are needed")
    return "; ".join(found)


def table(loads: Iterable[Load], verdicts: Mapping[float, str]) -> str:
    """Markdown."""
    columns = {
        "load": lambda load: f"{load.share:g} x",
        "capacity, 1/s": lambda load: f"{load.capacity_per_s:,.0f}",
        "requests": lambda load: f"{load.sent:,}",
        "refused": lambda load: f"{load.shed:.1%}",
        "p50 ms": lambda load: f"{_ms(load.accepted_ms, 0.5):.1f}",
        "p99 ms": lambda load: f"{_ms(load.accepted_ms, 0.99):.1f}",
        "goodput, 1/s": lambda load: f"{load.goodput_per_s:,.0f}",
        "p99 to 429, ms": lambda load: f"{_ms(load.refused_ms, 0.99):.1f}",
        "lost": lambda load: f"{load.lost}",
        "verdict": lambda load: verdicts[load.share] or "as it has to be",
    }
    rows = [list(columns), ["--:"] * (len(columns) - 1) + ["---"]]
    rows += [[told(load) for told in columns.values()] for load in loads]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(loads: Iterable[Load], max_queue_ms: float, file: Path) -> None:
    """How long accepted requests took, as an SVG: the share of them that took at most so long."""
    known = [load for load in loads if load.accepted_ms]
    slowest = max([max_queue_ms, *(max(load.accepted_ms) for load in known)])
    fastest = min([max_queue_ms / 2, *(min(load.accepted_ms) for load in known)])
    x, y = Scale(fastest, slowest, 60, 700, log=True), Scale(0, 100, 320, 40)
    bound = x(max_queue_ms)
    drawn: list[Element] = [
        node("style", text=_STYLE),
        *axes(x, y, "ms, from when the request was due to its answer", "% of accepted requests"),
        line(bound, y.end, bound, y.start, "bound"),
        label("bound of the queue", bound - 4, y.start - 8, anchor="end"),
    ]
    shares = np.linspace(0, 1, 201)
    for place, load in enumerate(known):
        ms = np.quantile(load.accepted_ms, shares)
        drawn.append(
            path([(x(at), y(100 * share)) for at, share in zip(ms, shares, strict=True)], f"load{place}")
        )
        below = y.end + 16 + 18 * place
        drawn += [
            line(70, below - 4, 90, below - 4, f"load{place}"),
            label(f"{load.share:g} x capacity", 96, below),
        ]
    made = picture(720, 370, "Open load with Poisson arrivals", drawn)
    made.set("xmlns", "http://www.w3.org/2000/svg")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(tostring(made))
