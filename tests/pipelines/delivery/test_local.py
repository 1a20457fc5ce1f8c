"""Releases on this machine, with real servers: under load, refused, killed in the middle, and back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hpml.core.errors import GateFailed, StageFailed, Unavailable
from hpml.pipelines.delivery.deployable import Deployable
from hpml.pipelines.delivery.local import LocalPlace
from hpml.pipelines.delivery.release import Release
from hpml.pipelines.delivery.rollout import Evidence, Rollout
from hpml.pipelines.delivery.smoke_limits import SmokeLimits
from tests.pipelines.delivery.releases import sealed_bundle
from tests.ports import free_port
from tests.serving.small_bundles import WEIGHTS, as_request, graph, logits

LIMITS = SmokeLimits(seconds=1, p50_factor=1000, p99_factor=1000)  # the machine is busy with other tests
NOT_SLOWER = LIMITS.model_copy(update={"p50_factor": 3})
SIZE = 768


def slow_graph() -> onnx.ModelProto:
    """As `graph`, and a product of two large matrices beside it, which nothing can leave out."""
    model = graph()
    large = numpy_helper.from_array(np.ones((SIZE, SIZE), np.float32), "large")
    zero = numpy_helper.from_array(np.zeros((), np.float32), "zero")
    model.graph.initializer.extend([large, zero])
    model.graph.node[-1].output[0] = "fast"
    model.graph.node.extend(
        [
            helper.make_node("ReduceSum", ["x_nchw"], ["sum"], keepdims=0),
            helper.make_node("Add", ["large", "sum"], ["once"]),
            helper.make_node("MatMul", ["once", "once"], ["twice"]),
            helper.make_node("ReduceMax", ["twice"], ["most"], keepdims=0),
            helper.make_node("Mul", ["most", "zero"], ["nothing"]),
            helper.make_node("Add", ["fast", "nothing"], ["logits"]),
        ]
    )
    assert model.graph.output[0].type.tensor_type.elem_type == TensorProto.FLOAT
    return model


def released(bundle: Path, port: int) -> Release:
    """A bundle, to be served at this port."""
    return Deployable(bundle, bundle.parent).released(str(bundle), {"port": port})


@dataclass
class Deployment:
    """A name on this machine."""

    folder: Path
    port: int
    said: list[str] = field(default_factory=list)
    kept: list[Evidence] = field(default_factory=list)

    def place(self, replay: Path | None = None) -> LocalPlace:
        return LocalPlace(
            self.folder, self.said.append, wait_s=0, ready_s=60, smoke_s=LIMITS.seconds, replay=replay
        )

    def rollout(self, replay: Path | None = None) -> Rollout:
        return Rollout(self.place(replay), self.kept.append, self.said.append)

    def deploy(self, bundle: Path, limits: SmokeLimits = LIMITS, replay: Path | None = None) -> Release:
        release = released(bundle, self.port)
        self.rollout(replay).deploy(release, limits, None)
        return release

    def version(self) -> str:
        """Of the model that answers."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v2/models/small") as answer:
            (version,) = json.load(answer)["versions"]
            return str(version)

    @contextmanager
    def load(self) -> Iterator[list[str]]:
        """Requests one after the other, each on a connection of its own; what was not answered with 200."""
        body, headers = as_request(np.zeros((1, 1, 4, 4), np.float32), binary=True)
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v2/models/small/infer", body, headers)
        failed: list[str] = []
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                try:
                    with urllib.request.urlopen(request, timeout=10) as answer:
                        answer.read()
                except OSError as error:
                    failed.append(str(error))
                time.sleep(0.002)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield failed
        finally:
            over.set()
            thread.join()


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path / "deployments" / "small", free_port())
    yield made
    with made.place().lock():
        made.place().remove()


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("bundles")
    made = {
        "first": sealed_bundle(place / "first", version=1),
        "second": sealed_bundle(place / "second", version=2),
        "slow": sealed_bundle(place / "slow", version=3, model=slow_graph()),
        "perturbed": sealed_bundle(place / "perturbed", version=4, model=graph(WEIGHTS + 0.1)),
    }
    return made


