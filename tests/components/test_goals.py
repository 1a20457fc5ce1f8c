"""Which engine meets the goals, and what is said of the others."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import (
    EngineFigures,
    MeasurementsSpec,
    PairedQuality,
    PairedRatio,
    Throughput,
)
from hpml.artifacts.metric import ACCURACY_TOP1, MetricFacts
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.measuring.goals import Goals, Objective, decide, is_better, objective_interval


def exactly(value: float) -> Interval:
    return Interval(value=value, low=value, high=value)


def between(low: float, value: float, high: float) -> Interval:
    return Interval(value=value, low=low, high=high)


def figures(
    *, accuracy: float = 0.97, p50: Interval | None = None, size_bytes: int = 1_000_000, **others: Any
) -> EngineFigures:
    return EngineFigures(
        status="measured",
        target="onnx",
        precision="fp32",
        methods=(),
        size_bytes=size_bytes,
        parameters=1000,
        macs=1000,
        quality={"accuracy_top1": exactly(accuracy)},
        latency_ms_p50=p50 or exactly(1.0),
        latency_ms_p90=p50 or exactly(1.0),
        **{"latency_ms_p99": p50 or exactly(1.0), **others},
    )


NOT_BUILT = EngineFigures(
    status="not built",
    reason="no GPU here",
    target="tensorrt",
    precision="fp16",
    methods=(),
    size_bytes=0,
    parameters=0,
    macs=0,
)


def measurements(**engines: EngineFigures) -> MeasurementsSpec:
    engines = {"reference": figures(p50=exactly(10.0)), **engines}
    return MeasurementsSpec(
        reference="reference",
        best_fp32="reference",
        engines=engines,
        rounds=1,
        threads=1,
        seed=0,
        environment={},
    )


def test_the_fastest_of_those_that_qualify_is_chosen() -> None:
    decision = decide(
        Goals(),
        measurements(
            fast=figures(p50=between(0.9, 1.0, 1.1)),
            slow=figures(p50=between(1.9, 2.0, 2.1)),
            wrong=figures(p50=exactly(0.1), accuracy=0.949),
            absent=NOT_BUILT,
        ),
    )
    assert decision.chosen == "fast" and decision.nearest is None
    assert "latency p50 1 ms (0.9 to 1.1)" in decision.reason
    outcomes = {name: verdict.outcome for name, verdict in decision.verdicts.items()}
    assert outcomes == {
        "reference": "reference",
        "fast": "chosen",
        "slow": "qualified",
        "wrong": "disqualified",
        "absent": "not built",
    }
    assert decision.verdicts["wrong"].reason == "top-1 worse by 2.1 points, allowed 1.0"
    assert decision.verdicts["wrong"].shortfall == pytest.approx(1.1)
    assert decision.verdicts["absent"].reason == "no GPU here"


def test_the_words_are_those_of_the_metric_that_the_goals_name() -> None:
    """A perplexity is lost in percent of the reference's, and lower is better."""
    perplexity = MetricFacts("perplexity", "perplexity", better="lower")
    values = {"reference": 20.0, "near": 20.4, "far": 23.0, "better": 12.0}
    engines = {
        name: figures(p50=exactly(number + 1.0)).model_copy(
            update={"quality": {"perplexity": exactly(value)}}
        )
        for number, (name, value) in enumerate(values.items())
    }
    spec = measurements(**engines).model_copy(update={"metrics": (ACCURACY_TOP1, perplexity)})
    decision = decide(Goals(metric="perplexity", max_quality_loss=0.05), spec)
    assert decision.chosen == "near" and decision.verdicts["better"].outcome == "qualified"
    assert decision.verdicts["far"].reason == "perplexity worse by 15.0 %, allowed 5.0"
    with pytest.raises(ConfigInvalid, match=r"goals.metric is 'bleu'.*accuracy_top1, perplexity"):
        decide(Goals(metric="bleu"), spec)


