"""`hpml run --dry-run` says all that would surely fail, at once, with exit code 3."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
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
from hpml.components.compress import AnyMethod
from hpml.components.compress import applicability as methods
from hpml.core import hardware, memory
from hpml.core.contract import validate
from hpml.core.errors import ConfigInvalid
from hpml.pipelines import recipe
from hpml.pipelines.__main__ import main
from hpml.pipelines.preflight import applicability, network_probe
from hpml.pipelines.preflight import checks as preflight
from hpml.pipelines.preflight.network_probe import Found
from hpml.tasks import AnySource, task_of
from hpml.tasks.metric import Limits
from tests.image_tasks import image_task
from tests.tasks.language_modeling.model_folders import write_folder


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network and the methods are examined in this process: starting one with torch takes seconds."""

    def probe(
        architecture: Any,
        task: dict[str, Any],
        import_paths: tuple[str, ...],
        weights: Path | None,
        *,
        facts: network_probe.Facts,
        trains: bool,
    ) -> Found:
        for path in import_paths:
            monkeypatch.syspath_prepend(path)
        monkeypatch.setenv("HPML_IMPORT_PATHS", os.pathsep.join(import_paths))
        monkeypatch.delitem(sys.modules, "mynets", raising=False)
        question = {
            "architecture": architecture,
            "task": task,
            "facts": facts,
            "weights": weights and str(weights),
            "trains": trains,
        }
        return network_probe._examine(question)

    def ask(module: str, question: Any, import_paths: tuple[str, ...], *, timeout_s: float) -> list[str]:
        assert module == methods.__name__
        return methods.why_not(
            ArchitectureSpec.model_validate(question["architecture"]),
            task_of(question["task"]),
            validate(tuple[AnyMethod, ...], question["methods"], where="the methods"),
        )

    monkeypatch.setattr(preflight, "probe", probe)
    monkeypatch.setattr(applicability, "ask", ask)


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


CHITCHAT = "data: {source: chitchat, context: 32, tokenizer: llama}\n"
OF_TRANSFORMERS = "train: {model: transformers, weights: llama, epochs: 0}\n"


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CHITCHAT.replace("32", "4096"), "the network looks back 2,048 tokens, data.context is 4,096"),
        (
            "data: {source: chitchat, context: 32}\n",
            "has 304 token ids, the data set has 4,096.*data.tokenizer",
        ),
        (
            CHITCHAT + OF_TRANSFORMERS.replace("transformers", "decoder"),
            "llama is a folder: set model: transformers",
        ),
        (
            CHITCHAT + OF_TRANSFORMERS.replace("weights: llama", "weights: none"),
            "none does not exist: a model's folder",
        ),
    ],
)
def test_what_a_folder_of_transformers_would_fail_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    write_folder(tmp_path / "llama")
    code, steps, _ = dry_run(tmp_path, text if "train" in text else text + OF_TRANSFORMERS, capsys)
    assert code == 3 and re.search(said, steps["train"]["reasons"][0]) and len(steps["train"]["reasons"]) == 1


