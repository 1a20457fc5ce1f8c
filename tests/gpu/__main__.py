"""Show the GPU path on this machine with whatever this Python has: make test-gpu [PYTHON=python3].

Each part runs in a process of its own with a time limit, by the code of the pipeline itself. A table says
what ran and what did not, and why. The exit code is 0 if nothing failed, 4 if something did. Without an
NVIDIA GPU nothing is run. It needs no set-up: torch, numpy and pydantic suffice; more packages, more parts.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # nothing of ours is installed, and it may be started from anywhere

from hpml.core import hardware  # noqa: E402

TOTAL_S = 570.0  # "under 10 minutes"
FAILED = 4
NEEDED = ("torch", "numpy", "pydantic")

# In this order; the seconds are what a part may take, on a small GPU.
PARTS: dict[str, float] = {
    "installed": 60,
    "training-fp32": 120,
    "training-bf16": 90,
    "training-fp16": 90,
    "training-two-gpus": 90,
    "images": 60,
    "eager": 60,
    "peaks": 60,
    "clocks-energy": 30,
    "onnxruntime": 90,
    "tensorrt-fp32": 120,
    "tensorrt-fp16": 120,
    "tensorrt-int8": 150,
    "pytest": 180,
}


@dataclass(frozen=True)
class Row:
    """What became of a part. state: "passed", "failed" or "not run"; said: what was found, or why not."""

    part: str
    state: str
    said: str
    seconds: float = 0.0


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, print the table, return the exit code."""
    parser = argparse.ArgumentParser(prog="make test-gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: what of it a CPU can")
    parser.add_argument("--parts", default=",".join(PARTS), help="of the list, with commas")
    given = parser.parse_args(arguments)
    wanted = given.parts.split(",")
    if unknown := set(wanted) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if reason := _why_nothing(given.device):
        print(reason)
        rows = [Row(part, "not run", reason) for part in wanted]
    else:
        with tempfile.TemporaryDirectory(prefix="hpml-gpu-") as folder:
            rows = run_parts(wanted, given.device, Path(folder), total_s=TOTAL_S)
    print(table(rows))
    return FAILED if any(row.state == "failed" for row in rows) else 0


def _why_nothing(device: str) -> str:
    if device == "cuda" and not hardware.gpu_names():
        return "no NVIDIA GPU here: nothing was shown"
    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        return f"no {', '.join(absent)} here: nothing was shown; pip install {' '.join(absent)}"
    return ""


def run_parts(
    parts: list[str], device: str, folder: Path, *, total_s: float, limits_s: dict[str, float] = PARTS
) -> list[Row]:
    """One after the other, each told as it ends; what is over its limit is killed, with all it started."""
    until_s = time.monotonic() + total_s
    rows = []
    for part in parts:
        limit_s = min(limits_s[part], until_s - time.monotonic())
        if limit_s <= 0:
            rows.append(Row(part, "not run", f"the {total_s:.0f} s for all parts were over"))
            continue
        rows.append(_run_part(part, device, folder, limit_s))
        print(f"{rows[-1].part}: {rows[-1].state} in {rows[-1].seconds:.0f} s", flush=True)
    return rows


def _run_part(part: str, device: str, folder: Path, limit_s: float) -> Row:
    begun_s = time.monotonic()
    log, answer = folder / f"{part}.log", folder / f"{part}.json"
    command = [sys.executable, str(Path(__file__).with_name("parts.py")), part, device, str(folder)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return Row(part, "failed", f"killed after {limit_s:.0f} s: {_last_line(log)}", limit_s)
    finally:
        _kill_group(process)
    seconds = time.monotonic() - begun_s
    if not answer.exists():
        status = process.returncode
        how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
        return Row(part, "failed", f"{how}: {_last_line(log)}", seconds)
    return Row(part, **json.loads(answer.read_text()), seconds=seconds)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "it said nothing")


def table(rows: list[Row]) -> str:
    """Aligned columns."""
    width = max(len(row.part) for row in rows)
    shown = [f"{row.part:{width}}  {row.state:7}  {_seconds(row):>5}  {row.said}" for row in rows]
    return "\n".join([f"{'part':{width}}  {'':7}  {'s':>5}  what was found", *shown])


def _seconds(row: Row) -> str:
    return "" if row.state == "not run" else f"{row.seconds:.0f}"


if __name__ == "__main__":
    sys.exit(main())
