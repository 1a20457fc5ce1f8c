"""The training loop: the same for one process and for many, for a first training and for a fine-tune."""

from __future__ import annotations

import hashlib
import itertools
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from hpml import models
from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.core.batches import batches
from hpml.core.contract import Output, canonical_json
from hpml.core.errors import ConfigInvalid, StageFailed, Terminated
from hpml.tasks import task_of
from hpml.training.checkpoint import Checkpoint, CheckpointStore
from hpml.training.config import Hyperparameters
from hpml.training.device import CPU_FP32, choose_compute_device
from hpml.training.distributed import Group, joined_group
from hpml.training.learner import Learner
from hpml.training.losses import Distillation
from hpml.training.optimizers import peak_learning_rate
from hpml.training.schedule import rate_factor
from hpml.training.stopping import StopRequest
from hpml.training.stopwatch import Stopwatch
from hpml.training.stored_split import Batch, StoredSplit

REPORT_EVERY_S = 0.3


@dataclass(frozen=True)
class FitResult:
    """A trained network, on the CPU in evaluation mode (the averaged weights, where there is an average).

    quality: of each metric of the task, on the validation split. history: one row an epoch, the same whenever
    the training is repeated: epoch, loss, the task's metric on both splits, such as train_accuracy_top1 (of
    augmented rows) and validation_accuracy_top1, learning_rate. metrics: the last row, and what the training
    cost, such as images_per_s, gflop_per_s (of all workers), and the seconds by phase (data_s, compute_s,
    communication_s: waiting for gradients that the backward pass did not hide, evaluation_s, checkpoint_s).
    Without epochs the history is empty, and the only metric is that of the task.
    """

    model: nn.Module
    quality: Mapping[str, float]
    history: tuple[dict[str, float], ...]
    metrics: Mapping[str, float]


def fit(
    model: nn.Module,
    data: Artifact[DatasetSpec],
    config: Hyperparameters,
    out: Output,
    distillation: Distillation | None = None,
) -> FitResult:
    """Train `model`, in place, on the train split of `data`; every epoch ends with the validation split.

    With `distillation` the loss includes a teacher's outputs. In a process that torchrun started, it joins
    the others. Checkpoints go to `out.scratch`, and a training that was interrupted goes on from the newest.
    Raises StageFailed if the loss is no longer finite; Terminated (KeyboardInterrupt) once the state is saved
    after SIGTERM (SIGINT); ConfigInvalid if the hardware lacks what `config` names, or no weight is trained.
    """
    if not config.epochs:
        return _evaluate_only(model, data, config)
    require_trainable(model)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with joined_group() as group, StopRequest() as stop, torch.random.fork_rng(devices):
        return _Training(model, data, config, out, group, stop, distillation).run()


