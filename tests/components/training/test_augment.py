"""Augmentation: what it may do to an image, and what it may not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hpml.tasks.image_classification.augment import augmented
from hpml.tasks.image_classification.augment_options import Augment
from hpml.tasks.image_classification.task import ImageClassification

OFF = Augment(shift=0, rotation_degrees=0, scale=0)


def pixels(rows: int = 8, channels: int = 3, height: int = 12, width: int = 8) -> Tensor:
    return torch.rand(rows, channels, height, width, generator=torch.Generator().manual_seed(0))


def numbers(rows: int = 8, seed: int = 0) -> Tensor:
    return torch.rand(rows, ImageClassification.draws, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def at(**values: float) -> Tensor:
    """The numbers of one image, 0 unless named."""
    names = ("shift_y", "shift_x", "rotation", "scale", "flip", "cutout_y", "cutout_x")
    return torch.tensor([[values.get(name, 0.0) for name in names]])


def test_all_off_changes_nothing() -> None:
    x = pixels()
    assert augmented(x, numbers(), OFF) is x


def test_the_same_numbers_give_the_same_images_whatever_the_batch_around_them() -> None:
    x, uniform = pixels(), numbers()
    config = Augment(flip=True, cutout=0.3)
    whole = augmented(x, uniform, config)
    assert torch.equal(whole, augmented(x, numbers(), config))
    assert torch.equal(whole[2:5], augmented(x[2:5], uniform[2:5], config))
    assert not torch.equal(whole, augmented(x, numbers(seed=1), config))


@given(
    shift=st.floats(0, 0.5), rotation=st.floats(0, 180), scale=st.floats(0, 0.9),
    flip=st.booleans(), cutout=st.floats(0, 0.9), seed=st.integers(0, 99),
)  # fmt: skip
def test_shapes_and_range_stay(
    shift: float, rotation: float, scale: float, flip: bool, cutout: float, seed: int
) -> None:
    config = Augment(shift=shift, rotation_degrees=rotation, scale=scale, flip=flip, cutout=cutout)
    x = pixels(rows=4)
    y = augmented(x, numbers(rows=4, seed=seed), config)
    assert y.shape == x.shape and y.dtype == x.dtype
    assert y.min() >= 0 and y.max() <= 1 + 1e-5


@given(y=st.integers(-3, 3), x=st.integers(-2, 2))
def test_a_shift_is_by_whole_pixels_and_fills_with_black(y: int, x: int) -> None:
    image = pixels(rows=1)
    moved = augmented(
        image, at(shift_y=y / 3, shift_x=x / 2), Augment(shift=0.25, rotation_degrees=0, scale=0)
    )
    padded = torch.nn.functional.pad(image, (2, 2, 3, 3))
    assert torch.allclose(moved, padded[:, :, 3 + y : 15 + y, 2 + x : 10 + x], atol=1e-5)


def test_digits_are_not_mirrored_unless_asked() -> None:
    image = pixels(rows=1)
    mirrored = OFF.model_copy(update={"flip": True})
    assert torch.equal(augmented(image, at(flip=-1), OFF), image)
    assert torch.allclose(augmented(image, at(flip=-1), mirrored), image.flip(3), atol=1e-5)
    assert torch.allclose(augmented(image, at(flip=1), mirrored), image, atol=1e-5)


def test_a_quarter_turn() -> None:
    image = pixels(rows=1, height=8, width=8)
    turned = augmented(image, at(rotation=1), Augment(shift=0, rotation_degrees=90, scale=0))
    assert torch.allclose(turned, image.rot90(1, (2, 3)), atol=1e-4)


@pytest.mark.parametrize(("number", "larger"), [(1.0, True), (-1.0, False)])
def test_scale(number: float, larger: bool) -> None:
    square = torch.zeros(1, 1, 16, 16)
    square[:, :, 5:11, 5:11] = 1
    scaled = augmented(square, at(scale=number), Augment(shift=0, rotation_degrees=0, scale=0.3))
    assert (scaled.sum() > square.sum()) == larger


@pytest.mark.parametrize("center", [0.0, 0.99, -0.99])
def test_cutout_blanks_a_square_that_may_reach_over_the_edge(center: float) -> None:
    ones = torch.ones(1, 2, 20, 20)
    cut = augmented(ones, at(cutout_y=center, cutout_x=0.0), OFF.model_copy(update={"cutout": 0.5}))
    blank = int((cut[0, 0] == 0).sum())
    assert blank == (100 if center == 0 else 50)
    assert torch.equal(cut[0, 0], cut[0, 1])
    assert set(cut.unique().tolist()) == {0.0, 1.0}
