"""Texts in the user's own files: plain text, Markdown, JSON Lines; a file, or all of a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from hpml.core import regular_files
from hpml.core.errors import StageFailed

Unit = Literal["file", "paragraph", "line"]

PLAIN = (".txt", ".md")
RECORDS = ".jsonl"
MOST_CHARACTERS = 2**20  # of one text: more is cut at the end of a line into several


@dataclass(frozen=True)
class TextFiles:
    """The texts of a file or of a folder's files, in the order of their names; each may be read many times.

    unit: what is one text of a plain file; paragraphs have blank lines between them. field: the key of the
    text in each line of a .jsonl file.
    """

    root: Path
    unit: Unit
    field: str

    def __iter__(self) -> Iterator[str]:
        """Read a file at a time, so that no more than a text is in memory.

        Raises StageFailed that names the file, and the line of a .jsonl file, that cannot be read as text.
        """
        for file in self._files():
            if self._is_text(file):
                yield from self._texts_in(file)

    @property
    def left_out(self) -> list[str]:
        """The names of the files that are of another kind."""
        return [file.relative_to(self.root).as_posix() for file in self._files() if not self._is_text(file)]

    def _files(self) -> list[Path]:
        if self.root.is_file():
            return [self.root]
        return sorted(file for file in self.root.rglob("*") if not file.is_dir())

    @staticmethod
    def _is_text(file: Path) -> bool:
        return file.suffix.lower() in (*PLAIN, RECORDS)

    def _texts_in(self, file: Path) -> Iterator[str]:
        if why := regular_files.problem(file):
            raise StageFailed(f"cannot read {file}", why=f"it {why}")
        of_file = self._records if file.suffix.lower() == RECORDS else self._blocks
        try:
            with file.open(encoding="utf-8-sig") as content:
                yield from filter(None, map(str.strip, of_file(content)))
        except UnicodeDecodeError as error:
            raise StageFailed(
                f"{file} is not text in UTF-8", why=str(error), fix="convert it, for example with iconv"
            ) from None
        except OSError as error:
            raise StageFailed(f"cannot read {file}", why=str(error)) from None

    def _blocks(self, content: TextIO) -> Iterator[str]:
        block: list[str] = []
        characters = 0
        while line := content.readline(MOST_CHARACTERS):
            block.append(line)
            characters += len(line)
            is_end = self.unit == "line" or (self.unit == "paragraph" and not line.strip())
            if is_end or characters >= MOST_CHARACTERS:
                yield "".join(block)
                block, characters = [], 0
        yield "".join(block)

    def _records(self, content: TextIO) -> Iterator[str]:
        number = 0
        while line := content.readline(MOST_CHARACTERS + 1):
            number += 1
            where = f"line {number} of {content.name}"
            if len(line) > MOST_CHARACTERS:
                raise StageFailed(f"{where} is too long", why=f"{MOST_CHARACTERS:,} characters are allowed")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise StageFailed(f"{where} is not JSON", why=str(error)) from None
            text = record.get(self.field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                keys = ", ".join(map(repr, record)) if isinstance(record, dict) else "no keys"
                raise StageFailed(
                    f"{where} has no text {self.field!r}",
                    why=f"it has {keys[:200]}",
                    fix="set data.field to the key of the text",
                )
            yield text
