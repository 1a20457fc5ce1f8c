"""Levels are named by the caches that are known: private ones add up, shared ones count once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpml.components.peaks.memory_levels import MemoryLevels
from hpml.core.memory import available_bytes

KIB, MIB = 2**10, 2**20


def machine(root: Path, cpus: dict[int, list[tuple[int, str, str, str]]]) -> Path:
    """A /sys/devices/system/cpu of `cpus`, with (level, type, size, shared_cpu_list) of each cache."""
    for cpu, caches in cpus.items():
        for index, fields in enumerate(caches):
            folder = root / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, value in zip(("level", "type", "size", "shared_cpu_list"), fields, strict=True):
                (folder / name).write_text(f"{value}\n")
    return root


@pytest.fixture
def two_cpus(tmp_path: Path) -> Path:
    """32 KiB and 1 MiB of their own, 32 MiB shared."""
    return machine(
        tmp_path,
        {
            cpu: [
                (1, "Data", "32K", str(cpu)),
                (1, "Instruction", "64K", str(cpu)),
                (2, "Unified", "1M", str(cpu)),
                (3, "Unified", "32768K", "0-1"),
            ]
            for cpu in (0, 1)
        },
    )


def test_private_caches_add_up_and_shared_ones_count_once(two_cpus: Path) -> None:
    one, two = MemoryLevels.of([0], two_cpus), MemoryLevels.of([0, 1], two_cpus)
    assert one.capacities == {1: 32 * KIB, 2: MIB, 3: 32 * MIB}
    assert two.capacities == {1: 64 * KIB, 2: 2 * MIB, 3: 32 * MIB}
    assert two.in_words() == "L1 64 KiB, L2 2,048 KiB, L3 32,768 KiB (/sys)"


@pytest.mark.parametrize(
    ("working_set", "level"),
    [
        (8 * KIB, "L1"),
        (24 * KIB, "L1"),
        (32 * KIB, ""),  # the whole cache: not without the stack
        (63 * KIB, ""),  # L1 would serve some of it
        (64 * KIB, "L2"),
        (768 * KIB, "L2"),
        (MIB, ""),
        (2 * MIB, "L3"),
        (24 * MIB, "L3"),
        (100 * MIB, ""),
        (128 * MIB, "DRAM"),
    ],
)
def test_a_working_set_belongs_to_one_level_or_to_none(two_cpus: Path, working_set: int, level: str) -> None:
    assert MemoryLevels.of([0], two_cpus).level(working_set) == level


@pytest.mark.parametrize("cpus", [[0], [0, 1]])
def test_every_level_has_working_sets_and_none_lies_between(two_cpus: Path, cpus: list[int]) -> None:
    levels = MemoryLevels.of(cpus, two_cpus)
    sizes = list(levels.working_sets(len(cpus)))
    assert sizes == sorted(set(sizes)) and sizes[0] == 8 * KIB * len(cpus)
    names = [levels.level(size) for size in sizes]
    assert list(dict.fromkeys(names)) == ["L1", "L2", "L3", "DRAM"]
    assert all(names.count(name) >= 2 for name in names if name != "DRAM")
    assert sizes[-1] == levels.dram_from_bytes and names.count("DRAM") == 1  # no larger than must be


def test_without_a_third_level_only_what_is_surely_dram_is_called_so(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: [(1, "Data", "48K", "0"), (2, "Unified", "2048K", "0")]})
    levels = MemoryLevels.of([0], root)
    assert levels.level(8 * MIB) == "" and levels.level(256 * MIB) == "DRAM"
    assert {levels.level(size) for size in levels.working_sets(1)} == {"L1", "L2", "DRAM"}


def test_a_machine_that_tells_nothing_is_measured_in_dram_only() -> None:
    levels = MemoryLevels({}, "not known")
    assert {levels.level(size) for size in levels.working_sets(2)} == {"DRAM"}
    assert levels.in_words() == "not known"


@pytest.mark.parametrize("size", ["", "big", "0K", "-32K", "32KB"])
def test_a_size_that_is_none_is_not_believed(tmp_path: Path, size: str) -> None:
    root = machine(tmp_path, {0: [(1, "Data", size, "0"), (2, "Unified", "1024K", "0")]})
    assert MemoryLevels.of([0], root).capacities == {2: MIB}


def test_without_sys_the_c_library_is_asked(tmp_path: Path) -> None:
    levels = MemoryLevels.of([0, 1], tmp_path)
    assert levels.source == "sysconf" or levels.capacities == {}
    alone = MemoryLevels.of([0], tmp_path)
    if 3 in alone.capacities:
        assert levels.capacities[3] == alone.capacities[3]
        assert levels.capacities[1] == 2 * alone.capacities[1]


def test_some_memory_is_available() -> None:
    assert MIB < available_bytes() < 2**50
