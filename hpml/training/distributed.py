"""Several processes that train one network: how they find each other, agree, and are started and ended.

It reads the environment: `torchrun` and the training operators of Kubernetes say there who a process is, and
`run_workers` says the same to its workers. Imports torch only when used.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpml.core.errors import ConfigInvalid, ExitCode, StageFailed, Terminated, Unavailable
from hpml.training.stopping import StopRequest

if TYPE_CHECKING:
    import torch

GRACE_S = 10.0  # for workers to end by themselves once one has ended badly or all were asked to stop


@dataclass(frozen=True)
class Group:
    """The processes that train together; alone, every method returns at once what it was given."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element by element, the sum of `values` over the group."""
        return self._all_reduce_async(values, "SUM")()

    def all_reduce_max_async(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """The largest of `values` in the group, element by element; what it returns waits for the answer."""
        return self._all_reduce_async(values, "MAX")

    def _all_reduce_async(self, values: Sequence[float], operation: str) -> Callable[[], list[float]]:
        if self.size == 1:
            return lambda: list(values)
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation), async_op=True)

        def answer() -> list[float]:
            assert work is not None  # it is asynchronous
            work.wait()
            return list(tensor.tolist())

        return answer

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all processes the contents of rank 0's `tensors`, in place."""
        if self.size > 1:
            import torch.distributed as dist

            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def broadcast_bytes(self, data: bytes | None) -> bytes | None:
        """What rank 0 gave."""
        if self.size == 1:
            return data
        import torch

        size = torch.tensor([-1 if data is None else len(data)])
        self.broadcast([size])
        if size < 0:
            return None
        content = torch.frombuffer(bytearray(data or int(size)), dtype=torch.uint8)
        self.broadcast([content])
        return content.numpy().tobytes()


def is_launched() -> bool:
    """Whether a launcher such as torchrun started this process as a worker, be it the only one."""
    return "WORLD_SIZE" in os.environ


def in_group() -> bool:
    """Whether this process was started as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def rank() -> int:
    """The number of this process in its group, known before it is joined."""
    return int(os.environ.get("RANK", "0"))


def workers_on_this_machine() -> int:
    """How many processes of its group run beside this one, itself included: they share its CPUs."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def parent() -> int:
    """The process that started this worker; see `run_workers`."""
    return int(os.environ["HPML_PARENT"])


@contextmanager
def joined_group() -> Iterator[Group]:
    """The group that this process was started in, joined; a group of one if it was started alone.

    Raises ConfigInvalid if the environment says only half of it, and Unavailable, inside, if another process
    of the group is gone.
    """
    if not in_group():
        yield Group()
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigInvalid(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and {', '.join(missing)} is not set",
            why="a worker has to know its number and where the first one listens",
            fix="start the workers with torchrun, or unset WORLD_SIZE",
        )
    import torch
    import torch.distributed as dist

    with _lost_workers_explained():
        # Control messages and CPU gradients go through gloo, gradients on GPUs through NCCL.
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        try:
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            yield Group(dist.get_rank(), dist.get_world_size(), local_rank)
        finally:
            gc.collect()  # copies of a network are in cycles, and abort the process if they outlive the group
            dist.destroy_process_group()


@contextmanager
def _lost_workers_explained() -> Iterator[None]:
    """What gloo, NCCL or their store raise when another worker is gone, as Unavailable: it can be resumed."""
    import torch.distributed as dist

    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo/transport/" not in str(error):
            raise
        raise Unavailable(
            "another worker of this training is gone",
            why=" ".join(str(error).split())[:200],
            fix="its log says why; run again to resume from the last checkpoint",
        ) from None


# ------------------------------------------------------------------------------------- starting local workers


def run_workers(module: str, argument: str, *, count: int, threads: int) -> list[int]:
    """Run `python -m module argument` in `count` processes that form a group; return their exit statuses.

    They share `threads`, and die with this process whatever ends it. SIGTERM and SIGINT are passed on. Then,
    and also when one of them has failed, they have GRACE_S to end before they are killed.
    Raises Terminated or KeyboardInterrupt if they were stopped, StageFailed if a signal ended one of them.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers: list[subprocess.Popen[bytes]] = []
    with StopRequest() as stop:
        try:
            for rank in range(count):
                environment = _worker_environment(rank, count, max(1, threads // count), store.port)
                workers.append(subprocess.Popen([sys.executable, "-m", module, argument], env=environment))
            statuses = _wait(workers, stop)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    return _checked(statuses, stop)


def _checked(statuses: list[int | None], stop: StopRequest) -> list[int]:
    """The exit statuses; None, a worker that had to be killed because of the others, counts as 0."""
    if stop.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if stop.signal or ExitCode.TERMINATED in statuses:
        raise Terminated("the training workers were stopped by SIGTERM", fix="run again to resume")
    for rank, status in enumerate(statuses):
        if status is not None and status < 0:
            raise StageFailed(
                f"training worker {rank} of {len(statuses)} was ended by {signal.Signals(-status).name}",
                why="if it was not you, it is most often the kernel, short of memory",
                fix="lower batch_size or nproc_per_node, then run again: it resumes from the last checkpoint",
            )
    return [status or 0 for status in statuses]


def _worker_environment(rank: int, count: int, threads: int, port: int) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is this process's: there is no race for a port
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(threads),
        "HPML_PARENT": str(os.getpid()),
    }


def _wait(workers: Sequence[subprocess.Popen[bytes]], stop: StopRequest) -> list[int | None]:
    """The exit statuses once all have ended, or GRACE_S after one failed or all were asked to stop."""
    deadline = float("inf")
    asked = False
    while None in (statuses := [worker.poll() for worker in workers]) and time.monotonic() < deadline:
        if stop.signal and not asked:
            asked = True
            for worker in workers:
                worker.send_signal(stop.signal)
        if deadline == float("inf") and (asked or any(statuses)):
            deadline = time.monotonic() + GRACE_S
        time.sleep(0.02)
    return statuses
