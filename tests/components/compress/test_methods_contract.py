"""What holds for every row of METHODS, and for the stage that applies them."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from hpml import models
from hpml.components.compress import METHODS, AnyMethod, Method, Prune
from hpml.components.compress import stage as compress
from hpml.core.contract import Output, validate
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.tasks import task_of

FAST = {"distill": {"epochs": 1}, "quantize": {"calibration_samples": 16}}


@pytest.mark.parametrize("name", METHODS)
def test_a_row_is_its_configs_own_name(name):
    config = METHODS[name]()
    assert config.method == name and config.label.startswith(name)
    assert type(validate(AnyMethod, name, where="variants")) is METHODS[name]


@pytest.mark.parametrize("name", METHODS)
def test_a_config_survives_json(name):
    config = METHODS[name]()
    assert validate(AnyMethod, config.model_dump(mode="json"), where="variants") == config


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_network_loads_and_is_as_good_as_its_manifest_says(
    run_stage, small_model, digits_data, name
):
    config = METHODS[name](**FAST.get(name, {}))
    model = run_stage(compress.run, config, model=small_model, teacher=small_model, data=digits_data)
    network = models.load(model)
    assert not network.training
    assert models.count(network, task_of(model.spec.task)) == (model.spec.parameters, model.spec.macs)
    assert model.spec.methods == (config.label,)
    assert model.spec.architecture == small_model.spec.architecture
    assert set(model.manifest.metrics) == {
        f"{figure}_{when}"
        for figure in ("parameters", "macs", "accuracy_top1")
        for when in ("before", "after")
    }
    assert model.manifest.metrics["accuracy_top1_after"] == model.spec.quality["accuracy_top1"]
    assert set(model.manifest.files) == {"model.safetensors", "history.json"}


def test_labels_tell_two_prunings_apart():
    assert [Prune(channels=share).label for share in (0.5, 0.25, 0.625)] == [
        "prune50",
        "prune25",
        "prune62.5",
    ]


def test_an_unknown_method_is_named_with_the_nearest_right_one():
    with pytest.raises(ConfigInvalid, match="did you mean 'quantize'"):
        validate(AnyMethod, "quantise", where="variants")
    with pytest.raises(ConfigInvalid, match="channels"):
        validate(AnyMethod, {"method": "prune", "channels": 1.0}, where="variants")


class Rewire(Method):
    """A method that breaks the contract: it changes the architecture."""

    method: Literal["rewire"] = "rewire"

    def apply(self, network, teacher, data, out):
        network.module.features[2] = nn.Sigmoid()
        return network


def test_a_network_that_does_not_rebuild_is_not_written(tmp_path, small_model, digits_data):
    place, scratch = tmp_path / "model", tmp_path / "scratch"
    place.mkdir(), scratch.mkdir()
    out = Output(place, scratch)
    with pytest.raises(StageFailed, match=r"does not rebuild from its manifest: its outputs differ by \d"):
        compress.run(Rewire(), model=small_model, teacher=small_model, data=digits_data, out=out)


class Poison(Method):
    """A method that leaves weights which are no numbers."""

    method: Literal["poison"] = "poison"

    def apply(self, network, teacher, data, out):
        with torch.no_grad():
            network.module.head.weight.fill_(torch.nan)
        return network


def test_a_network_that_answers_nan_is_not_written(tmp_path, small_model, digits_data):
    place, scratch = tmp_path / "model", tmp_path / "scratch"
    place.mkdir(), scratch.mkdir()
    with pytest.raises(StageFailed, match="nan"):
        compress.run(
            Poison(), model=small_model, teacher=small_model, data=digits_data, out=Output(place, scratch)
        )
