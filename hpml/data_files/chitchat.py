"""The conversations that the package `chitchat-dataset` ships, read without running its code."""

from __future__ import annotations

import json
from collections.abc import Iterator

from hpml.core.errors import StageFailed
from hpml.data_files.packaged import PackagedFile

FILE = PackagedFile(package="chitchat_dataset", distribution="chitchat-dataset", name="dataset.json")
LICENCE = "MIT"
CONVERSATIONS = 7168


def conversations() -> Iterator[list[str]]:
    """Each conversation of the Chit-Chat Challenge (BYU, 2018) as the texts of its turns, in their order.

    Two people take turns; what one of them sent before the other answered is one text, a space between its
    messages. Whoever wrote no text has no turn. Raises StageFailed if the file is damaged.
    """
    try:
        talks = json.loads(FILE.read_bytes())
        for talk in talks.values():
            turns = (" ".join(_one_line(sent["text"]) for sent in turn).strip() for turn in talk["messages"])
            yield [turn for turn in turns if turn]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StageFailed(
            f"cannot read {FILE.name} of chitchat-dataset",
            why=f"{type(error).__name__}: {error}",
            fix="pip install --force-reinstall chitchat-dataset",
        ) from None


def _one_line(text: str) -> str:
    return " ".join(text.split())
