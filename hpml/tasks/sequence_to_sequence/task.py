"""A sequence of words that answers another: what was said and the answer, a sentence and its translation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import JsonValue

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.operation import Operation, TensorSpec
from hpml.core.contract import Config
from hpml.core.errors import ConfigInvalid
from hpml.tasks.base import Task
from hpml.tasks.metric import Metric
from hpml.tasks.perplexity import PERPLEXITY
from hpml.tasks.sequence_to_sequence.bleu import STATISTICS, bleu

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from tokenizers import Tokenizer
    from torch import Tensor, nn

    from hpml.tasks.base import Arrays, Outputs, Runs, Tensors
    from hpml.tasks.generation import Choose, Generation

TOKENIZER = "tokenizer.json"
PADDING = 0  # the id behind the end of a row
BLEU = Metric("bleu", "BLEU", better="higher", value=bleu, statistics=STATISTICS, least=0.0, most=100.0)
LOGITS, ANSWER_IDS = "logits", "answer_ids"


class SequenceToSequence(Task):
    """Sources (`source_ids`) and targets that begin with BEGIN (`target_ids`), int32, filled up with PADDING.

    The network takes the source and the target without its last id, and gives at each place of the target
    the logits of the next id. Engines have two operations, a graph each: `encode`, once for each source, and
    `decode`, once for each id of an answer, or once for a whole target: quality is computed so, but for BLEU,
    which is that of greedy answers to the rows of validation and test that `prepare` marked (`is_answered`).
    """

    row: ClassVar[str] = "pair"
    rows: ClassVar[str] = "pairs"
    units: ClassVar[str] = "tokens"
    metrics: ClassVar[tuple[Metric, ...]] = (PERPLEXITY, BLEU)
    files: ClassVar[tuple[str, ...]] = (TOKENIZER,)
    evaluation_rows: ClassVar[int] = 64  # logits of the whole vocabulary at each place take much memory
    default_architecture: ClassVar[str] = "gru_attention"
    architectures: ClassVar[tuple[str, ...]] = ("gru_attention", "encoder_decoder")
    talks: ClassVar[bool] = True
    watched_operation: ClassVar[str] = "encode"
    shape_options: ClassVar[str] = "data.source_tokens and data.target_tokens"
    int8_operators: ClassVar[tuple[str, ...]] = ("MatMul", "Gemm")  # layers; a mask has no scale of 8 bits

    task: Literal["sequence_to_sequence"] = "sequence_to_sequence"
    vocabulary_size: int
    source_tokens: int  # of a row, with END
    target_tokens: int  # of a row, with END: the steps of the longest answer
    mean_target_tokens: float  # over the train split, without PADDING
    tokenizer_sha256: str

    # ---------------------------------------------------------------------------------------------- the data

    def stored(self, data: Artifact[DatasetSpec], split: str) -> Arrays:
        """The arrays of a split. The tokenizer is remembered, too: BLEU is of texts."""
        from hpml.tasks.sequence_to_sequence import tokenizer

        tokenizer.remember(data.file(TOKENIZER))
        return super().stored(data, split)

    def features(self, stored: Arrays) -> dict[str, NDArray[Any]]:
        """`source_ids`, and the ids of the target but the last (`input_ids`)."""
        return {
            "source_ids": stored["source_ids"].astype("int64"),
            "input_ids": stored["target_ids"][:, :-1].astype("int64"),
        }

    def data_in_words(self) -> str:
        """How many ids there are."""
        return f"{self.vocabulary_size} token ids"

    @property
    def units_per_row(self) -> float:
        """Tokens of the target, on average."""
        return self.mean_target_tokens

    # ------------------------------------------------------------------------------------------- the network

    def row_in_words(self) -> str:
        """Such as "sources of 24 and targets of 24 ids, below 4000"."""
        return (
            f"sources of {self.source_tokens} and targets of {self.target_tokens} ids,"
            f" below {self.vocabulary_size}"
        )

    def output_shape(self, rows: int) -> tuple[int, ...]:
        """A logit an id, at each place of the target."""
        return rows, self.target_tokens, self.vocabulary_size

    def model_arguments(self) -> dict[str, JsonValue]:
        """How many ids there are, and how many of them are in the longest rows."""
        return {
            "vocabulary_size": self.vocabulary_size,
            "source_tokens": self.source_tokens,
            "target_tokens": self.target_tokens,
        }

    def operations(self, network: nn.Module) -> tuple[Operation, ...]:
        """`decode`, which an answer takes once for each of its ids, then `encode`.

        Raises ConfigInvalid for a network that has no encoder and decoder.
        """
        parts = _parts(network)
        source_ids = TensorSpec(
            name="source_ids",
            dtype="int64",
            shape=("batch", "source"),
            content="filled up with 0",
            below=self.vocabulary_size,
        )
        input_ids = TensorSpec(
            name="input_ids",
            dtype="int64",
            shape=("batch", "target"),
            content="the answer so far, which 1 begins and 2 ends, or its last id",
            below=self.vocabulary_size,
        )
        logits = TensorSpec(
            name=LOGITS, shape=("batch", "target", self.vocabulary_size), content="of the next id"
        )
        return (
            Operation(
                name="decode",
                graph="decoder",
                inputs=(input_ids, *parts.encoded),
                outputs=(logits, *parts.present),
            ),
            Operation(name="encode", graph="encoder", inputs=(source_ids,), outputs=parts.encoded),
        )

    def graphs(self, network: nn.Module) -> dict[str, nn.Module]:
        """The encoder and the decoder."""
        parts = _parts(network)
        return {"decoder": parts.decoder, "encoder": parts.encoder}

    def example(self, rows: int) -> tuple[Tensor, ...]:
        """Rows of the first id that is not PADDING."""
        import torch

        return tuple(
            torch.ones(rows, tokens, dtype=torch.int64) for tokens in (self.source_tokens, self.target_tokens)
        )

    # ---------------------------------------------------------------------------------------------- training

    def training_features(
        self,
        stored: Tensors,
        *,
        uniform: Tensor | None = None,
        augment: Config | None = None,
        layout: torch.memory_format | None = None,
    ) -> tuple[Tensor, ...]:
        """As `features`: there is nothing to augment."""
        return stored["source_ids"].long(), stored["target_ids"][:, :-1].long()

    def loss(self, outputs: Outputs, stored: Tensors, *, label_smoothing: float) -> Tensor:
        """The cross-entropy of the logits with the next ids, over all that are not PADDING."""
        from torch.nn import functional

        logits, following = _by_place(outputs, stored)
        return functional.cross_entropy(
            logits, following, ignore_index=PADDING, label_smoothing=label_smoothing
        )

    def soft_loss(
        self, outputs: Outputs, of_teacher: Outputs, stored: Tensors, *, temperature: float
    ) -> Tensor:
        """The divergence of the softened distributions, over the places that are not PADDING."""
        from hpml.tasks.losses import softened_divergence

        logits, following = _by_place(outputs, stored)
        real = following != PADDING
        return softened_divergence(logits[real], _by_place(of_teacher, stored)[0][real], temperature)

    # -------------------------------------------------------------------------------------- judging answers

    def outputs(self, runs: Runs, stored: Arrays) -> dict[str, NDArray[Any]]:
        """The logits of whole targets, and the greedy answers to the rows that are marked."""
        from hpml.tasks.sequence_to_sequence.decoding import decoded, encoded

        features = self.features(stored)
        logits, _ = decoded(runs, features["input_ids"], encoded(runs, features["source_ids"]))
        return {LOGITS: logits, ANSWER_IDS: self._answers(runs, stored)}

    def outputs_in_torch(self, network: nn.Module, stored: Tensors) -> Outputs:
        """Likewise."""
        import torch

        from hpml.tasks.torch_session import TorchSession

        device = next(network.parameters()).device
        runs = TorchSession(network, self, self.operations(network), str(device))
        answers = self._answers(runs, {name: tensor.cpu().numpy() for name, tensor in stored.items()})
        return network(*self.training_features(stored)), torch.from_numpy(answers)

    def statistics(self, outputs: Outputs, stored: Tensors) -> dict[str, Tensor]:
        """Of each row the sum of the negative log likelihoods of its ids and their number; where there are
        answers, the sums of BLEU, too."""
        import torch
        from torch.nn import functional

        logits, following = _by_place(outputs, stored)
        rows = len(stored["target_ids"])
        nll = functional.cross_entropy(logits, following, ignore_index=PADDING, reduction="none")
        found = {
            PERPLEXITY.name: torch.stack(
                [one.view(rows, -1).double().sum(dim=1) for one in (nll, following != PADDING)], dim=1
            )
        }
        if isinstance(outputs, tuple):
            found[BLEU.name] = self._bleu_statistics(outputs[1], stored)
        return found

    def decisions(self, outputs: Arrays, stored: Arrays) -> NDArray[np.int64]:
        """The likeliest next id at each place that is not PADDING."""
        likeliest: NDArray[np.int64] = outputs[LOGITS].argmax(axis=-1)
        real: NDArray[np.int64] = likeliest[stored["target_ids"][:, 1:] != PADDING]
        return real

    def served_decisions(self, outputs: Arrays) -> None:
        """None: the first operation reads what was said, and answers nothing yet."""
        return None

    def generated(self, runs: Runs, stored: Arrays) -> NDArray[np.int64]:
        """Greedy answers, PADDING behind their END."""
        from hpml.tasks.sequence_to_sequence.decoding import greedy

        return greedy(runs, stored["source_ids"], self.target_tokens)

    def requests(self, runs: Runs, stored: Arrays, operation: Operation) -> Arrays:
        """Sources for `encode`; for `decode` an id from the middle of each target, with the state before."""
        from hpml.tasks.sequence_to_sequence.decoding import decoded, encoded

        features = self.features(stored)
        if operation.name == "encode":
            return {"source_ids": features["source_ids"]}
        middle = self.target_tokens // 2
        state = encoded(runs, features["source_ids"])
        _, state = decoded(runs, features["input_ids"][:, :middle], state)
        return {"input_ids": features["input_ids"][:, middle : middle + 1], **state}

    def units_of_request(self, operation: str) -> tuple[str, float]:
        """Of `decode` the tokens of answers, one each; of `encode` sources, which are filled up."""
        return (self.units if operation == "decode" else "sources"), 1.0

    def calibration_requests(self, runs: Runs, stored: Arrays, operation: Operation) -> Arrays:
        """For `decode` the whole targets: all that is ever in the ranges of its layers."""
        from hpml.tasks.sequence_to_sequence.decoding import encoded

        features = self.features(stored)
        if operation.name == "encode":
            return {"source_ids": features["source_ids"]}
        return {"input_ids": features["input_ids"], **encoded(runs, features["source_ids"])}

    def reply(self, runs: Runs, files: Path, said: Sequence[str], *, beams: int, max_tokens: int) -> str:
        """The answer to what was said last."""
        from hpml.tasks.sequence_to_sequence import decoding, tokenizer

        known = tokenizer.opened(files / TOKENIZER)
        source_ids = self._source_ids(known, said[-1])
        steps = min(max_tokens, self.target_tokens)
        if beams == 1:
            answer = decoding.greedy(runs, source_ids, steps)
        else:
            answer = decoding.beam_search(runs, source_ids, steps, beams)
        return tokenizer.texts_of(known, answer)[0]

    def largest_sizes(self) -> dict[str, int]:
        """As many ids as rows of the data have."""
        most = self.target_tokens + 1
        return {"source": self.source_tokens, "target": most, "past": most}

    def observed(self, inputs: Arrays, outputs: Arrays) -> dict[str, NDArray[Any]]:
        """The lengths of sources, and their ids."""
        real = inputs["source_ids"] != PADDING
        return {"tokens of a source": real.sum(axis=1).astype(float), "id": inputs["source_ids"][real]}

    def next_turn(
        self, runs: Runs, files: Path, said: Sequence[str], choose: Choose, *, max_tokens: int
    ) -> Generation:
        """The answer to what was said last."""
        from hpml.tasks.generation import Generation
        from hpml.tasks.sequence_to_sequence import decoding, tokenizer

        known = tokenizer.opened(files / TOKENIZER)
        source_ids = self._source_ids(known, said[-1])
        room = min(max_tokens, self.target_tokens)
        return Generation(source_ids.shape[1], decoding.pieces(runs, source_ids, room, choose, known))

    def _source_ids(self, known: Tokenizer, text: str) -> NDArray[np.int32]:
        """(1, source)."""
        from hpml.tasks.sequence_to_sequence import tokenizer

        row = tokenizer.source_row(known.encode(text).ids, self.source_tokens)
        return tokenizer.filled_up([row], len(row))

    def _answers(self, runs: Runs, stored: Arrays) -> NDArray[np.int64]:
        """Greedy ones to the rows that are marked; of the others PADDING."""
        import numpy as np

        from hpml.tasks.sequence_to_sequence.decoding import greedy

        answers = np.full((len(stored["source_ids"]), self.target_tokens), PADDING, np.int64)
        marked = np.asarray(stored["is_answered"])
        if marked.any():
            answers[marked] = greedy(runs, stored["source_ids"][marked], self.target_tokens)
        return answers

    def _bleu_statistics(self, answer_ids: Tensor, stored: Tensors) -> Tensor:
        """(rows, STATISTICS): zeros in rows that are not marked."""
        import torch

        from hpml.tasks.sequence_to_sequence import bleu, tokenizer

        known = tokenizer.remembered(self.tokenizer_sha256)
        marked = stored["is_answered"].cpu()
        answers, references = (
            tokenizer.texts_of(known, ids.cpu()[marked].numpy())
            for ids in (answer_ids, stored["target_ids"][:, 1:])
        )
        found = torch.zeros(len(marked), STATISTICS, dtype=torch.float64)
        if answers:
            found[marked] = torch.tensor(
                [bleu.statistics(*pair) for pair in zip(answers, references, strict=True)],
                dtype=torch.float64,
            )
        return found.to(stored["is_answered"].device)


def _parts(network: nn.Module) -> Any:
    """`network`, if it is one of a `SequenceToSequenceNetwork`'s parts."""
    missing = [name for name in ("encoder", "decoder", "encoded", "present") if not hasattr(network, name)]
    if missing:
        raise ConfigInvalid(
            f"{type(network).__name__} does not answer sequences",
            why=f"it has no {', '.join(missing)}",
            fix="derive it from SequenceToSequenceNetwork of hpml.models.sequence_to_sequence",
        )
    return network


def _by_place(outputs: Outputs, stored: Tensors) -> tuple[Tensor, Tensor]:
    """Logits (places, vocabulary), and the ids (places,) that follow."""
    logits = outputs[0] if isinstance(outputs, tuple) else outputs
    return logits.flatten(0, 1), stored["target_ids"][:, 1:].long().flatten()
