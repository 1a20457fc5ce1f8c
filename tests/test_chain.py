"""The whole chain by the command, on real digits, as a user runs it; and every look at it afterwards."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.chain import HPML, RECIPE, Chain, Command, may_make_networks


@pytest.fixture
def hpml(chain: Chain) -> Command:
    assert chain.first.returncode == 0, chain.first.stderr
    return chain.hpml


@pytest.fixture
def answer(hpml: Command) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(hpml("report", "-o", "json").stdout)
    return result


def test_the_table_fits_80_columns_and_names_the_choice(chain: Chain) -> None:
    first = chain.first
    assert first.returncode == 0, first.stderr
    assert "\x1b" not in first.stdout + first.stderr
    table = [line for line in first.stdout.splitlines() if not line.startswith(("report:", "bundle:"))]
    for word in ("top-1", "p50", "p99", "x eager", "x fp32", "chosen", "small-int8/onnx"):
        assert word in first.stdout
    assert all(
        len(line) <= 80 for line in table[: table.index(next(x for x in table if "Second lines" in x))]
    )
    assert "Traceback" not in first.stderr


@pytest.mark.skipif(not may_make_networks(), reason="needs unshare, iproute2 and the right to use them")
def test_nothing_phones_home(chain: Chain) -> None:
    """It ran with nothing but a loopback, and an interface that counts attempts."""
    assert chain.first.returncode == 0, chain.first.stderr
    assert chain.hpml.packets["chain"] == 0
    assert chain.hpml.packets["control"] > 0


def test_what_it_found_is_whole_and_consistent(answer: dict[str, Any], hpml: Command) -> None:
    engines = answer["measurements"]["engines"]
    assert set(engines) == {
        "fp32/eager",
        "fp32/onnx",
        "fp32/tensorrt",
        "small-int8/onnx",
        "small-int8/tensorrt",
    }
    for name, figures in engines.items():
        if figures["status"] == "not built":
            assert name.endswith("tensorrt") and "GPU" in figures["reason"]
            continue
        known = figures["quality"] | {
            figure: figures[figure] for figure in ("latency_ms_p50", "speedup_vs_reference")
        }
        for interval in known.values():
            assert interval["low"] <= interval["value"] <= interval["high"]
    assert engines["small-int8/onnx"]["size_bytes"] < engines["fp32/onnx"]["size_bytes"]
    assert answer["chosen"] in engines
    tested = answer["evaluation"]
    assert tested["engine"] == answer["chosen"] and tested["test_split"] == "once"
    assert tested["quality"]["accuracy_top1"]["value"] > 0.5 and tested["rows"] > 0
    assert Path(answer["report"]).is_file()
    assert (Path(answer["bundle"]) / "bundle.json").is_file()
    assert set(step["status"] for step in answer["steps"].values()) == {"done"}


def test_its_bundle_names_the_digit_in_a_picture(answer: dict[str, Any], tmp_path: Path) -> None:
    """What prepare noted of pictures came through training, compression, export and the registry."""
    Image.new("RGBA", (300, 200), (255, 255, 255, 40)).save(tmp_path / "scan.png")
    command = [sys.executable, "-I", "bundle.py", "--json", str(tmp_path / "scan.png")]
    done = subprocess.run(command, cwd=answer["bundle"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    [said] = json.loads(done.stdout)
    assert said["class"] in "0123456789" and 0.1 <= said["probability"] <= 1


def test_the_table_comes_in_markdown_too(hpml: Command) -> None:
    table, _, notes = hpml("report", "-o", "markdown").stdout.partition("\n\n")
    assert "slices were undisturbed" in notes
    head, rule, *rows = table.splitlines()
    assert len(rows) == 5 and any("chosen" in row for row in rows)
    assert len({line.count("|") for line in (head, rule, *rows)}) == 1


def test_it_is_registered_and_tracked_once(answer: dict[str, Any], hpml: Command) -> None:
    database = sqlite3.connect(hpml.home / "mlflow.db")
    versions = database.execute("select name, version from model_versions").fetchall()
    assert versions == [("chain_recipe", 1)]
    runs = database.execute("select count(*) from runs").fetchone()[0]
    assert runs == 1 + len(answer["steps"])
    curve = database.execute("select count(distinct step) from metrics where key = 'loss'").fetchone()[0]
    assert curve >= 3


def test_a_second_run_is_all_cached_and_needs_no_torch(hpml: Command) -> None:
    no_torch = hpml.folder / "no-torch"
    no_torch.mkdir()
    (no_torch / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    again = hpml("run", str(RECIPE), "-o", "json", "--no-tracking", PYTHONPATH=str(no_torch))
    assert again.returncode == 0, again.stderr
    steps = json.loads(again.stdout)["steps"]
    assert {name: step for name, step in steps.items() if step["status"] != "cached"} == {}


def test_a_changed_goal_repeats_the_choice_only(hpml: Command) -> None:
    again = hpml("run", str(RECIPE), "-o", "json", "--set", "goals.objective=size_bytes", "--no-tracking")
    assert again.returncode == 0, again.stderr
    statuses = {name: step["status"] for name, step in json.loads(again.stdout)["steps"].items()}
    assert statuses["benchmark"] == statuses["train"] == "cached"
    assert statuses["select"] == statuses["report"] == "done"


def test_goals_that_none_meets_end_in_5_and_name_the_nearest(hpml: Command) -> None:
    answer = hpml("run", str(RECIPE), "--set", "goals.max_size_mb=0.000001", "--no-tracking")
    assert answer.returncode == 5
    last = answer.stderr.splitlines()[-1]
    assert last.startswith("error:") and "nearest" in last and "onnx" in last
    assert "report:" in answer.stdout


def test_dry_run_says_what_would_run_and_why(hpml: Command) -> None:
    answer = hpml("run", str(RECIPE), "--dry-run", "-o", "json", "--set", "train.epochs=5")
    steps = {item["step"]: item for item in json.loads(answer.stdout)}
    assert steps["prepare"]["outcome"] == "cached"
    assert steps["train"]["outcome"] == "would run"
    assert steps["train"]["reasons"] == ["config: epochs changed: 4 -> 5"]
    assert steps["bundle"]["outcome"] == "depends"


def test_status_logs_and_explain(hpml: Command) -> None:
    hpml("run", str(RECIPE), "--no-tracking")
    assert "prepare" in hpml("status").stdout
    runs = json.loads(hpml("status", "--all", "-o", "json").stdout)
    first = runs[-1]["id"]
    assert "epoch" in hpml("logs", "train", "--run", first).stdout
    assert "cached" in hpml("logs", "train").stderr
    assert "had to be run" in hpml("explain", "train", "--run", first).stdout
    assert "taken from the store" in hpml("explain", "train").stdout
    assert "has no step 'trian': it has prepare, train, " in hpml("explain", "trian").stderr


@pytest.mark.slow  # test_store does it without a chain
def test_gc_keeps_what_the_newest_runs_made(hpml: Command) -> None:
    dry = hpml("gc", "--keep-runs", "100", "--dry-run")
    assert re.match(r"would remove \d+ items", dry.stdout)
    assert hpml("gc", "--keep-runs", "100").returncode == 0
    again = hpml("run", str(RECIPE), "-o", "json", "--no-tracking")
    steps = json.loads(again.stdout)["steps"]
    assert {name: step for name, step in steps.items() if step["status"] != "cached"} == {}


@pytest.mark.slow  # test_store does it without a chain
def test_a_tampered_artifact_is_refused_by_name(hpml: Command, answer: dict[str, Any]) -> None:
    digest = answer["steps"]["train"]["digest"]
    weights = hpml.home / ".store" / "objects" / digest / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(bytes(data))
    forced = ["--only", "compress-prune50", "--force", "compress-prune50"]
    broken = hpml("run", str(RECIPE), "--no-tracking", *forced)
    assert broken.returncode == 4
    assert "model.safetensors is damaged" in broken.stderr
    data[-1] ^= 1
    weights.write_bytes(bytes(data))


def test_the_entrypoint_of_the_containers_runs_the_same_stage(
    hpml: Command, answer: dict[str, Any], tmp_path: Path
) -> None:
    """`python -m hpml.components STAGE` with the config and inputs of a step writes the same content."""
    place = tmp_path / "dataset"
    command = [sys.executable, "-m", "hpml.components", "prepare", "--config", '{"source": "digits"}']
    done = subprocess.run([*command, "--out", str(place)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["digest"] == answer["steps"]["prepare"]["digest"]


@pytest.mark.slow  # test_local interrupts a run, test_resume a training
def test_ctrl_c_says_how_to_resume_and_the_training_goes_on_where_it_was(tmp_path: Path) -> None:
    arguments = ["run", str(RECIPE), "--no-tracking", "--only", "train", "--set", "train.epochs=15"]
    arguments += ["--set", "train.checkpoint_every_s=0.5"]
    env = {**os.environ, "HPML_HOME": str(tmp_path / "runs")}
    process = subprocess.Popen([str(HPML), *arguments], env=env, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "runs" / "latest" / "logs" / "train.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and "epoch 3/" in log.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert process.stderr is not None
    assert process.stderr.read().splitlines()[-1] == f"interrupted; resume with: hpml run {RECIPE}"
    again = subprocess.run([str(HPML), *arguments], env=env, capture_output=True, text=True, timeout=100)
    assert again.returncode == 0, again.stderr
    assert "epoch 1/" not in log.read_text() and "epoch 15/15" in log.read_text()


def _may_mount() -> bool:
    command = ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow  # test_full_disk fills the disk under a step
@pytest.mark.skipif(not _may_mount(), reason="needs unshare and the right to mount")
@pytest.mark.parametrize("size", ["8k", "40k", "80k", "120k"])
def test_a_full_disk_is_one_line_and_costs_only_the_step_it_met(tmp_path: Path, size: str) -> None:
    script = """
        mount -t tmpfs -o size=$0 none "$HPML_HOME"
        "$@"; echo "status $?"
        mount -o remount,size=50m "$HPML_HOME"
        "$@"; echo "status $?"
    """
    home = tmp_path / "runs"
    home.mkdir()
    command = [str(HPML), "run", str(RECIPE), "--no-tracking", "--only", "prepare"]
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", script, size, *command],
        env={**os.environ, "HPML_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    first, second, *_ = done.stdout.splitlines()
    assert first in ("status 4", "status 6") and second == "status 0"
    assert re.search("disk is full|No space left", done.stderr) and "Traceback" not in done.stderr
