"""Text as tokens: a network predicts each from those before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import JsonValue

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.operation import Operation
from hpml.core.contract import Config
from hpml.core.errors import ConfigInvalid
from hpml.tasks.base import Task
from hpml.tasks.metric import Metric
from hpml.tasks.perplexity import PERPLEXITY

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from hpml.tasks.base import Arrays, Outputs, Runs, Tensors
    from hpml.tasks.generation import Choose, Generation
    from hpml.tasks.language_modeling.replies import Speaker


class LanguageModeling(Task):
    """Windows of `context` tokens and the one after them (`tokens`, integers, context + 1 in a row).

    The network takes `input_ids` int64 (batch, sequence) and gives the logits of the next token at each
    place. Engines have two operations of one graph with a cache, see `cache`: `decode`, by which goals judge
    the speed, and `prefill`, whose answers to whole windows are judged.
    """

    row: ClassVar[str] = "window"
    rows: ClassVar[str] = "windows"
    units: ClassVar[str] = "tokens"
    metrics: ClassVar[tuple[Metric, ...]] = (PERPLEXITY,)
    files: ClassVar[tuple[str, ...]] = ("tokenizer.json",)
    evaluation_rows: ClassVar[int] = 16  # logits of the whole vocabulary at each place take much memory
    default_architecture: ClassVar[str] = "decoder"
    architectures: ClassVar[tuple[str, ...]] = ("decoder", "transformers")
    talks: ClassVar[bool] = True
    watched_operation: ClassVar[str] = "prefill"
    shape_options: ClassVar[str] = "data.context and data.vocabulary_size"
    int8_operators: ClassVar[tuple[str, ...]] = ("MatMul", "Gemm")  # layers; a mask has no scale of 8 bits

    task: Literal["language_modeling"] = "language_modeling"
    vocabulary_size: int
    context: int  # tokens of a window: what the network was trained to look back
    end_id: int  # of the token that stands after each text
    begin_ids: tuple[int, ...] = ()  # of the tokens that stand before each text, where a model wants them
    tokenizer_class: str = "GPT2Tokenizer"  # as transformers and onnxruntime-genai call it: byte-level BPE

    @property
    def units_per_row(self) -> float:
        """Each window predicts so many tokens."""
        return float(self.context)

    def stored(self, data: Artifact[DatasetSpec], split: str) -> Arrays:
        """`tokens`: a view of the stream as windows, mapped from its file."""
        from hpml.tasks.language_modeling.token_files import windows

        return {"tokens": windows(super().stored(data, split)["tokens"], self.context)}

    def features(self, stored: Arrays) -> dict[str, NDArray[Any]]:
        """`input_ids`: all tokens of each window but the last."""
        return {"input_ids": stored["tokens"][:, :-1].astype("int64")}

    def data_in_words(self) -> str:
        """How many tokens there are to choose from."""
        return f"{self.vocabulary_size} token ids"

    def row_in_words(self) -> str:
        """Such as "token ids of 2x128 (batch x sequence), below 4096"."""
        return f"token ids of 2x{self.context} (batch x sequence), below {self.vocabulary_size}"

    def output_shape(self, rows: int) -> tuple[int, ...]:
        """A logit a token of the vocabulary, at each place."""
        return rows, self.context, self.vocabulary_size

    def model_arguments(self) -> dict[str, JsonValue]:
        """How many tokens there are, and how many the network sees at once."""
        return {"vocabulary_size": self.vocabulary_size, "context": self.context}

    def operations(self, network: nn.Module) -> tuple[Operation, ...]:
        """`decode`, then `prefill`."""
        from hpml.tasks.language_modeling.cache import cache_shape, cached_operations

        return cached_operations(cache_shape(network), self.vocabulary_size)

    def runtime_files(self, network: nn.Module, operations: Sequence[Operation]) -> Mapping[str, str]:
        """Those of `onnxruntime-genai`."""
        from hpml.tasks.language_modeling.cache import cache_shape
        from hpml.tasks.language_modeling.genai import genai_files

        heads = cache_shape(network).heads
        return genai_files(
            operations[0],
            attention_heads=getattr(network, "attention_heads", heads),
            vocabulary_size=self.vocabulary_size,
            context=self.context,
            begin_id=self._before_a_text[0],
            end_id=self.end_id,
            tokenizer_class=self.tokenizer_class,
        )

    def example(self, rows: int) -> tuple[Tensor, ...]:
        """Windows of the first token."""
        import torch

        return (torch.zeros(rows, self.context, dtype=torch.int64),)

    def training_features(
        self,
        stored: Tensors,
        *,
        uniform: Tensor | None = None,
        augment: Config | None = None,
        layout: torch.memory_format | None = None,
    ) -> tuple[Tensor, ...]:
        """`input_ids`: there is nothing to augment."""
        return (stored["tokens"][:, :-1].long(),)

    def loss(self, outputs: Outputs, stored: Tensors, *, label_smoothing: float) -> Tensor:
        """The cross-entropy of the logits with the token that follows, over all places."""
        from torch.nn import functional

        logits, following = _by_place(outputs, stored)
        return functional.cross_entropy(logits, following, label_smoothing=label_smoothing)

    def soft_loss(
        self, outputs: Outputs, of_teacher: Outputs, stored: Tensors, *, temperature: float
    ) -> Tensor:
        """The divergence of the softened distributions at each place (arXiv:1503.02531)."""
        from hpml.tasks.losses import softened_divergence

        logits, _ = _by_place(outputs, stored)
        return softened_divergence(logits, _by_place(of_teacher, stored)[0], temperature)

    def outputs(self, runs: Runs, stored: Arrays) -> dict[str, NDArray[Any]]:
        """The logits of whole windows."""
        from hpml.tasks.language_modeling.cache import LOGITS, prefill

        return {LOGITS: prefill(runs, self.features(stored)["input_ids"])[LOGITS]}

    def statistics(self, outputs: Outputs, stored: Tensors) -> dict[str, Tensor]:
        """Of each window the sum of the negative log probabilities, in nats, and the number of tokens."""
        import torch
        from torch.nn import functional

        logits, following = _by_place(outputs, stored)
        rows = len(stored["tokens"])
        nll = functional.cross_entropy(logits, following, reduction="none").view(rows, -1).double()
        tokens = torch.full((rows,), nll.shape[1], dtype=torch.float64, device=nll.device)
        return {PERPLEXITY.name: torch.stack([nll.sum(dim=1), tokens], dim=1)}

    def generated(self, runs: Runs, stored: Arrays) -> NDArray[np.int64]:
        """Greedy continuations of the first half of each window, as long as the other half."""
        from hpml.tasks.language_modeling.cache import greedy

        half = self._half
        return greedy(runs, self.features(stored)["input_ids"][:, :half], half)

    def calibration_requests(self, runs: Runs, stored: Arrays, operation: Operation) -> Arrays:
        """Whole windows: all that their layers see."""
        from hpml.tasks.language_modeling.cache import prefill_feeds

        return prefill_feeds(operation, self.features(stored)["input_ids"])

    def requests(self, runs: Runs, stored: Arrays, operation: Operation) -> Arrays:
        """Whole windows for `prefill`; for `decode` the token in the middle, with the cache before it."""
        from hpml.tasks.language_modeling.cache import DECODE, decode_feeds, prefill, prefill_feeds

        input_ids, half = self.features(stored)["input_ids"], self._half
        if operation.name == DECODE:
            return decode_feeds(input_ids[:, half : half + 1], prefill(runs, input_ids[:, :half]))
        return prefill_feeds(operation, input_ids)

    def units_of_request(self, operation: str) -> tuple[str, float]:
        """The tokens that go in: one for `decode`, a whole window for `prefill`."""
        from hpml.tasks.language_modeling.cache import DECODE

        return self.units, 1.0 if operation == DECODE else float(self.context)

    def reply(self, runs: Runs, files: Path, said: Sequence[str], *, beams: int, max_tokens: int) -> str:
        """The likeliest next line after the lines that were said: turns of a conversation are lines.

        Raises ConfigInvalid for more than one beam: the next line is greedy.
        """
        from hpml.tasks.generation import sampler

        if beams != 1:
            raise ConfigInvalid(f"a language model follows one answer, not {beams}", fix="leave out --beam")
        pieces = self.next_turn(runs, files, said, sampler(0.0, 1.0, None), max_tokens=max_tokens).pieces
        return "".join(piece.text for piece in pieces).strip()

    def continuation(
        self, runs: Runs, files: Path, text: str, choose: Choose, *, max_tokens: int
    ) -> Generation:
        """Until the network ends the text, or the context does."""
        return self._speaker(runs, files).continuation(text, choose, max_tokens=max_tokens)

    def next_turn(
        self, runs: Runs, files: Path, said: Sequence[str], choose: Choose, *, max_tokens: int
    ) -> Generation:
        """The next line: turns of a conversation are lines."""
        return self._speaker(runs, files).next_line(said, choose, max_tokens=max_tokens)

    def largest_sizes(self) -> dict[str, int]:
        """The context, of what was before and of what is new."""
        return {"past": self.context, "sequence": self.context}

    def observed(self, inputs: Arrays, outputs: Arrays) -> dict[str, NDArray[Any]]:
        """The ids, and which is the likeliest to follow, with its probability.

        Not how long a prompt is: the validation split is a stream, cut into windows of one length.
        """
        from hpml.tasks.drift.observed import of_logits

        return {"id": inputs["input_ids"].ravel(), **of_logits(outputs["logits"][:, -1], "next id")}

    def _speaker(self, runs: Runs, files: Path) -> Speaker:
        from hpml.tasks.language_modeling.replies import Speaker

        return Speaker(runs, files, self.context, self._before_a_text, self.end_id)

    @property
    def _before_a_text(self) -> tuple[int, ...]:
        """The tokens that a network has seen there: without any of its own, the end of the text before."""
        return self.begin_ids or (self.end_id,)

    @property
    def _half(self) -> int:
        return self.context // 2


def _by_place(outputs: Outputs, stored: Tensors) -> tuple[Tensor, Tensor]:
    """Logits (places, vocabulary), and the tokens (places,) that follow."""
    logits = outputs if not isinstance(outputs, tuple) else outputs[0]
    return logits.flatten(0, 1), stored["tokens"][:, 1:].long().flatten()
