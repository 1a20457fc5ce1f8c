"""How a release takes the place of the one before: a canary beside it, a look at both, then one or the other.

Where that happens is a `Place`. What it keeps, not this process, is the truth, so that a rollout that was cut
off at any moment is finished or undone by the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from hpml.core.errors import GateFailed, HpmlError, StageFailed, UsageError
from hpml.pipelines.delivery.release import Release
from hpml.pipelines.delivery.smoke_limits import Benchmark, SmokeLimits, judge
from hpml.serving.rollout.figures import SmokeFigures

Say = Callable[[str], None]
Outcome = Literal["promoted", "rolled back", "refused", "undeployed"]
_TOKENS = ("token_file", "token_secret")  # of the settings of a release, wherever it is served


@dataclass(frozen=True)
class Stable:
    """What takes the traffic. tried: whether it passed, rather than being the first and half made."""

    release: Release
    tried: bool
    previous: Release | None = None


class Place(Protocol):
    """Where releases of one name are served.

    Each method returns when its effect is there, and may be called again after it was cut off. They raise
    Unavailable if the place does not answer, StageFailed with the cause if a server does not get ready.
    """

    def lock(self) -> AbstractContextManager[None]:
        """One rollout at a time."""

    def stable(self) -> Stable | None:
        """What takes the traffic now."""

    def canary(self) -> Release | None:
        """What is beside it, left by a rollout that was cut off."""

    def begin(self, release: Release) -> None:
        """Serve `release` where nothing was served before; it is not tried yet."""

    def start_canary(self, release: Release) -> None:
        """Serve `release` beside the stable one, with a small share of the traffic."""

    def smoke(self, release: Release, *, beside_stable: bool) -> SmokeFigures:
        """Look at what was begun last."""

    def promote(self, release: Release, previous: Release | None) -> None:
        """Let `release` take the traffic from whatever has it, no request lost; it is tried."""

    def remove_canary(self) -> None:
        """Let what is beside the stable one answer what it has accepted, and go."""

    def remove(self) -> None:
        """Stop serving altogether, and remove all that was made for it; what stays is said."""


@dataclass(frozen=True)
class Evidence:
    """What a rollout ended with. problems: why it was refused. figures: what was seen.

    limits, benchmark: what `figures` were held to; None where nothing was judged, or there is no benchmark.
    """

    outcome: Outcome
    release: Release
    former: Release | None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    figures: SmokeFigures | None = None
    limits: SmokeLimits | None = None
    benchmark: Benchmark | None = None

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "outcome": self.outcome,
            "release": self.release.model_dump(),
            "former": self.former.model_dump() if self.former else None,
            "problems": self.problems,
            "notes": self.notes,
            "figures": self.figures.model_dump() if self.figures else None,
            "limits": self.limits.model_dump() if self.limits else None,
            "benchmark": asdict(self.benchmark) if self.benchmark else None,
        }


@dataclass(frozen=True)
class Rollout:
    """A way to roll out at `place`. keep: is given the evidence of what became of it, and raises nothing."""

    place: Place
    keep: Callable[[Evidence], None]
    say: Say

    def deploy(self, release: Release, limits: SmokeLimits, benchmark: Benchmark | None) -> Evidence:
        """Serve `release`, if it passes, in place of what is served; if it does not, nothing has changed.

        Raises GateFailed with what it did not pass, UsageError if it would drop the token of what is served.
        """
        with self.place.lock():
            stable = self._settled(release)
            if stable is None:
                return self._first(release, limits, benchmark)
            _check_token_stays(stable.release, release)
            if stable.release.digest == release.digest:
                return self._again(stable, release)
            return self._beside(stable, release, limits, benchmark)

    def rollback(self) -> Evidence:
        """Go back to the release before. Raises UsageError if there is none."""
        with self.place.lock():
            stable = self.place.stable()
            if stable is None or stable.previous is None:
                raise UsageError(
                    "there is nothing to go back to",
                    why="nothing is served" if stable is None else f"{stable.release} is the first",
                )
            self.place.promote(stable.previous, stable.release)
            self.place.remove_canary()
            self.say(f"{stable.previous} is served again, in place of {stable.release}")
            if _needs_token(stable.release) and not _needs_token(stable.previous):
                self.say("warning: it is served as it was: requests need no token any more")
            return self._kept(Evidence("rolled back", stable.previous, stable.release))

    def undeploy(self) -> Evidence:
        """Serve nothing any more. Raises UsageError if nothing is served."""
        with self.place.lock():
            stable = self.place.stable()
            if stable is None:
                raise UsageError("nothing is served by that name", fix="hpml deploy serves something")
            self.place.remove()
            self.say(f"{stable.release} is not served any more")
            return self._kept(Evidence("undeployed", stable.release, None))

    def _settled(self, release: Release) -> Stable | None:
        """What is served, after what a rollout left that was cut off is finished or undone."""
        stable, canary = self.place.stable(), self.place.canary()
        if stable and not stable.tried:
            self.say(f"{stable.release} was begun and never tried: it is removed")
            self.place.remove()
            return None
        if canary and not (stable and stable.release.digest == canary.digest == release.digest):
            self.say(f"a rollout that was cut off left {canary} as canary: it is removed")
            self.place.remove_canary()
        return stable

    def _first(self, release: Release, limits: SmokeLimits, benchmark: Benchmark | None) -> Evidence:
        self.say(f"{release} is the first here")
        try:
            self.place.begin(release)
            figures = self.place.smoke(release, beside_stable=False)
            evidence = self._judged(release, None, figures, limits, benchmark)
        except StageFailed as error:
            evidence = Evidence("refused", release, None, (str(error),))
        except BaseException:
            self._after_all(self.place.remove)
            raise
        if evidence.problems:
            self.place.remove()
            raise _refusal(self._kept(evidence))
        self.place.promote(release, None)
        return self._kept(evidence)

    def _again(self, stable: Stable, release: Release) -> Evidence:
        """The same bundle, whose settings may be others."""
        if stable.release.settings == release.settings:
            self.place.promote(release, stable.previous)
            self.place.remove_canary()
            self.say(f"{release} is served")
            return self._kept(Evidence("promoted", release, stable.previous))
        self.say(f"{release} is served already: its settings are changed")
        self._promote(stable, release)
        return self._kept(Evidence("promoted", release, stable.release, notes=("only settings changed",)))

    def _beside(
        self, stable: Stable, release: Release, limits: SmokeLimits, benchmark: Benchmark | None
    ) -> Evidence:
        self.say(f"{release} begins as canary beside {stable.release}")
        try:
            self.place.start_canary(release)
            figures = self.place.smoke(release, beside_stable=True)
            evidence = self._judged(release, stable.release, figures, limits, benchmark)
        except StageFailed as error:  # its own doing, not the place's
            evidence = Evidence("refused", release, stable.release, (str(error),))
        except BaseException:
            self._after_all(self.place.remove_canary)
            raise
        if evidence.problems:
            self.place.remove_canary()
            raise _refusal(self._kept(evidence))
        self.say(f"{release} has passed and takes over")
        self._promote(stable, release)
        return self._kept(evidence)

    def _promote(self, stable: Stable, release: Release) -> None:
        """Raises what keeps it from taking over, once what was served is served again."""
        try:
            self.place.promote(release, stable.release)
        except HpmlError as error:
            self.say(f"{release} could not take over, {stable.release} comes back: {error}")
            self.place.promote(stable.release, stable.previous)
            self.place.remove_canary()
            raise
        self.place.remove_canary()

    def _after_all(self, undo: Callable[[], None]) -> None:
        """What is raised already counts more than what hinders undoing it: the next rollout does it then."""
        with suppress(HpmlError, OSError):
            undo()

    def _judged(
        self,
        release: Release,
        former: Release | None,
        figures: SmokeFigures,
        limits: SmokeLimits,
        benchmark: Benchmark | None,
    ) -> Evidence:
        verdict = judge(figures, limits, benchmark)
        for note in verdict.notes:
            self.say(note)
        outcome: Outcome = "refused" if verdict.problems else "promoted"
        return Evidence(outcome, release, former, verdict.problems, verdict.notes, figures, limits, benchmark)

    def _kept(self, evidence: Evidence) -> Evidence:
        self.keep(evidence)
        return evidence


def _needs_token(release: Release) -> bool:
    return any(release.settings.get(name) for name in _TOKENS)


def _check_token_stays(stable: Release, release: Release) -> None:
    """Raise UsageError if a server that asks for a token would answer everybody, only as nobody named one."""
    if _needs_token(stable) and not _needs_token(release):
        raise UsageError(
            f"{stable} asks for a token, and {release} would not",
            why="no token is given",
            fix="give it again (--token-file, on a cluster --token-secret), or hpml undeploy first",
        )


def _refusal(evidence: Evidence) -> GateFailed:
    stays = f"{evidence.former} stays" if evidence.former else "nothing is served"
    return GateFailed(f"{evidence.release} was not rolled out, {stays}", why="; ".join(evidence.problems))
