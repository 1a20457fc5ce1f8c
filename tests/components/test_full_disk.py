"""A full disk: named with its path and the room that is left, wherever it is met; nothing is half-written."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpml.core import errors
from hpml.core.atomic_files import write_text_atomic
from hpml.core.errors import ExitCode, StageFailed, disk_full, disk_full_explained, explained
from hpml.io.tracking import Outbox, are_events

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "error",
    [
        NO_SPACE,
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("Error while serializing: No space left on device (os error 28)"),
        RuntimeError("(sqlite3.OperationalError) database or disk is full"),
    ],
)
def test_however_a_library_spells_it_path_and_room_are_told(tmp_path: Path, error: Exception) -> None:
    wrapped = ValueError("cannot save")
    wrapped.__cause__ = error
    for given in (error, wrapped):
        full = disk_full(given, tmp_path / "not" / "made" / "yet")
        assert full is not None and full.exit_code == ExitCode.STAGE_FAILED
        assert str(full).startswith(f"the disk is full: {tmp_path}/not/made/yet has ")
        assert "MB left -> free some space (hpml gc" in str(full)


def test_what_is_cut_short_where_no_room_is_left_counts_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_short = json.JSONDecodeError("Expecting value", "[1, ", 4)
    assert disk_full(cut_short, tmp_path) is None
    monkeypatch.setattr(errors, "_free_bytes", lambda path: 4096)
    told = rf"{tmp_path} has 0.0 MB left \(JSONDecodeError: Expecting value"
    with pytest.raises(StageFailed, match=told), disk_full_explained(tmp_path):
        raise cut_short
    with pytest.raises(StageFailed, match="bad data"), disk_full_explained(tmp_path):
        raise StageFailed("bad data")


def test_a_command_that_meets_it_ends_with_4_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, explained():
        raise OSError(errno.ENOSPC, "No space left on device", "/nowhere/file")
    assert left.value.code == ExitCode.STAGE_FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the disk is full: /nowhere/file has ")


def test_a_small_file_is_replaced_whole_or_not_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.json"
    file.write_text("old")

    def no_room(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_room)
    with pytest.raises(OSError, match=str(file)):
        write_text_atomic(file, "new")
    assert [found.read_text() for found in tmp_path.iterdir()] == ["old"]


def test_events_that_the_disk_does_not_take_come_with_the_next_and_none_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(tmp_path / "tracking.jsonl", "r1", "quickstart")
    outbox.run_started({}, {})

    class Cramped(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:10])

    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode="r", **_: Cramped(path, mode.replace("b", "")))
    outbox.step_started("step", {})
    monkeypatch.setattr(Path, "open", opened)
    assert are_events(outbox.path.read_text())
    outbox.run_ended("FINISHED")
    events = [json.loads(line) for line in outbox.path.read_text().splitlines()]
    assert [(event["event"], event["step"]) for event in events] == [
        ("started", ""),
        ("started", "step"),
        ("ended", ""),
    ]
