"""Texts as integers: byte-level BPE by Hugging Face's `tokenizers`, which can encode any text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hpml.core.errors import StageFailed

FILE = "tokenizer.json"
END, END_ID = "<|endoftext|>", 0  # stands after each text


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> Tokenizer:
    """A tokenizer of at most `vocabulary_size` tokens, the first of them END; the same for the same texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer in `file`. Raises StageFailed if it is damaged."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library's derive from nothing narrower
        raise StageFailed(f"{file} is not a tokenizer", why=" ".join(str(error).split())[:200]) from None


def encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The tokens of each text, whole. What looks like END, or another special token, in a text is text."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()  # as the file of a model's own may ask for
    tokenizer.no_padding()
    return [one.ids for one in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
