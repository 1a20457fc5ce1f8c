"""Why an engine is not faster: a rule is a condition on measured facts, a sentence, a remedy.

A rule is a function here, below its remedy. It gives None, or the sentence with its figures and how many
microseconds of a request it explains; findings are shown in that order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hpml.artifacts.diagnosis import Finding
from hpml.artifacts.interval import Interval
from hpml.components.diagnose.facts import Facts, time_of
from hpml.components.diagnose.roofs import LayerRoofline, share_of_roof

# A finding has to be worth a reader's time: shares of a request below these are not mentioned.
WORTH_IT = 0.05
_LARGE_PART = 0.3
_NAMED = 4  # layers in a sentence

_NEAR_PEAK = 0.6  # of the peak; kernels on real shapes seldom come nearer than 0.8
_FAR_FROM_PEAK = 0.25
_CLEARLY = 0.95  # a ratio of times below it is no noise
_FEW_CHANNELS = 4  # an image has no more


@dataclass(frozen=True)
class Evidence:
    """What a rule found.

    explains_us: the part of a request that its remedy is about. remedy: in place of the rule's.
    """

    sentence: str
    explains_us: float
    remedy: str = ""


Condition = Callable[[Facts], Evidence | None]


@dataclass(frozen=True)
class Rule:
    """One reason for an engine not to be faster."""

    name: str
    condition: Condition
    remedy: str


@dataclass(frozen=True)
class Found:
    """A finding, and the part of a request that it explains."""

    finding: Finding
    explains_us: float


RULES: list[Rule] = []  # in the order they stand below


def _rule(remedy: str) -> Callable[[Condition], Condition]:
    """Makes a rule of a condition: `_far_cores` is that of the rule "far-cores"."""

    def add(condition: Condition) -> Condition:
        name = condition.__name__.removeprefix("_").replace("_", "-")
        RULES.append(Rule(name, condition, remedy))
        return condition

    return add


def findings(facts: Facts) -> tuple[Found, ...]:
    """Of every rule whose condition the facts meet, the one that explains the most time first."""
    found = [
        Found(
            Finding(rule=rule.name, sentence=evidence.sentence, remedy=evidence.remedy or rule.remedy),
            evidence.explains_us,
        )
        for rule in RULES
        if (evidence := rule.condition(facts)) is not None
    ]
    return tuple(sorted(found, key=lambda item: -item.explains_us))


# ------------------------------------------------------------------------------------------------------ words


def percent(share: float) -> str:
    """A share in whole percent."""
    return f"{100 * share:.0f} %"


def milliseconds(time_us: float) -> str:
    """A time in ms with two significant digits, three from 1 ms on."""
    ms = time_us / 1e3
    return f"{ms:.3g} ms" if ms >= 1 else f"{ms:.2g} ms"


def _names(layers: Iterable[LayerRoofline]) -> str:
    """The slowest of `layers` by name, and how many more there are."""
    ordered = sorted(layers, key=lambda judged: -judged.layer.time_us)
    names = list(dict.fromkeys(judged.layer.name for judged in ordered))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _ops(layers: Iterable[LayerRoofline]) -> str:
    """How many of `layers` there are of each kind: of those that take the most time, and of all others."""
    listed = list(layers)
    counts = Counter(judged.layer.op for judged in listed)
    times_us = {op: time_of(judged for judged in listed if judged.layer.op == op) for op in counts}
    ordered = sorted(counts, key=lambda op: -times_us[op])
    named = [f"{counts[op]} {op}" for op in ordered[:_NAMED]]
    others = sum(counts[op] for op in ordered[_NAMED:])
    return ", ".join(named) + (f" and {_plural(others, 'other')}" if others else "")


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _verb(count: int, many: str, one: str) -> str:
    return one if count == 1 else many


def _share_of_time(
    facts: Facts, layers: Sequence[LayerRoofline], words: str, *, least: float = WORTH_IT
) -> Evidence | None:
    """That `layers` take at least the share `least` of a request, and in `words` what they do there."""
    share = facts.share(layers)
    return Evidence(f"{percent(share)} of the time {words}", time_of(layers)) if share >= least else None


# ------------------------------------------------------------------------------------------------- conditions


@_rule("serve larger batches, or use a network with fewer and wider layers; less arithmetic does not help")
def _dispatch(facts: Facts) -> Evidence | None:
    """Starting kernels, and what lies between them, takes a large part of a request."""
    if facts.roof_us is None:
        return None
    tiny = facts.tiny
    if facts.dispatch_us < _LARGE_PART * facts.whole_us:
        return None
    return Evidence(
        f"{milliseconds(facts.roof_us)} of work at the machine's peaks in {milliseconds(facts.time_us)}: "
        f"{len(tiny)} of {_plural(len(facts.layers), 'layer')} {_verb(len(tiny), 'have', 'has')} too little "
        f"work to amortize their start ({milliseconds(time_of(tiny))}), {_too_short(facts)}"
        f"and {milliseconds(facts.outside_us)} pass outside the layers",
        facts.dispatch_us,
    )


def _too_short(facts: Facts) -> str:
    count = sum(not judged.layer.time_us for judged in facts.layers)
    return f"{count} {_verb(count, 'are', 'is')} too short to be timed, " if count else ""


@_rule("only less arithmetic makes it faster: fewer channels (prune), or int8 where it is not yet")
def _near_arithmetic_peak(facts: Facts) -> Evidence | None:
    share = share_of_roof(facts.roof_us, facts.whole_us)
    if facts.bound != "compute" or share is None or share < _NEAR_PEAK:
        return None
    return Evidence(
        f"it runs at {percent(share)} of what the machine's arithmetic allows", share * facts.whole_us
    )


@_rule("move fewer bytes: int8, smaller activations (stride, channels), elementwise steps that can be fused")
def _memory(facts: Facts) -> Evidence | None:
    layers = [judged for judged in facts.layers if judged.bound == "memory"]
    moved = sum(judged.layer.bytes for judged in layers)
    words = (
        f"is in {_plural(len(layers), 'layer')} that {_verb(len(layers), 'wait', 'waits')} for memory, "
        f"{moved / 1e6:.2g} MB a request: {_names(layers)}"
    )
    return _share_of_time(facts, layers, words, least=_LARGE_PART)


@_rule("give these layers shapes that suit their kernels: more channels, fewer groups, ordinary strides")
def _slow_kernels(facts: Facts) -> Evidence | None:
    """Layers with enough work for the peaks to matter that stay far below them."""
    layers = [
        judged
        for judged in facts.layers
        if not judged.is_tiny and judged.share_of_roof is not None and judged.share_of_roof < _FAR_FROM_PEAK
    ]
    if facts.share(layers) < _LARGE_PART:
        return None
    reached = sum(judged.roof_us or 0.0 for judged in layers) / time_of(layers)
    return Evidence(
        f"{percent(facts.share(layers))} of the time is in {_plural(len(layers), 'layer')} that "
        f"{_verb(len(layers), 'reach', 'reaches')} {percent(reached)} of the peak: {_names(layers)}",
        sum(judged.excess_us for judged in layers),
    )


@_rule("quantize what is left in fp32, and see the findings on conversions, layout and dispatch")
def _below_int8_peak(facts: Facts) -> Evidence | None:
    """int8 gained less than the machine's int8 GEMM promises over that of what was quantized."""
    if facts.unquantized is None or not {"int8", facts.unquantized.spec.precision} <= set(facts.peaks):
        return None
    peak = facts.peaks["int8"] / facts.peaks[facts.unquantized.spec.precision]
    reached = facts.unquantized.time_us / facts.time_us
    if peak <= 1 or reached > 0.8 * peak:
        return None
    in_int8 = [judged for judged in facts.weighted if judged.layer.precision == "int8"]
    allowed_us, taken_us = sum(judged.roof_us or 0.0 for judged in in_int8), time_of(in_int8)
    fp32 = facts.share(facts.in_fp32)
    converting, reordering = (facts.share(facts.of_role(role)) for role in ("conversion", "layout"))
    outside = facts.outside_us / facts.whole_us
    known = (
        (fp32 >= 0.01, f"{percent(fp32)} of the time is in fp32 nodes ({_ops(facts.in_fp32)})"),
        (converting >= 0.01, f"{percent(converting)} in quantize/dequantize"),
        (reordering >= 0.01, f"{percent(reordering)} in changes of layout"),
        (
            allowed_us < taken_us,
            f"its int8 products reach {percent(allowed_us / (taken_us or 1.0))} of their peak",
        ),
        (outside >= 0.01, f"{percent(outside)} outside the layers"),
    )
    causes = [words for applies, words in known if applies]
    because = f": {', '.join(causes)}" if causes else ""
    return Evidence(
        f"int8 peak {peak:.1f}x, reached {reached:.1f}x against {facts.unquantized.name}{because}",
        max(0.0, facts.time_us - facts.unquantized.time_us / peak),
    )


