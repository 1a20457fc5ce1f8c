"""Train a network on a dataset, in one process or in many."""

from __future__ import annotations

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.components.train.config import TrainConfig
from hpml.core.contract import Output, Result


def run(config: TrainConfig, *, data: Artifact[DatasetSpec], out: Output) -> Result[ModelSpec]:
    """Train, and write `model.safetensors` and `history.json`, which is empty where there are no epochs.

    Resumes from the checkpoints of an interrupted attempt in `out.scratch`. Raises StageFailed if the loss
    is no longer finite, ConfigInvalid if the network does not take the images or `weights` are not of it,
    Terminated after SIGTERM.
    """
    from hpml.training.distributed import is_launched

    if config.workers > 1 and not is_launched():  # a launcher has said how many
        from hpml.components.train.multiprocess import train_in_workers

        return train_in_workers(config, data, out)
    from hpml.components.train.local import train

    return train(config, data, out)
