"""torch eager, one operation at a time: what it computes and moves, how long it takes, whose module it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hpml.components.diagnose.config import DiagnoseConfig
from hpml.components.diagnose.layers import Layer, Precision, Profile, requests_within, typical_us

if TYPE_CHECKING:
    from hpml.targets import Session

_WARMUP = 3
_LEAST_REQUESTS = 10
# What moves data only, beside what gives a view of its input.
_MOVES = frozenset(
    {"aten::cat", "aten::clone", "aten::contiguous", "aten::copy_", "aten::_to_copy", "aten::pad"}
)
_PER_OUTPUT = {"aten::batch_norm": 2, "aten::layer_norm": 8, "aten::softmax": 5}  # operations an element
_PER_INPUT = frozenset({"aten::adaptive_avg_pool2d", "aten::mean", "aten::sum"})

Images = NDArray[np.float32]  # (images, channels, height, width)


def profile(session: Session, x_nchw: Images, *, threads: int, config: DiagnoseConfig) -> Profile:
    """The operations of an eager engine on the CPU, one image of `x_nchw` a request."""
    one, all_ = _threads_compared(session, x_nchw[:1], threads)
    requests = requests_within(config.seconds, all_ / 1e3, least=_LEAST_REQUESTS, most=config.requests)
    with _Modules() as modules:
        with _Counted(modules) as counted:
            session.predict(x_nchw[:1])
        durations_us: list[list[float]] = [[] for _ in counted.layers]
        for index in range(_WARMUP + requests):
            row = index % len(x_nchw)
            with _Timed() as timed:
                session.predict(x_nchw[row : row + 1])
            if index >= _WARMUP:
                for times, duration_us in zip(durations_us, timed.durations_us, strict=True):
                    times.append(duration_us)
    layers = (
        Layer(**counts, time_us=typical_us(times))
        for counts, times in zip(counted.layers, durations_us, strict=True)
        if counts["activation_bytes"]  # a view of a tensor is no layer
    )
    return Profile(tuple(layers), one, all_)


class _Modules:
    """Knows the name of the module that is running."""

    def __init__(self) -> None:
        self._running: list[torch.nn.Module] = []
        self._names: dict[torch.nn.Module, str] = {}
        self.constants: set[int] = set()  # where parameters and buffers lie in memory

    def __enter__(self) -> _Modules:
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if not self._running and not self._names:
            self._names = {part: name for name, part in module.named_modules()}
            held: Iterable[torch.Tensor] = (*module.parameters(), *module.buffers())
            self.constants = {tensor.data_ptr() for tensor in held}
        self._running.append(module)

    def _leave(self, *_: Any) -> None:
        self._running.pop()

    @property
    def current(self) -> str:
        """The innermost running module; empty for the network itself."""
        return self._names.get(self._running[-1], "") if self._running else ""


class _Timed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times each operation of torch as the network calls it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.durations_us: list[float] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        clock: Callable[[], int] = time.perf_counter_ns
        begun_ns = clock()
        result = func(*args, **(kwargs or {}))
        self.durations_us.append((clock() - begun_ns) / 1e3)
        return result


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what each operation computes and moves: a `Layer` without its time."""

    def __init__(self, modules: _Modules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._modules = modules
        self.layers: list[dict[str, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with FlopCounterMode(display=False) as counter:
            result = func(*args, **(kwargs or {}))
        op = func.name().partition(".")[0]
        inputs = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Tensor)]
        outputs = [value for value in _flat(result) if isinstance(value, torch.Tensor)]
        weights = [value for value in inputs if value.data_ptr() in self._modules.constants]
        moved = [value for value in inputs if value.data_ptr() not in self._modules.constants] + outputs
        is_view = bool(inputs and outputs) and not func._schema.is_mutable
        is_view = is_view and _storage(outputs[0]) == _storage(inputs[0])
        weight = max(weights, key=lambda value: value.ndim, default=None)
        in_channels, out_channels, groups = _channels(op, inputs[0] if inputs else None, weight)
        self.layers.append(
            {
                "name": self._modules.current or op.removeprefix("aten::"),
                "op": op,
                "precision": _precision(outputs),
                "flops": 0 if is_view else max(counter.get_total_flops(), _flops(op, inputs, outputs)),
                "weight_bytes": sum(value.nbytes for value in weights),
                "activation_bytes": 0 if is_view else sum(value.nbytes for value in moved),
                "in_channels": in_channels,
                "out_channels": out_channels,
                "groups": groups,
            }
        )
        return result


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _flat(result: Any) -> Iterable[Any]:
    return result if isinstance(result, tuple | list) else (result,)


def _flops(op: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Of what torch's own counter leaves out: attention on the CPU, and what works element by element."""
    if op == "aten::scaled_dot_product_attention":  # scores of queries and keys, and their sums of values
        return 2 * 2 * outputs[0].numel() * inputs[1].shape[-2]
    if op in _MOVES or not outputs or not outputs[0].is_floating_point():
        return 0
    if op in _PER_INPUT and inputs:
        return inputs[0].numel()
    return outputs[0].numel() * _PER_OUTPUT.get(op, 1)


def _channels(op: str, x: torch.Tensor | None, weight: torch.Tensor | None) -> tuple[int, int, int]:
    """(input channels, output channels, groups) of a convolution or a linear layer; zeros of all else."""
    if x is None or weight is None or weight.ndim < 2:
        return 0, 0, 1
    if "conv" in op and weight.ndim > 2:
        return x.shape[1], weight.shape[0], x.shape[1] // weight.shape[1]
    if op in ("aten::linear", "aten::addmm", "aten::mm"):
        return x.shape[-1], math.prod(weight.shape) // x.shape[-1], 1
    return 0, 0, 1


def _precision(outputs: list[torch.Tensor]) -> Precision:
    kind = outputs[0].dtype if outputs else torch.float32
    return "fp16" if kind == torch.float16 else "bf16" if kind == torch.bfloat16 else "fp32"


def _threads_compared(session: Session, x_nchw: Images, threads: int) -> tuple[float, float]:
    """Microseconds of a request with one thread, and with `threads`; in turns."""
    begun_s = time.perf_counter()
    session.predict(x_nchw)
    rounds = requests_within(0.3, 2e3 * (time.perf_counter() - begun_s), least=3, most=100)
    measured: dict[int, list[float]] = {1: [], threads: []}
    for _ in range(rounds):
        for count, times in measured.items():
            torch.set_num_threads(count)
            session.predict(x_nchw)  # the pool settles
            begun_s = time.perf_counter()
            session.predict(x_nchw)
            times.append(1e6 * (time.perf_counter() - begun_s))
    torch.set_num_threads(threads)
    return typical_us(measured[1]), typical_us(measured[threads])
