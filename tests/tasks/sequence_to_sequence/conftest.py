"""A data set small enough to train in seconds: one or two number words, and their translation."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.components.prepare import stage as prepare
from hpml.components.train import stage as train
from hpml.components.train.config import TrainConfig
from hpml.tasks.sequence_to_sequence.sources import Pairs
from tests.conftest import RunStage

WORDS = {
    **{"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "six": "sechs"},
    **{"seven": "sieben", "eight": "acht", "nine": "neun", "ten": "zehn", "eleven": "elf", "twelve": "zwölf"},
    **{"twenty": "zwanzig", "thirty": "dreißig", "forty": "vierzig", "fifty": "fünfzig"},
}
SMALL = {
    "gru_attention": {"embedding": 32, "hidden": 64, "dropout": 0.0},
    "encoder_decoder": {"dim": 64, "depth": 2, "heads": 4, "dropout": 0.0},
}


@pytest.fixture(scope="session")
def numbers_tsv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each of the words, and each two of them."""
    sentences = [*((one,) for one in WORDS), *itertools.product(WORDS, WORDS)]
    file = tmp_path_factory.mktemp("pairs") / "numbers.tsv"
    lines = (f"{' '.join(said)}\t{' '.join(WORDS[word] for word in said)}\n" for said in sentences)
    file.write_text("".join(lines))
    return file


@pytest.fixture(scope="session")
def numbers(numbers_tsv: Path, run_stage_once: RunStage) -> Artifact[DatasetSpec]:
    """These pairs, prepared."""
    config = Pairs(path=numbers_tsv, vocabulary_size=512, source_tokens=8, target_tokens=8, answered_rows=8)
    data: Artifact[DatasetSpec] = run_stage_once(prepare.run, config)
    return data


@pytest.fixture(scope="session", params=list(SMALL))
def translator(
    request: pytest.FixtureRequest, numbers: Artifact[DatasetSpec], run_stage_once: RunStage
) -> Artifact[ModelSpec]:
    """A network of each architecture that has learnt these words."""
    config = TrainConfig(
        model={"architecture": request.param, "arguments": SMALL[request.param]},
        epochs=20 if request.param == "gru_attention" else 8,
        batch_size=16,
        optimizer="adamw",
        learning_rate=1e-2 if request.param == "gru_attention" else 3e-3,
        label_smoothing=0,
    )
    model: Artifact[ModelSpec] = run_stage_once(train.run, config, data=numbers)
    return model
