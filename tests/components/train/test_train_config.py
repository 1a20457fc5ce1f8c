"""What a recipe may say about training, and what a machine cannot do."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from hpml.components.train.config import TrainConfig
from hpml.core import hardware
from hpml.core.contract import validate
from hpml.core.errors import ConfigInvalid


def read(given: dict[str, Any]) -> TrainConfig:
    config: TrainConfig = validate(TrainConfig, given, where="train")
    return config


def test_a_bare_name_stands_for_a_model() -> None:
    assert read({"model": "vit"}) == read({"model": {"architecture": "vit", "arguments": {}}})
    assert read({"model": "mine:net"}).model.architecture == "mine:net"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": "resnet81"}, "did you mean 'resnet18'"),
        ({"model": "mlp"}, "ours are cnn, decoder, resnet18"),
        ({"model": {"architecture": "resnet18", "argument": {}}}, "did you mean 'arguments'"),
        ({"learning_rat": 1}, "did you mean 'learning_rate'"),
        ({"learning_rate": 0}, "more than 0"),
        ({"learning_rate": float("nan")}, "finite"),
        ({"optimizer": "adam"}, "'sgd', 'adamw', 'lars' or 'muon'"),
        ({"augment": {"shift": 4}}, "augment.shift"),
        ({"epochs": 0}, "epochs"),
        ({"batch_size": 60, "accumulate": 7}, "not a multiple of accumulate 7"),
        ({"batch_size": 64, "nproc_per_node": 3}, "nodes x nproc_per_node x accumulate = 1 x 3 x 1"),
        ({"batch_size": 64, "nodes": 3}, "nodes x nproc_per_node x accumulate = 3 x 1 x 1"),
        ({"batch_size": 64, "nodes": 4, "min_nodes": 2}, "= 3 x 1 x 1 (min_nodes 2: so many may train)"),
        ({"nodes": 2, "min_nodes": 3}, "min_nodes 3 is more than nodes 2"),
        ({"min_nodes": 0}, "at least 1"),
        ({"nproc_per_nod": 2}, "did you mean 'nproc_per_node'"),
        ({"epochs": 3, "warmup_epochs": 3}, "leaves nothing of 3 epochs"),
    ],
)
def test_a_wrong_config_names_its_key_and_the_right_one(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigInvalid, match="train is not valid") as caught:
        read(given)
    assert told in str(caught.value)


def test_what_is_not_trained_needs_no_warmup() -> None:
    assert read({"weights": "model.safetensors", "epochs": 0, "warmup_epochs": 0.1}).epochs == 0


@pytest.mark.parametrize(("launched", "workers_here"), [(False, 8), (True, 4)])
def test_each_worker_of_this_machine_needs_a_gpu(
    monkeypatch: pytest.MonkeyPatch, launched: bool, workers_here: int
) -> None:
    """On a node of a cluster these are its own, elsewhere those of all nodes."""
    config = read({"nodes": 2, "nproc_per_node": 4})
    if launched:
        monkeypatch.setenv("WORLD_SIZE", "8")
    for gpus in (workers_here - 1, workers_here):
        monkeypatch.setattr(hardware, "gpu_names", lambda gpus=gpus: ("GPU",) * gpus)
        unsupported_reason = config.unsupported_reason()
        assert (f"this machine has {gpus} GPU(s)" in unsupported_reason) == (gpus < workers_here)


def test_an_elastic_training_divides_its_batch_for_every_number_of_nodes() -> None:
    assert read({"batch_size": 48, "nodes": 4, "min_nodes": 2}).workers == 4
    assert read({"batch_size": 64, "nodes": 4, "nproc_per_node": 2}).workers == 8


NO_GPU = pytest.mark.skipif(bool(hardware.gpu_names()), reason="this machine has a GPU")


@NO_GPU
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"device": "cuda"}, "no NVIDIA GPU"),
        ({"device": "cuda", "nproc_per_node": 2}, "no NVIDIA GPU"),
        ({"precision": "fp16"}, "needs a GPU"),
        ({"nproc_per_node": 2}, ""),
        ({"precision": "fp32"}, ""),
    ],
)
def test_what_a_machine_without_a_gpu_cannot_do(given: dict[str, Any], told: str) -> None:
    unsupported_reason = read(given).unsupported_reason()
    assert told in unsupported_reason
    assert bool(told) == bool(unsupported_reason)


@NO_GPU
def test_bf16_is_met_only_where_the_cpu_has_it() -> None:
    has_it = {"avx512_bf16", "amx_bf16"} & set(hardware.cpu_flags())
    assert bool(read({"precision": "bf16"}).unsupported_reason()) == (not has_it)


def test_the_config_imports_nothing_heavy() -> None:
    code = (
        "import sys, hpml.components.train.stage; print({'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"
