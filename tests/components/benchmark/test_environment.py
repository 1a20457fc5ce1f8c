"""What is said of a machine that does not tell everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpml.measuring.machine import environment
from hpml.measuring.machine.environment import Pressure


def test_pressure_is_a_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpu"
    file.write_text("some avg10=0.00 avg60=1.50 avg300=0.91 total=2500000\nfull avg10=0.00 total=0\n")
    monkeypatch.setattr(environment, "_PRESSURE", str(file))
    now = Pressure.read()
    assert now is not None
    assert now.share_since(Pressure(stalled_s=1.5, at_s=now.at_s - 10)) == pytest.approx(0.1)


def test_without_pressure_stall_information_the_pressure_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_PRESSURE", str(tmp_path / "absent"))
    assert Pressure.read() is None
    assert environment.describe()["cpu_pressure_10_s_before"] == "not known"