@pytest.mark.usefixtures("network")
def test_what_is_on_the_hub_is_not_fetched_to_check_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise AssertionError("something wants a network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    write_folder(tmp_path / "llama")
    address = f"hf://org/name@{'0' * 40}"
    for text in (
        CHITCHAT + OF_TRANSFORMERS.replace("weights: llama", f"weights: '{address}'"),
        CHITCHAT.replace("llama", f"'{address}'") + OF_TRANSFORMERS,
    ):
        code, _, said = dry_run(tmp_path, text, capsys)
        assert code == 0 and f"the network was not checked: it is known when {address} is read" in said


NETWORKS = {
    "import nowhere_at_all\n": "cannot import the model 'mynets:net': ModuleNotFoundError",
    "def net(:\n": "SyntaxError",
    "net = 3\n": "is not callable: its type is int",
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


TEXTS = {  # of a language model, whose vocabulary is smaller where the texts are few
    "def net(in_channels=1): pass\n": ("fails", "unexpected keyword argument 'vocabulary_size'"),
    "net = 3\n": ("fails", "is not callable: its type is int"),
    "def net(vocabulary_size, context, width): pass\n": ("fails", "missing a required argument: 'width'"),
    "def net(vocabulary_size, **_): assert vocabulary_size < 300\n": ("may fail", "AssertionError"),
    "from torch.nn import *\ndef net(**_): return Embedding(999, 8)\n": (
        "may fail",
        "it must be (2, 8, 999)",
    ),
    "from torch.nn import *\ndef net(**_): return Embedding(999, 999)\n": ("", ""),
}


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(("code", "outcome", "said"), [(code, *told) for code, told in TEXTS.items()])
def test_what_texts_may_change_of_the_network_is_a_doubt_and_no_refusal(
    code: str, outcome: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mynets.py").write_text(code)
    data = "data: {source: text, path: mynets.py, vocabulary_size: 999, context: 8}\n"
    status, steps, stderr = dry_run(tmp_path, f"{data}train: {{model: 'mynets:net'}}\n", capsys)
    told = " ".join(stderr.split())
    assert status == (3 if outcome == "fails" else 0), told
    assert ("train may fail, depending on the data" in told) is (outcome == "may fail")
    assert said in (steps["train"]["reasons"][0] if outcome == "fails" else told)


MYTASK = """
from hpml.artifacts.operation import TensorSpec
from hpml.tasks import CustomTask, Metric
import numpy as np

class Mine(CustomTask):
    metrics = (Metric("mae", "MAE", better="lower", least=0.0),)
    mean: float = 0.0
    @classmethod
    def load(cls, path, options):
        x = np.arange(40, dtype="float32").reshape(20, 2)
        return {"train": {"x": x, "y": x[:, 0]}}
    @classmethod
    def facts(cls, train): return {"mean": float(train["x"].mean())}
    def inputs(self): return (TensorSpec(name="x", shape=("batch", 2)),)
    def answers(self): return (TensorSpec(name="y", shape=("batch",)),)
    def loss(self, outputs, stored, *, label_smoothing): return (outputs - stored["y"]).abs().mean()
    def statistics(self, outputs, stored):
        error = (outputs - stored["y"]).abs()
        return {"mae": error.new_ones(len(error), 2) * error[:, None]}
"""
GIVES = "class Giving(Mine):\n    def model_arguments(self): return {'mean': self.mean}\n"
NETS = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, width, **_): super().__init__(nn.Linear(2, width), nn.Flatten(0))
class Normal(Net):
    def __init__(self, mean, width=1, depth: int = 1, sizes: tuple[int, ...] = ()): super().__init__(width)
"""


@pytest.mark.usefixtures("network")
def test_the_network_of_a_users_own_task_is_built_as_far_as_its_facts_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mytasks.py").write_text(MYTASK + GIVES)
    (tmp_path / "mynets.py").write_text(NETS)

    def tried(task: str, net: str, more: str = "") -> tuple[int, str]:
        text = (
            f"data: {{source: custom, task: 'mytasks:{task}'}}\n"
            f"train: {{model: {{architecture: 'mynets:{net}, epochs: 1{more}}}\n"
        )
        code, steps, said = dry_run(tmp_path, text, capsys)
        return code, said + " ".join(steps["train"]["reasons"])

    # It gives the network nothing, so all that this gets is in the recipe.
    assert tried("Mine", "Net', arguments: {width: 1}}") == (0, "on what prepare will write")
    assert "missing a required argument: 'width'" in tried("Mine", "Net'}")[1]
    assert "cannot build the model 'mynets:Net'" in tried("Mine", "Net', arguments: {width: one}}")[1]
    # It gives what nobody knows yet: then only names can be wrong.
    assert tried("Giving", "Normal'}")[0] == 0
    code, said = tried("Giving", "Normal', arguments: {widht: 2}}")
    assert code == 3 and "unexpected keyword argument 'widht'" in said and "it takes mean, width" in said
    assert tried("Giving", "Normal', arguments: {width: one}}")[0] == 0
    assert tried("Giving", "Normal', arguments: {sizes: [1, 2]}}")[0] == 0
    code, said = tried("Giving", "Normal', arguments: {depth: two}}")
    assert code == 3 and 'does not take depth "two": depth is int -> correct train.model.arg' in said
    assert "cannot import the model" in tried("Giving", "Nomral'}")[1]
    code, said = tried("Giving", "Normal'}", ", required: {mae: -1}")
    assert code == 3 and "train.required.mae: -1 cannot be, mae is at least 0" in said
    code, said = tried("Giving", "Normal'}", ", required: {rmse: 1}")
    assert code == 3 and "train.required.rmse: the task has no metric 'rmse'; give one of mae" in said


@pytest.mark.usefixtures("network")
def test_once_its_data_are_prepared_the_network_of_a_users_own_task_is_shown_two_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mytasks.py").write_text(MYTASK + GIVES)
    (tmp_path / "mynets.py").write_text(NETS)
    text = (
        "data: {source: custom, task: 'mytasks:Giving'}\n"
        "train: {model: {architecture: 'mynets:Normal', arguments: {width: 3}}}\n"
    )
    assert dry_run(tmp_path, text, capsys)[0] == 0
    arguments = ("--only", "prepare", "--no-tracking", "--home", str(tmp_path / "runs"))
    main(["run", str(tmp_path / "mine.yaml"), *arguments])
    capsys.readouterr()
    code, steps, _ = dry_run(tmp_path, text, capsys)
    assert code == 3 and steps["prepare"]["outcome"] == "cached"
    with pytest.raises(SystemExit):
        main(["run", str(tmp_path / "mine.yaml"), "--set", "goals.metric=rmse", *arguments[2:]])
    assert "goals.metric: the task has no metric 'rmse'; give one of mae" in capsys.readouterr().err
    assert "makes (6,) of 2 samples -> it must be (2,)" in steps["train"]["reasons"][0].replace(
        ": it", " -> it"
    )


@pytest.mark.usefixtures("network")
def test_a_run_refuses_a_wrong_network_before_it_prepares_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("data: digits\ntrain: {model: {architecture: cnn, arguments: {widht: 8}}}\n")
    with pytest.raises(SystemExit) as ended:
        main(["run", str(file), "--no-tracking", "--home", str(tmp_path / "runs")])
    assert ended.value.code == 3
    assert "step train cannot run on this machine: " in (said := capsys.readouterr().err) and "widht" in said
    assert not list((tmp_path / "runs").glob("*/run.json"))


@pytest.mark.parametrize(("key", "name"), [("goals.metric", "bleu"), ("train.required.bleu", "bleu")])
def test_a_metric_that_the_task_lacks_is_refused_with_the_recipe(key: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("data: digits\n")
    with pytest.raises(ConfigInvalid, match=rf"{key}: the task has no metric '{name}'; give one of accuracy"):
        recipe.load(tmp_path / "mine.yaml", (f"{key}={'bleu' if key.startswith('goals') else 1}",))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.required.accuracy_top1=90", "90 cannot be, accuracy_top1 is at least 0 and at most 1"),
        ("goals.max_quality_loss=5", "5 allows any loss of accuracy_top1; give at least 0 and at most 1"),
        ("train.batch_size=1e12", "train.batch_size: "),
    ],
)
def test_thresholds_that_nothing_can_meet_are_refused_with_the_recipe(
    override: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("data: digits\n")
    with pytest.raises(ConfigInvalid, match=re.escape(said)):
        recipe.load(tmp_path / "mine.yaml", (override,))
    (tmp_path / "mine.yaml").write_text("data: chitchat\n")
    recipe.load(tmp_path / "mine.yaml", ("goals.max_quality_loss=5",))  # of perplexity: six times as much


@pytest.mark.usefixtures("network")
def test_weights_are_held_against_the_network_by_their_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = models.build(ArchitectureSpec(name="cnn"), image_task())
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
    of_images = image_task().model_dump(mode="json")
    loud, deadly = (
        network_probe.probe({"name": f"{name}:net"}, of_images, paths, facts="stand_in", trains=True)
        for name in ("loud", "deadly")
    )
    assert loud == Found(weights=20, largest_graph=20, metrics={"accuracy_top1": Limits(0.0, 1.0, 1.0)})
    assert "ended its process (9)" in deadly.problem


@pytest.mark.usefixtures("network")
def test_data_that_prepare_would_refuse_is_found_in_its_headers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, side in (("a", 8), ("b", 9)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(3):
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


def test_a_network_that_no_onnx_file_holds_is_refused_before_it_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "probe", lambda *_, **__: Found(weights=10**9, largest_graph=600_000_000))
    text = "data: digits\ntrain: {model: cnn}\nvariants: {fp32: [], small: [prune]}\ntargets: [eager, onnx]\n"
    code, steps, said = dry_run(tmp_path, text, capsys)
    assert code == 3 and "600,000,000 weights in one graph, an ONNX file holds at most 536,870,911" in said
    assert [name for name, item in steps.items() if item["outcome"] == "would fail"] == ["export-onnx"]
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / "mine.yaml"), "--no-tracking", "--home", str(tmp_path / "runs")])
    assert ended.value.code == 3 and not list((tmp_path / "runs").glob("*/run.json"))


def test_of_several_graphs_the_weights_of_the_largest_count() -> None:
    task = validate(AnySource, "conversations", where="it").stand_in()
    question = {"architecture": {"name": "gru_attention"}, "task": task.model_dump(mode="json")}
    found = network_probe._examine({**question, "facts": "stand_in", "weights": None, "trains": True})
    assert found.weights / 2 < found.largest_graph < found.weights


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
