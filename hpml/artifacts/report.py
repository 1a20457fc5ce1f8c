"""The report of a run."""

from __future__ import annotations

from typing import Literal

from hpml.core.contract import Config


class ReportSpec(Config):
    """`report.html` (self-contained, no scripts), `figures.json` and `figures.csv`."""

    kind: Literal["report"] = "report"
    title: str
