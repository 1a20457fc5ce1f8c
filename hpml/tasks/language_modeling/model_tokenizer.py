"""The tokenizer in a model's folder of `transformers`, and what stands before and after each text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml.core import regular_files
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.data_files import model_folder
from hpml.data_files.model_folder import CONFIG, TOKENIZER, TOKENIZER_CONFIG

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class ModelTokenizer:
    """vocabulary_size: how many token ids the model has logits for, which may be more than there are tokens.

    begin_ids stand before each text, and end_id after it. kind: the tokenizer's class in transformers.
    """

    file: Path
    tokenizer: Tokenizer
    vocabulary_size: int
    begin_ids: tuple[int, ...]
    end_id: int
    kind: str


def read_tokenizer(folder: Path, end_token: str | None) -> ModelTokenizer:
    """The tokenizer in `folder`. end_token: what stands after each text; None: what the folder says.

    Raises StageFailed if there is none or it is damaged, ConfigInvalid if the end is not one of its tokens.
    """
    from hpml.tasks.language_modeling.tokenizer import load_tokenizer

    if problem := model_folder.tokenizer_problem(folder):
        raise StageFailed("the model's tokenizer cannot be used", why=problem)
    tokenizer = load_tokenizer(folder / TOKENIZER)
    described = _described(folder / TOKENIZER_CONFIG)
    end_id = _end_id(tokenizer, folder, end_token or _text_of(described.get("eos_token")))
    tokenizer.no_padding()
    begin_ids = list(tokenizer.encode("").ids)  # what it puts around a text
    while begin_ids and begin_ids[-1] == end_id:
        begin_ids.pop()
    return ModelTokenizer(
        file=folder / TOKENIZER,
        tokenizer=tokenizer,
        vocabulary_size=vocabulary_size(folder),
        begin_ids=tuple(begin_ids),
        end_id=end_id,
        kind=str(described.get("tokenizer_class") or ""),
    )


def vocabulary_size(folder: Path) -> int:
    """How many token ids the model in `folder` has logits for; without a config.json, how many it has.

    Raises ConfigInvalid if that cannot be read.
    """
    config = _described(folder / CONFIG)
    nested = config.get("text_config")
    stated = config.get("vocab_size") or (nested.get("vocab_size") if isinstance(nested, dict) else None)
    if stated is None:
        tokenizer = model_folder.read_json(folder / TOKENIZER)
        vocabulary = tokenizer.get("model", {}).get("vocab", {})
        ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
        stated = 1 + max([*ids, *(token["id"] for token in tokenizer.get("added_tokens", []))], default=0)
    if not isinstance(stated, int) or not 2 <= stated <= 2**24:
        raise ConfigInvalid(
            f"{folder / CONFIG} says vocab_size {stated!r}", fix="it should be a number of tokens"
        )
    return stated


def _described(file: Path) -> dict[str, Any]:
    return {} if regular_files.problem(file) else model_folder.read_json(file)


def _text_of(token: Any) -> str | None:
    """A special token is written as its text, or with its options."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _end_id(tokenizer: Tokenizer, folder: Path, token: str | None) -> int:
    """The id of `token`; without one, what config.json says of the end of a text."""
    found: Any
    if token is not None:
        found = tokenizer.token_to_id(token)
    else:
        stated = _described(folder / CONFIG).get("eos_token_id")
        found = stated[0] if isinstance(stated, list) and stated else stated
    if not isinstance(found, int) or tokenizer.id_to_token(found) is None:
        raise ConfigInvalid(
            f"the tokenizer in {folder} has no token for the end of a text",
            why=f"{token!r} is not one of its tokens" if token else "the folder does not say which it is",
            fix="set data.end_token to the token that the model ends a text with, such as </s>",
        )
    return found
