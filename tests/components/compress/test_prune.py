"""Pruning: what it removes, that what is left rebuilds exactly, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpml import models
from hpml.artifacts.model import ArchitectureSpec
from hpml.components.compress import Prune
from hpml.components.compress import stage as compress
from hpml.components.compress.prune_channels import Group, _kept, remove_channels
from hpml.core.errors import ConfigInvalid, ExitCode
from hpml.models.channel_plan import apply_channel_plan, channel_plan, layer_sizes
from hpml.tasks import task_of
from tests.image_tasks import image_task

TASK = image_task()
RESNET = ArchitectureSpec(name="resnet18", arguments={"width": 16})


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return models.build(RESNET, TASK).eval()


def logits(network: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return network(torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)))


# ------------------------------------------------------------------------------------------------- the stage


def test_half_of_the_channels_is_a_quarter_of_the_work(pruned, small_model):
    spec, before = pruned.spec, small_model.spec
    assert spec.methods == ("prune50",)
    assert spec.parameters < 0.3 * before.parameters and spec.macs < 0.3 * before.macs
    assert models.count(models.load(pruned), task_of(spec.task)) == (spec.parameters, spec.macs)
    metrics = pruned.manifest.metrics
    assert (
        metrics["parameters_before"] == before.parameters and metrics["parameters_after"] == spec.parameters
    )
    assert metrics["macs_before"] == before.macs and metrics["macs_after"] == spec.macs
    assert metrics["accuracy_top1_before"] == before.quality["accuracy_top1"]
    assert metrics["accuracy_top1_after"] == spec.quality["accuracy_top1"]
    assert json.loads(pruned.file("history.json").read_text()) == []


def test_the_plan_says_what_changed_and_nothing_else(pruned):
    assert pruned.spec.channel_plan == {
        "features.0": {"in_channels": 1, "out_channels": 8, "groups": 1},
        "features.1": {"num_features": 8},
        "features.3": {"in_channels": 8, "out_channels": 16, "groups": 1},
        "features.4": {"num_features": 16},
        "features.6": {"in_channels": 16, "out_channels": 32, "groups": 1},
        "features.7": {"num_features": 32},
        "head": {"in_features": 32, "out_features": 10},
    }


def test_pruning_again_composes_the_plans(run_stage, pruned, small_model, digits_data):
    config = Prune(channels=0.5, round_to=4)
    again = run_stage(compress.run, config, model=pruned, teacher=small_model, data=digits_data)
    assert again.spec.methods == ("prune50", "prune50")
    assert again.spec.channel_plan["features.3"] == {"in_channels": 4, "out_channels": 8, "groups": 1}
    assert (
        models.count(models.load(again), task_of(again.spec.task))[0]
        == again.spec.parameters
        < pruned.spec.parameters
    )


def test_the_same_pruning_writes_the_same_artifact(run_stage, pruned, small_model, digits_data):
    again = run_stage(compress.run, Prune(), model=small_model, teacher=small_model, data=digits_data)
    assert again.digest == pruned.digest


def test_what_matters_is_kept(run_stage, small_model, digits_data):
    """Channels chosen by what the logits lose cost less accuracy than channels drawn by lot."""

    def mean_accuracy(importance):
        found = [
            run_stage(
                compress.run,
                Prune(importance=importance, ranking="global", round_to=4, seed=seed),
                model=small_model,
                teacher=small_model,
                data=digits_data,
            )
            for seed in range(4)
        ]
        return sum(model.spec.quality["accuracy_top1"] for model in found) / len(found)

    assert mean_accuracy("taylor") > mean_accuracy("random") + 0.1


def test_a_vision_transformer_is_refused_with_what_to_do(tmp_path, digits_data):
    vit = ArchitectureSpec(name="vit", arguments={"image_size": 8, "dim": 16, "depth": 1, "heads": 2})
    network = models.build(vit, TASK)
    with pytest.raises(ConfigInvalid, match="prune cannot prune a network with Vit weights") as failure:
        remove_channels(network, TASK, Prune(), digits_data)
    assert failure.value.exit_code == ExitCode.CONFIG_INVALID
    assert "Conv2d, Linear, BatchNorm2d" in failure.value.why and "leave prune out" in failure.value.fix


# --------------------------------------------------------------------------------------------- any user's CNN


@pytest.mark.parametrize(
    "ranking, importance", [("uniform", "taylor"), ("global", "taylor"), ("uniform", "l1")]
)
def test_shared_channels_are_removed_together(network_type, ranking, importance, digits_data):
    torch.manual_seed(0)
    network = network_type().eval()
    before, sizes = models.count(network, TASK), layer_sizes(network)
    remove_channels(network, TASK, Prune(round_to=4, ranking=ranking, importance=importance), digits_data)
    parameters, macs = models.count(network, TASK)
    assert parameters < 0.6 * before[0] and macs < 0.65 * before[1]
    assert logits(network).shape == (4, 10)

    rebuilt = network_type()
    apply_channel_plan(rebuilt, channel_plan(sizes, network))
    rebuilt.load_state_dict(network.state_dict())
    assert torch.equal(logits(rebuilt.eval()), logits(network))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in network.parameters())


@given(
    channels=st.floats(0.05, 0.95),
    round_to=st.sampled_from([1, 4, 8]),
    ranking=st.sampled_from(["uniform", "global"]),
)
def test_what_is_left_is_a_multiple_of_round_to_and_never_nothing(channels, round_to, ranking):
    scores = torch.rand(64, generator=torch.Generator().manual_seed(1))
    groups = [
        Group(nn.Identity(), scores, 1),
        Group(nn.Identity(), scores[:24] * 1e-6, 1),
        Group(nn.Identity(), scores[:2], 1),
    ]
    kept = _kept(groups, Prune(channels=channels, round_to=round_to, ranking=ranking))
    for group, count in zip(groups, kept, strict=True):
        assert 0 < count <= len(group.scores)
        assert count % round_to == 0 or count == len(group.scores)
        assert len(group.least_important(count)) == len(group.scores) - count
    if ranking == "uniform":
        assert abs(kept[0] - (1 - channels) * 64) <= max(round_to, 1)


def test_global_ranking_takes_from_where_it_hurts_least():
    strong, weak = torch.linspace(2, 3, 32), torch.linspace(0, 1, 32)
    groups = [Group(nn.Identity(), strong, 1), Group(nn.Identity(), weak, 1)]
    assert _kept(groups, Prune(channels=0.5, ranking="global")) == [32, 8]
    assert _kept(groups, Prune(channels=0.5, ranking="uniform")) == [16, 16]


def test_the_weakest_channels_go():
    group = Group(nn.Identity(), torch.tensor([3.0, 1.0, 2.0, 0.0]), 1)
    assert group.least_important(2) == [1, 3]
    assert Group(nn.Identity(), torch.tensor([3.0, 1.0, 2.0, 4.0]), 2).least_important(2) == [0, 2]


def test_excluded_layers_keep_their_channels(digits_data):
    network = resnet()
    remove_channels(network, TASK, Prune(excluded_layers=("groups.3", "stem.0")), digits_data)
    sizes, whole = layer_sizes(network), layer_sizes(resnet())
    for name in ("stem.0", "groups.3.0.conv1", "groups.3.1.conv2", "head"):
        key = "out_features" if name == "head" else "out_channels"
        assert sizes[name][key] == whole[name][key]
    assert sizes["groups.2.0.conv1"]["out_channels"] == 32


def test_an_unknown_excluded_layer_is_named_with_the_nearest_right_one(digits_data):
    with pytest.raises(ConfigInvalid, match=r"no layer 'groups.4' -> did you mean 'groups.\d'"):
        remove_channels(resnet(), TASK, Prune(excluded_layers=("groups.4",)), digits_data)


class HardCoded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 16, 3, 2, 1), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).view(-1, 256))


def test_a_network_with_sizes_in_its_code_is_refused(digits_data):
    with pytest.raises(ConfigInvalid, match="does not run with fewer channels") as failure:
        remove_channels(HardCoded(), TASK, Prune(), digits_data)
    assert "take sizes from tensors" in failure.value.fix


def test_pruning_nothing_is_refused(digits_data):
    with pytest.raises(ConfigInvalid, match="prune would remove nothing"):
        remove_channels(resnet(), TASK, Prune(channels=0.05, round_to=256), digits_data)


@pytest.mark.parametrize("importance", ["taylor", "random"])
def test_the_seed_decides_and_the_global_one_does_not(importance, digits_data):
    sizes = []
    for outer in (1, 2):
        network = resnet()
        torch.manual_seed(outer)
        remove_channels(network, TASK, Prune(importance=importance, ranking="global"), digits_data)
        sizes.append((layer_sizes(network), logits(network)))
    assert sizes[0][0] == sizes[1][0]
    assert torch.equal(sizes[0][1], sizes[1][1])
