"""trainer(config) starts trainings on the digits, each trainer in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.components.train.config import TrainConfig
from tests.components.train.attempts import Trainer


@pytest.fixture
def trainer(tmp_path: Path, digits_data: Artifact[DatasetSpec]) -> Callable[..., Trainer]:
    made = 0

    def make(config: TrainConfig, *, threads: int = 1) -> Trainer:
        nonlocal made
        made += 1
        root = tmp_path / f"trainer-{made}"
        root.mkdir()
        return Trainer(root, digits_data, config, threads)

    return make
