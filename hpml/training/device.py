"""Where and in which precision a training computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from hpml.core import hardware
from hpml.core.errors import ConfigInvalid
from hpml.training.config import Hyperparameters


@dataclass(frozen=True)
class ComputeDevice:
    """Where a network computes.

    dtype: of matrix products and convolutions; float32 means no mixed precision. layout: of images in memory.
    """

    device: torch.device
    dtype: torch.dtype
    layout: torch.memory_format

    def put(self, model: nn.Module) -> nn.Module:
        """`model`, moved here in place."""
        return model.to(device=self.device, memory_format=self.layout)  # type: ignore[call-overload, no-any-return]


CPU_FP32 = ComputeDevice(torch.device("cpu"), torch.float32, torch.contiguous_format)


def choose_compute_device(config: Hyperparameters, local_rank: int) -> ComputeDevice:
    """The compute device of the worker with this number on its machine.

    Raises ConfigInvalid if the machine, or torch, lacks what `config` names.
    """
    device = _choose_device(config.device, local_rank)
    layout = torch.channels_last if config.channels_last else torch.contiguous_format
    return ComputeDevice(device, _choose_dtype(config.precision, device), layout)


def _choose_device(wanted: str, local_rank: int) -> torch.device:
    """ "auto" is the GPU where torch can use one."""
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    present = len(hardware.gpu_names())
    if wanted == "cpu" or (wanted == "auto" and not usable):
        if wanted == "auto" and present:
            print(f"this machine has {present} GPU(s), this build of torch uses none: training on the CPU")
        return torch.device("cpu")
    if local_rank >= usable:
        raise ConfigInvalid(
            f"worker {local_rank} has no GPU of its own",
            why=f"torch {torch.__version__} can use {usable} of this machine's {present}",
            fix="lower nproc_per_node, install the CUDA build of torch, or set device: cpu",
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """ "auto" is mixed where the hardware gains by it: bf16 on a GPU that has it, fp16 on an older one, bf16
    on a CPU with AMX (with AVX512-BF16 alone it is slower than fp32)."""
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if wanted == "bf16" and not has_bf16:
            name = torch.cuda.get_device_name(device)
            raise ConfigInvalid(f"precision is bf16, which {name} only emulates", fix="set precision: fp16")
        best = "bf16" if has_bf16 else "fp16"
    else:
        best = "bf16" if "amx_bf16" in hardware.cpu_flags() else "fp32"
    chosen = best if wanted == "auto" else wanted
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[chosen]
