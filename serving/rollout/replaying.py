"""Send recorded requests to the canary and to the stable server, and compare their answers."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from hpml.measuring.subjects.bundle import BundleFacts, BundleSubject
from hpml.serving.config import MOST_BATCH_ROWS
from hpml.serving.recording import read_requests
from hpml.serving.rollout.client import Client, NoAnswer, Request, as_request, outputs, summed_up
from hpml.serving.rollout.figures import MOST_REPLAY_S, ReplayFigures
from hpml.tasks import task_of
from hpml.tasks.packaging.engine_script import distance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hpml.tasks.base import Arrays

_MOST_FAILURES = 5  # of the canary, which is refused by then


def replay(file: Path, bundle: Path, clients: Sequence[Client]) -> ReplayFigures:
    """What becomes of the requests in `file`. clients: of the canary, which serves `bundle`, and of the
    stable server where there is one.

    Raises UsageError for a file that does not fit the bundle.
    """
    told = BundleSubject(folder=bundle).facts()
    latencies_ms: list[list[float]] = [[] for _ in clients]
    failures: list[str] = []
    agreement = _Agreement(told)
    recorded = sent = unanswered_by_stable = 0
    until_s = time.monotonic() + MOST_REPLAY_S
    for feeds in read_requests(file, told.engine, max_rows=MOST_BATCH_ROWS, tell=lambda line: None):
        recorded += 1
        if time.monotonic() > until_s or len(failures) == _MOST_FAILURES:
            continue  # the others are counted
        sent += 1
        request = as_request(told.model_name, feeds, told.engine.operations[0].inputs)
        answers: dict[int, Arrays] = {}
        why = ""
        for place in random.sample(range(len(clients)), len(clients)):
            try:
                latency_ms, answers[place] = _ask(clients[place], request)
                latencies_ms[place].append(latency_ms)
            except NoAnswer as error:
                why = str(error) if place == 0 else why
        is_unanswered_by_stable = len(clients) > 1 and 1 not in answers
        unanswered_by_stable += is_unanswered_by_stable
        if 0 not in answers and not is_unanswered_by_stable:
            failures.append(f"request {recorded}: {why}")
        if len(answers) > 1:
            agreement.add(answers[0], answers[1])
    for client in clients:
        client.close()
    canary, stable, *_ = [*(summed_up(np.array(one)) if one else None for one in latencies_ms), None]
    return ReplayFigures(
        recorded=recorded,
        sent=sent,
        failures=tuple(failures),
        unanswered_by_stable=unanswered_by_stable,
        agreement=agreement.same / agreement.compared if agreement.compared else None,
        compared=agreement.compared,
        compared_by=agreement.compared_by,
        canary=canary,
        stable=stable,
    )


def _ask(client: Client, request: Request) -> tuple[float, Arrays]:
    """How long the answer took, and what it says. Raises NoAnswer."""
    begun_s = time.perf_counter()
    answer, headers = client.ask(request)
    return (time.perf_counter() - begun_s) * 1e3, outputs(answer, headers)


class _Agreement:
    """How often the answers of two versions are alike; see ReplayFigures."""

    def __init__(self, bundle: BundleFacts) -> None:
        described = bundle.engine.task
        self._task = None if ":" in str(described.get("task")) else task_of(described)  # a user's is not here
        self._tolerance = bundle.operations[0].tolerance
        self.compared_by: Literal["decisions", "rows"] = "decisions"
        self.same = self.compared = 0

    def add(self, own: Arrays, stable: Arrays) -> None:
        """The answers to one request."""
        decided = self._decided(own)
        self.compared_by = "rows" if decided is None else "decisions"
        self.compared += len(next(iter(own.values()))) if decided is None else decided.size
        if own.keys() != stable.keys():  # of another model, with which nothing agrees
            return
        if decided is None:
            self.same += self._rows_within(own, stable)
            return
        expected = self._decided(stable)
        if expected is not None and expected.shape == decided.shape:
            self.same += int((decided == expected).sum())

    def _decided(self, answers: Arrays) -> NDArray[np.int64] | None:
        return self._task.served_decisions(answers) if self._task else None

    def _rows_within(self, own: Arrays, stable: Arrays) -> int:
        """How many rows have no number that differs by more."""
        return sum(
            all(
                distance(own[name][row : row + 1], stable[name][row : row + 1]) <= allowed
                for name, allowed in self._tolerance.items()
            )
            for row in range(len(next(iter(own.values()))))
        )
