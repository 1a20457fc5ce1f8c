"""torch eager, one operation at a time: what it computes and moves, how long it takes, whose module it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from hpml.components.diagnose.config import DiagnoseConfig
from hpml.components.diagnose.layers import Channels, Layer, Precision, Profile, requests_within, typical_us
from hpml.components.diagnose.onnx_nodes import Feeds

_WARMUP = 3
_LEAST_REQUESTS = 10
# What moves data only, beside what gives a view of its input.
_MOVES = frozenset(
    {"aten::cat", "aten::clone", "aten::contiguous", "aten::copy_", "aten::_to_copy", "aten::pad"}
)
_PER_OUTPUT = {"aten::batch_norm": 2, "aten::layer_norm": 8, "aten::softmax": 5}  # operations an element
_PER_INPUT = frozenset({"aten::adaptive_avg_pool2d", "aten::mean", "aten::sum"})

Answer = Callable[[Feeds], object]


def profile(answer: Answer, requests: Sequence[Feeds], *, threads: int, config: DiagnoseConfig) -> Profile:
    """The operations of an eager engine on the CPU, one of `requests` after the other."""
    one, all_ = _threads_compared(answer, requests[0], threads)
    count = requests_within(config.seconds, all_ / 1e3, least=_LEAST_REQUESTS, most=config.requests)
    counted: list[Layer] = []
    with _Modules() as modules, _Watched(partial(_counted, counted, modules)):
        answer(requests[0])
    durations_us: list[list[float]] = [[] for _ in range(_WARMUP + count)]
    for index, of_request in enumerate(durations_us):
        with _Watched(partial(_timed, of_request)):
            answer(requests[index % len(requests)])
    layers = (
        replace(layer, time_us=typical_us(times))
        for layer, times in zip(counted, zip(*durations_us[_WARMUP:], strict=True), strict=True)
        if layer.activation_bytes  # a view of a tensor is no layer
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


class _Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands each operation of torch to `run` as the network calls it."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._run(func, *args, **(kwargs or {}))


def _timed(durations_us: list[float], func: Any, *args: Any, **kwargs: Any) -> Any:
    begun_ns = time.perf_counter_ns()
    result = func(*args, **kwargs)
    durations_us.append((time.perf_counter_ns() - begun_ns) / 1e3)
    return result


def _counted(layers: list[Layer], modules: _Modules, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Adds what the operation computes and moves: a `Layer` that takes no time yet."""
    with FlopCounterMode(display=False) as counter:
        result = func(*args, **kwargs)
    op = func.name().partition(".")[0]
    inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    outputs = [value for value in _flat(result) if isinstance(value, torch.Tensor)]
    weights = [value for value in inputs if value.data_ptr() in modules.constants]
    moved = [value for value in inputs if value.data_ptr() not in modules.constants] + outputs
    is_view = bool(inputs and outputs) and not func._schema.is_mutable
    is_view = is_view and _storage(outputs[0]) == _storage(inputs[0])
    weight = max(weights, key=lambda value: value.ndim, default=None)
    layers.append(
        Layer(
            name=modules.current or op.removeprefix("aten::"),
            op=op,
            precision=_precision(outputs),
            flops=0 if is_view else max(counter.get_total_flops(), _flops(op, inputs, outputs)),
            weight_bytes=sum(value.nbytes for value in weights),
            activation_bytes=0 if is_view else sum(value.nbytes for value in moved),
            time_us=0.0,
            channels=_channels(op, inputs[0] if inputs else None, weight),
        )
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


def _channels(op: str, x: torch.Tensor | None, weight: torch.Tensor | None) -> Channels:
    if x is None or weight is None or weight.ndim < 2:
        return Channels()
    if "conv" in op and weight.ndim > 2:
        return Channels(x.shape[1], weight.shape[0], x.shape[1] // weight.shape[1])
    if op in ("aten::linear", "aten::addmm", "aten::mm"):
        return Channels(x.shape[-1], math.prod(weight.shape) // x.shape[-1])
    return Channels()


def _precision(outputs: list[torch.Tensor]) -> Precision:
    kind = outputs[0].dtype if outputs else torch.float32
    return "fp16" if kind == torch.float16 else "bf16" if kind == torch.bfloat16 else "fp32"


def _threads_compared(answer: Answer, request: Feeds, threads: int) -> tuple[float, float]:
    """Microseconds of a request with one thread, and with `threads`; in turns."""
    begun_s = time.perf_counter()
    answer(request)
    rounds = requests_within(0.3, 2e3 * (time.perf_counter() - begun_s), least=3, most=100)
    measured: dict[int, list[float]] = {1: [], threads: []}
    for _ in range(rounds):
        for count, times in measured.items():
            torch.set_num_threads(count)
            answer(request)  # the pool settles
            begun_s = time.perf_counter()
            answer(request)
            times.append(1e6 * (time.perf_counter() - begun_s))
    torch.set_num_threads(threads)
    return typical_us(measured[1]), typical_us(measured[threads])
