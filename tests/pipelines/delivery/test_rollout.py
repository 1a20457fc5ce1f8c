"""What becomes of stable traffic in a rollout, whatever happens in the middle of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from hpml.core.errors import GateFailed, StageFailed, Unavailable, UsageError
from hpml.pipelines.delivery.release import Release
from hpml.pipelines.delivery.rollout import Evidence, Rollout, Stable
from hpml.pipelines.delivery.smoke_limits import Benchmark, SmokeLimits, judge
from hpml.serving.rollout.figures import ReplayFigures, SmokeFigures
from tests.pipelines.delivery.releases import about, latencies, release, seen

A, B, C = release("aaaaaaaa"), release("bbbbbbbb"), release("cccccccc")
LIMITS = SmokeLimits()


class Killed(BaseException):
    """The process was killed: nothing of it runs any more."""


@dataclass
class Memory:
    """A place that keeps what it is told, and where a process may be killed before or after any change.

    fails: by method, what it raises for `broken`. figures: what a canary is seen to do.
    """

    served: Stable | None = None
    beside: Release | None = None
    fails: dict[str, BaseException] = field(default_factory=dict)
    broken: Release = B
    figures: dict[str, Any] = field(default_factory=dict)
    kill_at: int = -1
    changes: int = 0
    is_dead: bool = False
    history: list[str] = field(default_factory=list)

    @contextmanager
    def lock(self) -> Iterator[None]:
        yield

    def stable(self) -> Stable | None:
        return self.served

    def canary(self) -> Release | None:
        return self.beside

    def begin(self, release: Release) -> None:
        self._moment()
        self.served = Stable(release, tried=False)
        self._moment()
        self._fail("begin", release)

    def start_canary(self, release: Release) -> None:
        self._moment()
        self.beside = release
        self._moment()
        self._fail("start_canary", release)

    def smoke(self, release: Release, *, beside_stable: bool) -> SmokeFigures:
        self._moment()
        self._fail("smoke", release)
        return seen(release, **({} if beside_stable else {"stable": None, "p50_ratio": None}) | self.figures)

    def promote(self, release: Release, previous: Release | None) -> None:
        self._moment()
        self.served = Stable(release, tried=True, previous=previous)
        self._moment()
        self._fail("promote", release)

    def remove_canary(self) -> None:
        self._moment()
        self.beside = None
        self._moment()

    def remove(self) -> None:
        self._moment()
        self.served = self.beside = None
        self._moment()

    def _moment(self) -> None:
        self.changes += 1
        self.is_dead = self.is_dead or self.changes == self.kill_at
        if self.is_dead:  # also for what would be undone
            raise Killed

    def revived(self) -> Memory:
        """It, for another process."""
        self.is_dead = False
        return self

    def _fail(self, method: str, release: Release) -> None:
        self.history.append(f"{method} {release.model_version}")
        if method in self.fails and release == self.broken:
            raise self.fails[method]


def rollout(place: Memory, kept: list[Evidence] | None = None) -> Rollout:
    return Rollout(place, (kept if kept is not None else []).append, lambda line: None)


def test_a_release_takes_the_place_of_the_one_before_and_comes_back() -> None:
    place, kept = Memory(), list[Evidence]()
    rollout(place, kept).deploy(A, LIMITS, None)
    assert place.served == Stable(A, tried=True) and place.beside is None
    rollout(place, kept).deploy(B, LIMITS, None)
    assert place.served == Stable(B, tried=True, previous=A) and place.beside is None
    rollout(place, kept).rollback()
    assert place.served == Stable(A, tried=True, previous=B)
    assert [one.outcome for one in kept] == ["promoted", "promoted", "rolled back"]


@pytest.mark.parametrize("setting", ["token_file", "token_secret"])
@pytest.mark.parametrize("digest", [A.digest, B.digest])
def test_a_token_is_not_dropped_because_nobody_named_it(setting: str, digest: str) -> None:
    guarded = A.model_copy(update={"settings": {setting: "secret"}})
    place = Memory(Stable(guarded, tried=True))
    with pytest.raises(UsageError, match="asks for a token"):
        rollout(place).deploy(B.model_copy(update={"digest": digest}), LIMITS, None)
    assert place.served == Stable(guarded, tried=True) and place.beside is None


def test_a_rollback_to_what_had_no_token_says_so() -> None:
    guarded = B.model_copy(update={"settings": {"token_file": "secret"}})
    said: list[str] = []
    Rollout(Memory(Stable(guarded, tried=True, previous=A)), lambda _: None, said.append).rollback()
    assert said[-1] == "warning: it is served as it was: requests need no token any more"


def test_what_was_judged_is_kept_with_what_it_was_held_to() -> None:
    place, kept, benchmark = Memory(Stable(A, tried=True)), list[Evidence](), Benchmark(0.1, "a CPU")
    rollout(place, kept).deploy(B, LIMITS, benchmark)
    rollout(place, kept).rollback()
    assert [(one.limits, one.benchmark) for one in kept] == [(LIMITS, benchmark), (None, None)]


def test_that_nothing_is_served_any_more_is_kept_too() -> None:
    place, kept = Memory(Stable(B, tried=True, previous=A)), list[Evidence]()
    rollout(place, kept).undeploy()
    assert place.served is None and [(one.outcome, one.release) for one in kept] == [("undeployed", B)]
    with pytest.raises(UsageError, match="nothing is served"):
        rollout(place, kept).undeploy()
    assert len(kept) == 1


def test_the_same_release_again_changes_nothing_but_its_settings() -> None:
    place = Memory(Stable(B, tried=True, previous=A))
    rollout(place).deploy(B, LIMITS, None)
    assert place.served == Stable(B, tried=True, previous=A)
    assert place.history == ["promote bbbbbbbb"]


def test_other_settings_of_the_same_bundle_come_back_too() -> None:
    other = B.model_copy(update={"settings": {"port": 9}})
    place = Memory(Stable(B, tried=True, previous=A))
    rollout(place).deploy(other, LIMITS, None)
    assert place.served == Stable(other, tried=True, previous=B)
    rollout(place).rollback()
    assert place.served and place.served.release == B


def test_settings_that_do_not_work_leave_those_of_before() -> None:
    served = Stable(A, tried=True, previous=C)
    place = Memory(served, fails={"promote": StageFailed("port 9 is taken")})
    place.broken = A.model_copy(update={"settings": {"port": 9}})
    with pytest.raises(StageFailed, match="port 9"):
        rollout(place).deploy(place.broken, LIMITS, None)
    assert place.served == served


def test_ctrl_c_takes_the_canary_away() -> None:
    place = Memory(Stable(A, tried=True), fails={"smoke": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        rollout(place).deploy(B, LIMITS, None)
    assert place.served == Stable(A, tried=True) and place.beside is None


@pytest.mark.parametrize(
    ("fails", "figures"),
    [
        ({"start_canary": StageFailed("it crashed")}, {}),
        ({"smoke": StageFailed("no answer")}, {}),
        ({}, {"disagreements": ("a number of logits differs by 1",)}),
        ({}, {"failures": ("canary answers 500",)}),
        ({}, {"p50_ratio": about(2.0)}),
        ({}, {"canary": latencies(1, 9)}),
    ],
    ids=["crash", "no smoke", "wrong", "errors", "slow", "slow tail"],
)
def test_what_does_not_pass_leaves_the_stable_one(
    fails: dict[str, BaseException], figures: dict[str, Any]
) -> None:
    place, kept = Memory(Stable(A, tried=True, previous=C), fails=fails, figures=figures), list[Evidence]()
    with pytest.raises(GateFailed, match=r"bbbbbbbb .* was not rolled out, small/aaaaaaaa .* stays"):
        rollout(place, kept).deploy(B, LIMITS, None)
    assert place.served == Stable(A, tried=True, previous=C) and place.beside is None
    assert [one.outcome for one in kept] == ["refused"] and kept[0].problems


def test_a_place_that_does_not_answer_is_no_verdict_on_the_release() -> None:
    place = Memory(Stable(A, tried=True), fails={"smoke": Unavailable("no room for its pod")})
    with pytest.raises(Unavailable):
        rollout(place).deploy(B, LIMITS, None)
    assert place.served == Stable(A, tried=True) and place.beside is None


def test_one_that_cannot_take_over_gives_way_again() -> None:
    place = Memory(Stable(A, tried=True, previous=C), fails={"promote": StageFailed("no room")})
    with pytest.raises(StageFailed):
        rollout(place).deploy(B, LIMITS, None)
    assert place.served == Stable(A, tried=True, previous=C) and place.beside is None


def test_a_first_release_that_does_not_pass_is_removed() -> None:
    place = Memory(figures={"disagreements": ("wrong",)})
    with pytest.raises(GateFailed, match="nothing is served"):
        rollout(place).deploy(A, LIMITS, None)
    assert place.served is None


@pytest.mark.parametrize("place", [Memory(), Memory(Stable(A, tried=True))], ids=["nothing", "the first"])
def test_there_may_be_nothing_to_go_back_to(place: Memory) -> None:
    with pytest.raises(UsageError, match="nothing to go back to"):
        rollout(place).rollback()


def moments(place: Memory, release: Release) -> int:
    """How often a process can be killed in a rollout that is not."""
    rollout(place).deploy(release, LIMITS, None)
    return place.changes


@pytest.mark.parametrize("again", [B, C], ids=["the same", "another"])
@pytest.mark.parametrize("before", [None, Stable(A, tried=True, previous=C)], ids=["first", "second"])
def test_killed_at_any_moment_the_next_rollout_finishes_or_undoes(
    before: Stable | None, again: Release
) -> None:
    total = moments(Memory(before), B)
    assert total >= 4
    for moment in range(1, total + 1):
        place = Memory(before, kill_at=moment)
        with pytest.raises(Killed):
            rollout(place).deploy(B, LIMITS, None)
        tried = place.served if place.served and place.served.tried else None
        assert tried in (before, Stable(B, tried=True, previous=before.release if before else None))
        rollout(place.revived()).deploy(again, LIMITS, None)
        assert place.served and place.served.release == again and place.served.tried
        assert place.beside is None, f"killed at {moment}"


def test_killed_in_a_refusal_the_stable_one_goes_on() -> None:
    for moment in range(1, 6):
        place = Memory(Stable(A, tried=True), figures={"failures": ("500",)}, kill_at=moment)
        with pytest.raises((Killed, GateFailed)):
            rollout(place).deploy(B, LIMITS, None)
        assert place.served == Stable(A, tried=True)


# ---------------------------------------------------------------------------------------------------- limits


def test_the_benchmark_counts_where_it_was_on_the_same_cpu() -> None:
    assert not judge(seen(B, engine_ms_mean=0.2), LIMITS, Benchmark(0.01, "a CPU")).problems  # it is colder
    figures = seen(B, engine_ms_mean=0.5)
    slow = judge(figures, LIMITS, Benchmark(0.1, "a CPU"))
    assert len(slow.problems) == 1 and "5.00 times its registered p50" in slow.problems[0]
    elsewhere = judge(figures, LIMITS, Benchmark(0.1, "another CPU"))
    assert not elsewhere.problems and "not compared with the benchmark" in elsewhere.notes[0]
    assert not judge(seen(B), LIMITS, Benchmark(0.1, "a CPU")).notes


def test_limits_are_as_given() -> None:
    figures = seen(B, p50_ratio=about(1.4), canary=latencies(1.4, 2.8))
    assert judge(figures, LIMITS, None).problems
    assert not judge(figures, SmokeLimits(p50_factor=1.5), None).problems


def replayed(**others: Any) -> ReplayFigures:
    """A hundred requests, all answered by both, half of them alike unless `others` say otherwise."""
    told: dict[str, Any] = {"recorded": 100, "sent": 100, "agreement": 0.5, "compared": 100}
    both = {"canary": latencies(1.5, 2), "stable": latencies(1, 2)}
    return ReplayFigures(**{**told, **both, **others})


def test_agreement_on_replayed_requests_is_told_and_a_limit_if_asked_for() -> None:
    figures = seen(B, replay=replayed())
    told = judge(figures, LIMITS, None)
    assert not told.problems
    assert told.notes[-1] == (
        "100 of 100 recorded requests were replayed, p50 1.5 ms, the stable version's 1 ms;"
        " 50.00% of 100 decisions are the same"
    )
    assert not judge(figures, SmokeLimits(replay_agreement=0.5), None).problems
    (problem,) = judge(figures, SmokeLimits(replay_agreement=0.51), None).problems
    assert problem == "the answers to replayed requests agree in 50.00%, 51.00% are needed"


def test_a_replayed_request_that_fails_keeps_a_canary_from_taking_over() -> None:
    replay = replayed(failures=("request 7: canary answers 500",), unanswered_by_stable=2, compared_by="rows")
    told = judge(seen(B, replay=replay), LIMITS, None)
    assert told.problems == ("replayed request 7: canary answers 500",)
    assert "the stable version did not answer 2; 50.00% of 100 rows agree within" in told.notes[-1]


def test_agreement_that_is_not_known_is_not_enough_where_some_is_asked_for() -> None:
    replay = replayed(agreement=None, compared=0, stable=None, unanswered_by_stable=100)
    figures = seen(B, replay=replay)
    assert not judge(figures, LIMITS, None).problems
    (problem,) = judge(figures, SmokeLimits(replay_agreement=0.1), None).problems
    assert "agreement is not known" in problem
    first = judge(
        seen(B, stable=None, p50_ratio=None, replay=replayed(agreement=None, stable=None)),
        SmokeLimits(replay_agreement=0.1),
        None,
    )
    assert not first.problems and first.notes[-1].endswith("compared with no stable version: there is none")
