"""What is judged of a server under open load."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.open_load import Load, draw, judged, table

CAPACITY_PER_S = 100.0


def load(
    share: float, *, accepted: int, refused: int = 0, lost: int = 0, ms: float = 5.0, refused_ms: float = 1.0
) -> Load:
    """Of ten seconds."""
    return Load(
        share,
        CAPACITY_PER_S,
        10.0,
        accepted_ms=[ms] * accepted,
        refused_ms=[refused_ms] * refused,
        late_ms=[0.1] * (accepted + refused + lost),
        lost=lost,
    )


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        (load(0.5, accepted=500), ""),
        (load(0.5, accepted=499, refused=1), "1 refused, none may be"),
        (load(0.5, accepted=500, ms=120), "p99 is 120 ms, 100 are allowed"),
        (load(0.9, accepted=895, refused=5), ""),
        (load(0.9, accepted=880, refused=20), "2.2% refused, 1 % may be"),
        (load(1.5, accepted=950, refused=550), ""),
        (load(1.5, accepted=800, refused=700), "goodput is 0.80 of the capacity, 0.9 is needed"),
        (load(1.5, accepted=950, refused=550, refused_ms=80), "a 429 takes 80 ms, less than 50 are needed"),
        (load(1.5, accepted=950, refused=549, lost=1), "1 lost"),
    ],
)
def test_what_is_not_kept_is_told(measured: Load, told: str) -> None:
    assert judged(measured, max_queue_ms=100.0) == told


def test_a_client_that_was_late_judges_nothing() -> None:
    late = load(0.5, accepted=500)
    late.late_ms = [40.0] * 500
    assert judged(late, 100.0) == "not judged: the client sent 40 ms late"


def test_the_table_and_the_picture_have_a_row_and_a_line_for_each(tmp_path: Path) -> None:
    loads = [load(0.5, accepted=500), load(1.5, accepted=950, refused=550)]
    rows = table(loads, {0.5: "", 1.5: "1 lost"}).splitlines()
    assert rows[2] == "| 0.5 x | 100 | 500 | 0.0% | 5.0 | 5.0 | 50 | 0.0 | 0 | as it has to be |"
    assert rows[3].endswith("| 1 lost |")
    draw(loads, 100.0, tmp_path / "load.svg")
    drawn = ElementTree.parse(tmp_path / "load.svg").getroot()
    assert len(drawn.findall("{http://www.w3.org/2000/svg}path")) == 2
