"""The process of one measured engine: python -m components.benchmark.worker FD PARENT_PID.

It answers JSON requests on an inherited socket, blocks between them (an idle engine must not disturb the one
that is timed), and dies with its parent.
"""

from __future__ import annotations

import gc
import itertools
import json
import signal
import sys
import time
from array import array
from collections.abc import Callable, Iterator, MutableSequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.artifacts import EngineSpec, open_artifact
from components.contract import validate
from components.errors import HpmlError, StageFailed
from components.images import load_split, to_x_nchw
from components.process import die_with_parent
from components.targets import AnyTarget

_SETTLING_NS = 20_000_000  # an engine of 20 us reaches its speed after some 20 requests, a slow one at once
_NO_OP_REQUESTS = 1000

Batch = NDArray[np.float32]  # (batch, channels, height, width)
Predict = Callable[[Batch], Any]


class Engine:
    """A loaded engine and its inputs. Its public methods are the requests that a worker answers."""

    def load(
        self,
        folder: str,
        data: str,
        rows: list[int],
        batch_sizes: list[int],
        threads: int,
        golden_tolerance: float,
    ) -> dict[str, float]:
        """Load the engine in `folder`, check it against its golden samples, prepare test rows as inputs.

        Raises StageFailed if the golden logits are not reproduced.
        """
        artifact = open_artifact(Path(folder), kind="engine", verify=False)  # verified by the stage
        spec: EngineSpec = artifact.spec
        target: AnyTarget = validate(AnyTarget, spec.target, where="the target of the engine")
        self._predict: Predict = target.load(artifact.path, spec, threads=threads).predict
        golden_error = _check_golden(self._predict, artifact.path, golden_tolerance)
        images_nhwc, _ = load_split(open_artifact(Path(data), kind="dataset", verify=False), "test")
        x_nchw = to_x_nchw(images_nhwc[rows], spec.input)
        self._inputs = {batch: itertools.cycle(_windows(x_nchw, batch)) for batch in batch_sizes}
        return {"golden_error": golden_error, "harness_us_per_request": _harness_us(self._inputs[1])}

    def time(self, batch: int, requests: int) -> dict[str, list[int]]:
        """Latencies in nanoseconds of `requests` predictions at `batch`."""
        started_ns, finished_ns = time_requests(self._predict, self._inputs[batch], requests)
        return {"latency_ns": (finished_ns - started_ns).tolist()}


def time_requests(
    predict: Predict, inputs: Iterator[Batch], requests: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """When each of `requests` inputs was given to `predict`, back to back, and when it was done, in ns.

    Before that `predict` runs, through the very same code, until a CPU that slept has settled.
    """
    timed = list(itertools.islice(inputs, requests))
    started_ns, finished_ns = (array("q", bytes(8 * requests)) for _ in range(2))
    gc.collect()
    gc.disable()
    try:
        settled_ns = time.perf_counter_ns() + _SETTLING_NS
        while time.perf_counter_ns() < settled_ns:
            _stamp(predict, timed[:1], started_ns, finished_ns)
        _stamp(predict, timed, started_ns, finished_ns)
    finally:
        gc.enable()
    return np.asarray(started_ns), np.asarray(finished_ns)


def _stamp(
    predict: Predict, inputs: list[Batch], started_ns: MutableSequence[int], finished_ns: MutableSequence[int]
) -> None:
    clock = time.perf_counter_ns
    for index, x_nchw in enumerate(inputs):
        started_ns[index] = clock()
        predict(x_nchw)
        finished_ns[index] = clock()


def _harness_us(inputs: Iterator[Batch]) -> float:
    """Microseconds from one request to the next where predicting takes no time."""
    started_ns, _ = time_requests(lambda _: None, inputs, _NO_OP_REQUESTS)
    return float(np.median(np.diff(started_ns))) / 1e3


def _windows(x_nchw: Batch, batch: int) -> list[Batch]:
    """Contiguous views of `batch` consecutive samples."""
    return [x_nchw[start : start + batch] for start in range(0, len(x_nchw) - batch + 1, batch)]


def _check_golden(predict: Predict, folder: Path, tolerance: float) -> float:
    """The largest error of a golden logit, as a share of the largest golden logit."""
    golden = np.load(folder / "golden_logits.npy", allow_pickle=False)
    logits = predict(np.load(folder / "golden_x_nchw.npy", allow_pickle=False))
    if logits.shape != golden.shape:
        raise StageFailed(
            "it does not reproduce its golden outputs",
            why=f"logits of shape {logits.shape} instead of {golden.shape}",
        )
    error = float(np.abs(logits - golden).max() / np.abs(golden).max())
    if not error <= tolerance:  # NaN is an error too
        raise StageFailed(
            "it does not reproduce its golden outputs",
            why=f"a logit is off by {error:.2%} of the largest, {tolerance:.2%} is allowed",
            fix="build the engine again on this machine",
        )
    return error


def _answer(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    methods: dict[str, Callable[..., dict[str, Any]]] = {"load": engine.load, "time": engine.time}
    try:
        return {"result": methods[request["do"]](**request["arguments"])}
    except HpmlError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}


def main() -> None:
    """Answer requests until the other end of the socket closes."""
    descriptor, parent = (int(argument) for argument in sys.argv[1:])
    die_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this one
    engine = Engine()
    with Connection(descriptor) as channel:
        while True:
            try:
                request = json.loads(channel.recv_bytes())
            except EOFError:
                return
            channel.send_bytes(json.dumps(_answer(engine, request)).encode())


if __name__ == "__main__":
    main()
