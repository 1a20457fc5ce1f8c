"""What prepare and train take of memory does not grow with the pictures: see `make measure-large-dataset`."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.measure_large_dataset import steps, write_pictures

SIDE = 32
FEW, MANY = 3_000, 36_000  # pictures: 9 MB, and 111 MB; few fill the batches of training and validation, too
MORE_BYTES = (MANY - FEW) * SIDE * SIDE * 3


def peak_own_bytes(command: list[str]) -> int:
    """The most memory that no file backs that a command had."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        peak = max(peak, int(lines.get("RssAnon", "0 kB").split()[0]) * 1024)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.005)
    assert process.returncode == 0
    return peak


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, int]]:
    """Of prepare and train with FEW and with MANY pictures."""
    found: dict[int, dict[str, int]] = {}
    for rows in (FEW, MANY):
        folder = tmp_path_factory.mktemp(str(rows))
        (folder / "pictures").mkdir()
        write_pictures(folder / "pictures", rows, SIDE)
        commands = {stage: command for stage, command in steps(folder) if stage in ("prepare", "train")}
        found[rows] = {stage: peak_own_bytes(command) for stage, command in commands.items()}
    return found


@pytest.mark.parametrize(("stage", "share"), [("prepare", 1 / 10), ("train", 1 / 2)])
def test_twelve_times_the_pictures_take_hardly_more_memory(
    stage: str, share: float, peaks: dict[int, dict[str, int]]
) -> None:
    """Allocators keep some MB more or less; a copy of the pictures would be all of them."""
    assert peaks[MANY][stage] - peaks[FEW][stage] < share * MORE_BYTES, peaks