def require_trainable(model: nn.Module) -> None:
    """Raise ConfigInvalid if no weight of `model` is trained."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigInvalid(
            "the network has nothing to train",
            why="none of its weights has requires_grad",
            fix="leave some unfrozen; or, for trained weights as they are, set `weights` and epochs: 0",
        )


def _evaluate_only(model: nn.Module, data: Artifact[DatasetSpec], config: Hyperparameters) -> FitResult:
    """`model` with its quality; every process of a group finds that for itself."""
    with joined_group() as group:
        compute_device = choose_compute_device(config, group.local_rank)
        quality = evaluate(compute_device.put(model), data)
    metric = task_of(data.spec.task).metric.name
    return FitResult(CPU_FP32.put(model.eval()), quality, (), {f"validation_{metric}": quality[metric]})


def evaluate(model: nn.Module, data: Artifact[DatasetSpec]) -> dict[str, float]:
    """Each metric of the task on the validation split of `data`, of `model` in fp32 on its device."""
    task = task_of(data.spec.task)
    split = StoredSplit(task.stored(data, "validation"), "validation", next(model.parameters()).device)
    sums: dict[str, Tensor] = {}
    was_training = model.training
    model.eval()
    with torch.no_grad(), closing(split.stream(batches(len(split), task.evaluation_rows))) as parts:
        for stored in parts:
            outputs = task.outputs_in_torch(model, stored)
            for name, statistics in task.statistics(outputs, stored).items():
                sums[name] = sums.get(name, 0) + statistics.sum(dim=0)
    model.train(was_training)
    return {metric.name: metric.value(sums[metric.name].tolist()) for metric in task.metrics}


@dataclass
class _Progress:
    """How far a training is: whole epochs, steps of the current one, and what was added up so far."""

    epoch: int = 0
    step: int = 0
    # Over the steps of the current epoch, of all workers: the loss, and the statistics of the metric.
    sums: list[float] = field(default_factory=list)
    rows: int = 0  # over all epochs and workers
    seconds: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)

    @property
    def rows_per_s(self) -> float:
        """Of the training alone, without evaluation and checkpoints."""
        return self.rows / sum(self.seconds.get(name, 0.0) for name in ("data", "compute", "communication"))


@dataclass
class _Training:
    model: nn.Module
    data: Artifact[DatasetSpec]
    config: Hyperparameters
    out: Output
    group: Group
    stop: StopRequest
    distillation: Distillation | None

    def __post_init__(self) -> None:
        config, group, data = self.config, self.group, self.data
        self.task = task_of(data.spec.task)
        self.metric = self.task.metric
        fingerprint = _fingerprint(self.model, data, config, self.distillation)
        self.store = CheckpointStore(self.out.scratch / f"checkpoints-{fingerprint}")
        self.compute_device = choose_compute_device(config, group.local_rank)
        self.device = self.compute_device.device
        self.stopwatch = Stopwatch(self.device)
        self.learner = Learner(
            self.model, self.task, config, self.compute_device, self.stopwatch, group.size, self.distillation
        )
        self.train_set, self.validation_set = (
            StoredSplit(self.task.stored(data, split), split, self.device)
            for split in ("train", "validation")
        )
        for stored in (self.train_set, self.validation_set):
            if stored.residence and group.rank == 0:
                print(stored.residence, flush=True)
        self.batch_size = _batch_size(len(self.train_set), config, group, self.task.rows)
        self.steps_per_epoch = len(self.train_set) // self.batch_size
        self.progress = _Progress()
        # This worker's losses and statistics of this epoch; on the device, so no step waits for it.
        self.sums = torch.zeros(1 + self.metric.statistics, dtype=torch.float64, device=self.device)
        self.saved_at = self.reported_at = time.monotonic()
        # To what was asked at the last `_sync_stop_and_save`.
        self.answer: Callable[[], list[float]] = lambda: [0.0, 0.0, 0.0]

    def run(self) -> FitResult:
        try:
            self._resume()
            while self.progress.epoch < self.config.epochs:
                self._train_epoch()
                self._finish_epoch()
            self.answer()  # the group is left with nothing under way
            self._save()
            return self._fitted()
        finally:
            self.learner.leave_group()

    # ---------------------------------------------------------------------------------------------- training

    def _train_epoch(self) -> None:
        order = torch.randperm(len(self.train_set), generator=self._generator("order"))
        used = order[: self.steps_per_epoch * self.batch_size]
        to_come = torch.split(used, self.batch_size)[self.progress.step :]
        self.stopwatch.start()
        ahead = (part for rows in to_come for part in self._micro_batches(rows))
        with closing(self.train_set.stream(ahead)) as stored:
            for rows in to_come:
                self._train_step(rows, stored)
                self.progress.step += 1
                self.progress.rows += self.batch_size
                self._sync_stop_and_save()

    def _train_step(self, rows: Tensor, stored: Iterator[Batch]) -> None:
        """One optimizer step with `rows`; this worker takes its share in micro-batches."""
        torch.manual_seed(self._seed("network", self.progress.step, self.group.rank))
        # The draws belong to the place in the whole batch, so that neither the number of workers nor that of
        # micro-batches changes what becomes of a row.
        generator = self._generator("augment", self.progress.step)
        uniform = torch.rand(len(rows), self.task.draws, generator=generator) * 2 - 1
        micro_batches = self._micro_batches(uniform)
        changed = [*self.learner.model.buffers(), self.sums]  # by each part, before the step is whole
        before = [tensor.clone() for tensor in changed] if len(micro_batches) > 1 else []
        for number, drawn in enumerate(micro_batches, start=1):
            if number > 1:
                self._sync_stop_and_save(undo=list(zip(changed, before, strict=True)))
            part = next(stored)
            features = self.task.training_features(
                part,
                uniform=drawn.to(self.device) if self.task.draws else None,
                augment=self.config.augment,
                layout=self.compute_device.layout,
            )
            self.stopwatch.lap("data")
            share, last = 1 / len(micro_batches), number == len(micro_batches)
            self.sums += self.learner.accumulate_gradients(features, part, share=share, last=last)
        self.learner.step(self._learning_rate(self.progress.step))

    def _micro_batches(self, of_batch: Tensor) -> tuple[Tensor, ...]:
        """This worker's share of what there is for each row of a batch, in `accumulate` parts."""
        share = len(of_batch) // self.group.size
        mine = of_batch[self.group.rank * share : (self.group.rank + 1) * share]
        return torch.split(mine, share // self.config.accumulate)

    def _learning_rate(self, step: int) -> float:
        """At a step of the current epoch."""
        done = self.progress.epoch * self.steps_per_epoch + step
        return peak_learning_rate(self.config) * rate_factor(done, self.steps_per_epoch, self.config)

    def _seed(self, *what: object) -> int:
        """A seed for one use: what is drawn depends on where the training is, not on how it got there."""
        key = repr((self.config.seed, self.progress.epoch, *what))
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])

    def _generator(self, *what: object) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed(*what))

    # -------------------------------------------------------------------------------------- at an epoch's end

    def _finish_epoch(self) -> None:
        of_validation = self._validation_metric()
        loss_sum, *statistics = self.group.sum(self.sums.tolist())
        row = {
            "epoch": self.progress.epoch + 1,
            "loss": loss_sum / (self.steps_per_epoch * self.group.size),
            f"train_{self.metric.name}": self.metric.value(statistics),
            f"validation_{self.metric.name}": of_validation,
            "learning_rate": self._learning_rate(self.steps_per_epoch - 1),
        }
        self.progress.history.append(row)
        self.progress.epoch, self.progress.step = self.progress.epoch + 1, 0
        self.sums.zero_()
        self._count_time()
        if self.group.rank == 0:
            self._report_epoch(row)

    def _validation_metric(self) -> float:
        """Of the network that would be handed over now, in fp32; each worker takes some of the rows."""
        model = self.learner.result().eval()
        self.group.broadcast(list(model.buffers()))
        sums = torch.zeros(self.metric.statistics, dtype=torch.float64, device=self.device)
        shares = list(batches(len(self.validation_set), self.task.evaluation_rows))
        rounds = range(0, len(shares), self.group.size)  # as many for every worker
        mine = shares[self.group.rank :: self.group.size]
        with closing(self.validation_set.stream(mine)) as parts:
            for share, _ in itertools.zip_longest(mine, rounds):
                if share is not None:
                    with torch.no_grad():
                        stored = next(parts)
                        features = self.task.training_features(stored, layout=self.compute_device.layout)
                        statistics = self.task.statistics(model(*features), stored)
                        sums += statistics[self.metric.name].sum(dim=0)
                self.stopwatch.lap("evaluation")
                self._sync_stop_and_save()
        model.train()
        return self.metric.value(self.group.sum(sums.tolist()))

    def _fitted(self) -> FitResult:
        macs = models.count(self.learner.model, self.task)[1]
        flops_per_row = 3 * 2 * macs  # the backward pass costs twice the forward pass
        if self.learner.teacher is not None:
            flops_per_row += 2 * models.count(self.learner.teacher, self.task)[1]
        rows_per_s = self.progress.rows_per_s
        metrics = {
            **{name: value for name, value in self.progress.history[-1].items() if name != "epoch"},
            **{f"{phase}_s": seconds for phase, seconds in self.progress.seconds.items()},
            f"{self.task.units}_per_s": rows_per_s * self.task.units_per_row,
            "gflop_per_s": rows_per_s * flops_per_row / 1e9,
        }
        model = self.learner.result().eval()
        quality = {self.metric.name: self.progress.history[-1][f"validation_{self.metric.name}"]}
        if len(self.task.metrics) > 1:
            quality = evaluate(model, self.data) | quality
        return FitResult(CPU_FP32.put(model), quality, tuple(self.progress.history), metrics)

    # ----------------------------------------------------------------------------------------- between steps

    def _sync_stop_and_save(self, undo: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Do together what any worker has a reason for: fail, save, stop.

        In a group it is what they had when this was called before: no step waits for the others to answer.
        undo: inside of a step, the tensors that its first parts changed, and what they held before it.
        """
        now = time.monotonic()
        is_reporting = now - self.reported_at >= REPORT_EVERY_S
        epoch, step = self.progress.epoch, self.progress.step
        if is_reporting:
            self.reported_at = now
            if self.group.rank == 0 and step:
                self._report_progress(epoch + 1, step, loss=self.sums[0].item() / step)
        at_end = step == self.steps_per_epoch
        is_cheap = self.device.type == "cpu"  # on a GPU, to look at the loss is to wait for it
        is_bad = (is_cheap or is_reporting or at_end) and not math.isfinite(self.sums[0].item())
        is_due = now - self.saved_at >= self.config.checkpoint_every_s
        wanted = [float(self.stop.signal), is_bad, is_due]
        stopped_by, any_bad, any_due = wanted
        if self.group.size > 1:
            stopped_by, any_bad, any_due = self.answer()
            self.stopwatch.lap("communication")
        if any_bad:
            raise self._not_finite()
        if stopped_by:
            for tensor, before in undo:
                tensor.copy_(before)
        if stopped_by or (any_due and not undo):
            self._save()
            wanted[2] = False
        if stopped_by == signal.SIGINT:
            raise KeyboardInterrupt
        if stopped_by:
            raise Terminated(
                "the training was stopped by SIGTERM", why=f"saved {self._place()}", fix="run again to resume"
            )
        if self.group.size > 1:
            self.answer = self.group.all_reduce_max_async(wanted)

    def _place(self) -> str:
        return f"in epoch {self.progress.epoch + 1}, after step {self.progress.step}"

    def _not_finite(self) -> StageFailed:
        rate = peak_learning_rate(self.config)
        dtype = str(self.compute_device.dtype).removeprefix("torch.")
        return StageFailed(
            f"the loss is no longer finite in epoch {self.progress.epoch + 1}, step {self.progress.step}",
            why=f"most often the learning rate is too high: its peak is {rate:g}, in {dtype}",
            fix=f"lower learning_rate, for example to {rate / 5:g}, or raise warmup_epochs",
        )

    def _save(self) -> None:
        self.progress.sums = self.group.sum(self.sums.tolist())
        self._count_time()
        if self.group.rank == 0:
            tensors, scaler = self.learner.state()
            step = self.progress.epoch * (self.steps_per_epoch + 1) + self.progress.step
            state = {"progress": asdict(self.progress), "scaler": scaler, "workers": self.group.size}
            self.store.write(step, Checkpoint(tensors, state))
        self.stopwatch.lap("checkpoint")
        self.saved_at = time.monotonic()

    def _resume(self) -> None:
        data = self.group.broadcast_bytes(self.store.read_newest() if self.group.rank == 0 else None)
        if data is None:
            return
        checkpoint = Checkpoint.from_bytes(data)
        self.progress = _Progress(**checkpoint.state["progress"])
        self.learner.restore(checkpoint.tensors, checkpoint.state["scaler"])
        if self.group.rank == 0:  # which saved the sums of all
            (loss_sum, *statistics), workers = self.progress.sums, checkpoint.state["workers"]
            changed = ""
            if workers != self.group.size:  # each worker adds the mean loss of its share of a batch
                loss_sum *= self.group.size / workers
                changed = f", with {self.group.size} workers instead of {workers}"
            self.sums.copy_(torch.tensor([loss_sum, *statistics], dtype=self.sums.dtype))
            print(f"resuming {self._place()}{changed}", flush=True)

    def _count_time(self) -> None:
        for phase, seconds in self.stopwatch.take().items():
            self.progress.seconds[phase] = self.progress.seconds.get(phase, 0.0) + seconds

    # ------------------------------------------------------------------------------------------ what is told

    def _report_progress(self, epoch: int, step: int, loss: float) -> None:
        done = (epoch - 1) * self.steps_per_epoch + step
        note = f"epoch {epoch}/{self.config.epochs}, loss {loss:.3f}"
        self.out.progress(done, self.config.epochs * self.steps_per_epoch, "steps", note)

    def _report_epoch(self, row: dict[str, float]) -> None:
        epoch, units = self.progress.epoch, self.task.units
        rate = self.progress.rows_per_s * self.task.units_per_row
        self._report_progress(epoch, self.steps_per_epoch, row["loss"])
        for name, value in (row | {f"{units}_per_s": rate}).items():
            if name != "epoch":
                self.out.metric(name, value, index=epoch)
        of_train, of_validation = (
            self.metric.in_words(row[f"{split}_{self.metric.name}"]) for split in ("train", "validation")
        )
        print(
            f"epoch {epoch}/{self.config.epochs}: loss {row['loss']:.4f},"
            f" {self.metric.label} train {of_train}, validation {of_validation},"
            f" learning rate {row['learning_rate']:.2g}, {rate:.0f} {units}/s",
            flush=True,
        )


def _batch_size(rows: int, config: Hyperparameters, group: Group, called: str) -> int:
    """Rows per step: what the config says, or as many as there are."""
    shares = group.size * config.accumulate
    if config.batch_size % shares:
        raise ConfigInvalid(
            f"batch_size {config.batch_size} is not a multiple of {shares}",
            why=f"it is shared by {group.size} workers, each in {config.accumulate} parts",
        )
    size = min(config.batch_size, rows - rows % shares)
    if size == 0:
        raise ConfigInvalid(f"{rows} {called} are too few for {shares} shares of a batch")
    if size < config.batch_size:
        print(f"the batch is {size} {called} instead of {config.batch_size}: there are no more", flush=True)
    return size


def _fingerprint(
    model: nn.Module,
    data: Artifact[DatasetSpec],
    config: Hyperparameters,
    distillation: Distillation | None,
) -> str:
    """What tells this training from another one: a checkpoint of another is not resumed."""
    decisive = set(Hyperparameters.model_fields) - {"checkpoint_every_s"}
    settings = config.model_dump(mode="json", include=decisive)
    networks = [model, distillation.teacher] if distillation else [model]
    states = [Checkpoint(dict(network.state_dict()), {}).to_bytes() for network in networks]
    weights = [hashlib.sha256(state).hexdigest() for state in states]
    text = canonical_json([settings, data.digest, weights, repr(distillation)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
