"""What serving costs above the engine, ours and others', and how much of the engine's rate is left.

    .venv/bin/python -m tests.measure_serving BUNDLE [--peers FOLDER] [--rounds 30]

Serves the first operation of a bundle of pictures with one thread by `hpml serve` and, of those whose
environments are in FOLDER (`kserve`, `mlserver`, `litserve`, `bentoml`: made by `make measure-serving`), by
the others: one raw socket asks each for one sample at a time, in turns, with the engine itself among them.
Then the rate at saturation: the server on one CPU, eight clients on the other, requests of 32 samples and of
one, against the engine's own rate on that CPU. Last, open load (`tests.open_load`): Poisson arrivals of
requests of 32 samples at 0.5, 0.9 and 1.5 of what the server can do, with a picture of how long they took.
Prints tables for docs/serving.md. --only-open-load is that alone, in less than two minutes; the exit code is
1 if a limit is not kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from hpml.measuring import statistics
from hpml.measuring.machine.core_latency_probe import CoreLatencyProbe
from hpml.measuring.machine.state_clusters import find_states
from hpml.measuring.subjects import BundleSubject
from hpml.targets.onnx_session import session_options
from tests import open_load
from tests.ports import free_port

_PEERS = Path(__file__).parent / "serving_peers"
_REQUESTS = 300  # of each server in a round
_STARTS = 7
_WAIT_S = 120.0  # for a server to begin
_MAX_QUEUE_MS = 100.0  # under open load: the default


@dataclass(frozen=True)
class Served:
    """A server that runs. `path` and `body` are those of a request."""

    port: int
    path: str
    body: bytes
    headers: Mapping[str, str]

    @property
    def request(self) -> bytes:
        """The bytes of a request."""
        head = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        return (
            f"POST {self.path} HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(self.body)}\r\n\r\n".encode()
            + self.body
        )


class Client:
    """One connection that is kept; it reads answers as little as it has to."""

    def __init__(self, served: Served) -> None:
        self._socket = socket.create_connection(("127.0.0.1", served.port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._request = served.request

    def ask(self) -> int:
        """Send the request, read the whole answer; its HTTP status."""
        self._socket.sendall(self._request)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._more()
        head, _, body = received.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if lengths:
            left = int(lengths[0].split(b":")[1]) - len(body)
            while left > 0:
                left -= len(self._more())
        else:
            while not body.endswith(b"0\r\n\r\n"):
                body += self._more()
        return int(head[9:12])

    def _more(self) -> bytes:
        part = self._socket.recv(1 << 16)
        if not part:
            raise ConnectionError("the server closed the connection")
        return part

    def close(self) -> None:
        """Close it."""
        self._socket.close()


def binary_body(name: str, x: NDArray[np.float32]) -> tuple[bytes, dict[str, str]]:
    """An inference with a tensor as bytes."""
    told = {"name": name, "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": x.nbytes}}
    wanted = {"name": "logits", "parameters": {"binary_data": True}}
    head = json.dumps({"inputs": [told], "outputs": [wanted]}).encode()
    return head + x.tobytes(), {"Inference-Header-Content-Length": str(len(head))}


@contextmanager
def running(command: list[str], folder: Path, log: Path, cpus: set[int] | None = None) -> Iterator[None]:
    """A server's process, and those that it starts."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": f"{folder}", "BENTOML_DO_NOT_TRACK": "True"},
            preexec_fn=(lambda: os.sched_setaffinity(0, cpus)) if cpus else None,
        )
    try:
        yield
    finally:
        os.killpg(process.pid, 15)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def wait_for(served: Served) -> None:
    """Until it answers with 200."""
    give_up_s = time.monotonic() + _WAIT_S
    while True:
        try:
            with closing(Client(served)) as client:
                if client.ask() == 200:
                    return
        except (OSError, ConnectionError, ValueError):
            pass
        if time.monotonic() > give_up_s:
            raise SystemExit(f"error: no server answers at {served.path}")
        time.sleep(0.02)


def ours(
    bundle: Path, name: str, model: str, x: NDArray[np.float32], max_queue_ms: float = 10_000.0
) -> tuple[list[str], Served]:
    """`hpml serve`: its command and a request."""
    port = free_port()
    hpml = Path(sys.executable).with_name("hpml")
    command = [
        str(hpml),
        "serve",
        str(bundle),
        "--port",
        str(port),
        "--threads",
        "1",
        "--max-queue-ms",
        str(max_queue_ms),
    ]
    return command, Served(port, f"/v2/models/{model}/infer", *binary_body(name, x))


