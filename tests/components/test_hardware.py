"""The limits of a control group, of both versions, are respected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from components import hardware


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for folder in ("cpu", "memory"):
        (tmp_path / folder).mkdir()
    return tmp_path


def test_without_a_limit_the_affinity_mask_counts(cgroup: Path) -> None:
    assert hardware.usable_cpus() == 8
    assert hardware.memory_limit_bytes() is None


@pytest.mark.parametrize(("quota", "cpus"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)])
def test_the_quota_of_version_2(cgroup: Path, quota: str, cpus: int) -> None:
    (cgroup / "cpu.max").write_text(quota)
    assert hardware.usable_cpus() == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("-1", 8), ("300000", 3)])
def test_the_quota_of_version_1(cgroup: Path, quota: str, cpus: int) -> None:
    (cgroup / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (cgroup / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert hardware.usable_cpus() == cpus


def test_the_memory_limits_of_both_versions(cgroup: Path) -> None:
    (cgroup / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert hardware.memory_limit_bytes() is None
    (cgroup / "memory" / "memory.limit_in_bytes").write_text("2000000000\n")
    assert hardware.memory_limit_bytes() == 2_000_000_000
    (cgroup / "memory.max").write_text("max\n")
    assert hardware.memory_limit_bytes() is None
