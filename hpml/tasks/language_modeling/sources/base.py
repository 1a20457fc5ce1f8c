"""What every source of texts is: a config that gives texts, one after the other, as often as asked."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from hpml.core.contract import Output, Result
from hpml.core.errors import ConfigInvalid
from hpml.data_files import model_folder
from hpml.data_files.model_folder import ModelFolder
from hpml.tasks.data_source import Preview, Source
from hpml.tasks.language_modeling import model_tokenizer
from hpml.tasks.language_modeling.model_tokenizer import ModelTokenizer
from hpml.tasks.language_modeling.task import LanguageModeling

if TYPE_CHECKING:
    from hpml.artifacts.dataset import DatasetSpec


VOCABULARY_SIZE = 4096  # of a tokenizer that is made, unless a recipe says otherwise


@dataclass(frozen=True)
class Texts:
    """texts: they are read several times. notes: what was left out of the source, and why."""

    texts: Iterable[str]
    licence: str
    notes: tuple[str, ...] = ()


class TextSource(Source):
    """Base of the sources of texts. A subclass adds `source`, its options, and `open_texts`."""

    task_class = LanguageModeling

    # At most: 256 bytes, the end, and merges; None: that of `tokenizer`, or 4096.
    vocabulary_size: int | None = Field(default=None, ge=257, le=2**20)
    # The model's folder that has it, as `train.weights` names it; None: one is made of the train split.
    tokenizer: ModelFolder | None = None
    end_token: str | None = None  # stands after each text; None: what the folder of `tokenizer` says
    context: int = Field(default=128, ge=2, le=2**17)  # tokens that the network sees at once
    test_fraction: float = Field(default=0.1, gt=0, lt=1)  # of the texts
    validation_fraction: float = Field(default=0.1, gt=0, lt=1)  # of the others

    @model_validator(mode="after")
    def _one_vocabulary(self) -> Self:
        if self.tokenizer is not None and self.vocabulary_size is not None:
            raise ValueError("vocabulary_size is that of the tokenizer, which is given: leave it out")
        if self.tokenizer is None and self.end_token is not None:
            raise ValueError("end_token is of a tokenizer that is given: set `tokenizer`, or leave it out")
        return self

    @property
    def _folder(self) -> ModelFolder | None:
        """Where the tokenizer is; of the file, its folder."""
        given = self.tokenizer
        return given.parent if isinstance(given, Path) and given.name == model_folder.TOKENIZER else given

    def unsupported_reason(self) -> str:
        """Whether the tokenizer that is given is missing."""
        return model_folder.tokenizer_problem(self._folder) if self._folder else ""

    def fingerprint(self) -> str:
        """A digest of the tokenizer that is given; empty where none is."""
        return model_folder.fingerprint(self._folder, model_folder.OF_TOKENIZER) if self._folder else ""

    def stand_in(self) -> LanguageModeling:
        """As many tokens as there may be, or as the model knows whose tokenizer is on this machine."""
        size = self.vocabulary_size or VOCABULARY_SIZE
        if isinstance(self._folder, Path):
            with suppress(ConfigInvalid):  # unsupported_reason, or prepare, says it
                size = model_tokenizer.vocabulary_size(self._folder)
        return LanguageModeling(vocabulary_size=size, context=self.context, end_id=0)

    def preview(self) -> Preview:
        """The task, without a tokenizer with as many tokens as there may be. Raises ConfigInvalid.

        How many rows is not known before they are read; nothing is where the tokenizer is elsewhere.
        """
        if isinstance(self._folder, Path):
            model_tokenizer.vocabulary_size(self._folder)
            return Preview(task=self.stand_in())
        return Preview() if self._folder else Preview(task=self.stand_in(), is_guess=True)

    @abstractmethod
    def open_texts(self, out: Output) -> Texts:
        """The texts; `out.scratch` may hold what is fetched or extracted. Raises StageFailed, Unavailable."""

    def prepare(self, out: Output) -> Result[DatasetSpec]:
        """Write the tokens of every split, and the tokenizer; see `hpml.tasks.language_modeling.prepare`."""
        from hpml.tasks.language_modeling.prepare import Splitting, prepare

        with ExitStack() as stack:
            tokenizer: int | ModelTokenizer = self.vocabulary_size or VOCABULARY_SIZE
            if self._folder is not None:
                here = model_folder.opened(self._folder, model_folder.OF_TOKENIZER, out)
                tokenizer = model_tokenizer.read_tokenizer(stack.enter_context(here), self.end_token)
            found = self.open_texts(out)
            return prepare(
                found.texts,
                out,
                splitting=Splitting(self.validation_fraction, self.test_fraction, self.seed),
                tokenizer=tokenizer,
                context=self.context,
                source=self.source,
                licence=found.licence,
                notes=found.notes,
            )
