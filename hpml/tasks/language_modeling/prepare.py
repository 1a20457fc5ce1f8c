"""Texts as a dataset: split by whole texts, a tokenizer of the train split, streams of tokens, a baseline.

Texts are read several times, one after the other, so that any number of them takes little memory.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpml.artifacts.dataset import DatasetSpec, SplitSpec
from hpml.core.contract import Output, Result
from hpml.core.errors import StageFailed
from hpml.tasks.language_modeling.kneser_ney import KneserNey
from hpml.tasks.language_modeling.model_tokenizer import ModelTokenizer
from hpml.tasks.language_modeling.task import LanguageModeling
from hpml.tasks.language_modeling.token_files import TokenWriter, token_type, window_count
from hpml.tasks.language_modeling.tokenizer import END_ID, FILE, encoded, train_tokenizer

ORDER = 5  # of the n-gram model
BASELINE = f"kneser_ney_{ORDER}gram_perplexity"

_MOST_COUNTED = 5_000_000  # tokens that the n-gram model counts, in some 0.6 GB
_TOKENIZER_CHARACTERS = 50_000_000  # of the train split, that the tokenizer is trained on
_BATCH_CHARACTERS = 2**20  # encoded at once


@dataclass(frozen=True)
class Splitting:
    """Which split a text is in: told by its own digest, so that equal texts are never in two.

    test_fraction is of all texts, validation_fraction of those that are not for testing.
    """

    validation_fraction: float
    test_fraction: float
    seed: int

    def of(self, text: str) -> str:
        """The split of a text."""
        if self.share(text, "test") < self.test_fraction:
            return "test"
        return "validation" if self.share(text, "validation") < self.validation_fraction else "train"

    def share(self, text: str, use: str) -> float:
        """A number in [0, 1) that the text has for some use: uniform over texts, independent over uses."""
        digest = hashlib.sha256(f"{self.seed}\0{use}\0{text}".encode(errors="surrogatepass")).digest()
        return int.from_bytes(digest[:7]) / 2**56


def prepare(
    texts: Iterable[str],
    out: Output,
    *,
    splitting: Splitting,
    tokenizer: int | ModelTokenizer,
    context: int,
    source: str,
    licence: str,
    notes: tuple[str, ...] = (),
) -> Result[DatasetSpec]:
    """Write `<split>_tokens.npy`, integers (tokens,), and `tokenizer.json` into `out.path`.

    tokenizer: of a model; or of how many tokens, at most, one is made. The metrics tell what an n-gram model
    makes of the validation split, see `kneser_ney`. Raises StageFailed if a split has less than a window, or
    the tokenizer gives tokens that its model does not know.
    """
    documents, characters = _counted(texts, splitting)
    if isinstance(tokenizer, ModelTokenizer):
        own = tokenizer
        shutil.copyfile(own.file, out.path / FILE)
    else:
        own = _made(_sample(texts, splitting, characters["train"]), tokenizer, out.path / FILE)
    task = LanguageModeling(
        vocabulary_size=own.vocabulary_size,
        context=context,
        end_id=own.end_id,
        begin_ids=own.begin_ids,
        tokenizer_class=own.kind or LanguageModeling.model_fields["tokenizer_class"].default,
    )
    dtype = token_type(task.vocabulary_size)
    with ExitStack() as files:
        writers = {
            split: files.enter_context(TokenWriter(out.path / f"{split}_tokens.npy", dtype))
            for split in ("train", "validation", "test")
        }
        done = 0
        for batch in _batches(texts):
            for text, tokens in zip(batch, encoded(own.tokenizer, batch), strict=True):
                ids = [*task.begin_ids, *tokens, task.end_id]
                _require_known(ids, task.vocabulary_size)
                writers[splitting.of(text)].append(ids)
            done += len(batch)
            out.progress(done, sum(documents.values()), "texts", "encode")
    counts = {split: writer.count for split, writer in writers.items()}
    _require_windows(counts, documents, context)
    perplexity, note = _baseline(out.path, task, counts)
    told = ", ".join(f"{split} {documents[split]:,} texts, {counts[split]:,} tokens" for split in counts)
    print(f"{told}; an interpolated modified Kneser-Ney {ORDER}-gram model{note}:", end=" ")
    print(f"validation perplexity {perplexity:.2f}", flush=True)
    spec = DatasetSpec(
        task=task.model_dump(mode="json"),
        splits={split: SplitSpec(rows=window_count(count, context)) for split, count in counts.items()},
        source=source,
        licence=licence,
        notes=(*notes, *([f"the n-gram model{note}"] if note else [])),
    )
    of_split = {f"{split}_tokens": float(count) for split, count in counts.items()}
    sizes = {
        "vocabulary_size": float(task.vocabulary_size),
        "characters_per_token": sum(characters.values()) / sum(counts.values()),
    }
    return Result(spec, {**of_split, **sizes, BASELINE: perplexity})


def _made(texts: Iterable[str], vocabulary_size: int, file: Path) -> ModelTokenizer:
    """A tokenizer of `texts`, also in `file`."""
    tokenizer = train_tokenizer(texts, vocabulary_size)
    tokenizer.save(str(file))
    return ModelTokenizer(file, tokenizer, tokenizer.get_vocab_size(), (), END_ID, "")


def _require_known(ids: Sequence[int], vocabulary_size: int) -> None:
    if max(ids) >= vocabulary_size:
        raise StageFailed(
            f"the tokenizer gives the token {max(ids)}",
            why=f"the model beside it knows {vocabulary_size:,}, from 0",
            fix="give the tokenizer of the model, as it was when the model was trained",
        )


def _counted(texts: Iterable[str], splitting: Splitting) -> tuple[Counter[str], Counter[str]]:
    """How many texts, and how many characters, each split has. Raises StageFailed if one has none."""
    documents: Counter[str] = Counter()
    characters: Counter[str] = Counter()
    for text in texts:
        split = splitting.of(text)
        documents[split] += 1
        characters[split] += len(text)
    empty = [split for split in ("train", "validation", "test") if not documents[split]]
    if empty:
        raise StageFailed(
            f"there are no texts for {' and '.join(empty)}",
            why=f"the data has {documents.total()} texts, and equal ones are in one split",
            fix="give more; or set data.unit to paragraph or line, so that there are more; or change"
            " data.test_fraction and data.validation_fraction",
        )
    return documents, characters


def _sample(texts: Iterable[str], splitting: Splitting, characters: int) -> Iterator[str]:
    """The texts of the train split, or so many of them that they have about _TOKENIZER_CHARACTERS."""
    share = _TOKENIZER_CHARACTERS / characters
    for text in texts:
        if splitting.of(text) == "train" and splitting.share(text, "tokenizer") < share:
            yield text


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _require_windows(counts: dict[str, int], documents: Counter[str], context: int) -> None:
    short = [split for split, count in counts.items() if not window_count(count, context)]
    if short:
        raise StageFailed(
            f"{' and '.join(short)} have less than a window of {context + 1} tokens",
            why=", ".join(f"{split}: {documents[split]} texts, {counts[split]} tokens" for split in short),
            fix="give more text, raise the split's fraction, or lower data.context",
        )


def _baseline(folder: Path, task: LanguageModeling, counts: dict[str, int]) -> tuple[float, str]:
    """Perplexity of the n-gram model on all tokens that the validation windows predict; a limit, in words."""
    train = np.load(folder / "train_tokens.npy", mmap_mode="r", allow_pickle=False)
    validation = np.load(folder / "validation_tokens.npy", mmap_mode="r", allow_pickle=False)
    predicted = window_count(counts["validation"], task.context) * task.context
    model = KneserNey(train[:_MOST_COUNTED], task.vocabulary_size, ORDER)
    limit = f" of the first {_MOST_COUNTED:,} tokens" if counts["train"] > _MOST_COUNTED else ""
    return model.perplexity(validation[: predicted + 1]), limit
