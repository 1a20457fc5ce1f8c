"""What the command itself costs, whole process: `make measure` prints the table of docs/measured.md.

Needs a workspace in which the quickstart has been run (`make run`). Commands take turns, so that a busy
moment meets all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
HPML = str(Path(sys.executable).with_name("hpml"))
QUICKSTART = str(HERE.parent / "recipes" / "quickstart.yaml")

_NO_OP_RUN = f"""
import sys
sys.path.append({str(HERE / "pipelines")!r})
from pathlib import Path
import noop_stages
from hpml.pipelines.engine import run_record
from hpml.pipelines.terminal.console import PlainWatcher
from hpml.pipelines.engine.execution import Execution, Settings
from hpml.pipelines.executors.process import Processes
from hpml.pipelines.plan import trace

def chain(step, _):
    handle = step(noop_stages.start, noop_stages.Number())
    for value in range(1, 5):
        handle = step(noop_stages.add, noop_stages.Number(value=value), first=handle, others={{}})

plan = trace(chain, None)
home = Path(sys.argv[1])
record = run_record.start(home, "noop", "noop", "", plan)
settings = Settings(home=home, import_paths=({str(HERE / "pipelines")!r},))
record = Execution(plan, record, settings, PlainWatcher(), Processes(home)).execute()
assert [step.status for step in record.steps.values()] == ["done"] * 5
"""


def seconds_of(command: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as scratch:
        samples: dict[str, list[float]] = {}
        for index in range(rounds + 1):
            commands = {
                "`hpml --help`": [HPML, "--help"],
                "no-op run of five steps, cold": [
                    sys.executable,
                    "-c",
                    _NO_OP_RUN,
                    f"{scratch}/{index}",
                ],
                "cached re-run of the quickstart": [HPML, "run", QUICKSTART],
            }
            for name, command in commands.items():
                samples.setdefault(name, []).append(seconds_of(command))
    print("| command | min s | median s | max s |\n|---|---|---|---|")
    for name, all_seconds in samples.items():
        seconds = all_seconds[1:]  # the first round warms the disk cache
        print(f"| {name} | {min(seconds):.2f} | {statistics.median(seconds):.2f} | {max(seconds):.2f} |")


if __name__ == "__main__":
    main()
