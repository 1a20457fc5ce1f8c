"""Quantization: the spec it writes, and the arithmetic it simulates."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpml import models
from hpml.artifacts.model import QuantizationSpec
from hpml.components.compress import Distill, Prune, Quantize
from hpml.components.compress import stage as compress
from hpml.components.compress.simulate import simulate_int8
from hpml.components.export import stage as export
from hpml.core.errors import ConfigInvalid
from hpml.targets import Onnx
from hpml.tasks import task_of


def spec(**changes: object) -> QuantizationSpec:
    fields = {
        "scheme": "static",
        "weights": "int8-per-channel",
        "activations": "auto",
        "calibration": "minmax",
        "calibration_rows": (),
        **changes,
    }
    return QuantizationSpec.model_validate(fields)


@pytest.fixture
def x_nchw() -> torch.Tensor:
    return torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def calibration_rows(data, count: int, seed: int) -> tuple[int, ...]:
    return tuple(task_of(data.spec.task).calibration_rows(data, count, seed).tolist())


# ------------------------------------------------------------------------------------------------- the stage


def test_the_spec_is_written_and_the_weights_stay(run_stage, small_model, digits_data):
    config = Quantize(calibration_samples=50, excluded_layers=("head",), activations="uint8")
    model = run_stage(compress.run, config, model=small_model, teacher=small_model, data=digits_data)
    quantization = model.spec.quantization
    assert model.spec.methods == ("quantize",)
    assert (quantization.weights, quantization.activations) == ("int8-per-channel", "uint8")
    assert quantization.excluded_layers == ("head",)
    assert quantization.calibration_rows == calibration_rows(digits_data, 50, 0)
    weights = models.WEIGHTS
    assert model.manifest.files[weights].sha256 == small_model.manifest.files[weights].sha256
    assert model.spec.quality["accuracy_top1"] > small_model.spec.quality["accuracy_top1"] - 0.02


def test_the_accuracy_is_that_of_the_quantized_network(run_stage, small_model, digits_data):
    """Calibrated on one image, the ranges of most activations are wrong, and the accuracy says so."""
    accuracy = {}
    for samples in (1, 256):
        config = Quantize(calibration_samples=samples, calibration="percentile")
        model = run_stage(compress.run, config, model=small_model, teacher=small_model, data=digits_data)
        accuracy[samples] = model.manifest.metrics["accuracy_top1_after"]
    assert accuracy[1] < accuracy[256]


def test_pruned_distilled_and_quantized_all_the_way_to_an_engine(run_stage, pruned, small_model, digits_data):
    inputs = {"teacher": small_model, "data": digits_data}
    distilled = run_stage(compress.run, Distill(epochs=3), model=pruned, **inputs)
    quantized = run_stage(compress.run, Quantize(), model=distilled, **inputs)
    assert quantized.spec.methods == ("prune50", "distill", "quantize")
    assert quantized.spec.channel_plan == pruned.spec.channel_plan
    engine = run_stage(export.run, Onnx(), model=quantized, data=digits_data)
    assert engine.spec.precision == "int8" and engine.spec.methods == quantized.spec.methods
    assert engine.spec.quality["accuracy_top1"] > 0.9
    assert abs(engine.spec.quality["accuracy_top1"] - quantized.spec.quality["accuracy_top1"]) <= 0.02


def test_pruning_keeps_a_quantization_that_came_before(run_stage, small_model, digits_data):
    inputs = {"teacher": small_model, "data": digits_data}
    quantized = run_stage(compress.run, Quantize(), model=small_model, **inputs)
    pruned = run_stage(compress.run, Prune(channels=0.25), model=quantized, **inputs)
    assert pruned.spec.quantization == quantized.spec.quantization
    assert pruned.spec.channel_plan


def test_an_unknown_excluded_layer_is_named(run_stage, small_model, digits_data):
    config = Quantize(excluded_layers=("haed",))
    with pytest.raises(ConfigInvalid, match="no layer 'haed' -> did you mean 'head'"):
        run_stage(compress.run, config, model=small_model, teacher=small_model, data=digits_data)


# ---------------------------------------------------------------------------------------- calibration samples


def test_the_rows_are_a_fair_draw_of_the_training_images(digits_data):
    labels = np.load(digits_data.file("train_labels.npy"))
    rows = calibration_rows(digits_data, 100, seed=3)
    assert rows == calibration_rows(digits_data, 100, seed=3) != calibration_rows(digits_data, 100, seed=4)
    assert len(rows) == len(set(rows)) == 100 and list(rows) == sorted(rows)
    counts = Counter(int(label) for label in labels[list(rows)])
    assert set(counts) == set(range(10)) and max(counts.values()) - min(counts.values()) <= 2


def test_few_rows_are_of_different_classes_and_many_are_all(digits_data):
    labels = np.load(digits_data.file("train_labels.npy"))
    assert len(set(labels[list(calibration_rows(digits_data, 10, seed=0))])) == 10
    assert calibration_rows(digits_data, 10**6, seed=0) == tuple(range(len(labels)))


# -------------------------------------------------------------------------------------------- the arithmetic


def values(x: torch.Tensor) -> int:
    return len(x.unique())


@pytest.mark.parametrize("weights, most", [("int8-per-channel", 255 * 16), ("int8-per-tensor", 255)])
def test_weights_lie_on_the_grid_of_the_scheme(small_model, x_nchw, weights, most):
    simulated = simulate_int8(models.load(small_model), spec(weights=weights), (x_nchw,))
    layers = dict(simulated.named_modules())
    head = layers["head"].weight
    assert values(head) <= (255 if weights == "int8-per-tensor" else 255 * 10)
    for row in head:
        assert values(row) <= 255
        if weights == "int8-per-channel":
            steps = row / (row.abs().max() / 127)
            assert torch.allclose(steps, steps.round(), atol=1e-3)


def test_per_channel_is_closer_than_per_tensor(small_model, digits_data, x_nchw):
    network = models.load(small_model)
    errors = {}
    with torch.no_grad():
        for kind in ("int8-per-channel", "int8-per-tensor"):
            simulated = simulate_int8(network, spec(weights=kind), (x_nchw,))
            errors[kind] = float((simulated(x_nchw) - network(x_nchw)).abs().mean())
    assert 0 < errors["int8-per-channel"] < errors["int8-per-tensor"]


def test_the_network_itself_is_left_alone(small_model, x_nchw):
    network = models.load(small_model)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    simulate_int8(network, spec(calibration="percentile"), (x_nchw,))
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert not any(layer._forward_pre_hooks for layer in network.modules())


def test_excluded_layers_are_exact(small_model, x_nchw):
    network = models.load(small_model)
    with torch.no_grad():
        simulated = simulate_int8(network, spec(excluded_layers=("features", "head")), (x_nchw,))
        assert torch.equal(simulated(x_nchw), network(x_nchw))
        simulated = simulate_int8(network, spec(excluded_layers=("features.0", "features.3")), (x_nchw,))
    layers, originals = dict(simulated.named_modules()), dict(network.named_modules())
    assert torch.equal(layers["features.0"].weight, originals["features.0"].weight)
    assert not torch.equal(layers["features.6"].weight, originals["features.6"].weight)


def test_layers_whose_inputs_keep_too_few_bits_are_exact(x_nchw):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8)).eval()
    spiky = x_nchw.clone()
    spiky[0, 0, 0, 0] = 1e3
    with torch.no_grad():
        for x, least_bits, exact in ((x_nchw, 4.0, False), (spiky, 4.0, True), (spiky, 0.0, False)):
            simulated = simulate_int8(network, spec(), (x,), least_bits=least_bits)
            assert torch.equal(simulated(x), network(x)) == exact


def test_a_percentile_ignores_one_outlier_and_minmax_does_not(x_nchw):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Flatten(), nn.Linear(256, 10)).eval()
    spoilt = x_nchw.repeat(100, 1, 1, 1)
    spoilt[0, 0, 0, 0] = 1e4
    with torch.no_grad():
        error = {
            kind: float(
                (simulate_int8(network, spec(calibration=kind), (spoilt,))(x_nchw) - network(x_nchw))
                .abs()
                .mean()
            )
            for kind in ("minmax", "percentile")
        }
    assert error["percentile"] < 0.1 * error["minmax"]


def test_norms_are_folded_before_weights_are_rounded(x_nchw):
    """Per tensor, one large gamma coarsens the grid of every other channel; unfolded it would not."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 10)
    )
    with torch.no_grad():
        network[1].weight[0] = 1e4
    simulated = simulate_int8(network.eval(), spec(weights="int8-per-tensor"), (x_nchw,))
    assert not simulated[0].weight[1:].any() and simulated[0].weight[0].any()


@given(gamma=st.floats(-4, 4), scale=st.floats(0.1, 10))
def test_folding_does_not_matter_per_channel(gamma, scale):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3)
    ).eval()
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        plain = simulate_int8(network, spec(), (x,))[0].weight.clone()
        network[1].weight[:] = gamma
        network[1].running_var[:] = scale
        folded = simulate_int8(network, spec(), (x,))[0].weight
    if abs(gamma) > 1e-3:
        assert torch.allclose(plain, folded, atol=float(plain.abs().max()) / 100)
