"""`hpml run --dry-run` says all that would surely fail, at once, with exit code 3."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from hpml import models
from hpml.artifacts.model import ArchitectureSpec
from hpml.core import hardware, memory
from hpml.pipelines import recipe
from hpml.pipelines.__main__ import main
from hpml.pipelines.preflight import checks as preflight
from hpml.pipelines.preflight import network_probe
from hpml.pipelines.preflight.network_probe import Found


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network is examined in this process: starting one with torch takes seconds."""

    def probe(
        architecture: Any,
        shape_chw: Any,
        classes: int,
        import_paths: tuple[str, ...],
        weights: Path | None,
        *,
        trains: bool,
    ) -> Found:
        for path in import_paths:
            monkeypatch.syspath_prepend(path)
        monkeypatch.delitem(sys.modules, "mynets", raising=False)
        question = {
            "architecture": architecture,
            "shape_chw": shape_chw,
            "classes": classes,
            "weights": weights and str(weights),
            "trains": trains,
        }
        return network_probe._examine(question)

    monkeypatch.setattr(preflight, "probe", probe)


def dry_run(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    """The exit code, the forecast by step, and what stderr got."""
    (folder / "mine.yaml").write_text(text)
    code = 0
    try:
        main(["run", str(folder / "mine.yaml"), "--dry-run", "--home", str(folder / "runs"), "-o", "json"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr()
    return code, {item["step"]: item for item in json.loads(said.out)}, said.err


@pytest.mark.usefixtures("network")
def test_all_that_would_fail_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (
        "data: {source: folder, path: nowhere}\n"
        "train: {model: 'mynets:absent', precision: fp16, device: cpu}\n"
        "goals: {max_size_mb: 0.001}\n"
        "variants: {fp32: []}\n"
        "targets: [eager]\n"
    )
    (tmp_path / "mynets.py").write_text("")
    code, steps, said = dry_run(tmp_path, text, capsys)
    assert code == 3
    last = said.splitlines()[-1]
    assert last.startswith("error: the recipe cannot run on this machine, for 4 reasons: (1) prepare: ")
    assert "nowhere does not exist" in steps["prepare"]["reasons"][0]
    precision, network = steps["train"]["reasons"]
    assert "precision is fp16" in precision
    assert "cannot import the model 'mynets:absent'" in network
    assert "the only one is the reference, fp32/eager" in steps["select"]["reasons"][0]
    assert {name for name, item in steps.items() if item["outcome"] == "would fail"} == {
        "prepare",
        "train",
        "select",
    }
    for reason in (precision, network):
        assert reason in last
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/run.json"))


@pytest.mark.usefixtures("network")
def test_a_run_of_which_nothing_is_known_to_fail_is_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, steps, said = dry_run(
        tmp_path, "data: digits\ntrain: {model: cnn}\ngoals: {max_size_mb: 0.0241}\n", capsys
    )
    assert (code, said) == (0, "")
    assert steps["prepare"]["outcome"] == "would run"


NETWORKS = {
    "import nowhere_at_all\n": "cannot import the model 'mynets:net': ModuleNotFoundError",
    "def net(:\n": "SyntaxError",
    "net = 3\n": "'int' object is not callable",
    "def net(in_channels): pass\n": "unexpected keyword argument 'num_classes'",
    "def net(**sizes): return 'x'\n": "returned a str, not a torch.nn.Module",
    "from torch.nn import *\ndef net(**_): return Linear(3, 5).requires_grad_(False)\n": "nothing to train",
    "from torch import nn\ndef net(**sizes): return nn.Linear(3, 5)\n": "does not take images of 1x8x8",
    "from torch.nn import *\ndef net(**sizes): return Sequential(Flatten(), Linear(64, 3))\n": "(2, 3)",
}


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(("code", "said"), NETWORKS.items(), ids=lambda text: text[-30:])
def test_a_network_that_cannot_be_trained_is_found_before_the_data_is_read(
    code: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mynets.py").write_text(code)
    status, steps, _ = dry_run(tmp_path, "data: digits\ntrain: {model: 'mynets:net'}\n", capsys)
    assert status == 3
    assert said in steps["train"]["reasons"][0]


@pytest.mark.usefixtures("network")
def test_weights_are_held_against_the_network_by_their_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = models.build(ArchitectureSpec(name="cnn"), in_channels=1, num_classes=10)
    models.save(network, tmp_path)
    right = (tmp_path / models.WEIGHTS).read_bytes()
    text = "data: digits\ntrain: {model: cnn, weights: model.safetensors}\n"
    assert dry_run(tmp_path, text, capsys)[0] == 0

    for content, data, said in (
        (save({"other": torch.zeros(1)}), "digits", "1 unexpected: other"),
        (right[:-1], "digits", "not a whole file of safetensors"),
        (b"text" * 9, "{source: folder, path: nowhere}", "not a whole file of safetensors"),
    ):
        (tmp_path / models.WEIGHTS).write_bytes(content)
        code, steps, _ = dry_run(tmp_path, text.replace("digits", data), capsys)
        assert code == 3 and said in steps["train"]["reasons"][0]
    _, steps, _ = dry_run(tmp_path, text.replace("model.safetensors", "/dev/zero"), capsys)
    assert [reason[:22] for reason in steps["train"]["reasons"]] == ["/dev/zero is a device,"]


def test_a_network_is_examined_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "from torch import nn\nprint('hello')\ndef net(**sizes): return nn.Conv2d(1, 2, 3)\n"
    )
    (tmp_path / "deadly.py").write_text("import os\nos._exit(9)\n")
    paths = (str(tmp_path),)
    assert network_probe.probe({"name": "loud:net"}, None, 2, paths, trains=True) == Found(weights=20)
    deadly = network_probe.probe({"name": "deadly:net"}, None, 2, paths, trains=True)
    assert "ended its process (9)" in deadly.problem


@pytest.mark.usefixtures("network")
def test_data_that_prepare_would_refuse_is_found_in_its_headers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, side in (("a", 8), ("b", 9)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("L", (side, side)).save(tmp_path / "photos" / name / f"{number}.png")
    (tmp_path / "photos/README").touch()
    np.savez(tmp_path / "x.npz", x=np.zeros((4, 9, 9), np.uint8), y=np.zeros(4, np.int64))
    folder = "data: {source: folder, path: photos}\ntrain: {model: cnn}\n"
    code, steps, said = dry_run(tmp_path, folder, capsys)
    assert code == 3 and "of different sizes" in steps["prepare"]["reasons"][0]
    assert "prepare will leave out, as no images: 1 file: README" in said
    (tmp_path / "photos/b/0.png").write_bytes(b"")
    _, steps, _ = dry_run(tmp_path, folder, capsys)
    assert "1 file: b/0.png (not a PNG or JPEG)" in steps["prepare"]["reasons"][0]
    (tmp_path / "photos/c").mkdir()
    code, steps, _ = dry_run(tmp_path, folder, capsys)
    assert code == 3 and "1 folder: c (no images)" in steps["prepare"]["reasons"][0]
    arrays = "data: {source: npz, path: x.npz, image_size: 8}\ntrain: {model: cnn}\n"
    code, steps, _ = dry_run(tmp_path, arrays, capsys)
    assert code == 3
    assert steps["prepare"]["reasons"] == [
        "the data has 1 class, two are needed",
        "image_size 8 is smaller than the images, whose side is 9",
    ]


@pytest.mark.usefixtures("network")
def test_methods_that_apply_to_no_variant_are_among_what_would_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = "data: {source: folder, path: nowhere}\n"
    text = f"{data}train: {{model: vit}}\nvariants: {{small: [prune]}}\n"
    code, steps, said = dry_run(tmp_path, text, capsys)
    assert code == 3 and "for 2 reasons: (1) prepare: " in said
    assert "none of the recipe's variants can be built" in steps["compress-prune50"]["reasons"][0]


@pytest.mark.usefixtures("network")
def test_what_cannot_fit_is_refused_by_arithmetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "total_bytes", lambda: 64 * 100 * 16 * 2 - 1)  # of 100 images of 8x8, 16 wide
    monkeypatch.setattr(hardware, "gpu_names", lambda: ())
    text = "data: digits\ntrain: {model: {architecture: cnn, arguments: {width: 16}}, batch_size: 100}\n"
    code, steps, _ = dry_run(tmp_path, text, capsys)
    assert code == 3
    assert "takes at least 204,800 bytes for 100 images at once" in steps["train"]["reasons"][0]
    assert dry_run(tmp_path, text.replace("100", "99"), capsys)[0] == 0

    np.savez_compressed(tmp_path / "x.npz", x=np.zeros((600, 4, 4), np.uint8), y=np.arange(600) % 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=600 * 1024**2 - 1))
    arrays = "data: {source: npz, path: x.npz, image_size: 1024}\ntrain: {model: cnn}\n"
    _, steps, _ = dry_run(tmp_path, arrays, capsys)
    assert "the 600 images take 629.1 MB once prepared" in steps["prepare"]["reasons"][0]


@pytest.mark.usefixtures("network")
def test_a_target_that_is_absent_here_is_said_and_fails_only_if_there_is_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if hardware.gpu_names():
        pytest.skip("this machine has a GPU")
    base = "data: digits\ntrain: {model: cnn}\n"
    code, _, said = dry_run(tmp_path, base + "targets: [onnx, tensorrt]\n", capsys)
    assert code == 0 and "engines of tensorrt will not be built here: this machine has no" in said
    code, steps, _ = dry_run(tmp_path, base + "targets: [tensorrt]\n", capsys)
    assert code == 3 and steps["export-tensorrt"]["outcome"] == "would fail"


@pytest.mark.parametrize(
    ("goals", "variants", "weights", "reachable"),
    [
        ("{max_size_mb: 0.1}", "{fp32: []}", 100_000, False),
        ("{max_size_mb: 0.1}", "{fp32: [], int8: [quantize]}", 100_001, False),
        ("{max_size_mb: 0.1}", "{fp32: [], int8: [quantize]}", 99_999, True),
        ("{max_size_mb: 0.1}", "{fp32: [], small: [prune]}", 10**9, True),  # nobody knows how small
        ("{max_size_mb: 0.1}", "{fp32: []}", 0, True),
        ("{}", "{fp32: []}", 10**9, True),
    ],
)
def test_a_size_below_that_of_the_weights_cannot_be_met(
    goals: str, variants: str, weights: int, reachable: bool, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text(f"data: digits\ngoals: {goals}\nvariants: {variants}\n")
    loaded = recipe.load(tmp_path / "mine.yaml").recipe
    assert (not list(preflight.unreachable_goals(loaded, weights))) is reachable


def test_a_run_lists_all_that_it_lacks_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "data: {source: npz, path: nowhere.npz}\ntrain: {precision: fp16, device: cpu}\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "mine.yaml"), "--home", str(tmp_path / "runs")])
    assert ended.value.code == 3
    said = capsys.readouterr().err
    assert "(1) prepare: " in said and "(2) train: precision is fp16" in said
