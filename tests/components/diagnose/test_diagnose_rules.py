"""Each rule on a real engine that shows its condition, and on one that does not."""

from __future__ import annotations

import pytest

from components.diagnose.examine import vector_lanes
from components.diagnose.rules import RULES
from components.measurements import DiagnosisSpec
from tests.components.diagnose.conftest import Diagnose, MakeEngine, Network, make_ceilings, rules_of

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


def reached(diagnosis: DiagnosisSpec) -> tuple[float, float]:
    """Gflop/s and GB/s of the layers of the only engine, as they were profiled."""
    (one,) = diagnosis.engines.values()
    return one.flops / one.profiled_us / 1e3, one.bytes / one.profiled_us / 1e3


def test_dispatch(make_engine: MakeEngine, run_diagnosis: Diagnose) -> None:
    diagnosis = run_diagnosis({"tiny/onnx": make_engine(tiny_layers())})
    one = diagnosis.engines["tiny/onnx"]
    assert one.bound == "overhead"
    assert one.verdict.startswith("dispatch-bound: ")
    sentence = rules_of(diagnosis, "tiny/onnx")["dispatch"]
    assert "ms of work at the machine's ceilings in" in sentence and "layers have too little work" in sentence


def test_no_dispatch_where_the_ceilings_explain_the_time(
    make_engine: MakeEngine, run_diagnosis: Diagnose
) -> None:
    engine = {"product/onnx": make_engine(convolutions(64, 64))}
    first = run_diagnosis(engine)
    gflop_per_s, _ = reached(first)
    time_us = {"product/onnx": first.engines["product/onnx"].profiled_us}
    ceilings = make_ceilings(gflop_per_s=0.9 * gflop_per_s, gb_per_s=1e4)
    diagnosis = run_diagnosis(engine, ceilings=ceilings, time_us=time_us)
    assert "dispatch" not in rules_of(diagnosis, "product/onnx")
    assert diagnosis.engines["product/onnx"].bound == "compute"


def test_near_the_arithmetic_ceiling_and_far_from_it(
    make_engine: MakeEngine, run_diagnosis: Diagnose
) -> None:
    engine = {"conv/onnx": make_engine(convolutions(64, 64))}
    first = run_diagnosis(engine)
    gflop_per_s, _ = reached(first)
    time_us = {"conv/onnx": first.engines["conv/onnx"].profiled_us}
    near, far = (
        run_diagnosis(
            engine, ceilings=make_ceilings(gflop_per_s=factor * gflop_per_s, gb_per_s=1e4), time_us=time_us
        )
        for factor in (0.8, 20)
    )
    assert near.engines["conv/onnx"].verdict.startswith("compute-bound: ")
    assert "near-arithmetic-ceiling" in rules_of(near, "conv/onnx")
    assert "slow-kernels" not in rules_of(near, "conv/onnx")
    assert "near-arithmetic-ceiling" not in rules_of(far, "conv/onnx")
    assert "of the ceiling: conv" in rules_of(far, "conv/onnx")["slow-kernels"]
    assert far.engines["conv/onnx"].verdict.startswith("bound by kernels far below their ceilings: ")


def test_memory(make_engine: MakeEngine, run_diagnosis: Diagnose) -> None:
    chain = Network((16, 128, 128))
    for op in ("Sigmoid", "Abs", "Neg", "Floor"):
        chain.then(op).plus(0.5)
    engine = {"chain/onnx": make_engine(chain)}
    first = run_diagnosis(engine)
    _, gb_per_s = reached(first)
    time_us = {"chain/onnx": first.engines["chain/onnx"].profiled_us}
    ceilings = make_ceilings(gflop_per_s=1e5, gb_per_s=0.8 * gb_per_s)
    diagnosis = run_diagnosis(engine, ceilings=ceilings, time_us=time_us)
    assert diagnosis.engines["chain/onnx"].bound == "memory"
    assert "for memory" in rules_of(diagnosis, "chain/onnx")["memory"]
    generous = run_diagnosis(engine, ceilings=make_ceilings(gb_per_s=1e5), time_us=time_us)
    assert "memory" not in rules_of(generous, "chain/onnx")


@pytest.fixture(scope="module")
def pair(make_engine: MakeEngine) -> dict[str, object]:
    """A network in fp32, and quantized."""
    return {
        "fp32/onnx": make_engine(convolutions(32, 32, 32)),
        "int8/onnx": make_engine(convolutions(32, 32, 32), activations="uint8"),
    }


def test_below_the_int8_ceiling(pair: dict[str, object], run_diagnosis: Diagnose) -> None:
    times_us = {"fp32/onnx": 2000.0, "int8/onnx": 1000.0}
    short = run_diagnosis(pair, time_us=times_us)
    sentence = rules_of(short, "int8/onnx")["below-int8-ceiling"]
    assert sentence.startswith("int8 ceiling 4.0x, reached 2.0x against fp32/onnx: ")
    assert "below-int8-ceiling" not in rules_of(short, "fp32/onnx")
    reached_it = run_diagnosis(pair, time_us={**times_us, "int8/onnx": 520.0})
    assert "below-int8-ceiling" not in rules_of(reached_it, "int8/onnx")
    no_gain = run_diagnosis(pair, time_us=times_us, ceilings=make_ceilings(int8_gain=1.0))
    assert "below-int8-ceiling" not in rules_of(no_gain, "int8/onnx")


def test_slower_than_fp32_at_some_batch_sizes(pair: dict[str, object], run_diagnosis: Diagnose) -> None:
    rates = {
        "fp32/onnx": {1: 1000.0, 8: 3000.0, 32: 4000.0},
        "int8/onnx": {1: 2000.0, 8: 2500.0, 32: 3960.0},  # the last is within the intervals
    }
    diagnosis = run_diagnosis(pair, throughput=rates)
    sentence = rules_of(diagnosis, "int8/onnx")["slower-than-fp32"]
    assert sentence == "int8 is slower than fp32/onnx at batch 8: 2,500 against 3,000 images/s at 8"
    assert "slower-than-fp32" not in rules_of(diagnosis, "fp32/onnx")


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
            Network((16, 48, 48)).conv(64).conv(64).conv(64, stride=2).head(), activations="uint8"
        ),
    }
    diagnosis = run_diagnosis(engines)
    found = rules_of(diagnosis, "mixed/onnx")
    assert "DequantizeLinear" in found["quantize-dequantize"]
    assert "erf" in found["fp32-in-int8"] and "3 Erf" in found["fp32-in-int8"]
    assert not {"quantize-dequantize", "fp32-in-int8"} & set(rules_of(diagnosis, "whole/onnx"))


def test_stem(make_engine: MakeEngine, run_diagnosis: Diagnose) -> None:
    fast = make_ceilings(gflop_per_s=5000, gb_per_s=5000)
    images_in = {"stem/onnx": make_engine(convolutions(32, 32, inputs=3))}
    sentence = rules_of(run_diagnosis(images_in, ceilings=fast), "stem/onnx")["stem"]
    assert sentence.startswith("the stem conv0 has 3 input channels: it reaches ")
    features_in = {"stem/onnx": make_engine(convolutions(32, 32, inputs=16))}
    assert "stem" not in rules_of(run_diagnosis(features_in, ceilings=fast), "stem/onnx")


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


def test_every_rule_has_a_remedy_and_a_name_of_its_own() -> None:
    assert all(rule.remedy for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)
