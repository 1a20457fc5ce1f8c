"""What the terminal says of a measurement beside its figures."""

from __future__ import annotations

import pytest

from components.goals import Decision
from components.measurements import Conditions, MeasurementsSpec
from pipelines import console

NOTHING_CHOSEN = Decision(verdicts={}, chosen=None, nearest=None, reason="")


@pytest.mark.parametrize(
    ("conditions", "is_told"),
    [
        (Conditions(slices=100, dropped=31, causes={"noise": 31}, enforced=False), True),
        (Conditions(slices=100, dropped=31, causes={"noise": 31}), False),  # they are not in the figures
        (Conditions(slices=100, enforced=False), False),  # there were none
    ],
)
def test_figures_of_a_busy_machine_come_with_a_warning(
    conditions: Conditions, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = MeasurementsSpec(
        reference="fp32/eager",
        best_fp32="fp32/onnx",
        engines={},
        rounds=5,
        requests_per_round=20,
        threads=1,
        seed=0,
        environment={},
        conditions=conditions,
    )
    console.print_variants(measured, NOTHING_CHOSEN)
    told = " ".join(capsys.readouterr().out.split())
    for text in (told, console.variants_markdown(measured, NOTHING_CHOSEN)):
        assert ("31 of 100 slices were disturbed (noise) and are in the figures" in text) == is_told
