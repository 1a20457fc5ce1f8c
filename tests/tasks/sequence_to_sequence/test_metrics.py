"""What answers are judged by."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sacrebleu.metrics.bleu import BLEU

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.tasks import task_of
from hpml.tasks.sequence_to_sequence.bleu import bleu, statistics

PAIRS = [
    ("the cat sat on the mat.", "the cat sat on a mat."),
    ("no", "yes, I do think that it is so"),
    ("", "nothing was said"),
    ("it's a long, long way to go", "it is a long, long way to go"),
]


@pytest.mark.parametrize("pairs", [PAIRS, PAIRS[1:3], PAIRS[2:3]])
def test_sums_of_rows_are_the_score_of_the_corpus(pairs: list[tuple[str, str]]) -> None:
    answers, references = zip(*pairs, strict=True)
    sums = np.sum([statistics(*pair) for pair in pairs], axis=0)
    assert bleu(sums.tolist()) == pytest.approx(BLEU().corpus_score(answers, [references]).score)


def test_perplexity_is_of_real_tokens(numbers: Artifact[DatasetSpec]) -> None:
    task = task_of(numbers.spec.task)
    stored = {name: torch.from_numpy(np.array(array)) for name, array in task.stored(numbers, "test").items()}
    uniform = torch.zeros(task.output_shape(len(stored["target_ids"])))
    sums = task.statistics(uniform, stored)["perplexity"].sum(dim=0).tolist()
    tokens = int((stored["target_ids"][:, 1:] != 0).sum())
    assert sums[1] == tokens
    assert task.metric.value(sums) == pytest.approx(uniform.shape[-1])
    loss = task.loss(uniform, stored, label_smoothing=0)
    assert float(loss) == pytest.approx(math.log(uniform.shape[-1]))


def test_bleu_is_of_the_marked_rows(numbers: Artifact[DatasetSpec]) -> None:
    task = task_of(numbers.spec.task)
    stored = {name: torch.from_numpy(np.array(array)) for name, array in task.stored(numbers, "test").items()}
    marked = stored["is_answered"]
    assert 0 < marked.sum() < len(marked)
    logits = torch.zeros(task.output_shape(len(marked)))
    found = task.statistics((logits, stored["target_ids"][:, 1:].long()), stored)["bleu"]
    assert (found[marked][:, 0] == found[marked][:, 1]).all() and (found[marked][:, 0] > 0).all()
    assert not found[~marked].any()
