"""A project whose own packages have the names of our folders: its modules are its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HPML = Path(sys.executable).with_name("hpml")
NET = """
from torch import nn

from components.parts import CHANNELS
from pipelines.parts import CHANNELS as MORE
from tasks.parts import CHANNELS as MOST


def net(in_channels, num_classes):
    widths = (in_channels, CHANNELS, MORE, MOST)
    features = [nn.Conv2d(one, next, 3, padding=1) for one, next in zip(widths, widths[1:])]
    head = nn.Linear(16 * MOST, num_classes)
    return nn.Sequential(*features, nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), head)
"""


def test_components_pipelines_and_tasks_may_be_the_users_own(tmp_path: Path) -> None:
    for package in ("components", "pipelines", "tasks"):
        folder = tmp_path / package
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "parts.py").write_text("CHANNELS = 4\n")
    (tmp_path / "components" / "nets.py").write_text(NET)
    (tmp_path / "mine.yaml").write_text(
        "data: digits\ntrain: {model: {architecture: 'components.nets:net'}, epochs: 1}\n"
    )
    command = [str(HPML), "run", "mine.yaml", "--only", "train", "-o", "json", "--no-tracking"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"]["train"]["status"] == "done"
