"""A data set larger than memory, prepared, trained on, quantized and exported: `make measure-large-dataset`.

    .venv/bin/python -m tests.measure_large_dataset [--gb 8] [--limit-mib 1536] [--folder DIR]

Makes pictures that carry their class, as one IDX file, and runs each stage in a control group that may
hold so much memory, page cache included. Prints what each took, of its own and with the cache. Making a group
takes root. On disk it takes twice the size of the pictures for a while.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from tests.memory_group import memory_group

SIDE, CLASSES, BLOCK = 128, 10, 1024


def write_pictures(folder: Path, rows: int, side: int = SIDE) -> None:
    """`train-images-idx4-ubyte` and its labels: stripes whose direction is the class, in noise."""
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, rows, np.uint8)
    (folder / "train-labels-idx1-ubyte").write_bytes(
        struct.pack(">BBBBI", 0, 0, 8, 1, rows) + labels.tobytes()
    )
    y, x = np.mgrid[:side, :side] / side
    angles = np.pi * np.arange(CLASSES)[:, None, None] / CLASSES
    stripes = 64 + 63 * np.sin(24 * (x * np.cos(angles) + y * np.sin(angles)))
    of_class = np.repeat(stripes[..., None], 3, axis=3).astype(np.uint8)
    with (folder / "train-images-idx4-ubyte").open("wb") as file:
        file.write(struct.pack(">BBBBIIII", 0, 0, 8, 4, rows, side, side, 3))
        for start in range(0, rows, BLOCK):
            some = labels[start : start + BLOCK]
            noise = np.frombuffer(random.bytes(len(some) * side * side * 3), np.uint8)
            file.write((of_class[some] + (noise >> 1).reshape(-1, side, side, 3)).tobytes())


def patch_net(*, in_channels: int, num_classes: int) -> nn.Module:
    """A network that costs less than reading its pictures does."""

    class PatchNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shrink = nn.AvgPool2d(8)
            self.patches = nn.Conv2d(in_channels, 32, 3)
            self.norm = nn.BatchNorm2d(32)
            self.head = nn.Linear(32, num_classes)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.norm(self.patches(self.shrink(x))).relu().mean(dim=(2, 3)))
            return logits

    return PatchNet()


def steps(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Each stage and the command that runs it, on what those before it wrote."""
    train = {
        "model": {"architecture": "tests.measure_large_dataset:patch_net"},
        "epochs": 1,
        "batch_size": 256,
        "augment": {"shift": 0, "rotation_degrees": 0, "scale": 0},
        "device": "cpu",
    }
    data, model, int8 = (str(folder / name) for name in ("data", "model", "int8"))
    stages: list[tuple[str, dict[str, object], list[str]]] = [
        ("prepare", {"source": "idx", "path": str(folder / "pictures")}, ["--out", data]),
        ("train", train, ["--data", data, "--out", model]),
        (
            "compress",
            {"method": "quantize"},
            ["--data", data, "--model", model, "--teacher", model, "--out", int8],
        ),
        ("export", {"target": "onnx"}, ["--data", data, "--model", int8, "--out", str(folder / "engine")]),
    ]
    for stage, config, arguments in stages:
        command = [sys.executable, "-m", "hpml.components", stage, "--config", json.dumps(config), *arguments]
        yield stage, command


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gb", type=float, default=8.0)
    parser.add_argument("--limit-mib", type=int, default=1536)
    parser.add_argument(
        "--folder", type=Path, help="where there is room; by default, where temporary files are"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        folder = Path(place)
        (folder / "pictures").mkdir()
        row_bytes = SIDE * SIDE * 3
        rows = int(given.gb * 1e9 / row_bytes)
        write_pictures(folder / "pictures", rows)
        os.sync()
        print(
            f"{rows:,} pictures, {rows * row_bytes / 1e9:.2f} GB; {given.limit_mib} MiB of memory", flush=True
        )
        print(f"{'stage':10} {'s':>6} {'own MiB':>8} {'with cache MiB':>15}", flush=True)
        try:
            with memory_group(given.limit_mib << 20) as group:
                for stage, command in steps(folder):
                    used = group.run(command)
                    sizes = f"{used.own_bytes / 2**20:8.0f} {used.with_cache_bytes / 2**20:15.0f}"
                    print(f"{stage:10} {used.seconds:6.0f} {sizes}", flush=True)
        except OSError as error:
            sys.exit(f"error: no control group: {error} -> run as root, not in an unprivileged container")
        except subprocess.CalledProcessError as error:
            killed = " (killed, as one that takes too much memory is)" if error.returncode == -9 else ""
            sys.exit(f"error: {stage} ended with {error.returncode}{killed}")
        quality = {
            name: json.loads((folder / name / "manifest.json").read_text()) for name in ("model", "engine")
        }
        told = ", ".join(f"{name} {made['spec'].get('quality')}" for name, made in quality.items())
        print(f"quality: {told}")


if __name__ == "__main__":
    main()
