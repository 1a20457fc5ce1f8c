"""Texts as a dataset: splits, tokens, windows; what is refused."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.components.prepare import stage as prepare
from hpml.core.errors import StageFailed
from hpml.tasks import task_of
from hpml.tasks.language_modeling.prepare import BASELINE
from hpml.tasks.language_modeling.sources import Text
from hpml.tasks.language_modeling.token_files import token_type
from hpml.tasks.language_modeling.tokenizer import END, encoded, load_tokenizer, train_tokenizer
from tests.conftest import RunStage

SPLITS = ("train", "validation", "test")
LINES = [f"The {animal} number {n} says {n * n} times hello." for n in range(40) for animal in ("cat", "dog")]


def texts_of(data: Artifact[DatasetSpec], split: str) -> list[str]:
    """The texts of a split, decoded."""
    tokens = np.load(data.file(f"{split}_tokens.npy")).tolist()
    end_id, texts = task_of(data.spec.task).end_id, [[]]
    for token in tokens:
        if token == end_id:
            texts.append([])
        else:
            texts[-1].append(token)
    tokenizer = load_tokenizer(data.file("tokenizer.json"))
    return [tokenizer.decode(text) for text in texts[:-1]]


def text_source(path: Path, **options: object) -> Text:
    return Text(path=path, vocabulary_size=300, context=8, **{"unit": "line", **options})


def test_each_text_is_in_one_split_whole_and_as_it_was(tmp_path: Path, run_stage: RunStage) -> None:
    repeated = [*LINES, *LINES[::3], f"who writes {END} means it"]
    (tmp_path / "a.txt").write_text("\n".join(repeated))
    data = run_stage(prepare.run, text_source(tmp_path / "a.txt"))
    found = {split: texts_of(data, split) for split in SPLITS}
    assert sorted(text for texts in found.values() for text in texts) == sorted(repeated)
    assert all(found.values()) and len(set(found["train"])) > 40
    sets = [set(texts) for texts in found.values()]
    assert sum(map(len, sets)) == len(set().union(*sets))


def test_windows_predict_every_token_once(conversations: Artifact[DatasetSpec]) -> None:
    task = task_of(conversations.spec.task)
    for split in SPLITS:
        windows = task.stored(conversations, split)["tokens"]
        stream = np.load(conversations.file(f"{split}_tokens.npy"), mmap_mode="r")
        assert windows.shape == (conversations.spec.splits[split].rows, task.context + 1)
        assert (windows[:, 1:].ravel() == stream[1 : 1 + windows[:, 1:].size]).all()
        assert len(stream) - 1 - windows[:, 1:].size < task.context
        assert np.shares_memory(windows, windows.base) and not windows.flags.writeable


def test_the_same_texts_give_the_same_dataset(tmp_path: Path, run_stage: RunStage) -> None:
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    one, same, other = (
        run_stage(prepare.run, text_source(tmp_path / "a.txt", seed=seed)) for seed in (0, 0, 1)
    )
    assert one.digest == same.digest != other.digest


def test_the_tokenizer_does_not_see_what_is_held_out(tmp_path: Path, run_stage: RunStage) -> None:
    """Words that are in the train split only make merges, whatever the other splits have."""
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    data = run_stage(prepare.run, text_source(tmp_path / "a.txt"))
    alone = train_tokenizer(texts_of(data, "train"), 300)
    assert json.loads(alone.to_str()) == json.loads(data.file("tokenizer.json").read_text())


def test_any_text_can_be_encoded() -> None:
    tokenizer = train_tokenizer(["only plain words here"], 270)
    text = f"naïve 日本語 \U0001f600 \x00 {END}"
    [tokens] = encoded(tokenizer, [text])
    assert tokenizer.decode(tokens) == text and 0 not in tokens


def test_folders_and_archives_of_several_formats(tmp_path: Path, run_stage: RunStage) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "plain.txt").write_text("\n".join(LINES[:40]))
    (folder / "notes.md").write_text("\n".join(LINES[40:]))
    records = [json.dumps({"body": f"record {line}"}) for line in LINES]
    (folder / "records.jsonl").write_text("\n".join(records))
    (folder / "picture.png").write_bytes(b"\x89PNG")
    with zipfile.ZipFile(tmp_path / "texts.zip", "w") as archive:
        for file in folder.iterdir():
            archive.write(file, file.name)
    of_folder, of_archive = (
        run_stage(prepare.run, text_source(place, field="body")) for place in (folder, tmp_path / "texts.zip")
    )
    assert of_folder.manifest.files == of_archive.manifest.files
    assert sum(len(texts_of(of_folder, split)) for split in SPLITS) == 2 * len(LINES)
    assert "picture.png" in of_folder.spec.notes[0]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"\xff\xfe broken", "not text in UTF-8"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": ', "line 2 of"),
        ("a.jsonl", b'{"title": "no text"}', "has no text 'text'"),
        ("a.jsonl", b"[" * 100_000, "is not JSON"),
        ("a.txt", b"one line only", "there are no texts for .* or change data.test_fraction"),
        ("a.zip", b"PK\x03\x04 no archive", "the archive"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, run_stage: RunStage, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StageFailed, match=said):
        run_stage(prepare.run, text_source(tmp_path / name))


def test_a_context_that_is_longer_than_a_split_is_refused(tmp_path: Path, run_stage: RunStage) -> None:
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    with pytest.raises(StageFailed, match="less than a window of 5001 tokens"):
        run_stage(prepare.run, Text(path=tmp_path / "a.txt", vocabulary_size=300, context=5000, unit="line"))


def test_the_baseline_is_told(conversations: Artifact[DatasetSpec]) -> None:
    """Better than a uniform guess by far, and no better than what a network can hope for."""
    assert 5 < conversations.manifest.metrics[BASELINE] < task_of(conversations.spec.task).vocabulary_size / 8


def test_tokens_are_of_a_type_that_gpus_can_index() -> None:
    assert token_type(2**15) == np.int16 and token_type(2**15 + 1) == np.int32
