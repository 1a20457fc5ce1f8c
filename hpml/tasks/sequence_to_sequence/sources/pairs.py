"""The user's own file of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

from hpml.core.contract import Output
from hpml.data_files import user_files
from hpml.data_files.user_files import UserPath
from hpml.tasks.sequence_to_sequence.sources.base import PairsSource


class Pairs(PairsSource):
    """Pairs of a `.tsv` file (source, a tab, target) or a `.jsonl` file.

    Those with the same source are in one split.
    """

    GROUPS: ClassVar[str] = "sources"

    source: Literal["pairs"] = "pairs"
    path: UserPath  # the file; also at s3://BUCKET/KEY
    keys: tuple[str, str] = ("source", "target")  # of source and target in a .jsonl file
    licence: str = "not stated"  # of the texts, for the record

    def unsupported_reason(self) -> str:
        """Whether `path` is missing."""
        return user_files.unsupported_reason(self.path, or_folder=False)

    def fingerprint(self) -> str:
        """A digest of the file's size and modification time."""
        return user_files.fingerprint(self.path)

    def groups(self, out: Output) -> tuple[Iterable[Sequence[tuple[str, str]]], str]:
        """The pairs of each source, in the order of the file; each pair once."""
        from hpml.data_files.text_pairs import text_pairs

        of_source: dict[str, dict[str, None]] = {}
        for source, target in text_pairs(user_files.here(self.path, out), *self.keys):
            of_source.setdefault(source, {})[target] = None
        groups = ([(source, target) for target in targets] for source, targets in of_source.items())
        return groups, self.licence
