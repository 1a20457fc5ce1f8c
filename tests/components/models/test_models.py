"""Architectures: what they compute, and that a manifest rebuilds them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hpml import models
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ArchitectureSpec, ModelSpec
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.models.channel_plan import apply_channel_plan, channel_plan, layer_sizes
from tests.image_tasks import image_task

TASK = image_task((3, 32, 32))


def built(name: str, **arguments: int) -> nn.Module:
    torch.manual_seed(0)
    spec = ArchitectureSpec(name=name, arguments=dict(arguments))
    return models.build(spec, TASK)


@pytest.mark.parametrize(
    ("name", "arguments", "parameters", "macs"),
    [
        ("resnet18", {}, 11_173_962, 555_422_720),  # as everybody's ResNet-18 for CIFAR
        ("cnn", {"width": 8}, 6_418, 811_328),
        # patches, two blocks (qkv, attention, projection, MLP) of 64 tokens, head
        (
            "vit",
            {"dim": 64, "depth": 2, "heads": 4},
            107_978,
            48 * 64 * 64 + 2 * (12 * 64 * 64 * 64 + 2 * 64 * 64 * 64) + 640,
        ),
    ],
)
def test_size_and_work(name: str, arguments: dict[str, int], parameters: int, macs: int) -> None:
    model = built(name, **arguments).train()
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert models.count(model, TASK) == (parameters, macs)
    assert model.training


def test_a_vit_tells_places_apart() -> None:
    model = built("vit", dim=32, depth=1, heads=2).eval()
    x = torch.rand(1, 3, 32, 32)
    assert not torch.allclose(model(x), model(x.roll(8, dims=3)), atol=1e-4)


def test_names() -> None:
    assert models.import_path("cnn") == "hpml.models.cnn:Cnn"
    assert models.import_path("mine.nets:small") == "mine.nets:small"
    with pytest.raises(ConfigInvalid, match="did you mean 'resnet18'"):
        models.import_path("resnet81")


def test_the_names_do_not_import_torch() -> None:
    code = "import sys, hpml.models; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


def test_an_interruption_is_not_an_error_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stopped_net.py").write_text(
        "from hpml.core.errors import Terminated\nraise Terminated('stopped by SIGTERM')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Exception, match=r"^stopped by SIGTERM$"):
        built("stopped_net:net")


class Tied(nn.Module):
    """Two names for one tensor, as in a language model's embedding and head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_weights_come_back_as_they_were(layout: torch.memory_format, tmp_path: Path) -> None:
    model = built("cnn", width=4).to(memory_format=layout)  # type: ignore[call-overload]
    models.save(model, tmp_path)
    again = models.load_weights(built("cnn", width=4), tmp_path / models.WEIGHTS)
    assert same_state(model, again)


def test_shared_tensors_are_saved_too(tmp_path: Path) -> None:
    model = Tied()
    models.save(model, tmp_path)
    assert same_state(model, models.load_weights(Tied(), tmp_path / models.WEIGHTS))


def test_weights_of_another_network_or_no_weights_are_refused(tmp_path: Path) -> None:
    models.save(built("cnn", width=4), tmp_path)
    with pytest.raises(StageFailed, match="do not fit the network"):
        models.load_weights(built("cnn", width=8), tmp_path / models.WEIGHTS)
    (tmp_path / models.WEIGHTS).write_bytes(b"\xff" * 64)
    with pytest.raises(StageFailed, match="do not fit the network"):
        models.load_weights(built("cnn", width=8), tmp_path / models.WEIGHTS)


# ----------------------------------------------------------------------------------------- the channel plan


def narrowed(name: str, narrow: int, wide: int) -> tuple[nn.Module, dict[str, dict[str, int]]]:
    """A network that has the sizes of a narrower one, and the plan that says so."""
    small, large = built(name, width=narrow), built(name, width=wide)
    return small, channel_plan(layer_sizes(large), small)


@pytest.mark.parametrize("name", ["cnn", "resnet18"])
def test_a_plan_rebuilds_the_narrower_network_exactly(name: str) -> None:
    small, plan = narrowed(name, 4, 8)
    rebuilt = built(name, width=8)
    apply_channel_plan(rebuilt, plan)
    assert layer_sizes(rebuilt) == layer_sizes(small)
    rebuilt.load_state_dict(small.state_dict())
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(rebuilt.eval()(x), small.eval()(x))
    assert models.count(rebuilt, TASK) == models.count(small, TASK)


def test_a_plan_names_only_what_changed() -> None:
    model = built("cnn", width=8)
    assert channel_plan(layer_sizes(model), built("cnn", width=8)) == {}
    _, plan = narrowed("cnn", 4, 8)
    assert plan["features.0"] == {"in_channels": 3, "out_channels": 4, "groups": 1}
    assert plan["head"] == {"in_features": 16, "out_features": 10}


def test_grouped_convolutions_keep_their_shape() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8))
    apply_channel_plan(model, {"0": {"in_channels": 4, "out_channels": 4, "groups": 4}})
    assert model(torch.zeros(1, 4, 5, 5)).shape == (1, 4, 3, 3)


@pytest.mark.parametrize(
    "plan",
    [
        {"nowhere": {"num_features": 4}},
        {"features.0": {"num_features": 4}},
        {"features.1": {"num_features": 0}},
        {"features.1": {"num_features": -1}},
        {"features.1": {"num_features": 10**12}},
        {"features.2": {}},
    ],
)
def test_a_plan_from_elsewhere_is_checked(plan: dict[str, dict[str, int]]) -> None:
    with pytest.raises(StageFailed, match="the channel plan"):
        apply_channel_plan(built("cnn", width=8), plan)


def test_a_manifest_rebuilds_its_network(small_model: Artifact[ModelSpec]) -> None:
    model = models.load(small_model)
    assert not model.training
    saved = load_file(small_model.file(models.WEIGHTS))
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def same_state(first: nn.Module, second: nn.Module) -> bool:
    pairs: list[tuple[Tensor, Tensor]] = list(
        zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    return all(torch.equal(a, b) for a, b in pairs)
