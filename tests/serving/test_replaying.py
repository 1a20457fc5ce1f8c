"""Recorded requests sent to two versions: what is compared, and what counts as a failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from hpml.artifacts.operation import Operation, TensorSpec
from hpml.serving.apis import open_inference
from hpml.serving.rollout import replaying, smoke
from hpml.serving.rollout.client import Client, NoAnswer, Request
from hpml.serving.rollout.figures import ReplayFigures, SmokeFigures
from hpml.serving.rollout.replaying import replay
from hpml.tasks import TASKS
from tests.serving.small_bundles import (
    CLASSES,
    OPERATION,
    PICTURES,
    WEIGHTS,
    as_request,
    logits,
    write_bundle,
)
from tests.serving.test_server import serving

X = np.random.default_rng(7).standard_normal((40, 1, 4, 4)).astype(np.float32)
OPPOSITE = -WEIGHTS  # what was the likeliest class is the least likely one


@dataclass
class Version:
    """A version in place of its server. fails: which of the requests it does not answer, counted from 1."""

    weights: np.ndarray = field(default_factory=lambda: WEIGHTS)
    fails: frozenset[int] = frozenset()
    operation: Operation = OPERATION
    asked: list[np.ndarray] = field(default_factory=list)

    def ask(self, request: Request) -> tuple[bytes, Mapping[str, str]]:
        assert request.path == "/v2/models/small/infer"
        length = {name.lower(): value for name, value in request.headers.items()}
        json_length = length[open_inference.HEADER_LENGTH]
        parsed = open_inference.parse_request(request.body, json_length, OPERATION, 64)
        self.asked.append(parsed.feeds["x_nchw"])
        if len(self.asked) in self.fails:
            raise NoAnswer("127.0.0.1:1 answers 500: the server failed")
        (name,) = (one.name for one in self.operation.outputs)
        outputs = {name: logits(parsed.feeds["x_nchw"], self.weights)}
        wanted = open_inference.InferRequest("", parsed.feeds, {name: True})
        return open_inference.answer(wanted, outputs, self.operation, name="small", version="1")

    def close(self) -> None:
        """Nothing is open."""


def figures(bundle: Path, file: Path, *versions: Version) -> ReplayFigures:
    return replay(file, bundle, [cast(Client, one) for one in versions])


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Ten of four rows."""
    file = tmp_path / "requests.jsonl"
    file.write_bytes(b"".join(as_request(part)[0] + b"\n" for part in np.split(X, 10)))
    return file


def test_versions_that_decide_alike_agree_whatever_their_numbers(bundle: Path, requests: Path) -> None:
    canary, stable = Version(WEIGHTS * 2), Version()
    told = figures(bundle, requests, canary, stable)
    assert (told.recorded, told.sent, told.failures) == (10, 10, ())
    assert (told.agreement, told.compared, told.compared_by) == (1.0, 40, "decisions")
    assert told.canary and told.canary.requests == 10 and told.stable and told.stable.requests == 10
    assert np.array_equal(np.concatenate(canary.asked), X)


def test_agreement_is_the_share_of_the_same_decisions(bundle: Path, requests: Path) -> None:
    other = WEIGHTS + np.float32(0.5) * np.random.default_rng(1).standard_normal(WEIGHTS.shape, np.float32)
    same = (logits(X, other).argmax(axis=1) == logits(X).argmax(axis=1)).mean()
    assert 0.5 < same < 1
    assert figures(bundle, requests, Version(other), Version()).agreement == pytest.approx(same)
    assert figures(bundle, requests, Version(OPPOSITE), Version()).agreement == 0.0


def test_where_a_task_decides_nothing_its_numbers_have_to_be_within_the_tolerance(
    tmp_path: Path, requests: Path
) -> None:
    bundle = write_bundle(tmp_path / "users", task={"task": "somebody.elses:Task"})
    near, apart = WEIGHTS + np.float32(1e-6), WEIGHTS.copy()
    apart[0] += np.float32(0.1)  # of the first pixel: rows whose own is about 0 stay within the tolerance
    assert figures(bundle, requests, Version(near), Version()).agreement == 1.0
    told = figures(bundle, requests, Version(apart), Version())
    within = (np.abs(logits(X, apart) - logits(X)).max(axis=1) <= 1e-4).sum()
    assert (told.agreement, told.compared, told.compared_by) == (within / 40, 40, "rows")


def test_a_model_of_other_outputs_agrees_in_nothing(bundle: Path, requests: Path) -> None:
    outputs = (TensorSpec(name="scores", shape=("batch", CLASSES)),)
    stable = Version(operation=Operation(inputs=OPERATION.inputs, outputs=outputs))
    told = figures(bundle, requests, Version(), stable)
    assert (told.agreement, told.compared) == (0.0, 40)


def test_what_only_the_canary_fails_is_its_failure(bundle: Path, requests: Path) -> None:
    canary, stable = Version(fails=frozenset({2, 3})), Version(fails=frozenset({3, 4}))
    told = figures(bundle, requests, canary, stable)
    assert told.failures == ("request 2: 127.0.0.1:1 answers 500: the server failed",)
    assert (told.unanswered_by_stable, told.compared) == (2, 28)


def test_without_a_stable_version_each_failure_counts(bundle: Path, requests: Path) -> None:
    told = figures(bundle, requests, Version(fails=frozenset({2})))
    assert len(told.failures) == 1 and told.stable is None and told.agreement is None
    assert told.unanswered_by_stable == 0


def test_it_ends_early_with_a_canary_that_fails_and_when_its_time_is_over(
    bundle: Path, requests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = figures(bundle, requests, Version(fails=frozenset(range(100))), Version())
    assert (told.recorded, told.sent, len(told.failures)) == (10, 5, 5)
    monkeypatch.setattr(replaying, "MOST_REPLAY_S", -1.0)
    told = figures(bundle, requests, Version(), Version())
    assert (told.recorded, told.sent, told.canary) == (10, 0, None)


def test_the_program_of_the_pod_that_asks_replays_them(
    bundle: Path, requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(str(bundle)) as address:
        url = f"http://localhost:{address.port}"
        smoke.main(
            [str(bundle), "a-release", url, "--stable", url, "--seconds", "0", "--requests", str(requests)]
        )
    told = SmokeFigures.model_validate_json(capsys.readouterr().out)
    assert not told.failures and told.replay
    assert (told.replay.recorded, told.replay.sent, told.replay.agreement) == (10, 10, 1.0)


def test_what_a_server_answers_first_may_decide_nothing() -> None:
    answers: dict[str, Any] = {"logits": logits(X)}
    described = TASKS["image_classification"].model_validate(PICTURES)
    decided = described.served_decisions(answers)
    assert decided is not None and len(decided) == len(X)
    assert TASKS["sequence_to_sequence"].model_construct().served_decisions(answers) is None
