"""Random changes to a whole batch at once, on its device."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from hpml.tasks.image_classification.augment_options import Augment


def augmented(pixels_nchw: Tensor, uniform: Tensor, config: Augment) -> Tensor:
    """The images changed by their random numbers; what comes in from outside is black.

    pixels_nchw: float (batch, channels, height, width), 0 is black. uniform: (batch, 7) in [-1, 1), for
    shift y, shift x, rotation, scale, flip, cutout y, cutout x. The same numbers give the same images.
    """
    if config.shift or config.rotation_degrees or config.scale or config.flip:
        grid = functional.affine_grid(
            _affine(uniform, config, pixels_nchw.shape[-2:]), list(pixels_nchw.shape), align_corners=False
        )
        pixels_nchw = functional.grid_sample(pixels_nchw, grid, align_corners=False)
    if config.cutout:
        pixels_nchw = pixels_nchw * _kept(uniform, config.cutout, pixels_nchw.shape[-2:])
    return pixels_nchw


def _affine(uniform: Tensor, config: Augment, size_hw: torch.Size) -> Tensor:
    """Where each output position reads: (batch, 2, 3), in coordinates from -1 to 1 over the image."""
    height, width = size_hw
    shift_y, shift_x, rotation, scale, flip = uniform[:, :5].unbind(1)
    angle = rotation * math.radians(config.rotation_degrees)
    zoom = 1 / (1 + scale * config.scale)
    mirror = torch.where(flip < 0, -1.0, 1.0) if config.flip else torch.ones_like(flip)
    cosine, sine = zoom * angle.cos(), zoom * angle.sin()
    move_x = (shift_x * config.shift * width).round() * 2 / width
    move_y = (shift_y * config.shift * height).round() * 2 / height
    row_x = torch.stack([cosine * mirror, -sine * height / width, move_x], dim=1)
    row_y = torch.stack([sine * mirror * width / height, cosine, move_y], dim=1)
    return torch.stack([row_x, row_y], dim=1)


def _kept(uniform: Tensor, side: float, size_hw: torch.Size) -> Tensor:
    """0 inside of each image's blanked square, 1 elsewhere: (batch, 1, height, width)."""
    height, width = size_hw
    center_y, center_x = uniform[:, 5:7, None].unbind(1)
    off_y = (torch.linspace(-1, 1, height, device=uniform.device) - center_y).abs() > side
    off_x = (torch.linspace(-1, 1, width, device=uniform.device) - center_x).abs() > side
    return (off_y[:, :, None] | off_x[:, None, :])[:, None].float()