def test_goals_and_figures_of_before_there_were_tasks_are_read() -> None:
    assert Goals.model_validate({"max_accuracy_drop": 0.03}) == Goals(max_quality_loss=0.03)
    figure = {"value": 0.5, "low": 0.4, "high": 0.6}
    now = figures(
        throughput=(Throughput(batch=8, rows_per_s=between(0.4, 0.5, 0.6)),),
        paired=PairedQuality(
            change={"accuracy_top1": between(0.4, 0.5, 0.6)},
            mcnemar_p=0.5,
            groups=(between(0.4, 0.5, 0.6),),
            agreement=0.99,
            max_abs_error=0.1,
        ),
    )
    fields = now.model_dump(mode="json")
    fields["accuracy_top1"] = fields.pop("quality")["accuracy_top1"]
    fields["throughput"] = [{"batch": 8, "images_per_s": figure}]
    fields["paired"] = {
        "top1_change": figure,
        "mcnemar_p": 0.5,
        "gained": 0,
        "lost": 0,
        "per_class": [figure],
        "top1_agreement": 0.99,
        "max_abs_logit_error": 0.1,
    }
    of_before = measurements().model_dump(mode="json", exclude={"metrics", "unit", "operation", "operations"})
    of_before["engines"]["a"] = fields
    assert MeasurementsSpec.model_validate(of_before) == measurements(a=now)
    unbuilt = NOT_BUILT.model_dump(mode="json", exclude={"quality"}) | {"accuracy_top1": None}
    assert EngineFigures.model_validate(unbuilt) == NOT_BUILT


def test_within_the_noise_the_smaller_is_chosen() -> None:
    decision = decide(
        Goals(),
        measurements(
            a=figures(p50=between(0.9, 1.0, 1.2), size_bytes=2_000_000),
            b=figures(p50=between(1.1, 1.3, 1.4), size_bytes=1_000_000),
        ),
    )
    assert decision.chosen == "b"
    assert (
        decision.verdicts["a"].outcome == "tied"
        and decision.verdicts["a"].reason
        == "latency p50 1 ms (0.9 to 1.2), not told apart from b; b is smaller"
    )


def test_a_small_engine_that_another_beats_beyond_the_noise_is_not_tied() -> None:
    """`best` overlaps both, but `good` is better than `small` beyond doubt."""
    decision = decide(
        Goals(),
        measurements(
            best=figures(p50=between(0.5, 1.0, 3.0), size_bytes=3),
            good=figures(p50=between(1.1, 1.2, 1.3), size_bytes=2),
            small=figures(p50=between(1.5, 2.0, 2.5), size_bytes=1),
        ),
    )
    assert decision.chosen == "good"
    assert decision.verdicts["small"].outcome == "qualified"


def test_equal_engines_go_by_name() -> None:
    assert decide(Goals(), measurements(b=figures(), a=figures())).chosen == "a"


def test_a_drop_of_exactly_what_is_allowed_qualifies() -> None:
    assert 0.97 - 0.96 > 0.01  # in floating point
    assert decide(Goals(max_quality_loss=0.01), measurements(a=figures(accuracy=0.96))).chosen == "a"


def test_every_missed_constraint_is_named_and_the_nearest_is_the_one_that_misses_least() -> None:
    goals = Goals(max_quality_loss=0.01, max_latency_ms_p99=2.0, max_size_mb=1.0)
    decision = decide(
        goals,
        measurements(
            far=figures(accuracy=0.9, p50=exactly(4.0), size_bytes=3_000_000),
            near=figures(p50=exactly(2.2)),
        ),
    )
    assert decision.chosen is None and decision.nearest == "near"
    assert (
        decision.reason == "no engine meets the goals; the nearest is near: latency p99 2.20 ms, allowed 2.00"
    )
    far = decision.verdicts["far"]
    assert far.reason == (
        "top-1 worse by 7.0 points, allowed 1.0; latency p99 4.00 ms, allowed 2.00;"
        " size 3.00 MB, allowed 1.00"
    )
    assert far.shortfall == pytest.approx(6.0)


def test_a_near_miss_is_written_so_that_one_sees_the_difference() -> None:
    decision = decide(Goals(max_size_mb=1.0), measurements(a=figures(size_bytes=1_000_400)))
    assert decision.verdicts["a"].reason == "size 1.0004 MB, allowed 1.0000"


