"""The learning rate as a function of the step, so that a resumed training needs no state for it."""

from __future__ import annotations

import math

from hpml.training.config import Hyperparameters

WARMUP_SHARE = {"one-cycle": 0.3, "cosine": 0.05}  # of the whole training, where the config names no epochs
ONE_CYCLE_START = 1 / 25  # of the peak, as in Smith and Topin


def rate_factor(step: int, steps_per_epoch: int, config: Hyperparameters) -> float:
    """What to multiply the peak learning rate by at `step`, counted from 0 over all epochs; in (0, 1].

    cosine: linear warm-up, then half a cosine to 0 (Loshchilov and Hutter 2017, arXiv:1608.03983).
    one-cycle: half a cosine up from 1/25, a longer one down to 0 (Smith and Topin 2018, arXiv:1708.07120;
    the momentum is left alone).
    """
    total = config.epochs * steps_per_epoch
    share = WARMUP_SHARE[config.schedule]
    warmup = total * share if config.warmup_epochs is None else config.warmup_epochs * steps_per_epoch
    if step + 1 <= warmup:
        done = (step + 1) / warmup
        return done if config.schedule == "cosine" else _between(ONE_CYCLE_START, 1.0, done)
    return _between(1.0, 0.0, (step + 1 - warmup) / (total + 1 - warmup))


def _between(start: float, end: float, done: float) -> float:
    """From `start` (done = 0) to `end` (done = 1) along half a cosine."""
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2