@_rule("quantize the layers between two conversions too, or leave both of their neighbours in fp32")
def _quantize_dequantize(facts: Facts) -> Evidence | None:
    layers = facts.of_role("conversion")
    return _share_of_time(facts, layers, f"goes into conversions between fp32 and int8 ({_ops(layers)})")


@_rule(
    "replace these operations by ones that the runtime has in int8, or take them off excluded_layers; layers "
    "that a note in the report says 8 bits are too few for are best left as they are"
)
def _fp32_in_int8(facts: Facts) -> Evidence | None:
    if facts.spec.precision != "int8":
        return None
    layers = facts.in_fp32
    which = f"{_plural(len(layers), 'node')} that stayed in fp32: {_names(layers)} ({_ops(layers)})"
    return _share_of_time(facts, layers, f"is in {which}")


@_rule("give the stem fewer output channels or a larger stride; it cannot fill a vector with its inputs")
def _stem(facts: Facts) -> Evidence | None:
    """The first convolution sees an image: too few channels to fill a vector."""
    first = next((judged for judged in facts.weighted if judged.layer.channels.groups == 1), None)
    inputs = first.layer.channels.inputs if first else 0
    if first is None or inputs > _FEW_CHANNELS or "conv" not in first.layer.op.lower():
        return None
    if facts.share([first]) < WORTH_IT or first.share_of_roof is None or first.share_of_roof > 0.5:
        return None
    return Evidence(
        f"the stem {first.layer.name} has {_plural(inputs, 'input channel')}: it reaches "
        f"{percent(first.share_of_roof)} of its peak and takes {percent(facts.share([first]))} of the "
        "time",
        first.excess_us,
    )


