"""Texts as ids and back: byte-level byte-pair encoding (Sennrich et al. 2016, arXiv:1508.07909)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from hpml.core.errors import HpmlError, StageFailed

FILE = "tokenizer.json"
PADDING, BEGIN, END = 0, 1, 2
_SPECIAL = ["<padding>", "<begin>", "<end>"]  # in this order
FEWEST = len(_SPECIAL) + 256  # ids: these, and one a byte
_MOST_BYTES = 64 << 20

_known: dict[str, Tokenizer] = {}  # by the SHA-256 of their files


def trained(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """A tokenizer of at most so many ids, the pairs of bytes that are most frequent in `texts`."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=_SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def opened(file: Path) -> Tokenizer:
    """The tokenizer in `file`. Raises StageFailed if that holds none of ours."""
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")
        tokenizer = Tokenizer.from_str(file.read_text())
    except HpmlError:  # a signal's
        raise
    except Exception as error:  # the library raises nothing narrower
        raise StageFailed(f"cannot read the tokenizer in {file}", why=str(error)[:300]) from None
    if [tokenizer.id_to_token(number) for number in range(len(_SPECIAL))] != _SPECIAL:
        raise StageFailed(f"{file} is not a tokenizer of this task", why=f"its first ids are not {_SPECIAL}")
    tokenizer.encode_special_tokens = True  # who writes "<end>" means these five characters
    return tokenizer


def remember(file: Path) -> None:
    """Have the tokenizer in `file` found by `remembered`, as long as this process lives."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest not in _known:
        _known[digest] = opened(file)


def remembered(sha256: str) -> Tokenizer:
    """The tokenizer whose file has this digest."""
    return _known[sha256]


def source_row(ids: Sequence[int], length: int) -> list[int]:
    """The last ids that fit, as what a question asks mostly stands at its end, then END."""
    return [*ids[max(len(ids) - (length - 1), 0) :], END]


def target_row(ids: Sequence[int], length: int) -> list[int]:
    """BEGIN, the ids and END; of more than `length` ids and END the first, without an END."""
    return [BEGIN, *[*ids, END][:length]]


def filled_up(rows: Sequence[Sequence[int]], length: int) -> NDArray[np.int32]:
    """Rows of ids as an array (rows, length) with PADDING on the right."""
    array = np.full((len(rows), length), PADDING, np.int32)
    for place, row in enumerate(rows):
        array[place, : len(row)] = row
    return array


def texts_of(tokenizer: Tokenizer, rows: NDArray[np.integer]) -> list[str]:
    """The texts of rows of ids (rows, steps), each up to its END."""
    texts: list[str] = tokenizer.decode_batch([_before_end(row) for row in rows.tolist()])
    return [text.strip() for text in texts]


def _before_end(row: list[int]) -> list[int]:
    return row[: row.index(END)] if END in row else row
