"""What `hpml doctor` finds, on this machine and in a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `need` says what it is for; `advice` is empty where all is well."""

    name: str
    state: Literal["ok", "missing", "optional"]
    found: str
    advice: str = ""
