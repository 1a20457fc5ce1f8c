"""WebDataset: samples in .tar shards, each the consecutive files that share a name up to its first dot.

Read within our own limits and not by the package `webdataset`, which unpickles what is called .pyd or .pth,
and runs what is called pipe:.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.data_files.archive import small_files

MOST_SHARDS = 100_000
_BRACES = re.compile(r"\{([^{}]*)\}")


def expanded(pattern: str) -> list[str]:
    """The names that a pattern stands for: train-{000..146}.tar, {train,test}.tar.

    Raises ConfigInvalid for more than MOST_SHARDS, or braces that are neither.
    """
    parts = _BRACES.split(pattern)
    choices = [[part] if place % 2 == 0 else _choices(part, pattern) for place, part in enumerate(parts)]
    names = ["".join(chosen) for chosen in itertools.islice(itertools.product(*choices), MOST_SHARDS + 1)]
    if len(names) > MOST_SHARDS:
        raise ConfigInvalid(f"{pattern} stands for more than {MOST_SHARDS} shards")
    return names


def _choices(braced: str, pattern: str) -> list[str]:
    numbers = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", braced)
    if numbers:
        first, last = numbers.groups()
        count = min(int(last) - int(first) + 1, MOST_SHARDS + 1)
        if count > 0:
            return [str(int(first) + at).zfill(len(first)) for at in range(count)]
    elif "," in braced:
        return braced.split(",")
    raise ConfigInvalid(
        f"{pattern} has {{{braced}}} in it", why="allowed are {000..146}, ascending, and {one,other}"
    )


def samples(shard: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """The key of each sample, and its files by what follows the first dot, in lower case, where `wanted`.

    Raises StageFailed if the shard is damaged or hostile, or a sample has two files of one kind.
    """

    def kind_of(name: str) -> str:
        return PurePosixPath(name).name.partition(".")[2].lower()

    def key_of(name: str) -> str:
        path = PurePosixPath(name)
        return path.with_name(path.name.partition(".")[0] or path.name).as_posix()

    files = small_files(shard, lambda name: wanted(kind_of(name)))
    for key, of_sample in itertools.groupby(files, lambda file: key_of(file[0])):
        sample: dict[str, bytes] = {}
        for name, content in of_sample:
            if kind_of(name) in sample:
                raise StageFailed(f"{shard} has {name!r} twice", fix="write the shard again")
            sample[kind_of(name)] = content
        yield key, sample
