"""How many of 8 bits numbers keep."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hpml.tasks.effective_bits import LEAST_BITS, effective_bits


def bits_kept(x: np.ndarray) -> float:
    """Of 256 steps over the whole range."""
    scale = np.abs(x).max() / 127.5
    return effective_bits(np.square(np.rint(x / scale) * scale - x).sum() / np.square(x).sum())


def test_an_ideal_converter_has_its_bits() -> None:
    """A full-scale sine, of which the definition is."""
    sine = np.sin(np.linspace(0, 2 * np.pi * 997, 1_000_003))
    assert bits_kept(sine) == pytest.approx(8, abs=0.05)


def test_spikes_take_bits_and_tails_do_not_take_half() -> None:
    random = np.random.default_rng(0)
    normal, laplace = random.normal(size=1_000_000), random.laplace(size=1_000_000)
    assert bits_kept(normal) == pytest.approx(6, abs=0.3)
    assert LEAST_BITS < bits_kept(laplace) < 5.5
    normal[0] = 100
    assert bits_kept(normal) < LEAST_BITS


def test_what_is_not_rounded_keeps_all() -> None:
    assert effective_bits(0.0) == math.inf
