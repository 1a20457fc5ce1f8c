"""Pairs of texts in a user's own file: tab-separated, or JSON Lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from hpml.core.errors import StageFailed

KINDS = (".tsv", ".jsonl")
MOST_CHARACTERS = 2**20  # of a line
MOST_PAIRS = 20_000_000  # their ids are held in memory


def text_pairs(file: Path, source_field: str, target_field: str) -> Iterator[tuple[str, str]]:
    """The pairs of a `.tsv` file (source, a tab, target) or of a `.jsonl` file with these keys.

    Raises StageFailed that names the line that is not such a pair; no line is skipped, but for empty ones at
    the end.
    """
    if file.suffix.lower() not in KINDS:
        raise StageFailed(f"{file} is no file of pairs", why=f"its name has to end in {' or '.join(KINDS)}")
    is_tsv = file.suffix.lower() == ".tsv"
    blank = 0
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            blank = blank or number
            continue
        if blank:
            raise _refused(file, blank, "it is empty")
        if number > MOST_PAIRS:
            raise StageFailed(f"{file} has more than {MOST_PAIRS:,} pairs", fix="take a part of it")
        fields = line.split("\t") if is_tsv else _of_json(file, number, line, (source_field, target_field))
        if len(fields) != 2:
            columns = "1 column" if len(fields) == 1 else f"{len(fields)} columns"
            raise _refused(file, number, f"it has {columns}, 2 are needed: source and target")
        source, target = (" ".join(field.split()) for field in fields)
        if not source or not target:
            raise _refused(file, number, "a text of it is empty")
        yield source, target


def _lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8-sig", newline="\n") as content:
            number = 0
            while line := content.readline(MOST_CHARACTERS + 1):
                number += 1
                if len(line) > MOST_CHARACTERS:
                    raise _refused(file, number, f"it has more than {MOST_CHARACTERS:,} characters")
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise StageFailed(
            f"{file} is not text in UTF-8", why=str(error), fix="convert it, for example with iconv"
        ) from None
    except OSError as error:
        raise StageFailed(f"cannot read {file}", why=str(error)) from None


def _of_json(file: Path, number: int, line: str, keys: tuple[str, str]) -> list[str]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _refused(file, number, f"it is not JSON: {error}") from None
    if not isinstance(record, dict) or not all(isinstance(record.get(key), str) for key in keys):
        raise _refused(file, number, f"it has no texts {keys[0]!r} and {keys[1]!r}")
    return [record[key] for key in keys]


def _refused(file: Path, number: int, why: str) -> StageFailed:
    return StageFailed(
        f"line {number} of {file} is no pair",
        why=why,
        fix="a line of .tsv is source, a tab, target; of .jsonl an object with the keys of data.keys",
    )
