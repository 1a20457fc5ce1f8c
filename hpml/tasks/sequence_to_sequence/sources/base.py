"""What every source of pairs of texts is: a config that gives them in groups."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from hpml.core.contract import Output, Result
from hpml.tasks.data_source import Preview, Source
from hpml.tasks.sequence_to_sequence.task import SequenceToSequence

if TYPE_CHECKING:
    from hpml.artifacts.dataset import DatasetSpec


class PairsSource(Source):
    """Base of the sources of pairs. A subclass adds `source`, its options, and `groups`.

    GROUPS: what those are called that belong together, and so into one split. Sources that are too long lose
    their beginning, targets their end.
    """

    task_class = SequenceToSequence
    GROUPS: ClassVar[str]

    vocabulary_size: int = Field(
        default=4000, ge=512, le=65_536
    )  # at most: bytes, and what they are often in
    source_tokens: int = Field(default=32, ge=1, le=4096)  # with the end; 1: nothing is seen of the sources
    target_tokens: int = Field(default=32, ge=2, le=4096)  # with the end
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    test_fraction: float = Field(default=0.05, gt=0, lt=1)
    answered_rows: int = Field(default=512, ge=1, le=65_536)  # of validation and test each, that BLEU is of

    @abstractmethod
    def groups(self, out: Output) -> tuple[Iterable[Sequence[tuple[str, str]]], str]:
        """Groups of pairs of source and target that belong together, and the licence of the texts.

        `out.scratch` may hold what is fetched. Raises StageFailed if they cannot be read, Unavailable.
        """

    def preview(self) -> Preview:
        """The task with as many ids as there may be; how many rows is not known before the file is read."""
        return Preview(task=self.stand_in(), is_guess=True)

    def stand_in(self) -> SequenceToSequence:
        """With as many ids as there may be."""
        return SequenceToSequence(
            vocabulary_size=self.vocabulary_size,
            source_tokens=self.source_tokens,
            target_tokens=self.target_tokens,
            mean_target_tokens=self.target_tokens,
            tokenizer_sha256="",
        )

    def prepare(self, out: Output) -> Result[DatasetSpec]:
        """Write the ids of every split, and the tokenizer; see `hpml.tasks.sequence_to_sequence.prepare`."""
        from hpml.tasks.sequence_to_sequence.prepare import Shares, Sizes, prepare

        groups, licence = self.groups(out)
        return prepare(
            groups,
            out,
            groups_called=self.GROUPS,
            source=self.source,
            licence=licence,
            sizes=Sizes(self.vocabulary_size, self.source_tokens, self.target_tokens, self.answered_rows),
            shares=Shares(self.validation_fraction, self.test_fraction, self.seed),
        )