def peers(
    environments: Path, name: str, x: NDArray[np.float32], folder: Path
) -> dict[str, tuple[list[str], Served]]:
    """Those that are installed."""
    found: dict[str, tuple[list[str], Served]] = {}
    as_json = json.dumps({"x": x.tolist()}).encode(), {"Content-Type": "application/json"}
    tensor = {"name": name, "datatype": "FP32", "shape": x.shape, "data": x.ravel().tolist()}
    v2_json = json.dumps({"inputs": [tensor]}).encode(), {"Content-Type": "application/json"}
    port = free_port()
    (folder / "settings.json").write_text(
        json.dumps(
            {
                "http_port": port,
                "grpc_port": free_port(),
                "metrics_port": free_port(),
                "parallel_workers": 0,
                "debug": False,
            }
        )
    )
    (folder / "model-settings.json").write_text(
        json.dumps({"name": "peer", "implementation": "mlserver_runtime.Peer"})
    )
    ways = {
        "kserve": (["python", "kserve_server.py"], "/v2/models/peer/infer", binary_body(name, x)),
        "mlserver": (["mlserver", "start", "."], "/v2/models/peer/infer", v2_json),
        "litserve": (["python", "litserve_server.py"], "/predict", as_json),
        "bentoml": (["bentoml", "serve", "bentoml_service:Peer", "--port"], "/predict", as_json),
    }
    for peer, ([program, *arguments], path, (body, headers)) in ways.items():
        executable = environments / peer / "bin" / program
        if not executable.exists():
            print(f"note: {peer} is not in {environments}")
            continue
        own = port if peer == "mlserver" else free_port()
        numbers = [] if peer == "mlserver" else [str(own)]
        found[peer] = ([str(executable), *arguments, *numbers], Served(own, path, body, headers))
    return found


@dataclass
class Timed:
    """The medians of a server's rounds, in ms."""

    ask: Callable[[], object]
    p50_ms: list[float] = field(default_factory=list)
    all_ms: list[float] = field(default_factory=list)

    def round(self, requests: int) -> None:
        """Time so many requests."""
        times = []
        for _ in range(requests):
            begun_ns = time.perf_counter_ns()
            self.ask()
            times.append((time.perf_counter_ns() - begun_ns) / 1e6)
        self.p50_ms.append(float(np.median(times)))
        self.all_ms += times


def print_latencies(timed: Mapping[str, Timed], rounds: int) -> None:
    """Rounds of all in random order, with the distance of the cores before and after; then the table."""
    round_trips_ns = []
    with CoreLatencyProbe(sorted(os.sched_getaffinity(0))) as distance:
        for one in timed.values():
            one.round(_REQUESTS)
            one.p50_ms.clear()
            one.all_ms.clear()
        before_ns = distance.round_trip_ns() or 1.0
        for _ in range(rounds):
            for one in random.sample(list(timed.values()), len(timed)):
                one.round(_REQUESTS)
            after_ns = distance.round_trip_ns() or 1.0
            round_trips_ns.append((before_ns * after_ns) ** 0.5)
            before_ns = after_ns
    states = find_states(np.array(round_trips_ns))
    at = states.of(np.array(round_trips_ns))
    for index, state in enumerate(states.names):
        chosen = np.flatnonzero(at == index)
        distance_ns = np.median(np.array(round_trips_ns)[chosen])
        print(f"\nCores {state or 'as they were'}, {distance_ns:.0f} ns, {len(chosen)} of {rounds} rounds:\n")
        print("| at concurrency 1, one sample | p50 ms | above the engine, ms | p99 ms |\n|---|--:|--:|--:|")
        engine_ms = np.array(timed["the engine"].p50_ms)[chosen]
        for name, one in timed.items():
            own_ms = np.array(one.p50_ms)[chosen]
            above = statistics.median(own_ms - engine_ms)
            every = np.array(one.all_ms).reshape(rounds, _REQUESTS)[chosen]
            told = f"{above.value:.3f} ({above.low:.3f} to {above.high:.3f})"
            print(
                f"| {name} | {np.median(own_ms):.3f} | {told if name != 'the engine' else ''} "
                f"| {np.quantile(every, 0.99):.3f} |"
            )


def rate_of_engine(bundle: Path, x: NDArray[np.float32], name: str, seconds: float) -> float:
    """Samples per second of the engine alone, with one thread on this CPU."""
    session = onnxruntime.InferenceSession(_file(bundle), session_options(1, spinning=False))
    begun_s, done = time.perf_counter(), 0
    while time.perf_counter() - begun_s < seconds:
        session.run(None, {name: x})
        done += len(x)
    return done / (time.perf_counter() - begun_s)


def rate_of_server(served: Served, rows: int, seconds: float, clients: int = 8) -> float:
    """Samples per second that so many clients get, each asking anew as soon as it is answered."""
    counts = [0] * clients
    until_s = time.perf_counter() + seconds

    def ask(number: int) -> None:
        with closing(Client(served)) as client:
            while time.perf_counter() < until_s:
                counts[number] += client.ask() == 200

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(clients)]
    begun_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) * rows / (time.perf_counter() - begun_s)


