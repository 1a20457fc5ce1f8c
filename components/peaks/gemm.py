"""How fast square matrix products run through torch: the library that its layers use for each precision."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from hpml.artifacts.peaks import GemmPoint
from hpml.components.peaks.rounds import NotMeasurable, Probe, Timed

Precision = Literal["fp32", "fp16", "bf16", "int8"]
Product = Callable[[], object]

_PATIENCE_S = 0.05  # for one product; a slow one would eat the time of all others
_WARM_UPS = 2  # the first one compiles kernels and starts threads


@dataclass
class Series:
    """Products of one library in one precision, of ascending size.

    build: makes a product of a size; what it raises is why there is none. What the product of one size took
    tells whether the next is affordable: an emulated precision takes minutes for what others do in one.
    """

    precision: Precision
    library: str
    threads: int
    build: Callable[[int], Product]
    flop_per_s: float = 0.0

    def probes(self, sizes: Sequence[int]) -> Iterator[Probe]:
        """A probe a size."""
        for size in sorted(sizes):
            point = GemmPoint(
                device="cpu", precision=self.precision, library=self.library, threads=self.threads, size=size
            )
            yield Probe(point, lambda size=size: self._prepare(size))  # type: ignore[misc]

    def _prepare(self, size: int) -> Timed:
        flop = 2 * size**3
        if self.flop_per_s and flop / self.flop_per_s > _PATIENCE_S:
            needed_s = flop / self.flop_per_s
            raise NotMeasurable(
                f"too slow: one product would take {needed_s:.2g} s, {_PATIENCE_S:g} s is the limit"
            )
        product = self.build(size)

        def seconds() -> float:
            torch.set_num_threads(self.threads)  # for torch's products; an ONNX session has its own
            begun_s = time.perf_counter()
            product()
            return time.perf_counter() - begun_s

        self.flop_per_s = flop / min(seconds() for _ in range(_WARM_UPS))
        return Timed(seconds, flop)


def torch_series(threads: int) -> Iterator[Series]:
    """What torch multiplies with: oneDNN for convolutions and for bf16, MKL for fp32 matrices."""
    blas = "MKL" if torch.backends.mkl.is_available() else "BLAS"  # type: ignore[no-untyped-call]
    yield Series("fp32", f"torch ({blas})", threads, lambda size: _mm(size, torch.float32))
    if _has_onednn():
        yield Series("fp32", "torch (oneDNN)", threads, _onednn_linear)
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        name = "torch (oneDNN)" if _onednn_has(precision) else "torch (emulated)"
        yield Series(precision, name, threads, lambda size, dtype=dtype: _mm(size, dtype))  # type: ignore[arg-type, misc]


def _mm(size: int, dtype: torch.dtype) -> Product:
    a, b, c = (torch.randn(size, size).to(dtype) for _ in range(3))
    return lambda: torch.mm(a, b, out=c)


def _onednn_linear(size: int) -> Product:
    """oneDNN in fp32, which torch uses for convolutions, is reached through its own layout of a tensor."""
    x, weight = (torch.randn(size, size).to_mkldnn() for _ in range(2))

    def product() -> torch.Tensor:
        with torch.no_grad():
            return functional.linear(x, weight)

    return product


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _onednn_has(precision: str) -> bool:
    """Whether oneDNN has kernels for a 16-bit precision on this CPU; elsewhere torch converts or loops."""
    return _has_onednn() and bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{precision}_supported")())
