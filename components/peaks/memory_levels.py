"""Which level of the memory a working set lies in, by the caches that Linux tells of.

A virtual machine may hide its caches; what is not known to lie in one level is then not measured. Nor is the
stretch between two levels: a loop over a little more than a cache still finds some of its data there, and
would make the outer level look faster than it is.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_SYSCONF = {1: "SC_LEVEL1_DCACHE_SIZE", 2: "SC_LEVEL2_CACHE_SIZE", 3: "SC_LEVEL3_CACHE_SIZE"}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}

_FILLS = 0.75  # of a cache: the rest is for the stack, and for page colours that collide
_SPILLS = 2  # times a cache: so large a loop finds next to nothing of itself in there
_STREAM = 4  # times the last cache: the rule of STREAM (McCalpin 1995) for reaching DRAM
_DRAM_BYTES = 256 * 2**20  # taken for DRAM where no third level is known
_SMALLEST_BYTES = 8 * 2**10  # of one thread, where the first level is not known


@dataclass(frozen=True)
class MemoryLevels:
    """The caches that some CPUs have together: `capacities` maps a level to its bytes.

    source: where that is known from, in words.
    """

    capacities: Mapping[int, int]
    source: str

    @classmethod
    def of(cls, cpus: Sequence[int], root: Path = _CPUS) -> MemoryLevels:
        """The caches that `cpus` reach; one that several of them share counts once."""
        caches = {cache for cpu in cpus for cache in _caches(root / f"cpu{cpu}" / "cache")}
        if caches:
            together: Counter[int] = Counter()
            for level, size, _ in sorted(caches):
                together[level] += size
            return cls(dict(together), "/sys")
        capacities = {level: size * (1 if level == 3 else len(cpus)) for level, size in _from_sysconf()}
        return cls(capacities, "sysconf" if capacities else "not known: neither /sys nor sysconf tells")

    @property
    def dram_from_bytes(self) -> int:
        """The smallest working set that is read from DRAM for certain."""
        return _STREAM * self.capacities[3] if 3 in self.capacities else _DRAM_BYTES

    def level(self, working_set_bytes: float) -> str:
        """The level that alone serves a loop over so many bytes: "L1", ..., "DRAM"; empty where none does."""
        inner_bytes = 0
        for level, capacity in sorted(self.capacities.items()):
            if working_set_bytes <= _FILLS * capacity:
                return f"L{level}" if working_set_bytes >= _SPILLS * inner_bytes else ""
            inner_bytes = capacity
        return "DRAM" if working_set_bytes >= self.dram_from_bytes else ""

    def working_sets(self, threads: int) -> Iterator[int]:
        """Bytes of `threads` together: two sizes an octave in each cache, from a quarter of L1, one in DRAM.

        One, and the smallest: several times the last cache is gigabytes on many servers.
        """
        size, half_octave = self.capacities.get(1, 4 * threads * _SMALLEST_BYTES) // 4, False
        while size < self.dram_from_bytes:
            if self.level(size):
                yield size
            size, half_octave = (size * 4 // 3 if half_octave else size * 3 // 2), not half_octave
        yield self.dram_from_bytes

    def in_words(self) -> str:
        """ "L1 64 KiB, L2 2,048 KiB, L3 32,768 KiB (/sys)"."""
        sizes = ", ".join(f"L{level} {size // 1024:,} KiB" for level, size in sorted(self.capacities.items()))
        return f"{sizes} ({self.source})" if sizes else self.source


def _caches(folder: Path) -> Iterator[tuple[int, int, str]]:
    """The level, the bytes and the CPUs of each cache for data of one CPU."""
    for index in sorted(folder.glob("index*")):
        try:
            kind, size, level, cpus = (
                (index / name).read_text().strip() for name in ("type", "size", "level", "shared_cpu_list")
            )
        except OSError:
            continue
        match = re.fullmatch(r"(\d+)([KMG]?)", size)
        if kind != "Instruction" and match and level.isdecimal() and int(match[1]):
            yield int(level), int(match[1]) * _UNITS[match[2]], cpus


def _from_sysconf() -> Iterator[tuple[int, int]]:
    for level, name in _SYSCONF.items():
        size = os.sysconf(name) if name in os.sysconf_names else 0
        if size > 0:
            yield level, size