def print_starts(bundle: Path, model: str, name: str, sample: NDArray[np.float32]) -> None:
    """How long it takes from the command to the first answer."""
    seconds = []
    for _ in range(_STARTS):
        command, served = ours(bundle, name, model, sample)
        with tempfile.TemporaryDirectory() as logs:
            begun_s = time.monotonic()
            with running(command, Path(logs), Path(logs) / "log"):
                wait_for(served)
                seconds.append(time.monotonic() - begun_s)
    print(
        f"\nFrom the command to the first answer: {np.median(seconds):.1f} s"
        f" ({min(seconds):.1f} to {max(seconds):.1f}) in {_STARTS} starts"
    )


def print_rates(
    bundle: Path, model: str, name: str, sample: NDArray[np.float32], rounds: int, logs: Path
) -> None:
    """At saturation: the server on the first CPU, its clients on the others."""
    first, *others = sorted(os.sched_getaffinity(0))
    print(
        "\n| samples a request | engine alone, samples/s | served, samples/s | served over engine |"
        "\n|--:|--:|--:|--:|"
    )
    for rows in (32, 1):
        x = np.repeat(sample, rows, axis=0)
        command, served = ours(bundle, name, model, x)
        engine, server = [], []
        with running(command, logs, logs / "rates.log", {first}):
            wait_for(served)
            for _ in range(rounds):
                os.sched_setaffinity(0, {first})
                engine.append(rate_of_engine(bundle, x, name, 1.0))
                os.sched_setaffinity(0, set(others))
                server.append(rate_of_server(served, rows, 2.0))
        os.sched_setaffinity(0, {first, *others})
        ratio = statistics.geometric_mean([own / alone for own, alone in zip(server, engine, strict=True)])
        print(
            f"| {rows} | {np.median(engine):,.0f} | {np.median(server):,.0f} "
            f"| {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) |"
        )


def print_open_load(
    bundle: Path, model: str, name: str, sample: NDArray[np.float32], seconds: float, plot: Path
) -> bool:
    """The server on the first CPU, its clients on the others; whether every limit was kept."""
    first, *others = sorted(os.sched_getaffinity(0))
    command, served = ours(bundle, name, model, np.repeat(sample, 32, axis=0), _MAX_QUEUE_MS)
    with tempfile.TemporaryDirectory() as logs, running(command, Path(logs), Path(logs) / "open", {first}):
        wait_for(served)
        os.sched_setaffinity(0, set(others))
        loads = open_load.measured_loads(served.port, served.request, seconds, seed=0)
        os.sched_setaffinity(0, {first, *others})
    verdicts = {load.share: open_load.judged(load, _MAX_QUEUE_MS) for load in loads}
    print(f"\nOpen load, 32 samples a request, {seconds:g} s each:\n")
    print(open_load.table(loads, verdicts))
    open_load.draw(loads, _MAX_QUEUE_MS, plot)
    print(f"\n{plot}")
    return not any(verdicts.values())


def _file(bundle: Path) -> Path:
    return bundle / BundleSubject(folder=bundle).facts().file


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--peers", type=Path, default=Path("runs/.serving-peers"))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--only-open-load", action="store_true")
    parser.add_argument("--seconds", type=float, default=25.0, help="of each load")
    parser.add_argument("--plot", type=Path, default=Path("runs/open_load.svg"))
    given = parser.parse_args()
    bundle = given.bundle.resolve()
    told = BundleSubject(folder=bundle).facts()
    taken = told.engine.operations[0].inputs[0]
    sample = np.random.default_rng(0).standard_normal(taken.sizes(batch=1)).astype(np.float32)
    of_open_load = (bundle, told.model_name, taken.name, sample, given.seconds, given.plot)
    if given.only_open_load:
        raise SystemExit(0 if print_open_load(*of_open_load) else 1)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        shutil.copytree(_PEERS, folder, dirs_exist_ok=True)
        shutil.copyfile(_file(bundle), folder / "model.onnx")
        session = onnxruntime.InferenceSession(_file(bundle), session_options(1, spinning=False))
        timed = {"the engine": Timed(lambda: session.run(None, {taken.name: sample}))}
        started = {"hpml serve": ours(bundle, taken.name, told.model_name, sample)}
        started |= peers(given.peers.resolve(), taken.name, sample, folder)
        for name, (command, served) in started.items():
            stack.enter_context(running(command, folder, folder / f"{name}.log"))
            wait_for(served)
            client = stack.enter_context(closing(Client(served)))
            timed[name] = Timed(client.ask)
        print_latencies(timed, given.rounds)
    print_starts(bundle, told.model_name, taken.name, sample)
    with tempfile.TemporaryDirectory() as scratch:
        print_rates(bundle, told.model_name, taken.name, sample, max(3, given.rounds // 5), Path(scratch))
    raise SystemExit(0 if print_open_load(*of_open_load) else 1)


if __name__ == "__main__":
    main()