def test_no_loss_allowed_still_ranks_the_misses() -> None:
    goals = Goals(max_quality_loss=0.0)
    decision = decide(goals, measurements(a=figures(accuracy=0.9), b=figures(accuracy=0.96)))
    assert decision.nearest == "b"


def test_the_reference_is_not_chosen_even_when_it_is_the_best() -> None:
    spec = measurements(a=figures(p50=exactly(20.0)))
    assert decide(Goals(), spec).chosen == "a"


def test_nothing_built_chooses_nothing() -> None:
    decision = decide(Goals(), measurements(a=NOT_BUILT))
    assert (decision.chosen, decision.nearest) == (None, None)
    assert decision.reason == "no engine was built"


def test_throughput_is_maximised_at_the_best_batch() -> None:
    def serving(*rates: float) -> EngineFigures:
        return figures(
            throughput=tuple(
                Throughput(batch=2**index, rows_per_s=between(rate - 1, rate, rate + 1))
                for index, rate in enumerate(rates)
            )
        )

    decision = decide(Goals(objective="throughput"), measurements(a=serving(100, 200), b=serving(150, 190)))
    assert decision.chosen == "a"
    assert "throughput 200 images/s (199 to 201)" in decision.reason


UNTIMED: dict[str, Any] = {
    "status": "not measured",
    "reason": "machine busy",
    "latency_ms_p50": None,
    "latency_ms_p99": None,
}


def untimed(**others: Any) -> EngineFigures:
    return figures(**others).model_copy(update=UNTIMED)


def paired(**speedups: Interval | None) -> tuple[PairedRatio, ...]:
    """a_b=...: how many times faster a is than b."""
    return tuple(
        PairedRatio(engine=one, baseline=other, rounds=40, speedup=speedup, reason="" if speedup else "few")
        for names, speedup in speedups.items()
        for one, other in [names.split("_")]
    )


def with_pairs(spec: MeasurementsSpec, **speedups: Interval | None) -> MeasurementsSpec:
    return spec.model_copy(update={"pairs": paired(**speedups)})


def test_the_paired_ratio_decides_where_the_figures_overlap() -> None:
    """Both latencies have two values, so their own intervals are wide; in every round b is the faster."""
    spec = measurements(
        a=figures(p50=between(0.20, 0.25, 0.30), size_bytes=1),
        b=figures(p50=between(0.12, 0.19, 0.24), size_bytes=2),
    )
    assert decide(Goals(), spec).chosen == "a"  # as versions before did, without pairs
    decision = decide(Goals(), with_pairs(spec, a_b=between(0.74, 0.75, 0.76)))
    assert decision.chosen == "b" and decision.undecided == ""
    assert decision.verdicts["a"].outcome == "qualified"
    assert decision.verdicts["a"].reason.endswith("beaten by b 1.33 times (1.32 to 1.35)")


def test_a_ratio_that_holds_1_beats_nobody() -> None:
    spec = measurements(a=figures(p50=exactly(1.0), size_bytes=2), b=figures(p50=exactly(2.0), size_bytes=1))
    decision = decide(Goals(), with_pairs(spec, a_b=between(0.9, 2.0, 4.0)))
    assert decision.chosen == "b" and decision.verdicts["a"].outcome == "tied" and not decision.undecided
    assert "not told apart from a: the smallest of them" in decision.reason


def test_without_any_latency_the_smallest_is_chosen_and_the_reason_says_so() -> None:
    spec = measurements(
        a=untimed(size_bytes=2),
        b=untimed(size_bytes=1),
        wrong=untimed(size_bytes=0, accuracy=0.9),
    )
    decision = decide(Goals(), spec)
    assert decision.chosen == "b" and decision.undecided == "latency is not measured"
    assert decision.reason == "b: latency is not measured: the smallest of the candidates"
    assert decision.verdicts["wrong"].outcome == "disqualified"  # accuracy and size hold always
    assert decision.verdicts["a"].reason == "latency is not measured; b is smaller"


