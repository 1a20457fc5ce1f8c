"""Ask a server that may take over, in turns with the one that serves: what a rollout decides by.

`python -m hpml.serving.rollout.smoke BUNDLE RELEASE CANARY [--stable URL] [--through URL]` prints one line of
JSON (`SmokeFigures`) and judges nothing: see `hpml.pipelines.delivery.smoke_limits`. It runs beside the
servers, in a pod of the cluster or a process of this machine, so that the way to both is the same.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from hpml.artifacts.interval import Interval
from hpml.artifacts.operation import DATATYPES, TensorSpec
from hpml.core.errors import Unavailable, explained
from hpml.measuring.subjects.bundle import BundleSubject
from hpml.serving.apis.open_inference import HEADER_LENGTH
from hpml.serving.rollout.figures import RELEASE_HEADER, Latencies, SmokeFigures
from hpml.tasks.packaging.engine_script import distance

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ANSWERS_THROUGH = 3  # of the canary, by the address that clients use
_MOST_TRIES = 300  # to get them: a canary with a hundredth of the traffic answers three of these, as a rule
_REQUESTS = 20  # of each server in a round
_LEAST_ROUNDS = 7  # one warms up; six are the fewest that have an interval
_Z = 1.96  # of an interval of 95 %
_TIMEOUT_S, _RESOLVING_S = 10.0, 30.0
_MOST_ROWS = 16  # of the golden samples: a server may be told to take no more


@dataclass(frozen=True)
class _Sample:
    """Golden inputs and outputs of an operation, as a request, and what its answer may be off by."""

    model: str
    body: bytes
    headers: Mapping[str, str]
    expected: Mapping[str, NDArray[Any]]
    tolerance: dict[str, float]

    @property
    def path(self) -> str:
        return f"/v2/models/{self.model}/infer"

    def disagreement(self, answer: bytes, json_length: str | None) -> str:
        """In words; empty if the answer is within the tolerance."""
        outputs = _outputs(answer, json_length)
        for name, allowed in self.tolerance.items():
            error = distance(outputs[name], self.expected[name]) if name in outputs else float("nan")
            if not error <= allowed:
                return f"a number of {name} differs by {error:.3g}, {allowed:.3g} is allowed"
        return ""


def smoke(
    bundle: Path, release: str, canary: str, *, stable: str, through: str, token: str, seconds: float
) -> SmokeFigures:
    """Ask the server at `canary`, which serves `bundle`, and the one at `stable` ("": there is none).

    through: the address that clients use, behind which both are; "": none. release: what the canary calls
    itself. A server that cannot be reached is a failure, not an error.
    Raises Unavailable if a name is not known.
    """
    canary, stable, through = (_resolved(url) for url in (canary, stable, through))
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
        told |= _in_turns(row, [url for url in (canary, stable) if url], token, seconds, failures)
    return SmokeFigures(**told, disagreements=tuple(disagreements), failures=tuple(failures))


# -------------------------------------------------------------------------------------------- golden samples


def _samples(bundle: Path, *, most_rows: int) -> list[_Sample]:
    """The golden samples of each operation."""
    subject = BundleSubject(folder=bundle)
    told = subject.facts()
    made = []
    for number, (operation, known) in enumerate(zip(told.engine.operations, told.operations, strict=True)):
        arrays = {name: array[:most_rows] for name, array in subject.golden(operation.name).items()}
        body, headers = _as_request(
            {one.name: arrays[one.name] for one in operation.inputs}, operation.inputs
        )
        name = f"{told.model_name}.{operation.name}" if number else told.model_name
        made.append(_Sample(name, body, headers, arrays, known.tolerance))
    return made


def _as_request(
    arrays: Mapping[str, NDArray[Any]], inputs: Sequence[TensorSpec]
) -> tuple[bytes, dict[str, str]]:
    told = [
        {
            "name": one.name,
            "datatype": DATATYPES[one.dtype],
            "shape": arrays[one.name].shape,
            "parameters": {"binary_data_size": arrays[one.name].nbytes},
        }
        for one in inputs
    ]
    head = json.dumps({"inputs": told, "parameters": {"binary_data_output": True}}).encode()
    tail = b"".join(arrays[one.name].tobytes() for one in inputs)
    return head + tail, {HEADER_LENGTH: str(len(head)), "Content-Type": "application/octet-stream"}


def _outputs(answer: bytes, json_length: str | None) -> dict[str, NDArray[Any]]:
    end = int(json_length or len(answer))
    types = {told: np.dtype(dtype) for dtype, told in DATATYPES.items()}
    found = {}
    for one in json.loads(answer[:end])["outputs"]:
        size_bytes = one["parameters"]["binary_data_size"]
        data = np.frombuffer(answer[end : end + size_bytes], types[one["datatype"]])
        found[one["name"]], end = data.reshape(one["shape"]), end + size_bytes
    return found


def _disagreements(samples: Sequence[_Sample], url: str, token: str, failures: list[str]) -> list[str]:
    """Of the server at `url`, in every operation."""
    found = []
    for sample in samples:
        try:
            with closing(_Client(url, token)) as client:
                answer, headers = client.ask(sample)
            found.append(sample.disagreement(answer, headers.get(HEADER_LENGTH)))
        except _NoAnswer as error:
            failures.append(f"{sample.path}: {error}")
    return [one for one in found if one]


def _through(
    sample: _Sample, url: str, release: str, token: str, disagreements: list[str], failures: list[str]
) -> int:
    """How many answers of the canary came by the address that clients use; a connection for each request."""
    answers = 0
    for _ in range(_MOST_TRIES):
        try:
            with closing(_Client(url, token)) as client:
                answer, headers = client.ask(sample)
        except _NoAnswer as error:
            failures.append(f"by the address of all: {error}")
            return answers
        if headers.get(RELEASE_HEADER) == release:
            answers += 1
            if why := sample.disagreement(answer, headers.get(HEADER_LENGTH)):
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
    clients = [_Client(url, token) for url in urls]
    before = _engine(clients[0])
    rounds: list[list[list[float]]] = []
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until or len(rounds) < _LEAST_ROUNDS:
            rounds.append([[] for _ in clients])
            for place in random.sample(range(len(clients)), len(clients)):
                rounds[-1][place] = list(_latencies_ms(clients[place], sample))
    except _NoAnswer as error:
        failures.append(str(error))
        return {}
    after = _engine(clients[0])
    for client in clients:
        client.close()
    latencies_ms = np.array(rounds)[1:].swapaxes(0, 1)  # (servers, rounds, requests); the first warms up
    told = [
        Latencies(
            requests=of_one.size,
            latency_ms_p50=float(np.median(of_one)),
            latency_ms_p99=float(np.quantile(of_one, 0.99, method="inverted_cdf")),
        )
        for of_one in latencies_ms
    ]
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


def _latencies_ms(client: _Client, sample: _Sample) -> Iterator[float]:
    for _ in range(_REQUESTS):
        begun_s = time.perf_counter()
        client.ask(sample)
        yield (time.perf_counter() - begun_s) * 1e3


@dataclass(frozen=True)
class _Engine:
    runs: float
    seconds: float
    hardware: str


def _engine(client: _Client) -> _Engine:
    """What the server's metrics say of its engine, so far."""
    from prometheus_client.parser import text_string_to_metric_families as families

    text = client.get("/metrics").decode()
    values = {one.name: one for family in families(text) for one in family.samples}
    hardware = values["hpml_hardware"].labels["cpu"] if "hpml_hardware" in values else ""
    runs, seconds = (values[f"hpml_engine_seconds_{name}"].value for name in ("count", "sum"))
    return _Engine(runs, seconds, hardware)


