"""A small real language model, shared by the tests of its task."""

from __future__ import annotations

import pytest

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.components.export import stage as export
from hpml.components.prepare import stage as prepare
from hpml.components.train import stage as train
from hpml.components.train.config import TrainConfig
from hpml.targets.onnx import Onnx
from hpml.tasks.language_modeling.sources import Chitchat
from tests.conftest import RunStage


@pytest.fixture(scope="session")
def conversations(run_stage_once: RunStage) -> Artifact[DatasetSpec]:
    """Some conversations as windows of 32 of 400 tokens."""
    return run_stage_once(prepare.run, Chitchat(conversations=60, vocabulary_size=400, context=32))


@pytest.fixture(scope="session")
def talker(conversations: Artifact[DatasetSpec], run_stage_once: RunStage) -> Artifact[ModelSpec]:
    """A decoder of two blocks that has seen them."""
    config = TrainConfig(
        model={"architecture": "decoder", "arguments": {"dim": 32, "depth": 2, "heads": 2}},
        optimizer="adamw",
        learning_rate=1e-2,
        label_smoothing=0,
        epochs=2,
        batch_size=16,
    )
    return run_stage_once(train.run, config, data=conversations)


@pytest.fixture(scope="session")
def engine(
    conversations: Artifact[DatasetSpec], talker: Artifact[ModelSpec], run_stage_once: RunStage
) -> Artifact[EngineSpec]:
    """It by ONNX Runtime."""
    return run_stage_once(export.run, Onnx(), model=talker, data=conversations)
