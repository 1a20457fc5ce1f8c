"""From pairs of texts to a dataset."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.components.prepare import stage as prepare
from hpml.core.errors import StageFailed
from hpml.data_files import chitchat
from hpml.data_files.text_pairs import text_pairs
from hpml.tasks import task_of
from hpml.tasks.sequence_to_sequence import tokenizer
from hpml.tasks.sequence_to_sequence.sources import Conversations, Pairs
from tests.conftest import RunStage

TALKS = [
    [f"{speaker}{number} says {word}" for speaker in "abc" for word in ("hi", "bye")] for number in range(12)
]


@pytest.fixture
def talks(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setattr(chitchat, "conversations", lambda: iter([*TALKS, TALKS[0], ["alone"]]))
    return TALKS


def texts(data: Artifact[DatasetSpec], split: str, side: str) -> list[str]:
    known = tokenizer.opened(data.file("tokenizer.json"))
    ids = task_of(data.spec.task).stored(data, split)[f"{side}_ids"]
    return tokenizer.texts_of(known, np.asarray(ids)[:, side == "target" :])


def test_a_conversation_is_in_one_split(talks: list[list[str]], run_stage: RunStage) -> None:
    data = run_stage(
        prepare.run, Conversations(vocabulary_size=512, test_fraction=0.25, validation_fraction=0.25)
    )
    where = {
        split: {target.split()[0][1:] for target in texts(data, split, "target")}
        for split in ("train", "validation", "test")
    }
    assert sorted(map(len, where.values())) == [2, 3, 7]
    assert len(set.union(*where.values())) == 12, "none is in two splits"
    assert data.spec.notes == ("left out, as copies of others: 1 of 13 conversations",)


def test_each_turn_answers_the_one_before(talks: list[list[str]], run_stage: RunStage) -> None:
    data = run_stage(prepare.run, Conversations(vocabulary_size=512))
    found = {
        pair
        for split in data.spec.splits
        for pair in zip(texts(data, split, "source"), texts(data, split, "target"), strict=True)
    }
    assert found == {pair for talk in talks for pair in itertools.pairwise(talk)}


def test_the_tokenizer_is_of_the_train_split_and_always_the_same(
    talks: list[list[str]], run_stage: RunStage
) -> None:
    first, second = (run_stage(prepare.run, Conversations(vocabulary_size=512)) for _ in range(2))
    assert first.digest == second.digest
    content = first.file("tokenizer.json").read_bytes()
    assert task_of(first.spec.task).tokenizer_sha256 == hashlib.sha256(content).hexdigest()  # type: ignore[attr-defined]


def test_rows_end_and_are_cut(numbers_tsv: Path, run_stage: RunStage) -> None:
    data = run_stage(
        prepare.run, Pairs(path=numbers_tsv, vocabulary_size=512, source_tokens=1, target_tokens=2)
    )
    stored = task_of(data.spec.task).stored(data, "train")
    assert (stored["source_ids"] == tokenizer.END).all(), (
        "of one token the end is left: nothing of the source"
    )
    target_ids = stored["target_ids"]
    assert (target_ids[:, 0] == tokenizer.BEGIN).all() and target_ids.shape[1] == 3
    of_two_words = target_ids[:, 2] != tokenizer.END
    assert of_two_words.any() and not (target_ids[of_two_words] == tokenizer.END).any()


def test_what_looks_special_is_text(numbers: Artifact[DatasetSpec]) -> None:
    known = tokenizer.opened(numbers.file("tokenizer.json"))
    ids = known.encode("<end> é 🙂").ids
    assert tokenizer.END not in ids
    assert tokenizer.texts_of(known, np.array([[*ids, tokenizer.END, 5]])) == ["<end> é 🙂"]


def test_pairs_with_one_source_stay_together(tmp_path: Path, run_stage: RunStage) -> None:
    file = tmp_path / "pairs.jsonl"
    lines = [{"de": f"wort{number}", "en": f"word{number}{kind}"} for kind in "abc" for number in range(9)]
    file.write_text("\n".join(map(json.dumps, lines)))
    config = Pairs(path=file, keys=("de", "en"), vocabulary_size=512, test_fraction=0.3)
    data = run_stage(prepare.run, config)
    rows = {split: sorted(texts(data, split, "source")) for split in data.spec.splits}
    assert not set(rows["train"]) & (set(rows["test"]) | set(rows["validation"]))
    assert all(counted.count(word) == 3 for counted in rows.values() for word in counted)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.tsv", "one\ttwo\nthree\n", "line 2 of .* it has 1 column, 2 are needed"),
        ("a.tsv", "one\ttwo\n\nthree\tfour\n", "line 2 of .* it is empty"),
        ("a.tsv", "one\t \n", "line 1 of .* a text of it is empty"),
        ("a.jsonl", '{"source": "a", "target": "b"}\n{"source": 1}\n', "line 2 of .* no texts"),
        ("a.jsonl", "[" * 100_000, "line 1 of .* not JSON"),
        ("a.tsv", b"\xff\xfe", "not text in UTF-8"),
        ("a.csv", "one,two\n", "has to end in"),
        ("a.tsv", "x" * (2**20 + 1), "line 1 of .* more than"),
    ],
)
def test_what_is_no_pair_is_refused(tmp_path: Path, name: str, content: str | bytes, said: str) -> None:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(StageFailed, match=said):
        list(text_pairs(file, "source", "target"))


@pytest.mark.parametrize(("test", "validation"), [(0.05, 0.05), (0.6, 0.5)])
def test_no_split_is_empty_whatever_the_fractions(
    test: float, validation: float, tmp_path: Path, run_stage: RunStage
) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("".join(f"source {number}\ttarget {number}\n" for number in range(4)))
    data = run_stage(prepare.run, Pairs(path=file, test_fraction=test, validation_fraction=validation))
    expected = (
        {"train": 2, "validation": 1, "test": 1} if test < 0.5 else {"train": 1, "validation": 1, "test": 2}
    )
    assert {name: split.rows for name, split in data.spec.splits.items()} == expected


def test_too_few_pairs_are_refused(tmp_path: Path, run_stage: RunStage) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_text("one\teins\ntwo\tzwei\n")
    with pytest.raises(StageFailed, match="2 are too few"):
        run_stage(prepare.run, Pairs(path=file))
