"""ONNX files run by ONNX Runtime. Does not import torch: a bundle is checked, and served, with this."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from hpml.artifacts.operation import Operation
from hpml.core.errors import HpmlError, StageFailed

Feeds = Mapping[str, NDArray[np.generic]]  # input name -> array (rows, ...)

PROVIDERS = {
    "cpu": ["CPUExecutionProvider"],
    # TF32 would round the products of an fp32 network to 11 bits.
    "cuda": [("CUDAExecutionProvider", {"use_tf32": 0}), "CPUExecutionProvider"],
}


class OnnxSession:
    """An ONNX file opened for requests."""

    def __init__(self, file: Path, *, device: str, threads: int, spinning: bool | None = None) -> None:
        """Open `file`; ONNX Runtime itself refuses weights that lie outside the file's folder.

        spinning: see `session_options`.
        Raises StageFailed if ONNX Runtime cannot load it.
        """
        try:
            self._session = onnxruntime.InferenceSession(
                file, session_options(threads, spinning), providers=PROVIDERS[device]
            )
        except HpmlError:  # a signal's
            raise
        except Exception as error:  # ONNX Runtime's derive from nothing narrower
            reason = " ".join(str(error).split())[:300]
            raise StageFailed(f"ONNX Runtime cannot load {file}", why=reason) from None
        _check_runs_on(device, self._session.get_providers())
        self.inputs: tuple[str, ...] = tuple(given.name for given in self._session.get_inputs())
        self.outputs: tuple[str, ...] = tuple(output.name for output in self._session.get_outputs())

    def run(self, feeds: Feeds) -> list[Any]:
        """All outputs, in the order of `outputs`: arrays, or what else the model gives."""
        outputs: list[Any] = self._session.run(None, feeds)
        return outputs


class OnnxEngine:
    """The graphs of an engine, each opened once, asked by operation."""

    def __init__(self, graphs: Mapping[str, OnnxSession], operations: Sequence[Operation]) -> None:
        self.operations = {one.name: one for one in operations}
        self._sessions = {one.name: graphs[one.graph] for one in operations}

    def run(self, feeds: Feeds, operation: str = "predict") -> dict[str, NDArray[Any]]:
        """The outputs of an operation by name; `feeds` has its inputs by name, the batch in front."""
        session = self._sessions[operation]
        return dict(zip(session.outputs, session.run(feeds), strict=True))


def single_requests(samples: Feeds) -> list[Feeds]:
    """A request for each row of `samples`."""
    rows = min(len(array) for array in samples.values())
    return [{name: array[row : row + 1] for name, array in samples.items()} for row in range(rows)]


def _check_runs_on(device: str, providers: list[str]) -> None:
    """ONNX Runtime falls back to the CPU where its CUDA libraries do not load; raises StageFailed then."""
    if device == "cuda" and "CUDAExecutionProvider" not in providers:
        raise StageFailed(
            "ONNX Runtime would run on the CPU what was meant for a GPU",
            why=f"its CUDA provider did not load; there are {', '.join(providers)}",
            fix="install the CUDA and cuDNN that onnxruntime-gpu asks for, or use the image hpml-gpu",
        )


def session_options(threads: int, spinning: bool | None = None) -> onnxruntime.SessionOptions:
    """One node after the other, with so many threads.

    spinning: whether they spin for some milliseconds after a request rather than sleep. That answers the
    next one sooner and takes the CPU from all others; None leaves ONNX Runtime's default, which is to spin.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    if spinning is not None:
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    return options


def has_cuda() -> bool:
    """Whether ONNX Runtime was built for NVIDIA GPUs."""
    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


Name = TypeVar("Name", bound=str)


def latencies_ms(
    sessions: Mapping[Name, OnnxSession], request: Feeds, *, rounds: int = 15, requests: int = 5
) -> dict[Name, float]:
    """The median milliseconds of a request to each session; they take turns, so a busy moment hits all."""
    measured: dict[Name, list[float]] = {name: [] for name in sessions}
    for _ in range(rounds + 1):
        for name, session in sessions.items():
            begun_s = time.perf_counter()
            for _ in range(requests):
                session.run(request)
            measured[name].append((time.perf_counter() - begun_s) / requests * 1000)
    return {name: float(np.median(latencies[1:])) for name, latencies in measured.items()}  # [0] warms up