def test_a_release_takes_over_under_load_and_comes_back(
    deployment: Deployment, bundles: dict[str, Path]
) -> None:
    deployment.deploy(bundles["first"])
    assert deployment.version() == "1"
    with deployment.load() as failed:
        deployment.deploy(bundles["second"])
        assert deployment.version() == "2"
        deployment.rollout().rollback()
        assert deployment.version() == "1"
    assert not failed
    assert [one.outcome for one in deployment.kept] == ["promoted", "promoted", "rolled back"]
    figures = deployment.kept[1].figures
    assert figures and figures.canary and figures.stable and figures.p50_ratio
    assert figures.engine_ms_mean and figures.hardware
    assert figures.tolerances == {"small": {"logits": 1e-4}}


@pytest.mark.parametrize(
    ("canary", "why"),
    [("slow", r"p50 is .* times the stable version's, 3 is allowed"), ("perturbed", "golden outputs")],
)
def test_a_canary_that_does_not_pass_leaves_the_stable_one(
    deployment: Deployment, bundles: dict[str, Path], canary: str, why: str
) -> None:
    deployment.deploy(bundles["first"])
    with deployment.load() as failed, pytest.raises(GateFailed, match=why):
        deployment.deploy(bundles[canary], NOT_SLOWER)
    assert not failed and deployment.version() == "1"
    assert deployment.place().canary() is None
    assert not servers(deployment.folder / "releases")


def test_recorded_requests_are_replayed_to_both(
    deployment: Deployment, bundles: dict[str, Path], tmp_path: Path
) -> None:
    pictures = np.random.default_rng(3).standard_normal((30, 1, 1, 4, 4)).astype(np.float32)
    requests = tmp_path / "requests.jsonl"
    requests.write_bytes(b"".join(as_request(one)[0] + b"\n" for one in pictures))
    weights = WEIGHTS + np.float32(0.5) * np.random.default_rng(1).standard_normal(WEIGHTS.shape, np.float32)
    golden = {"x_nchw": pictures[0], "logits": logits(pictures[0], weights)}
    other = sealed_bundle(tmp_path / "other", version=5, model=graph(weights), golden=golden)
    same = np.mean([logits(one, weights).argmax() == logits(one).argmax() for one in pictures])
    assert 0.5 < same < 1
    strict = LIMITS.model_copy(update={"replay_agreement": 0.99})

    deployment.deploy(bundles["first"], strict, requests)
    assert any("compared with no stable version" in line for line in deployment.said)
    with pytest.raises(GateFailed, match=rf"agree in {same:.2%}, 99.00% are needed"):
        deployment.deploy(other, strict, requests)
    assert deployment.version() == "1" and deployment.place().canary() is None

    replays = [one.figures.replay for one in deployment.kept if one.figures and one.figures.replay]
    assert [one.agreement for one in replays] == [None, pytest.approx(same)]
    assert all((one.recorded, one.sent, one.failures) == (30, 30, ()) for one in replays)


def servers(source: Path) -> list[int]:
    """The processes that serve something at or below `source`."""
    found = subprocess.run(["pgrep", "-f", f"serve {source}"], capture_output=True, text=True, check=False)
    return [int(number) for number in found.stdout.split()]


def test_one_rollout_at_a_time_and_the_other_is_told_whose_it_is(
    deployment: Deployment, bundles: dict[str, Path]
) -> None:
    whose = rf"under way, by \S+@\S+ \(process {os.getpid()}\), since \d{{4}}-\d\d-\d\d \d\d:\d\d"
    with deployment.place().lock(), pytest.raises(Unavailable, match=whose):
        deployment.deploy(bundles["first"])
    with deployment.place().lock():
        pass


def test_copies_that_no_rollback_needs_go_and_in_the_end_all_do(
    deployment: Deployment, bundles: dict[str, Path], tmp_path: Path
) -> None:
    third = sealed_bundle(tmp_path / "third", version=7)
    releases = [deployment.deploy(bundle) for bundle in (bundles["first"], bundles["second"], third)]
    copies = deployment.folder / "releases"
    assert {path.name for path in copies.iterdir()} == {one.digest for one in releases[1:]}
    assert (
        f"the copy of the bundle {releases[0].digest[:12]} is removed: no rollback needs it"
        in deployment.said
    )
    deployment.rollout().rollback()
    assert deployment.version() == "2"
    deployment.rollout().undeploy()
    assert not servers(deployment.folder)
    assert {path.name for path in deployment.folder.iterdir()} == {"lock", "stable.log", "canary.log"}
    assert deployment.said[-2].startswith("what stays: logs, and what was seen of rollouts, in ")