# -------------------------------------------------------------------------------------------------- a client


class _NoAnswer(Exception):
    """A request without the answer that it should have."""


def _resolved(url: str) -> str:
    """With the address in place of the name: a name server that is away says nothing of the servers."""
    parts = urlsplit(url)
    if not url:
        return ""
    until = time.monotonic() + _RESOLVING_S
    while True:
        try:
            return f"http://{socket.gethostbyname(str(parts.hostname))}:{parts.port or 80}"
        except OSError as error:
            if time.monotonic() > until:
                raise Unavailable(f"the name {parts.hostname} is not known", why=str(error)) from None
            time.sleep(1)


class _Client:
    """One connection."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        self._address = f"{parts.hostname}:{parts.port or 80}"
        self._connection = http.client.HTTPConnection(self._address, timeout=_TIMEOUT_S)
        self._authorization = {"Authorization": f"Bearer {token}"} if token else {}

    def ask(self, sample: _Sample) -> tuple[bytes, Mapping[str, str]]:
        """The body of the answer, and its headers in lower case."""
        return self._send("POST", sample.path, sample.body, sample.headers)

    def get(self, path: str) -> bytes:
        """What is at `path`."""
        return self._send("GET", path, b"", {})[0]

    def _send(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[bytes, Mapping[str, str]]:
        try:
            self._connection.request(method, path, body, {**headers, **self._authorization})
            response = self._connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise _NoAnswer(f"{self._address} does not answer: {error or type(error).__name__}") from None
        if response.status != 200:
            raise _NoAnswer(
                f"{self._address} answers {response.status}: {answer[:200].decode(errors='replace')}"
            )
        return answer, {name.lower(): value for name, value in response.getheaders()}

    def close(self) -> None:
        self._connection.close()


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
        )
        print(figures.model_dump_json())


if __name__ == "__main__":
    main()
