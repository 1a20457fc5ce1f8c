"""The training loop: the same for one process and for many, for a first training and for a fine-tune."""

from __future__ import annotations

import copy
import hashlib
import math
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from components import models
from components.artifacts import Artifact, DatasetSpec, InputSpec
from components.contract import Output, StageFailed, Terminated, canonical_json
from components.images import batches
from components.training.augment import augment, draw
from components.training.checkpoint import Checkpoint, CheckpointStore
from components.training.config import Hyperparameters
from components.training.device import choose_device, choose_dtype, gemm_flops_per_s
from components.training.distributed import Group, joined_group
from components.training.image_set import ImageSet
from components.training.losses import DistillationLoss
from components.training.optimizers import build_optimizer, peak_learning_rate
from components.training.schedule import rate_factor
from components.training.stopping import StopRequest
from components.training.stopwatch import Stopwatch

EVALUATION_BATCH = 250
REPORT_EVERY_S = 0.3


@dataclass(frozen=True)
class Fitted:
    """A trained network, on the CPU in evaluation mode (the averaged weights, where there is an average).

    history: one row an epoch, the same whenever the training is repeated: epoch, loss, train_accuracy (of the
    augmented images), test_accuracy, learning_rate. metrics: the last accuracies and what the training cost:
    images_per_s, the seconds by phase (data_s, compute_s, communication_s: waiting for gradients that the
    backward pass did not hide, evaluation_s), and gemm_peak_share.
    """

    model: nn.Module
    history: tuple[dict[str, float], ...]
    metrics: Mapping[str, float]


