"""Ask a server that may take over, in turns with the one that serves: what a rollout decides by.

`python -m hpml.serving.rollout.smoke BUNDLE RELEASE CANARY [--stable URL] [--through URL] [--requests FILE]`
prints one line of JSON (`SmokeFigures`) and judges nothing: see `hpml.pipelines.delivery.smoke_limits`. It
runs beside the servers, in a pod of the cluster or a process of this machine, so that the way to both is the
same.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpml.artifacts.interval import Interval
from hpml.core.errors import explained
from hpml.measuring.subjects.bundle import BundleSubject
from hpml.serving.rollout.client import Client, NoAnswer, Request, as_request, outputs, resolved, summed_up
from hpml.serving.rollout.figures import RELEASE_HEADER, SmokeFigures
from hpml.serving.rollout.replaying import replay
from hpml.tasks.packaging.engine_script import distance

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ANSWERS_THROUGH = 3  # of the canary, by the address that clients use
_MOST_TRIES = 300  # to get them: a canary with a hundredth of the traffic answers three of these, as a rule
_REQUESTS = 20  # of each server in a round
_LEAST_ROUNDS = 7  # one warms up; six are the fewest that have an interval
_Z = 1.96  # of an interval of 95 %
_MOST_ROWS = 16  # of the golden samples: a server may be told to take no more


@dataclass(frozen=True)
class _Sample:
    """Golden inputs of an operation, its outputs, and what an answer may be off by."""

    model: str
    request: Request
    expected: Mapping[str, NDArray[Any]]
    tolerance: dict[str, float]

    def disagreement(self, answer: bytes, headers: Mapping[str, str]) -> str:
        """In words; empty if the answer is within the tolerance."""
        found = outputs(answer, headers)
        for name, allowed in self.tolerance.items():
            error = distance(found[name], self.expected[name]) if name in found else float("nan")
            if not error <= allowed:
                return f"a number of {name} differs by {error:.3g}, {allowed:.3g} is allowed"
        return ""


def smoke(
    bundle: Path,
    release: str,
    canary: str,
    *,
    stable: str,
    through: str,
    token: str,
    seconds: float,
    requests: Path | None = None,
) -> SmokeFigures:
    """Ask the server at `canary`, which serves `bundle`, and the one at `stable` ("": there is none).

    through: the address that clients use, behind which both are; "": none. release: what the canary calls
    itself. requests: recorded ones, which both are sent afterwards. A server that cannot be reached is a
    failure, not an error.
    Raises Unavailable if a name is not known, UsageError for requests that do not fit the bundle.
    """
    canary, stable, through = (resolved(url) for url in (canary, stable, through))
    samples, row = _samples(bundle, most_rows=_MOST_ROWS), _samples(bundle, most_rows=1)[0]
    failures: list[str] = []
    disagreements = _disagreements(samples, canary, token, failures)
    answers = _through(samples[0], through, release, token, disagreements, failures) if through else 0
    told: dict[str, Any] = {
        "release": release,
        "answers_through": answers,
        "tolerances": {sample.model: sample.tolerance for sample in samples},
    }
    if not failures:
        urls = [url for url in (canary, stable) if url]
        told |= _in_turns(row, urls, token, seconds, failures)
    if requests and not failures:
        told["replay"] = replay(requests, bundle, [Client(url, token) for url in urls])
    return SmokeFigures(**told, disagreements=tuple(disagreements), failures=tuple(failures))


# -------------------------------------------------------------------------------------------- golden samples


def _samples(bundle: Path, *, most_rows: int) -> list[_Sample]:
    """The golden samples of each operation."""
    subject = BundleSubject(folder=bundle)
    told = subject.facts()
    made = []
    for number, (operation, known) in enumerate(zip(told.engine.operations, told.operations, strict=True)):
        arrays = {name: array[:most_rows] for name, array in subject.golden(operation.name).items()}
        name = f"{told.model_name}.{operation.name}" if number else told.model_name
        made.append(_Sample(name, as_request(name, arrays, operation.inputs), arrays, known.tolerance))
    return made


def _disagreements(samples: Sequence[_Sample], url: str, token: str, failures: list[str]) -> list[str]:
    """Of the server at `url`, in every operation."""
    found = []
    for sample in samples:
        try:
            with closing(Client(url, token)) as client:
                answer, headers = client.ask(sample.request)
            found.append(sample.disagreement(answer, headers))
        except NoAnswer as error:
            failures.append(f"{sample.request.path}: {error}")
    return [one for one in found if one]


def _through(
    sample: _Sample, url: str, release: str, token: str, disagreements: list[str], failures: list[str]
) -> int:
    """How many answers of the canary came by the address that clients use; a connection for each request."""
    answers = 0
    for _ in range(_MOST_TRIES):
        try:
            with closing(Client(url, token)) as client:
                answer, headers = client.ask(sample.request)
        except NoAnswer as error:
            failures.append(f"by the address of all: {error}")
            return answers
        if headers.get(RELEASE_HEADER) == release:
            answers += 1
            if why := sample.disagreement(answer, headers):
                disagreements.append(f"by the address of all: {why}")
        if answers == _ANSWERS_THROUGH:
            return answers
    failures.append(f"of {_MOST_TRIES} requests to the address of all, {answers} were answered by the canary")
    return answers


# ------------------------------------------------------------------------------------------------- latencies


def _in_turns(
    sample: _Sample, urls: Sequence[str], token: str, seconds: float, failures: list[str]
) -> dict[str, Any]:
    """Latencies of the servers (the canary's first), asked in rounds: each its requests, in random order."""
    clients = [Client(url, token) for url in urls]
    before = _engine(clients[0])
    rounds: list[list[list[float]]] = []
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until or len(rounds) < _LEAST_ROUNDS:
            rounds.append([[] for _ in clients])
            for place in random.sample(range(len(clients)), len(clients)):
                rounds[-1][place] = list(_latencies_ms(clients[place], sample))
    except NoAnswer as error:
        failures.append(str(error))
        return {}
    after = _engine(clients[0])
    for client in clients:
        client.close()
    latencies_ms = np.array(rounds)[1:].swapaxes(0, 1)  # (servers, rounds, requests); the first warms up
    told = [summed_up(of_one) for of_one in latencies_ms]
    medians = np.median(latencies_ms, axis=2)
    runs = after.runs - before.runs
    return {
        "canary": told[0],
        "stable": told[1] if len(told) > 1 else None,
        "p50_ratio": _median(medians[0] / medians[1]) if len(told) > 1 else None,
        "engine_ms_mean": (after.seconds - before.seconds) / runs * 1e3 if runs else None,
        "hardware": after.hardware,
    }


def _median(of_rounds: NDArray[np.float64]) -> Interval:
    """With the 95 % interval of the sign test: ranks, so whatever the distribution of the values is.

    By the normal approximation of the binomial distribution, corrected for continuity. The image of servers
    has no scipy, which `hpml.measuring.statistics` needs.
    """
    values, rounds = np.sort(of_rounds), len(of_rounds)
    low = math.floor((rounds - _Z * math.sqrt(rounds) - 1) / 2)
    high = rounds - 1 - low
    return Interval(value=float(np.median(values)), low=float(values[low]), high=float(values[high]))


def _latencies_ms(client: Client, sample: _Sample) -> Iterator[float]:
    for _ in range(_REQUESTS):
        begun_s = time.perf_counter()
        client.ask(sample.request)
        yield (time.perf_counter() - begun_s) * 1e3


@dataclass(frozen=True)
class _Engine:
    runs: float
    seconds: float
    hardware: str


def _engine(client: Client) -> _Engine:
    """What the server's metrics say of its engine, so far."""
    from prometheus_client.parser import text_string_to_metric_families as families

    text = client.get("/metrics").decode()
    values = {one.name: one for family in families(text) for one in family.samples}
    hardware = values["hpml_hardware"].labels["cpu"] if "hpml_hardware" in values else ""
    runs, seconds = (values[f"hpml_engine_seconds_{name}"].value for name in ("count", "sum"))
    return _Engine(runs, seconds, hardware)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command of the pod that looks at a canary."""
    parser = argparse.ArgumentParser(prog="python -m hpml.serving.rollout.smoke")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("release")
    parser.add_argument("canary")
    parser.add_argument("--stable", default="")
    parser.add_argument("--through", default="")
    parser.add_argument("--token-file", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--requests", type=Path)
    given = parser.parse_args(arguments)
    with explained():
        token = given.token_file.read_text().strip() if given.token_file else ""
        figures = smoke(
            given.bundle,
            given.release,
            given.canary,
            stable=given.stable,
            through=given.through,
            token=token,
            seconds=given.seconds,
            requests=given.requests,
        )
        print(figures.model_dump_json())


if __name__ == "__main__":
    main()
