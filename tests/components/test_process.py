"""The peak memory of a process is its own, whoever started it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from components import process
from components.benchmark.engine_process import EngineProcess

FAT_BYTES = 300_000_000


@pytest.fixture
def fat() -> np.ndarray:
    """Makes this process larger than any small child."""
    return np.ones(FAT_BYTES, np.uint8)


def test_the_child_of_a_fat_parent_reports_its_own_peak(fat: np.ndarray) -> None:
    code = (
        "import json, resource; from components.process import peak_rss_bytes as peak\n"
        "print(json.dumps([peak(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own, inherited = json.loads(answer.stdout)
    assert 0 < own < FAT_BYTES / 3
    assert inherited > FAT_BYTES, "ru_maxrss has become usable"
    assert (process.peak_rss_bytes() or 0) > FAT_BYTES


def test_a_worker_of_the_benchmark_and_a_step_report_their_own(fat: np.ndarray, tmp_path: Path) -> None:
    with EngineProcess("small", tmp_path / "log") as worker:
        assert 0 < worker.ask("memory", "telling its memory")["peak_rss_bytes"] < FAT_BYTES
    code = "from components.job import _peak_rss_bytes as peak; print(peak())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(answer.stdout) < FAT_BYTES


def test_what_the_system_does_not_tell_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (OSError("no /proc"), "Name:\tpython\n"):

        def read(_: Path, text: object = text) -> str:
            if isinstance(text, OSError):
                raise text
            return str(text)

        monkeypatch.setattr(Path, "read_text", read)
        assert process.peak_rss_bytes() is None
