"""Each rule on a real engine that shows its condition, and on one that does not; TensorRT's are by hand."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import StateFigures
from hpml.artifacts.peaks import PeaksSpec
from hpml.components.diagnose import onnx_nodes, rules
from hpml.components.diagnose.config import DiagnoseConfig
from hpml.components.diagnose.examine import facts_of, vector_lanes
from hpml.components.diagnose.layers import Layer, Profile
from hpml.components.diagnose.profilers import onnx_profile
from hpml.components.diagnose.profilers.tensorrt_profile import layers_of
from hpml.components.diagnose.roofs import LayerRoofline, Roofs
from hpml.components.diagnose.rules import RULES, findings
from hpml.components.diagnose.verdict import verdict
from hpml.targets.onnx_session import single_requests
from hpml.targets.tensorrt import GRAPH
from tests.components.diagnose import tensorrt_by_hand as by_hand
from tests.components.diagnose.conftest import (
    THREADS,
    Diagnose,
    MakeEngine,
    Network,
    interval,
    make_gpu_peaks,
    make_measured,
    make_peaks,
    request_of,
    rules_of,
)

LANES = vector_lanes()


def tiny_layers(channels: int = 4) -> Network:
    network = Network((channels, 4, 4))
    for _ in range(60):
        network.conv(channels, 1)
    return network.head()


def large_product() -> Network:
    return Network((16, 8, 8)).then("Flatten").linear(4096, inputs=1024).linear(2)


def convolutions(*channels: int, inputs: int = 16, size: int = 48, kernel: int = 3) -> Network:
    network = Network((inputs, size, size))
    for count in channels:
        network.conv(count, kernel)
    return network.head()


@dataclass(frozen=True)
class Said:
    """What follows from one profile of a real engine, in a request that takes as long as its layers."""

    profile: Profile
    engine: Artifact[EngineSpec]

    @property
    def time_us(self) -> float:
        return sum(layer.time_us for layer in self.profile.layers)

    @property
    def gflop_per_s(self) -> float:
        """What the layers reached."""
        return sum(layer.flops for layer in self.profile.layers) / self.time_us / 1e3

    @property
    def gb_per_s(self) -> float:
        """What the layers reached."""
        return sum(layer.bytes for layer in self.profile.layers) / self.time_us / 1e3

    def under(self, peaks: PeaksSpec) -> tuple[str | None, str, dict[str, str]]:
        """What binds it, the verdict, and the sentence of each finding by its rule."""
        engines = {"it/onnx": self.engine}
        measured = make_measured(engines, {"it/onnx": self.time_us}, {})
        facts = facts_of("it/onnx", engines, measured, self.profile, Roofs(peaks, threads=THREADS))
        found = findings(facts)
        rules = {item.finding.rule: item.finding.sentence for item in found}
        return facts.bound, verdict(facts, found), rules


@pytest.fixture
def profiled(make_engine: MakeEngine, tmp_path: Path) -> Callable[[Network], Said]:
    """Profile a network once, so that peaks can be put where its layers were in that very profile."""

    def run(network: Network) -> Said:
        engine = make_engine(network)
        x_nchw = np.random.default_rng(0).standard_normal((4, *network.shape_chw), np.float32)
        config = DiagnoseConfig(seconds=0.2)
        file = engine.path / "model.onnx"
        profile = onnx_profile.profile(
            file, single_requests({"x_nchw": x_nchw}), threads=THREADS, config=config, scratch=tmp_path
        )
        return Said(profile, engine)

    return run


def test_dispatch(make_engine: MakeEngine, run_diagnosis: Diagnose) -> None:
    diagnosis = run_diagnosis({"tiny/onnx": make_engine(tiny_layers())})
    one = diagnosis.engines["tiny/onnx"]
    assert one.bound == "overhead"
    assert one.verdict.startswith("dispatch-bound: ")
    sentence = rules_of(diagnosis, "tiny/onnx")["dispatch"]
    assert "ms of work at the machine's peaks in" in sentence and "layers have too little work" in sentence


def test_near_the_arithmetic_peak_and_far_from_it(profiled: Callable[[Network], Said]) -> None:
    said = profiled(convolutions(64, 64))
    bound, near, found = said.under(make_peaks(gflop_per_s=1.05 * said.gflop_per_s, gb_per_s=1e4))
    assert bound == "compute" and near.startswith("compute-bound: ")
    assert "near-arithmetic-peak" in found
    assert not {"slow-kernels", "dispatch"} & set(found)
    bound, far, found = said.under(make_peaks(gflop_per_s=20 * said.gflop_per_s, gb_per_s=1e4))
    assert bound == "overhead" and far.startswith("bound by kernels far below their peaks: ")
    assert "near-arithmetic-peak" not in found
    assert "of the peak: conv" in found["slow-kernels"]


def test_memory(profiled: Callable[[Network], Said]) -> None:
    chain = Network((16, 128, 128))
    for op in ("Sigmoid", "Abs", "Neg", "Floor"):
        chain.then(op).plus(0.5)
    said = profiled(chain)
    bound, _, found = said.under(make_peaks(gflop_per_s=1e5, gb_per_s=0.8 * said.gb_per_s))
    assert bound == "memory" and "for memory" in found["memory"]
    _, _, found = said.under(make_peaks(gb_per_s=1e5))
    assert "memory" not in found


@pytest.fixture(scope="module")
def pair(make_engine: MakeEngine) -> dict[str, object]:
    """A network in fp32, and quantized."""
    return {
        "fp32/onnx": make_engine(convolutions(32, 32, 32)),
        "int8/onnx": make_engine(convolutions(32, 32, 32), activations="uint8"),
    }


def test_below_the_int8_peak(pair: dict[str, object], run_diagnosis: Diagnose) -> None:
    times_us = {"fp32/onnx": 2000.0, "int8/onnx": 1000.0}
    short = run_diagnosis(pair, time_us=times_us)
    sentence = rules_of(short, "int8/onnx")["below-int8-peak"]
    assert sentence.startswith("int8 peak 4.0x, reached 2.0x against fp32/onnx: ")
    assert "below-int8-peak" not in rules_of(short, "fp32/onnx")
    reached_it = run_diagnosis(pair, time_us={**times_us, "int8/onnx": 520.0})
    assert "below-int8-peak" not in rules_of(reached_it, "int8/onnx")
    no_gain = run_diagnosis(pair, time_us=times_us, peaks=make_peaks(int8_gain=1.0))
    assert "below-int8-peak" not in rules_of(no_gain, "int8/onnx")


def test_slower_than_fp32_at_some_batch_sizes(pair: dict[str, object], run_diagnosis: Diagnose) -> None:
    rates = {
        "fp32/onnx": {1: 1000.0, 8: 3000.0, 32: 4000.0},
        "int8/onnx": {1: 2000.0, 8: 2500.0, 32: 3960.0},  # the last is within the intervals
    }
    diagnosis = run_diagnosis(pair, throughput=rates)
    sentence = rules_of(diagnosis, "int8/onnx")["slower-than-unquantized"]
    assert sentence == "int8 is slower than fp32/onnx at batch 8: 2,500 against 3,000 images/s at 8"
    assert "slower-than-unquantized" not in rules_of(diagnosis, "fp32/onnx")


def test_small_batch(pair: dict[str, object], run_diagnosis: Diagnose) -> None:
    rates = {"fp32/onnx": {1: 1000.0, 32: 4000.0}, "int8/onnx": {1: 3900.0, 32: 4000.0}}
    diagnosis = run_diagnosis(pair, throughput=rates)
    assert rules_of(diagnosis, "fp32/onnx")["small-batch"] == (
        "batch 1 leaves 75 % of the machine unused: 1,000 images/s, at batch 32 4,000"
    )
    assert "small-batch" not in rules_of(diagnosis, "int8/onnx")


def test_conversions_and_what_stayed_in_fp32(make_engine: MakeEngine, run_diagnosis: Diagnose) -> None:
    mixed = Network((16, 48, 48))
    for _ in range(3):
        mixed.conv(16, 1, relu=False).then("Erf")  # the quantizer knows no Erf
    engines = {
        "mixed/onnx": make_engine(mixed.head(), activations="uint8"),
        "whole/onnx": make_engine(
            Network((16, 48, 48)).conv(128).conv(128).conv(128, stride=2).head(), activations="uint8"
        ),
    }
    diagnosis = run_diagnosis(engines)
    found = rules_of(diagnosis, "mixed/onnx")
    assert "DequantizeLinear" in found["quantize-dequantize"]
    assert "erf" in found["fp32-in-int8"] and "3 Erf" in found["fp32-in-int8"]
    assert not {"quantize-dequantize", "fp32-in-int8"} & set(rules_of(diagnosis, "whole/onnx"))


def test_stem(make_engine: MakeEngine, run_diagnosis: Diagnose) -> None:
    fast = make_peaks(gflop_per_s=5000, gb_per_s=5000)
    images_in = {"stem/onnx": make_engine(convolutions(32, 32, inputs=3))}
    sentence = rules_of(run_diagnosis(images_in, peaks=fast), "stem/onnx")["stem"]
    assert sentence.startswith("the stem conv0 has 3 input channels: it reaches ")
    features_in = {"stem/onnx": make_engine(convolutions(32, 32, inputs=16))}
    assert "stem" not in rules_of(run_diagnosis(features_in, peaks=fast), "stem/onnx")
    quantized = {"stem/onnx": make_engine(convolutions(32, 32, inputs=3), activations="uint8")}
    diagnosis = run_diagnosis(quantized, peaks=fast)
    (first, *_) = (one for one in diagnosis.engines["stem/onnx"].layers if one.name == "conv0")
    assert first.op == "QLinearConv"
    assert "the stem conv0 has 3 input channels" in rules_of(diagnosis, "stem/onnx")["stem"]


def test_channels_that_do_not_fill_a_vector(make_engine: MakeEngine, run_diagnosis: Diagnose) -> None:
    odd = {"odd/onnx": make_engine(convolutions(13, 27, 27, size=64))}
    found = rules_of(run_diagnosis(odd), "odd/onnx")
    assert f"channel counts 13, 27 do not fill a {LANES}-lane vector" in found["lanes"]
    full = {"full/onnx": make_engine(convolutions(LANES, 2 * LANES, 2 * LANES, size=64))}
    assert "lanes" not in rules_of(run_diagnosis(full), "full/onnx")


def test_layout(make_engine: MakeEngine, run_diagnosis: Diagnose) -> None:
    engines = {
        "turned/onnx": make_engine(convolutions(16, 16, kernel=1), activations="uint8"),  # NHWC inside
        "product/onnx": make_engine(large_product()),
    }
    turned = rules_of(run_diagnosis({"turned/onnx": engines["turned/onnx"]}), "turned/onnx")
    assert "Transpose" in turned["layout"]
    product = run_diagnosis({"product/onnx": engines["product/onnx"]})
    assert "layout" not in rules_of(product, "product/onnx")


def test_signed_activations(make_engine: MakeEngine, run_diagnosis: Diagnose) -> None:
    """Behind a skip ONNX Runtime runs signed convolutions in fp32; in a plain chain signs cost nothing."""
    skips = Network((32, 32, 32)).residual().residual().residual().head()
    engines = {
        "skips/onnx": make_engine(skips, activations="int8"),
        "chain/onnx": make_engine(convolutions(32, 32, 32, inputs=32, size=32), activations="int8"),
        "unsigned/onnx": make_engine(
            Network((32, 32, 32)).residual().residual().residual().head(), activations="uint8"
        ),
    }
    diagnosis = run_diagnosis(engines)
    sentence = rules_of(diagnosis, "skips/onnx")["signed-activations"]
    assert "the same graph with unsigned activations" in sentence
    assert "signed-activations" not in rules_of(diagnosis, "unsigned/onnx")
    chain = diagnosis.engines["chain/onnx"]
    assert not any(layer.op == "Conv" for layer in chain.layers)


def test_pruned_and_not_faster(make_engine: MakeEngine, run_diagnosis: Diagnose) -> None:
    engines = {
        "fp32/onnx": make_engine(tiny_layers(4), macs=16_000),
        "pruned/onnx": make_engine(tiny_layers(4), methods=("prune", "distill"), macs=4_000),
    }
    diagnosis = run_diagnosis(engines, threads=1)
    sentence = rules_of(diagnosis, "pruned/onnx")["pruned-not-faster"]
    assert sentence.startswith("it has 25 % of the arithmetic of fp32/onnx and takes ")
    assert "pruned-not-faster" not in rules_of(diagnosis, "fp32/onnx")
    faster = run_diagnosis(engines, time_us={"fp32/onnx": 1000.0, "pruned/onnx": 300.0})
    assert "pruned-not-faster" not in rules_of(faster, "pruned/onnx")


def test_idle_threads(make_engine: MakeEngine, run_diagnosis: Diagnose) -> None:
    engine = {"tiny/onnx": make_engine(tiny_layers())}
    assert "than one at batch 1" in rules_of(run_diagnosis(engine, threads=2), "tiny/onnx")["idle-threads"]
    assert "idle-threads" not in rules_of(run_diagnosis(engine, threads=1), "tiny/onnx")


def far_cores(
    make_engine: MakeEngine, *ms_of_states: float, threads: int = 2, one_thread_ms: float | None = None
) -> tuple[str, str]:
    """What is said of an engine that takes so long in each state, and what is to be done about it."""
    engines = {"it/onnx": make_engine(tiny_layers())}
    shares = (0.35, 0.65)
    mixture_us = 1e3 * sum(map(operator.mul, shares, ms_of_states))
    measured = make_measured(engines, {"it/onnx": mixture_us}, {}, threads=threads)
    names = ("near", "far")
    states = tuple(
        CoreState(name=name, round_trip_ns=interval(200), share=share, seconds=60)
        for name, share in zip(names, shares, strict=True)
    )
    of_engine = tuple(
        StateFigures(state=name, rounds=40, latency_ms_p50=interval(ms))
        for name, ms in zip(names, ms_of_states, strict=True)
    )
    figures = measured.engines["it/onnx"].model_copy(update={"states": of_engine})
    measured = measured.model_copy(update={"states": states, "engines": {"it/onnx": figures}})
    profile = Profile((), one_thread_us=one_thread_ms and 1e3 * one_thread_ms)
    facts = facts_of("it/onnx", engines, measured, profile, Roofs(make_peaks(), threads=threads))
    found = {item.finding.rule: item.finding for item in findings(facts)}
    said = found.get("far-cores")
    return (said.sentence, said.remedy) if said else ("", "")


def test_far_cores(make_engine: MakeEngine) -> None:
    sentence, remedy = far_cores(make_engine, 0.2, 0.31, one_thread_ms=0.35)
    assert sentence == (
        "0.2 ms with the cores near, 0.31 ms far: 65 % of the time it is 1.6 times slower because its 2 "
        "threads hand each other cache lines across core complexes; one thread takes 0.35 ms in any state"
    )
    assert "dedicated host" in remedy
    _, remedy = far_cores(make_engine, 0.124, 0.219, one_thread_ms=0.173)
    assert remedy.startswith("give it one thread")
    sentence, remedy = far_cores(make_engine, 0.2, 0.31)
    assert sentence.endswith("core complexes") and "dedicated host" in remedy
    assert far_cores(make_engine, 0.2, 0.204, one_thread_ms=0.35) == ("", "")
    assert far_cores(make_engine, 0.2, 0.31, threads=1) == ("", "")


# ------------------------------------------------------------------------------------- on layers of TensorRT


OnGpu = Callable[..., dict[str, str]]


@pytest.fixture(scope="module")
def on_gpu(make_engine: MakeEngine) -> OnGpu:
    """The findings on the plan that was written by hand, with these times of its layers, beside its network
    before it was quantized: on_gpu(quantize, conv0, conv2, copy, conv4, mean, head, request_us=...).
    """
    target: Any = {"target": "tensorrt", "identity": {"device": "cuda NVIDIA H200"}}
    engines = {
        "int8/tensorrt": make_engine(by_hand.network(), activations="int8", in_fp32=["head"], **target),
        "fp16/tensorrt": make_engine(by_hand.network(), precision="fp16", **target),
    }
    plan = engines["int8/tensorrt"]
    nodes = onnx_nodes.read(plan.path / GRAPH, request_of(plan))

    def findings_on(
        *times_us: float, request_us: float = 0.0, unquantized_us: float = 1e6, **peaks: float
    ) -> dict[str, str]:
        profile = layers_of(by_hand.inferences((*times_us, 0.0)), by_hand.inspected(), nodes)
        request_us = request_us or sum(times_us)
        measured = make_measured(
            engines, {"int8/tensorrt": request_us, "fp16/tensorrt": unquantized_us}, {}, threads=2
        )
        roofs = Roofs(make_gpu_peaks(**peaks), threads=2, device="cuda")
        found = findings(facts_of("int8/tensorrt", engines, measured, profile, roofs))
        return {item.finding.rule: item.finding.sentence for item in found}

    return findings_on


def test_dispatch_on_a_gpu(on_gpu: OnGpu) -> None:
    found = on_gpu(3, 3, 3, 3, 3, 3, 3, request_us=100.0)
    assert "7 of 7 layers have too little work" in found["dispatch"]
    assert "0.079 ms pass outside the layers" in found["dispatch"]
    slow = {"gflop_per_s": 400.0, "gb_per_s": 20.0}
    assert "dispatch" not in on_gpu(1, 5, 15, 1, 15, 7, 1, **slow)


def test_fp32_in_int8_on_a_gpu(on_gpu: OnGpu) -> None:
    found = on_gpu(1, 20, 20, 1, 20, 30, 8)
    assert found["fp32-in-int8"] == (
        "38 % of the time is in 2 nodes that stayed in fp32: __myl_Mean_myl0_0, head (1 kgen, 1 gemm)"
    )
    assert "fp32-in-int8" not in on_gpu(1, 40, 40, 1, 40, 1, 1)


def test_kinds_of_layers_are_told_by_their_time_and_the_rest_counted() -> None:
    layers = [
        LayerRoofline(Layer(op, op, "fp32", 1, 0, 0, time_us), 0.0, 0.0)
        for op, time_us in (
            ("Add", 1),
            ("Mul", 9),
            ("Mul", 9),
            ("Pow", 8),
            ("Sin", 7),
            ("Neg", 6),
            ("Cos", 0.5),
        )
    ]
    assert rules._ops(layers) == "2 Mul, 1 Pow, 1 Sin, 1 Neg and 2 others"
    assert rules._ops(layers[:2]) == "1 Mul, 1 Add"


def test_conversions_and_copies_on_a_gpu(on_gpu: OnGpu) -> None:
    found = on_gpu(25, 20, 20, 10, 20, 3, 2)
    assert found["quantize-dequantize"] == (
        "25 % of the time goes into conversions between fp32 and int8 (1 Reformat)"
    )
    assert found["layout"] == "10 % of the time only changes the layout of activations (1 Reformat)"
    assert not {"quantize-dequantize", "layout"} & set(on_gpu(1, 40, 40, 1, 40, 3, 2))


def test_int8_is_held_against_what_was_quantized(on_gpu: OnGpu) -> None:
    """TensorRT's other engine is in fp16: the peak is that of int8 over fp16, 4x / 2x."""
    found = on_gpu(10, 20, 20, 10, 20, 10, 10, unquantized_us=120.0)
    assert found["below-int8-peak"].startswith("int8 peak 2.0x, reached 1.2x against fp16/tensorrt: ")
    assert "20 % of the time is in fp32 nodes" in found["below-int8-peak"]
    assert "below-int8-peak" not in on_gpu(10, 20, 20, 10, 20, 10, 10, unquantized_us=190.0)


def test_stem_on_a_gpu(on_gpu: OnGpu) -> None:
    assert "the stem conv0 has 3 input channels" in on_gpu(1, 30, 30, 1, 30, 1, 1)["stem"]
    assert "stem" not in on_gpu(1, 1, 30, 1, 30, 1, 1)


def test_what_is_of_cpus_only_is_not_said_of_a_gpu(on_gpu: OnGpu) -> None:
    """Its 10 classes and 3 channels fill no vector, its profile compares no threads and no signs."""
    assert not {"lanes", "idle-threads", "signed-activations"} & set(on_gpu(3, 30, 30, 3, 30, 3, 3))


def test_every_rule_has_a_remedy_and_a_name_of_its_own() -> None:
    assert all(rule.remedy for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)
