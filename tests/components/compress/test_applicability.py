"""A method that does not apply: said before training, and its variant is not built."""

from __future__ import annotations

import pytest
from torch import nn

from hpml import models
from hpml.artifacts.folder import open_artifact, seal_artifact
from hpml.artifacts.model import ArchitectureSpec, ModelSpec
from hpml.components.compress import Distill, Prune, Quantize
from hpml.components.compress import stage as compress
from hpml.components.compress.applicability import why_not
from hpml.components.export import stage as export
from hpml.targets import Onnx
from hpml.tasks import task_of
from tests.image_tasks import image_task

VIT = ArchitectureSpec(name="vit", arguments={"image_size": 8, "dim": 16, "depth": 1, "heads": 2})
TASK = image_task()
NOT_PRUNABLE = "prune cannot prune a network with Vit weights"


class HardCoded(nn.Module):
    """Has the size of its head's input in its code, so it does not run with fewer channels."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(in_channels, 16, 3, 2, 1), nn.Linear(256, num_classes)

    def forward(self, x):
        return self.head(self.body(x).view(-1, 256))


@pytest.fixture
def untrained(tmp_path, digits_data):
    """A model artifact of an architecture, as initialised."""

    def make(architecture: ArchitectureSpec):
        folder = tmp_path / "untrained"
        folder.mkdir()
        task = task_of(digits_data.spec.task)
        network = models.build(architecture, task)
        models.save(network, folder)
        (folder / "history.json").write_text("[]")
        spec = ModelSpec(
            architecture=architecture,
            task=digits_data.spec.task,
            operations=task.operations(network),
            parameters=1,
            macs=1,
            quality={"accuracy_top1": 0.1},
        )
        seal_artifact(folder, spec=spec, metrics={}, lineage=digits_data.manifest.lineage)
        return open_artifact(folder, kind="model")

    return make


def test_what_does_not_apply_is_known_without_weights():
    assert why_not(VIT, TASK, [Prune(), Quantize(), Distill()])[1:] == ["", ""]
    assert why_not(VIT, TASK, [Prune()])[0].startswith(NOT_PRUNABLE)
    assert why_not(ArchitectureSpec(name="resnet18", arguments={"width": 10**4}), TASK, [Prune()]) == [""]


def test_what_cannot_be_known_before_training_is_not_claimed():
    assert why_not(ArchitectureSpec(name="no.such:module"), TASK, [Prune(), Quantize()]) == ["", ""]


def test_a_variant_whose_method_does_not_apply_is_not_built_and_says_why(run_stage, untrained, digits_data):
    base = untrained(VIT)
    pruned = run_stage(compress.run, Prune(), model=base, teacher=base, data=digits_data)
    assert pruned.spec.status == "not built" and pruned.spec.reason.startswith(NOT_PRUNABLE)
    assert pruned.manifest.files == {}
    int8 = run_stage(compress.run, Quantize(), model=pruned, teacher=base, data=digits_data)
    assert (int8.spec.reason, int8.spec.methods) == (pruned.spec.reason, ("prune50", "quantize"))
    engine = run_stage(export.run, Onnx(), model=int8, data=digits_data)
    assert (engine.spec.status, engine.spec.reason) == ("not built", pruned.spec.reason)
    assert engine.spec.methods == ("prune50", "quantize")


def test_what_shows_on_the_trained_network_only_is_not_built_either(run_stage, untrained, digits_data):
    base = untrained(ArchitectureSpec(name=f"{__name__}:HardCoded"))
    pruned = run_stage(compress.run, Prune(), model=base, teacher=base, data=digits_data)
    assert pruned.spec.status == "not built"
    assert "does not run with fewer channels" in pruned.spec.reason
