"""Cron expressions, before they go to a server."""

from __future__ import annotations

import pytest

from hpml.core.errors import UsageError
from hpml.pipelines.kubeflow.cron import fields


@pytest.mark.parametrize(
    "cron",
    [
        "0 3 * * *",
        "*/15 0-6,22 ? JAN-mar 1-5",
        "0 0 12 1/2 * MON",
        "59 59 23 31 12 6",
    ],
)
def test_what_is_one(cron: str) -> None:
    assert fields(cron) == cron.split()


@pytest.mark.parametrize(
    ("cron", "why"),
    [
        ("0 3 * *", "has 4 fields"),
        ("@daily", "has 1 fields"),
        ("60 3 * * *", "'60' .* is no minute.*from 0 to 59"),
        ("0 24 * * *", "'24' .* is no hour"),
        ("0 0 0 * *", "'0' .* is no day of the month.*from 1 to 31"),
        ("0 0 * 13 *", "is no month"),
        ("0 0 * * 7", "is no day of the week.*from 0 to 6"),
        ("0 0 * * MONDAY", "is no day of the week"),
        ("0 5-3 * * *", "is no hour"),
        ("*/0 * * * *", "is no minute"),
        ("61 0 3 * * *", "is no second"),
        ("0 ٣ * * *", "is no hour"),
        ("0 3,, * * *", "is no hour"),
        ("$(id) 3 * * *", "is no minute"),
    ],
)
def test_what_is_none(cron: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        fields(cron)