@_rule("prune to whole vectors: channel counts that are multiples of the lanes")
def _lanes(facts: Facts) -> Evidence | None:
    """Channels are computed in whole vectors; what does not fill its last one is computed for nothing."""
    if facts.lanes is None:
        return None
    inner = facts.weighted[:-1]  # the last layer has as many outputs as there are classes
    layers = [
        judged
        for judged in inner
        if judged.layer.channels.outputs % facts.lanes
        and not judged.is_tiny
        and judged.layer.channels.groups == 1
    ]
    explains_us = sum(
        judged.layer.time_us * _empty(judged.layer.channels.outputs, facts.lanes) for judged in layers
    )
    if explains_us < WORTH_IT * facts.whole_us:
        return None
    counts = sorted({judged.layer.channels.outputs for judged in layers})
    shown = ", ".join(map(str, counts[:_NAMED])) + (", ..." if len(counts) > _NAMED else "")
    return Evidence(
        f"{_verb(len(counts), 'channel counts', 'channel count')} {shown} "
        f"{_verb(len(counts), 'do', 'does')} not fill a {facts.lanes}-lane vector, in layers that take "
        f"{percent(facts.share(layers))} of the time: {_names(layers)}",
        explains_us,
    )


def _empty(channels: int, lanes: int) -> float:
    """The share of lanes that `channels` leave empty."""
    return 1 - channels / (-(-channels // lanes) * lanes)


@_rule("use unsigned activations: quantize with activations: uint8")
def _signed_activations(facts: Facts) -> Evidence | None:
    signed_us, unsigned_us = facts.profile.signed_us, facts.profile.unsigned_us
    if signed_us is None or unsigned_us is None or unsigned_us > _CLEARLY * signed_us:
        return None
    kernels = "signed activations are slow here"
    if facts.sign_rates and facts.sign_rates[0] < _CLEARLY * facts.sign_rates[1]:
        kernels = "signed-signed kernels are slow on this CPU ({:,.0f} against {:,.0f} Gflop/s)".format(
            *facts.sign_rates
        )
    return Evidence(
        f"{kernels}: on one thread it takes {milliseconds(signed_us)}, the same graph with unsigned "
        f"activations {milliseconds(unsigned_us)}",
        (1 - unsigned_us / signed_us) * facts.time_us,
    )


@_rule(
    "channel counts that fill whole vectors stay in the runtime's own layout; so do neighbours that it "
    "knows in the same precision"
)
def _layout(facts: Facts) -> Evidence | None:
    layers = facts.of_role("layout")
    return _share_of_time(facts, layers, f"only changes the layout of activations ({_ops(layers)})")


@_rule("use the engine that is not quantized at these batch sizes")
def _slower_than_unquantized(facts: Facts) -> Evidence | None:
    """int8 has a lower throughput than the same network before it, beyond their intervals."""
    if facts.unquantized is None:
        return None
    before = {item.batch: item.rows_per_s for item in facts.unquantized.figures.throughput}
    worse = [
        (item.batch, item.rows_per_s, before[item.batch])
        for item in facts.figures.throughput
        if item.batch in before and _below(item.rows_per_s, before[item.batch])
    ]
    if not worse:
        return None
    batch, own, other = min(worse, key=lambda case: case[1].value / case[2].value)
    return Evidence(
        f"int8 is slower than {facts.unquantized.name} at batch {' and '.join(str(b) for b, *_ in worse)}: "
        f"{own.value:,.0f} against {other.value:,.0f} {facts.unit}/s at {batch}",
        max(0.0, facts.time_us - facts.unquantized.time_us),
    )


def _below(one: Interval, other: Interval) -> bool:
    return one.high < other.low


@_rule("remove whole layers rather than channels, or channels where the time is: see the slowest layers")
def _pruned_not_faster(facts: Facts) -> Evidence | None:
    """Less than half of the arithmetic that pruning took away is gone from the time."""
    if facts.unpruned is None or not facts.unpruned.spec.macs:
        return None
    arithmetic = facts.spec.macs / facts.unpruned.spec.macs
    time = facts.time_us / facts.unpruned.time_us
    if arithmetic > 1 - 2 * WORTH_IT or 1 - time > (1 - arithmetic) / 2:
        return None
    return Evidence(
        f"it has {percent(arithmetic)} of the arithmetic of {facts.unpruned.name} and takes "
        f"{percent(time)} of its time",
        max(0.0, facts.time_us - arithmetic * facts.unpruned.time_us),
    )


@_rule("give it one thread (benchmark.threads: 1), and run one such engine on each core")
def _idle_threads(facts: Facts) -> Evidence | None:
    """More threads than a request at batch 1 has work for."""
    one_us, all_us = facts.profile.one_thread_us, facts.profile.all_threads_us
    if facts.threads == 1 or one_us is None or all_us is None or all_us < _CLEARLY * one_us:
        return None
    compared = "slower" if _CLEARLY * all_us > one_us else "no faster"
    return Evidence(
        f"{facts.threads} threads are {compared} than one at batch 1: {milliseconds(all_us)} against "
        f"{milliseconds(one_us)}",
        max(0.0, all_us - one_us),
    )


@_rule(
    "on a machine of your own pin it to CPUs that share an L3 cache (lscpu -e lists them, taskset pins); "
    "in a cloud take a dedicated host: a virtual machine cannot keep its CPUs together"
)
def _far_cores(facts: Facts) -> Evidence | None:
    """Threads hand each other cache lines, which takes longer while their cores are far apart."""
    times_us = {
        state.state: 1e3 * state.latency_ms_p50.value
        for state in facts.figures.states
        if state.latency_ms_p50 is not None
    }
    if facts.threads == 1 or len(times_us) < 2:
        return None
    (near, near_us), *farther = times_us.items()
    shares = {state.name: state.share for state in facts.states}
    share = sum(shares[name] for name, _ in farther)
    far_us = sum(shares[name] * time_us for name, time_us in farther) / share
    if near_us > _CLEARLY * far_us:
        return None
    sentence = (
        f"{milliseconds(near_us)} with the cores {near}, "
        + ", ".join(f"{milliseconds(time_us)} {name}" for name, time_us in farther)
        + f": {percent(share)} of the time it is {far_us / near_us:.1f} times slower because its "
        f"{facts.threads} threads hand each other cache lines across core complexes"
    )
    remedy = ""
    one_us = facts.profile.one_thread_us
    if one_us:
        sentence += f"; one thread takes {milliseconds(one_us)} in any state"
        remedy = "give it one thread, which is faster over all states" if one_us < facts.time_us else ""
    return Evidence(sentence, share * (far_us - near_us), remedy)


@_rule("send larger batches where the latency allows it")
def _small_batch(facts: Facts) -> Evidence | None:
    """Larger batches give clearly more rows per second."""
    rates = {item.batch: item.rows_per_s for item in facts.figures.throughput}
    if 1 not in rates or len(rates) == 1:
        return None
    best = max(rates, key=lambda batch: rates[batch].value)
    gain = rates[best].value / rates[1].value
    if gain < 1.5 or not _below(rates[1], rates[best]):
        return None
    return Evidence(
        f"batch 1 leaves {percent(1 - 1 / gain)} of the machine unused: "
        f"{rates[1].value:,.0f} {facts.unit}/s, at batch {best} {rates[best].value:,.0f}",
        0.0,  # of a request's latency
    )
