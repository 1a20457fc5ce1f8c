"""A port for a program that is started later."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port of the loopback that nobody has, of those that the kernel gives to nobody by itself.

    One that it chose, for port 0, it may give to another test's connection before it is listened at.
    """
    end = int(_RANGE.read_text().split()[0])
    while True:
        port = _FIRST + secrets.randbelow(max(1, end - _FIRST))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
