"""The user's own texts: .txt, .md and .jsonl files."""

from __future__ import annotations

from typing import Literal

from hpml.core.contract import Output
from hpml.data_files import user_files
from hpml.data_files.user_files import UserPath
from hpml.tasks.language_modeling.sources.base import Texts, TextSource

_NAMED = 5  # files that a note lists


class Text(TextSource):
    """A text file, a folder of them, or an archive of that: UTF-8, of any size.

    A split has whole texts: of plain files the file, or a paragraph (between blank lines) or a line; of
    .jsonl files always a line. Files of other kinds are left out, and named.
    """

    source: Literal["text"] = "text"
    path: UserPath  # a file, a folder, or a .tar, .tar.gz or .zip; also at s3://BUCKET/KEY
    unit: Literal["file", "paragraph", "line"] | None = None  # None: paragraph of a single file, else file
    field: str = "text"  # the key of the text in each line of a .jsonl file
    licence: str = "not stated"  # of the texts, for the record

    def unsupported_reason(self) -> str:
        """Whether `path`, or the tokenizer that is given, is missing."""
        return user_files.unsupported_reason(self.path) or super().unsupported_reason()

    def fingerprint(self) -> str:
        """A digest of the files' names, sizes and modification times, and of a tokenizer that is given."""
        return user_files.fingerprint(self.path) + super().fingerprint()

    def open_texts(self, out: Output) -> Texts:
        """The texts in the order of the files' names.

        Raises StageFailed for an archive that is hostile or damaged; reading the texts does for a file that
        is not UTF-8, or not JSON Lines with that field.
        """
        from hpml.data_files.text_files import PLAIN, RECORDS, TextFiles

        root = user_files.here(self.path, out)
        if root.is_file() and root.suffix.lower() not in (*PLAIN, RECORDS):
            root = user_files.open_folder(root, out)
        files = TextFiles(root, self.unit or ("paragraph" if root.is_file() else "file"), self.field)
        return Texts(files, self.licence, tuple(_in_words(files.left_out)))


def _in_words(left_out: list[str]) -> list[str]:
    if not left_out:
        return []
    more = f" and {len(left_out) - _NAMED} more" if len(left_out) > _NAMED else ""
    return [f"left out, not text: {', '.join(left_out[:_NAMED])}{more}"]
