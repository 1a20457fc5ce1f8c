"""Averaging gradients over the workers while the backward pass goes on."""

# Without `from __future__ import annotations`: torch compares the hook's annotations with types.

import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel


def data_parallel(
    model: nn.Module, device: torch.device, *, static_graph: bool, on_bucket: Callable[[], None]
) -> DistributedDataParallel:
    """`model` as one of the equal copies of its group.

    on_bucket: called when a bucket of gradients is ready and its all-reduce starts; after the last one the
    backward pass only waits. static_graph: every step uses the same weights, each once.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames broadcast_buffers; 2.8 needs it
        network = DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            broadcast_buffers=False,  # training reads none of them, and those of rank 0 count
            gradient_as_bucket_view=True,
            static_graph=static_graph,
        )
    group = network.process_group

    def reduce(state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        on_bucket()
        return allreduce_hook(group, bucket)

    network.register_comm_hook(None, reduce)
    return network