def fit(
    model: nn.Module,
    data: Artifact[DatasetSpec],
    input_spec: InputSpec,
    config: Hyperparameters,
    out: Output,
    *,
    teacher: nn.Module | None = None,
    distillation: DistillationLoss | None = None,
) -> Fitted:
    """Train `model`, in place, on the train split of `data`, and evaluate it on the test split every epoch.

    With `distillation` the loss includes the logits of `teacher`. In a process that torchrun started, it joins
    the others. Checkpoints go to `out.scratch`, and a training that was interrupted goes on from the newest.
    Raises StageFailed if the loss is no longer finite; Terminated (KeyboardInterrupt) once the state is saved
    after SIGTERM (SIGINT); ConfigInvalid if the hardware lacks what `config` names.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with joined_group() as group, StopRequest() as stop, torch.random.fork_rng(devices):
        return _Training(model, data, input_spec, config, out, group, stop, teacher, distillation).run()


def evaluate(
    model: nn.Module, data: Artifact[DatasetSpec], input_spec: InputSpec, split: str = "test"
) -> NDArray[np.float32]:
    """Logits (rows, classes) of `model` over a split of `data`, in fp32 on the device that the model is on."""
    images = ImageSet(data, split, input_spec, next(model.parameters()).device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = [
            model(images.normalise(images.pixels_nchw(rows), torch.contiguous_format)).cpu()
            for rows in batches(len(images), EVALUATION_BATCH)
        ]
    model.train(was_training)
    return torch.cat(logits).numpy()


@dataclass
class _Progress:
    """How far a training is: whole epochs, steps of the current one, and what was added up so far."""

    epoch: int = 0
    step: int = 0
    loss_sum: float = 0.0  # of this worker, over the steps of the current epoch
    correct: float = 0.0
    images: int = 0  # over all epochs and workers
    seconds: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, float]] = field(default_factory=list)


class _Training:
    def __init__(
        self,
        model: nn.Module,
        data: Artifact[DatasetSpec],
        input_spec: InputSpec,
        config: Hyperparameters,
        out: Output,
        group: Group,
        stop: StopRequest,
        teacher: nn.Module | None,
        distillation: DistillationLoss | None,
    ) -> None:
        self.input_spec, self.config, self.out = input_spec, config, out
        self.group, self.stop, self.distillation = group, stop, distillation
        self.device = choose_device(config.device, group.local_rank)
        self.dtype = choose_dtype(config.precision, self.device)
        self.layout = torch.channels_last if config.channels_last else torch.contiguous_format
        self.store = CheckpointStore(
            out.scratch / f"checkpoints-{_fingerprint(model, data, config, teacher, distillation)}"
        )

        self.model = model.train().to(device=self.device, memory_format=self.layout)
        self.teacher = copy.deepcopy(teacher)
        if self.teacher is not None:
            self.teacher.eval().requires_grad_(False).to(device=self.device, memory_format=self.layout)
        self.average = _average(self.model, config.ema_decay) if config.ema_decay else None
        self.optimizer = build_optimizer(self.model, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)

        self.train_set = ImageSet(data, "train", input_spec, self.device)
        self.test_set = ImageSet(data, "test", input_spec, self.device)
        self.batch_size = _batch_size(len(self.train_set), config, group)
        self.steps_per_epoch = len(self.train_set) // self.batch_size
        self.progress = _Progress()
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, correct, of this epoch
        self.stopwatch = Stopwatch(self.device)
        self.saved_at = self.reported_at = time.monotonic()

    def run(self) -> Fitted:
        self._resume()
        self.network = self._distributed(self.model)
        while self.progress.epoch < self.config.epochs:
            self._train_epoch()
            self._finish_epoch()
        self._save()
        return self._fitted()

    def _distributed(self, model: nn.Module) -> nn.Module:
        """`model`, its gradients averaged over the group in buckets while the backward pass goes on."""
        if self.group.size == 1:
            return model
        network = DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            broadcast_buffers=False,  # training does not read them; those of rank 0 count
            gradient_as_bucket_view=True,
            static_graph=self.config.accumulate == 1,
        )

        def reduce_bucket(state: None, bucket: Any) -> torch.futures.Future[Tensor]:
            self.stopwatch.lap("compute")  # the last bucket's lap begins the wait
            return allreduce_hook(None, bucket)

        network.register_comm_hook(None, reduce_bucket)
        return network

    # ------------------------------------------------------------------------------------------------ training

    def _train_epoch(self) -> None:
        order = torch.randperm(len(self.train_set), generator=self._generator("order"))
        self.stopwatch.start()
        while self.progress.step < self.steps_per_epoch:
            start = self.progress.step * self.batch_size
            self._train_step(order[start : start + self.batch_size])
            self.progress.step += 1
            self.progress.images += self.batch_size
            self._leave_if_needed()
            if time.monotonic() - self.saved_at >= self.config.checkpoint_every_s:
                self._save()

    def _train_step(self, rows: Tensor) -> None:
        """One optimizer step with the images of `rows`, of which this worker takes its share in parts."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        torch.manual_seed(self._seed("network", self.progress.step, self.group.rank))
        parts = self._parts(rows)
        buffers = [buffer.clone() for buffer in self.model.buffers()] if len(parts) > 1 else []
        for index, (part, uniform) in enumerate(parts):
            if index:
                self._leave_if_needed(buffers)
            x, labels = self._batch(part, uniform)
            self.stopwatch.lap("data")
            with self._no_sync_before(index == len(parts) - 1):
                loss = self._loss(x, labels) / len(parts)
                self.scaler.scale(loss).backward()
            self.stopwatch.lap("compute" if self.group.size == 1 else "communication")
            self.sums[0] += loss.detach()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.model)
        self.stopwatch.lap("compute")

    def _parts(self, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """This worker's share of a batch in `accumulate` parts: rows, and the draws of their augmentation.

        The draws belong to the place in the whole batch, so that neither the number of workers nor that of
        parts changes what an image looks like.
        """
        uniform = draw(len(rows), self._generator("augment", self.progress.step))
        share = len(rows) // self.group.size
        mine = slice(self.group.rank * share, (self.group.rank + 1) * share)
        size = share // self.config.accumulate
        return list(zip(rows[mine].split(size), uniform[mine].split(size), strict=True))

    def _batch(self, rows: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        rows, uniform = rows.to(self.device), uniform.to(self.device)
        pixels = augment(self.train_set.pixels_nchw(rows), uniform, self.config.augment)
        return self.train_set.normalise(pixels, self.layout), self.train_set.labels[rows]

    def _no_sync_before(self, last: bool) -> AbstractContextManager[None]:
        """Gradients of all parts but the last only add up locally."""
        if isinstance(self.network, DistributedDataParallel) and not last:
            return self.network.no_sync()
        return nullcontext()

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self._forward(self.network, x)
        self.sums[1] += (logits.argmax(dim=1) == labels).sum()
        loss = functional.cross_entropy(logits, labels, label_smoothing=self.config.label_smoothing)
        if self.teacher is None or self.distillation is None:
            return loss
        with torch.no_grad():
            teacher_logits = self._forward(self.teacher, x)
        return self.distillation(logits, teacher_logits, loss)

    def _forward(self, network: nn.Module, x: Tensor) -> Tensor:
        mixed = self.dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.dtype if mixed else None, enabled=mixed):
            return network(x).float()

    def _learning_rate(self) -> float:
        step = self.progress.epoch * self.steps_per_epoch + self.progress.step
        return peak_learning_rate(self.config) * rate_factor(step, self.steps_per_epoch, self.config)

    def _seed(self, *what: object) -> int:
        """A seed for one use in one epoch: randomness depends on where the training is, not on how it got there."""
        key = repr((self.config.seed, self.progress.epoch, *what))
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])

    def _generator(self, *what: object) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed(*what))

    # -------------------------------------------------------------------------------------------- after an epoch

    def _finish_epoch(self) -> None:
        learning_rate = self._learning_rate()
        loss_sum, correct = self.group.sum(self.sums.tolist())
        seconds = self._take_seconds()
        test_accuracy = self._test_accuracy()
        seconds["evaluation"] = self._take_seconds()["evaluation"]
        images = self.steps_per_epoch * self.batch_size
        row = {
            "epoch": self.progress.epoch + 1,
            "loss": loss_sum / (self.steps_per_epoch * self.group.size),
            "train_accuracy": correct / images,
            "test_accuracy": test_accuracy,
            "learning_rate": learning_rate,
        }
        self.progress.history.append(row)
        self.progress.epoch, self.progress.step = self.progress.epoch + 1, 0
        self.sums.zero_()
        if self.group.rank == 0:
            self._report_epoch(row | {"images_per_s": images / _training_seconds(seconds)})

    def _test_accuracy(self) -> float:
        """Top-1 of the network as it will be handed over, in fp32; every worker takes a part of the rows."""
        model = self._result().eval()
        self.group.share(list(model.buffers()))
        correct = 0
        size = EVALUATION_BATCH * self.group.size
        for rows in batches(len(self.test_set), size):
            mine = slice(rows.start + self.group.rank * EVALUATION_BATCH, rows.stop)
            mine = slice(mine.start, min(mine.start + EVALUATION_BATCH, mine.stop))
            if mine.start < mine.stop:
                with torch.no_grad():
                    logits = model(self.test_set.normalise(self.test_set.pixels_nchw(mine), self.layout))
                correct += int((logits.argmax(dim=1) == self.test_set.labels[mine]).sum())
            self._leave_if_needed()
        model.train()
        self.stopwatch.lap("evaluation")
        return self.group.sum([correct])[0] / len(self.test_set)