def test_what_is_not_known_beats_nobody_and_is_beaten_by_nobody() -> None:
    spec = measurements(
        fast=figures(p50=exactly(1.0), size_bytes=3),
        slow=figures(p50=exactly(2.0), size_bytes=1),
        unknown=untimed(size_bytes=2),
    )
    decision = decide(Goals(), with_pairs(spec, fast_slow=exactly(2.0)))
    assert decision.chosen == "unknown" and decision.undecided == "latency of unknown is not measured"
    assert decision.reason == (
        "unknown: latency of unknown is not measured: the smallest of those that no other is known to beat"
    )
    outcomes = {name: verdict.outcome for name, verdict in decision.verdicts.items()}
    assert (outcomes["fast"], outcomes["slow"]) == ("tied", "qualified")


def test_engines_that_were_never_timed_together_are_undecided() -> None:
    spec = measurements(a=figures(size_bytes=1), b=figures(size_bytes=2), c=figures(size_bytes=3))
    decision = decide(Goals(), with_pairs(spec, a_b=exactly(1.0), a_c=None, b_c=exactly(1.0)))
    assert decision.chosen == "a" and decision.undecided == "latency is not compared with that of c"


def test_ratios_that_beat_each_other_in_a_circle_choose_the_smallest() -> None:
    spec = measurements(a=figures(size_bytes=3), b=figures(size_bytes=1), c=figures(size_bytes=2))
    circle = with_pairs(spec, a_b=exactly(1.1), b_c=exactly(1.1), c_a=exactly(1.1))
    assert decide(Goals(), circle).chosen == "b"


def test_a_latency_goal_without_a_figure_is_not_verified() -> None:
    few = {"latency_ms_p99": None, "unquoted": {"latency_ms_p99": "350 of 662 samples"}}
    decision = decide(
        Goals(max_latency_ms_p99=2.0), measurements(a=figures(**few), b=untimed(size_bytes=10**9))
    )
    assert decision.chosen == "a"
    assert decision.unverified == ("latency p99, allowed 2 ms, is not measured: 350 of 662 samples",)
    assert decision.verdicts["b"].unverified == ("latency p99, allowed 2 ms, is not measured: machine busy",)
    known = decide(Goals(max_latency_ms_p99=2.0), measurements(a=figures()))
    assert known.unverified == () and decide(Goals(), measurements(a=untimed())).unverified == ()


def test_other_objectives_without_a_figure_take_the_smallest() -> None:
    for objective, quantity in (("throughput", "throughput"), ("latency_ms_p99", "latency p99")):
        goals = Goals.model_validate({"objective": objective})
        decision = decide(goals, measurements(a=untimed(size_bytes=2), b=untimed(size_bytes=1)))
        assert decision.reason == f"b: {quantity} is not measured: the smallest of the candidates"
    by_size = decide(Goals(objective="size_bytes"), measurements(a=untimed(size_bytes=2), b=untimed()))
    assert by_size.chosen == "a" and by_size.undecided == ""


def test_equal_sizes_are_told_as_what_they_are() -> None:
    decision = decide(Goals(), measurements(a=untimed(), b=untimed()))
    assert decision.reason.endswith("the smallest of the candidates, and the first by name")
    assert decision.verdicts["b"].reason.endswith("a is as small, and first by name")
    alone = decide(Goals(), measurements(a=untimed()))
    assert alone.reason == "a: latency is not measured: the only one that meets the goals"


def test_a_reference_that_was_not_measured_is_refused() -> None:
    spec = measurements(a=figures()).model_copy(update={"reference": "fp32/eager"})
    with pytest.raises(StageFailed, match=r"'fp32/eager' was not measured.*reference, a"):
        decide(Goals(), spec)


# ------------------------------------------------------------------------------------------------ properties

OBJECTIVES: tuple[Objective, ...] = ("latency_ms_p50", "latency_ms_p99", "throughput", "size_bytes")


@st.composite
def any_interval(draw: st.DrawFn) -> Interval:
    low, value, high = sorted(draw(st.tuples(*[st.integers(1, 12)] * 3)))
    return between(low, value, high)


