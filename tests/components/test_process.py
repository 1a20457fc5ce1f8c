"""The peak memory of a process is its own, whoever started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpml.core import process
from hpml.measuring.process.engine_process import EngineProcess
from hpml.pipelines.executors.forkserver import ForkServer

FAT_BYTES = 300_000_000


@pytest.fixture
def fat() -> np.ndarray:
    """Makes this process larger than any small child."""
    return np.ones(FAT_BYTES, np.uint8)


def test_the_child_of_a_fat_parent_reports_its_own_peak(fat: np.ndarray) -> None:
    code = (
        "import json, resource; from hpml.core.process import peak_rss_bytes as peak\n"
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
    code = "from hpml.steps.job import _peak_rss_bytes as peak; print(peak())"
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


# What a step's process starts: a training worker (the environment as it is), and an engine to be measured.
STEP = """
import json, subprocess, sys
from hpml.components import __main__
from hpml.core import process
__main__.main(["--about"])
told = "import json, os; print(json.dumps(dict(os.environ)))"
ask = lambda env: json.loads(subprocess.check_output([sys.executable, "-c", told], env=env))
print(json.dumps([ask(None), ask(process.users_environment())]))
"""
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("of_the_user", "engine"),
    [({}, [None, None]), ({"OMP_WAIT_POLICY": "ACTIVE"}, ["ACTIVE", None])],
    ids=["nothing set", "set by the user"],
)
def test_threads_of_a_step_sleep_and_those_of_an_engine_are_as_users_run_them(
    of_the_user: dict[str, str], engine: list[str | None]
) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", STEP], env=clean | of_the_user, capture_output=True, text=True, check=True
    )
    found = [[told.get(name) for name in NAMES] for told in json.loads(done.stdout.splitlines()[-1])]
    assert found == [[of_the_user.get("OMP_WAIT_POLICY", "PASSIVE"), "3000"], engine]


def test_a_forked_step_has_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    server, log = ForkServer(), tmp_path / "log"
    try:
        server.start("subprocess:call", {"args": ["env"]}, log)
        while not server.ended(60):
            pass
    finally:
        server.close()
    assert {"OMP_WAIT_POLICY=PASSIVE", "GOMP_SPINCOUNT=3000"} < set(log.read_text().splitlines())