_ROLLOUT = """
import sys
from pathlib import Path
from tests.pipelines.delivery.test_local import Deployment
Deployment(Path(sys.argv[1]), int(sys.argv[2])).deploy(Path(sys.argv[3]))
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_next_rollout_finishes_or_undoes(
    deployment: Deployment, bundles: dict[str, Path]
) -> None:
    deployment.deploy(bundles["first"])
    command = [sys.executable, "-c", _ROLLOUT, str(deployment.folder), str(deployment.port)]
    random = np.random.default_rng(0)
    current = "first"
    for _ in range(4):
        wanted = "second" if current == "first" else "first"
        with deployment.load() as failed:
            process = subprocess.Popen(
                [*command, str(bundles[wanted])], env={**os.environ, "PYTHONPATH": "."}
            )
            time.sleep(float(random.uniform(0.5, 5)))
            process.send_signal(signal.SIGKILL)
            process.wait()
            deployment.deploy(bundles[wanted])
        assert not failed and not servers(deployment.folder / "releases")
        current = wanted
    assert deployment.version() == "1"


def test_a_server_that_is_gone_is_started_again(deployment: Deployment, bundles: dict[str, Path]) -> None:
    deployment.deploy(bundles["first"])
    (process,) = servers(deployment.folder / "current")
    os.kill(process, signal.SIGKILL)
    while servers(deployment.folder / "current"):
        time.sleep(0.05)
    deployment.deploy(bundles["first"])
    assert deployment.version() == "1"


def test_what_was_begun_and_never_tried_is_begun_anew_as_it_is_asked_for(
    deployment: Deployment, bundles: dict[str, Path]
) -> None:
    place = deployment.place()
    with place.lock():
        place.begin(released(bundles["first"], free_port()))
    deployment.deploy(bundles["first"])
    assert deployment.version() == "1"
    (process,) = servers(deployment.folder / "current")
    assert str(deployment.port) in Path(f"/proc/{process}/cmdline").read_text()


def test_a_port_that_is_taken_is_not_taken_for_ours(deployment: Deployment, bundles: dict[str, Path]) -> None:
    with (
        socket.create_server(("127.0.0.1", deployment.port)),
        pytest.raises(GateFailed, match=r"port \d+ is taken"),
    ):
        deployment.deploy(bundles["first"])
    assert not servers(deployment.folder / "current")


def test_settings_that_do_not_work_leave_the_server_as_it_was(
    deployment: Deployment, bundles: dict[str, Path]
) -> None:
    deployment.deploy(bundles["first"])
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(StageFailed, match="is taken"):
        port = other.getsockname()[1]
        release = released(bundles["first"], port)
        deployment.rollout().deploy(release, LIMITS, None)
    assert deployment.version() == "1"
    elsewhere = released(bundles["first"], free_port())
    deployment.rollout().deploy(elsewhere, LIMITS, None)
    deployment.rollout().rollback()  # settings come back, too
    assert deployment.version() == "1"


def test_a_rollout_that_was_killed_while_it_took_over_is_finished(
    deployment: Deployment, bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = deployment.deploy(bundles["first"])
    second = released(bundles["second"], deployment.port)
    place = deployment.place()
    with place.lock(), monkeypatch.context() as patched:
        patched.setattr(place, "_take_over", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            place.promote(second, first)
    with deployment.place().lock():
        stable = deployment.place().stable()
        assert stable and (stable.release, stable.previous) == (second, first)
    assert deployment.version() == "2"


def test_a_copy_that_was_changed_is_made_anew(deployment: Deployment, bundles: dict[str, Path]) -> None:
    release = deployment.deploy(bundles["first"])
    graph_file = deployment.folder / "releases" / release.digest / "engine" / "model.onnx"
    graph_file.write_bytes(b"changed")
    deployment.deploy(bundles["second"])
    deployment.deploy(bundles["first"])
    assert deployment.version() == "1" and graph_file.read_bytes() != b"changed"
