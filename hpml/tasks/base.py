"""What every task is: the schema of its data, what its network takes and gives, how answers are judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from pydantic import JsonValue

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.operation import Operation
from hpml.core.contract import Config
from hpml.core.errors import ConfigInvalid
from hpml.tasks.metric import Metric

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from hpml.tasks.endpoint import Endpoint
    from hpml.tasks.generation import Choose, Generation
    from hpml.tasks.packaging.base import Packaging

Arrays: TypeAlias = "Mapping[str, NDArray[Any]]"  # by name, rows in front
Tensors: TypeAlias = "Mapping[str, Tensor]"  # likewise, on one device
Outputs: TypeAlias = "Tensor | tuple[Tensor, ...]"  # what a network returns


class Runs(Protocol):
    """What can be asked: an engine's session, or a network in torch."""

    @property
    def operations(self) -> Mapping[str, Operation]:
        """What can be asked of it, by name."""
        ...

    def run(self, feeds: Arrays, operation: str = "predict") -> dict[str, NDArray[Any]]:
        """The outputs of an operation by name; `feeds` has its inputs by name, the batch in front."""
        ...


class Task(Config, ABC):
    """Base of the tasks. Its fields are what `prepare` found out about the data, such as the class names.

    Datasets, models and engines carry it in their manifests. `hpml.tasks.task_of` gives it back.

    A dataset stores each split as arrays with rows in front (`stored`); from those comes what the network
    takes (`features`, in numpy, the same for every runtime) and what its answers are judged by
    (`statistics`). What is done with tensors imports torch inside of the method, nothing else needs it.

    row, rows: what one row is called, and several. units, units_per_row: what training and throughput are
    counted in, if it is not rows. metrics: the first is what goals and gates go by unless a recipe says
    otherwise. draws: how many random numbers a row's augmentation takes; 0: there is none.
    files: of a dataset, that engines and bundles carry along, such as a tokenizer.
    default_architecture: where a recipe names none. architectures: those of ours that are for such data;
    none: whichever takes what the task gives it. shape_options: what changes the shape of a row.
    evaluation_rows: how many rows are answered at once where quality is judged. int8_operators: those of ONNX
    that int8 is for, of constant weights, but for layers whose inputs it would round too coarsely
    (`effective_bits`); none: all that the quantizer knows, and what flows between them.
    talks: whether `next_turn` and `reply` give an answer.
    watched_operation: whose requests are held against the validation split where it is served (`observed`);
    "" is the first.
    int8_agreement: the least share of decisions in which an int8 engine has to be at one with its network.
    """

    row: ClassVar[str] = "sample"
    rows: ClassVar[str] = "samples"
    units: ClassVar[str] = ""
    metrics: ClassVar[tuple[Metric, ...]]
    draws: ClassVar[int] = 0
    files: ClassVar[tuple[str, ...]] = ()
    evaluation_rows: ClassVar[int] = 250
    int8_operators: ClassVar[tuple[str, ...]] = ()
    talks: ClassVar[bool] = False
    watched_operation: ClassVar[str] = ""
    int8_agreement: ClassVar[float] = 0.97
    default_architecture: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]] = ()
    shape_options: ClassVar[str] = "the options of data"

    task: str

    # ---------------------------------------------------------------------------------------------- the data

    def stored(self, data: Artifact[DatasetSpec], split: str) -> Arrays:
        """The arrays of a split by name, mapped from their files: nothing is read before it is used.

        Raises StageFailed if the dataset has no such split.
        """
        import numpy as np

        data.spec.split(split)  # there is one
        prefix, suffix = f"{split}_", ".npy"
        return {
            name.removeprefix(prefix).removesuffix(suffix): np.load(
                data.file(name), mmap_mode="r", allow_pickle=False
            )
            for name in sorted(data.manifest.files)
            if name.startswith(prefix) and name.endswith(suffix)
        }

    @abstractmethod
    def features(self, stored: Arrays) -> dict[str, NDArray[Any]]:
        """What the network takes for some stored rows: its inputs by name, in the order of its arguments."""

    def calibration_rows(self, data: Artifact[DatasetSpec], count: int, seed: int) -> NDArray[np.int64]:
        """Rows of the train split that stand for it, at most `count`, sorted."""
        import numpy as np

        rows = data.spec.split("train").rows
        return np.sort(np.random.default_rng(seed).permutation(rows)[:count])

    @abstractmethod
    def data_in_words(self) -> str:
        """What `prepare` found, beside the number of rows: "10 classes"."""

    @property
    def units_per_row(self) -> float:
        """How many `units` a row counts for in training."""
        return 1.0

    # ------------------------------------------------------------------------------------------- the network

    @abstractmethod
    def row_in_words(self) -> str:
        """What the network has to take, for a message: "images of 1x8x8 (channels x height x width)"."""

    @abstractmethod
    def output_shape(self, rows: int) -> tuple[int, ...]:
        """Of the (first) output of the network for so many rows."""

    @abstractmethod
    def model_arguments(self) -> dict[str, JsonValue]:
        """What an architecture is given of the data, beside its own arguments."""

    @abstractmethod
    def operations(self, network: nn.Module) -> tuple[Operation, ...]:
        """What can be asked of such a network; goals judge the first."""

    def graphs(self, network: nn.Module) -> dict[str, nn.Module]:
        """The parts of a network that are exported, by the names that its operations use."""
        return {"model": network}

    def runtime_files(self, network: nn.Module, operations: Sequence[Operation]) -> Mapping[str, str]:
        """Texts by the names of the files that runtimes of such tasks read beside `model.onnx`."""
        return {}

    @abstractmethod
    def example(self, rows: int) -> tuple[Tensor, ...]:
        """Arguments of the network for so many rows, of the right shapes, whatever their numbers."""

    # ---------------------------------------------------------------------------------------------- training

    def training_features(
        self,
        stored: Tensors,
        *,
        uniform: Tensor | None = None,
        augment: Config | None = None,
        layout: torch.memory_format | None = None,
    ) -> tuple[Tensor, ...]:
        """The arguments of the network for stored rows on their device.

        uniform: the random numbers of each row, (rows, draws) in [-1, 1), where rows are to be augmented by
        the options `augment`. layout: the memory format for images.
        """
        import torch

        device = next(iter(stored.values())).device
        features = self.features({name: tensor.cpu().numpy() for name, tensor in stored.items()})
        return tuple(torch.from_numpy(array).to(device) for array in features.values())

    @abstractmethod
    def loss(self, outputs: Outputs, stored: Tensors, *, label_smoothing: float) -> Tensor:
        """What training minimises: the mean over some stored rows."""

    @abstractmethod
    def soft_loss(
        self, outputs: Outputs, of_teacher: Outputs, stored: Tensors, *, temperature: float
    ) -> Tensor:
        """How far the outputs are from a teacher's; its gradient does not depend on the temperature."""

    # -------------------------------------------------------------------------------------- judging answers

    def outputs(self, runs: Runs, stored: Arrays) -> dict[str, NDArray[Any]]:
        """What a network or an engine answers to stored rows: the outputs that are judged, by name."""
        return runs.run(self.features(stored))

    def outputs_in_torch(self, network: nn.Module, stored: Tensors) -> Outputs:
        """Likewise of a network in torch, on its device; where not all are what its forward returns."""
        outputs: Outputs = network(*self.training_features(stored))
        return outputs

    @abstractmethod
    def statistics(self, outputs: Outputs, stored: Tensors) -> dict[str, Tensor]:
        """For each metric the statistics of each row, (rows, k): their sums over a split give its value."""

    @property
    def metric(self) -> Metric:
        """What goals and gates go by unless a recipe says otherwise."""
        return self.metrics[0]

    def metric_named(self, name: str) -> Metric:
        """One of its metrics. Raises ConfigInvalid for another name; "" is the default."""
        known = {metric.name: metric for metric in self.metrics}
        if name and name not in known:
            raise ConfigInvalid(f"{self.task} has no metric {name!r}", fix=f"give one of {', '.join(known)}")
        return known.get(name, self.metric)

    @property
    def group_names(self) -> tuple[str, ...]:
        """Groups of rows by which quality is told besides, such as classes; empty where there are none."""
        return ()

    def groups(self, stored: Arrays) -> NDArray[np.int64] | None:
        """The place of each row's group in `group_names`; None where there are none."""
        return None

    def kept(self, outputs: Arrays) -> dict[str, NDArray[Any]]:
        """What is stored of the outputs on a split, rows in front, beside the statistics."""
        return {}

    def decisions(self, outputs: Arrays, stored: Arrays) -> NDArray[np.int64] | None:
        """What the answers decide, one or several numbers a row; None where they decide nothing.

        Engines have to decide as their network does. By default the place of the largest of the last axis
        of the first output.
        """
        import numpy as np

        return np.asarray(next(iter(outputs.values())).argmax(axis=-1), np.int64)

    def served_decisions(self, outputs: Arrays) -> NDArray[np.int64] | None:
        """What the answers of the first operation decide, as a server gives them, by which two versions of a
        model are compared; None where they decide nothing. By default `decisions`.
        """
        return self.decisions(outputs, {})

    def generated(self, runs: Runs, stored: Arrays) -> NDArray[np.int64] | None:
        """What is generated step by step for some rows, such as greedy continuations, (rows, steps).

        None where nothing is. Each step depends on those before, so engines may part from their network where
        single answers agree.
        """
        return None

    def requests(self, runs: Runs, stored: Arrays, operation: Operation) -> Arrays:
        """Inputs for an operation, from stored rows, to time it with: rows in front."""
        return self.features(stored)

    def units_of_request(self, operation: str) -> tuple[str, float]:
        """What rates of an operation are told in, and how many of it a row of a request counts for.

        Such as ("tokens", 128.0) where a row is a prompt of 128. By default rows.
        """
        return self.rows, 1.0

    def calibration_requests(self, runs: Runs, stored: Arrays, operation: Operation) -> Arrays:
        """Inputs for an operation that show the ranges of its layers, to quantize its graph with."""
        return self.requests(runs, stored, operation)

    # -------------------------------------------------------------------------------------------- deploying

    def packaging(self) -> Packaging:
        """What its bundles ship: by default a script that takes and gives named arrays."""
        from hpml.tasks.packaging.base import Packaging

        return Packaging(self.model_dump(mode="json"))

    def continuation(
        self, runs: Runs, files: Path, text: str, choose: Choose, *, max_tokens: int
    ) -> Generation | None:
        """What follows `text`, piece by piece; None of a network that does not go on with texts.

        files: the folder that has the task's `files`. choose: see `hpml.tasks.generation.sampler`.
        """
        return None

    def next_turn(
        self, runs: Runs, files: Path, said: Sequence[str], choose: Choose, *, max_tokens: int
    ) -> Generation | None:
        """The answer to what was said, by turns, piece by piece; None of a network that does not talk."""
        return None

    def largest_sizes(self) -> dict[str, int]:
        """The free dimensions beside the batch, and how large requests may make them; a server asks."""
        return {}

    def observed(self, inputs: Arrays, outputs: Arrays) -> dict[str, NDArray[Any]]:
        """What a server counts of requests to `watched_operation` to notice drift, see `hpml.tasks.drift`.

        By name, any number of values for a row; whole numbers are categories.
        """
        from hpml.tasks.drift.observed import of_arrays

        return of_arrays(inputs, outputs)

    def endpoint(self) -> Endpoint | None:
        """How a server is asked in the words of the task, beside named arrays; None: in no other way."""
        return None

    def reply(self, runs: Runs, files: Path, said: Sequence[str], *, beams: int, max_tokens: int) -> str:
        """An answer to what was said, by turns, the last turn by who asks; "" for one without words.

        files: the folder that has the task's `files`. beams: how many answers are followed; 1: greedy.
        max_tokens: where an answer that does not end is cut. Raises ConfigInvalid if the task does not talk.
        """
        raise ConfigInvalid(f"a network of the task {self.task} does not talk", fix="give one of texts")