@st.composite
def any_figures(draw: st.DrawFn) -> EngineFigures:
    if draw(st.integers(0, 5)) == 0:
        return NOT_BUILT
    return figures(
        accuracy=draw(st.sampled_from((0.93, 0.95, 0.96, 0.965, 0.97, 0.98))),
        p50=draw(any_interval()),
        size_bytes=draw(st.integers(1, 5)) * 500_000,
        latency_ms_p99=draw(any_interval()),
        throughput=(Throughput(batch=1, rows_per_s=draw(any_interval())),),
    )


any_engines = st.dictionaries(st.sampled_from("abcde"), any_figures(), max_size=5)
any_goals = st.builds(
    Goals,
    max_quality_loss=st.sampled_from((0.0, 0.005, 0.02)),
    max_latency_ms_p99=st.none() | st.integers(1, 12).map(float),
    max_size_mb=st.none() | st.sampled_from((0.5, 1.0, 2.0)),
    objective=st.sampled_from(OBJECTIVES),
)


def meets(goals: Goals, engine: EngineFigures) -> bool:
    if engine.status != "measured":
        return False
    assert "accuracy_top1" in engine.quality and engine.latency_ms_p99
    return (
        round(0.97 - engine.quality["accuracy_top1"].value, 6) <= goals.max_quality_loss
        and engine.latency_ms_p99.value <= (goals.max_latency_ms_p99 or 1e9)
        and engine.size_bytes <= (goals.max_size_mb or 1e9) * 1e6
    )


def known_objective(goals: Goals, engine: EngineFigures) -> Interval:
    interval = objective_interval(goals.objective, engine)
    assert interval
    return interval


@given(any_goals, any_engines)
def test_the_chosen_one_qualifies_and_nothing_that_qualifies_is_better(
    goals: Goals, engines: dict[str, EngineFigures]
) -> None:
    decision = decide(goals, measurements(**engines))
    qualified = {name: engine for name, engine in engines.items() if meets(goals, engine)}
    assert (decision.chosen is None) == (not qualified)
    if decision.chosen is None:
        return
    chosen = qualified[decision.chosen]
    objective = known_objective(goals, chosen)
    for other in qualified.values():
        other_objective = known_objective(goals, other)
        assert not is_better(goals.objective, other_objective, objective)
        unbeaten = not any(
            is_better(goals.objective, known_objective(goals, third), other_objective)
            for third in qualified.values()
        )
        assert not (unbeaten and other.size_bytes < chosen.size_bytes)


@given(any_goals, any_engines)
def test_each_engine_has_the_verdict_that_its_figures_deserve(
    goals: Goals, engines: dict[str, EngineFigures]
) -> None:
    decision = decide(goals, measurements(**engines))
    assert set(decision.verdicts) == {"reference", *engines}
    for name, engine in engines.items():
        verdict = decision.verdicts[name]
        assert (verdict.outcome in ("chosen", "tied", "qualified")) == meets(goals, engine)
        assert (verdict.outcome == "not built") == (engine.status == "not built")
        assert (verdict.shortfall > 0) == (verdict.outcome == "disqualified")
        assert (verdict.outcome == "chosen") == (decision.chosen == name)
    disqualified = [v.shortfall for v in decision.verdicts.values() if v.outcome == "disqualified"]
    if decision.nearest:
        assert decision.verdicts[decision.nearest].shortfall == min(disqualified)


@given(any_goals, st.dictionaries(st.sampled_from("abc"), any_figures(), min_size=3))
def test_the_order_of_the_engines_does_not_matter(goals: Goals, engines: dict[str, EngineFigures]) -> None:
    first = decide(goals, measurements(**engines))
    for names in permutations(engines):
        again = decide(goals, measurements(**{name: engines[name] for name in names}))
        assert again == first


@given(any_goals, any_engines)
def test_an_engine_that_cannot_qualify_changes_nothing(
    goals: Goals, engines: dict[str, EngineFigures]
) -> None:
    hopeless = figures(accuracy=0.1, p50=exactly(0.01), latency_ms_p99=exactly(0.01), size_bytes=1)
    without = decide(goals, measurements(**engines))
    assert decide(goals, measurements(**engines, z=hopeless)).chosen == without.chosen
