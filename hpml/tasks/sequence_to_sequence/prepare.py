"""From pairs of texts to the arrays of a dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from hpml.artifacts.dataset import DatasetSpec, SplitSpec
from hpml.core.contract import Output, Result
from hpml.core.errors import StageFailed
from hpml.tasks.prepared_splits import rows_drawn
from hpml.tasks.sequence_to_sequence import tokenizer
from hpml.tasks.sequence_to_sequence.task import SequenceToSequence

Pair = tuple[str, str]  # source and target

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Sizes:
    """vocabulary: at most so many ids. source_tokens, target_tokens: of a row, see `SequenceToSequence`.
    answered_rows: of validation and of test, whose answers BLEU is of."""

    vocabulary: int
    source_tokens: int
    target_tokens: int
    answered_rows: int


@dataclass(frozen=True)
class Shares:
    """Of the groups, such as conversations: validation of what is not for testing. seed: of who is where."""

    validation: float
    test: float
    seed: int


def prepare(
    groups: Iterable[Sequence[Pair]],
    out: Output,
    *,
    groups_called: str,
    source: str,
    licence: str,
    sizes: Sizes,
    shares: Shares,
) -> Result[DatasetSpec]:
    """Write `source_ids`, `target_ids` and `is_answered` of each split, and the tokenizer.

    All pairs of a group, such as a conversation, are in one split; a group that is the copy of another is
    left out. The tokenizer is made of the train split. Raises StageFailed if there are too few groups.
    """
    found = [tuple(group) for group in groups if group]
    kept = list(dict.fromkeys(found))
    random = np.random.default_rng(shares.seed)
    pairs = {
        split: [pair for place in places for pair in kept[place]]
        for split, places in _split(len(kept), shares, random).items()
    }
    known = tokenizer.trained((text for pair in pairs["train"] for text in pair), sizes.vocabulary)
    file = out.path / tokenizer.FILE
    known.save(str(file))
    rows = {split: len(of_split) for split, of_split in pairs.items()}
    tokens: dict[str, int] = {}
    for split in SPLITS:
        answered = 0 if split == "train" else sizes.answered_rows
        arrays = _arrays(known, pairs.pop(split), sizes)
        # In a random order, so that the rows that are answered stand for all.
        order = random.permutation(rows[split])
        for name, array in arrays.items():
            np.save(out.path / f"{split}_{name}.npy", array[order])
        np.save(out.path / f"{split}_is_answered.npy", np.arange(rows[split]) < answered)
        tokens[split] = int((arrays["target_ids"][:, 1:] != tokenizer.PADDING).sum())
        out.progress(len(tokens), len(SPLITS), "splits")
    task = SequenceToSequence(
        vocabulary_size=known.get_vocab_size(),
        source_tokens=sizes.source_tokens,
        target_tokens=sizes.target_tokens,
        mean_target_tokens=round(tokens["train"] / rows["train"], 3),
        tokenizer_sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    )
    copies = len(found) - len(kept)
    spec = DatasetSpec(
        task=task.model_dump(mode="json"),
        splits={split: SplitSpec(rows=count) for split, count in rows.items()},
        source=source,
        licence=licence,
        notes=(f"left out, as copies of others: {copies} of {len(found)} {groups_called}",) if copies else (),
    )
    metrics = {
        **{f"{split}_rows": count for split, count in rows.items()},
        **{f"{split}_target_tokens": count for split, count in tokens.items()},
        "vocabulary_size": known.get_vocab_size(),
        "left_out_copies": copies,
    }
    return Result(spec, metrics)


def _split(groups: int, shares: Shares, random: np.random.Generator) -> dict[str, NDArray[np.int64]]:
    """Which groups are in which split: at least one in each."""
    order = random.permutation(groups)
    test = rows_drawn(groups, shares.test)
    validation = rows_drawn(groups - test, shares.validation)
    if not validation:
        raise StageFailed(
            f"{groups} are too few to be divided into {', '.join(SPLITS)}",
            why="what belongs together, such as a conversation, is in one split",
            fix="give more pairs",
        )
    ends = (groups - validation - test, groups - test)
    return dict(zip(SPLITS, np.split(order, ends), strict=True))


def _arrays(known: Tokenizer, pairs: Sequence[Pair], sizes: Sizes) -> dict[str, NDArray[np.int32]]:
    sources, targets = (
        [encoding.ids for encoding in known.encode_batch_fast([pair[side] for pair in pairs])]
        for side in (0, 1)
    )
    return {
        "source_ids": tokenizer.filled_up(
            [tokenizer.source_row(ids, sizes.source_tokens) for ids in sources], sizes.source_tokens
        ),
        "target_ids": tokenizer.filled_up(
            [tokenizer.target_row(ids, sizes.target_tokens) for ids in targets], 1 + sizes.target_tokens
        ),
    }
