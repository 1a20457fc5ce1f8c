"""A diagnosis in one or two sentences."""

from __future__ import annotations

from hpml.components.diagnose.facts import Facts
from hpml.components.diagnose.roofs import share_of_roof
from hpml.components.diagnose.rules import WORTH_IT, Found, milliseconds, percent


def verdict(facts: Facts, found: tuple[Found, ...]) -> str:
    """What binds the engine, then the finding that explains the most time beside it."""
    first = _bound_in_words(facts)
    said = {"dispatch", "near-arithmetic-peak"}  # the first sentence says it already
    explaining = (
        item.finding.sentence
        for item in found
        if item.finding.rule not in said and item.explains_us >= WORTH_IT * facts.whole_us
    )
    second = next(explaining, "")
    return f"{first}. {second[:1].upper()}{second[1:]}." if second else f"{first}."


def _bound_in_words(facts: Facts) -> str:
    if facts.roof_us is None or facts.bound is None:
        whose = f"for {facts.threads} threads" if facts.device == "cpu" else "of its GPU"
        return f"The machine has no stable peaks {whose} to compare with"
    time = milliseconds(facts.time_us)
    if facts.bound == "overhead":
        mostly_dispatch = facts.dispatch_us > (facts.whole_us - facts.roof_us) / 2
        cause = "dispatch-bound" if mostly_dispatch else "bound by kernels far below their peaks"
        work = "arithmetic" if facts.is_compute_dominated else "memory traffic"
        return f"{cause}: {milliseconds(facts.roof_us)} of {work} in {time}"
    share = share_of_roof(facts.roof_us, facts.time_us)
    if share is None:
        return f"{facts.bound}-bound: {time}, faster than the peaks measured here, which are too low for it"
    return f"{facts.bound}-bound: {time}, {percent(share)} of the machine's peak"
