"""The limits of control groups, of both versions of the interface, at every level."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpml.core import cgroup, hardware


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the groups' files are; the process is in /slice/job of every hierarchy, as on a host."""
    membership = tmp_path / "self"
    membership.write_text("4:memory:/slice/job\n3:cpu,cpuacct:/slice/job\n1:name=systemd:/\n0::/slice/job\n")
    monkeypatch.setattr(cgroup, "_MOUNT", tmp_path)
    monkeypatch.setattr(cgroup, "_MEMBERSHIP", membership)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for controller in ("", "cpu", "memory"):
        (tmp_path / controller / "slice" / "job").mkdir(parents=True)
    return tmp_path


def test_without_a_limit_the_affinity_mask_counts(mount: Path) -> None:
    assert hardware.usable_cpus() == 64
    assert cgroup.memory_limit_bytes() is None
    assert cgroup.memory_left_bytes() is None
    assert cgroup.throttled_s() == 0
    assert cgroup.oom_kills() is None


@pytest.mark.parametrize(("quota", "cpus"), [("max 100000", 64), ("250000 100000", 2), ("50000 100000", 1)])
@pytest.mark.parametrize("level", ["", "slice", "slice/job"])
def test_the_quota_of_version_2(mount: Path, level: str, quota: str, cpus: int) -> None:
    (mount / level / "cpu.max").write_text(quota)
    assert hardware.usable_cpus() == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("-1", 64), ("300000", 3)])
@pytest.mark.parametrize("level", ["", "slice", "slice/job"])
def test_the_quota_of_version_1(mount: Path, level: str, quota: str, cpus: int) -> None:
    (mount / "cpu" / level / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    (mount / "cpu" / level / "cpu.cfs_period_us").write_text("100000\n")
    assert hardware.usable_cpus() == cpus


def test_the_smallest_of_nested_limits_holds(mount: Path) -> None:
    (mount / "cpu.max").write_text("max 100000")
    (mount / "slice" / "cpu.max").write_text("200000 100000")
    (mount / "slice" / "job" / "cpu.max").write_text("800000 100000")
    (mount / "slice" / "memory.max").write_text("2000")
    (mount / "slice" / "memory.current").write_text("1900")
    (mount / "slice" / "job" / "memory.max").write_text("3000")
    (mount / "slice" / "job" / "memory.current").write_text("1000")
    assert hardware.usable_cpus() == 2
    assert cgroup.memory_limit_bytes() == 2000
    assert cgroup.memory_left_bytes() == 100


def test_in_a_container_the_own_files_are_at_the_root(mount: Path) -> None:
    (mount / "self").write_text("0::/kubepods/pod7/container\n")
    (mount / "cpu.max").write_text("400000 100000")
    assert hardware.usable_cpus() == 4


def test_the_memory_limit_of_version_1(mount: Path) -> None:
    folder = mount / "memory" / "slice"
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (folder / "memory.usage_in_bytes").write_text("500\n")
    assert cgroup.memory_limit_bytes() is None
    (folder / "memory.limit_in_bytes").write_text("2000000000\n")
    assert cgroup.memory_limit_bytes() == 2_000_000_000
    assert cgroup.memory_left_bytes() == 1_999_999_500


def test_what_was_counted(mount: Path) -> None:
    (mount / "slice" / "cpu.stat").write_text("usage_usec 9\nthrottled_usec 1500000\n")
    (mount / "slice" / "job" / "cpu.stat").write_text("throttled_usec 500000\n")
    (mount / "cpu" / "slice" / "cpu.stat").write_text("nr_periods 9\nthrottled_time 1000000000\n")
    (mount / "slice" / "memory.events").write_text("low 0\noom 2\noom_kill 1\n")
    (mount / "memory" / "slice" / "job" / "memory.oom_control").write_text("under_oom 0\noom_kill 3\n")
    assert cgroup.throttled_s() == 3.0
    assert cgroup.oom_kills() == 1
