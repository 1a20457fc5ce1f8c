"""Small real things that the tests share: a dataset of handwritten digits, a network trained on it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from moto.server import ThreadedMotoServer

from hpml.artifacts.dataset import DatasetSpec, SplitSpec
from hpml.artifacts.folder import Artifact, Lineage, open_artifact, seal_artifact
from hpml.artifacts.model import ArchitectureSpec, ModelSpec
from hpml.components.__main__ import Job, execute
from hpml.core.contract import Config, signature
from hpml.core.process import spin_briefly
from hpml.pipelines.__main__ import main
from hpml.tasks.image_classification.task import ImageClassification
from tests.chain import Chain, run_chain

# Where tests are started in the background (nohup, a shell's &), Ctrl-C is ignored by whatever they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

spin_briefly()  # tests train in this process, as steps do in theirs
os.environ["OMP_NUM_THREADS"] = "1"  # a test runs on each CPU: more threads would wait for one another
os.environ["COLUMNS"] = "80"  # whatever the terminal's width
settings.register_profile("ours", deadline=None)  # no test of ours asserts an absolute time
settings.load_profile("ours")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests take longest come first: side by side, none of them is then begun last."""

    def takes_long(item: pytest.Item) -> bool:
        return "chain" in getattr(item, "fixturenames", ()) or bool(item.get_closest_marker("slow"))

    long_files = {item.path for item in items if takes_long(item)}
    items.sort(key=lambda item: item.path not in long_files)


LINEAGE = Lineage(
    stage="fixture",
    code_digest="",
    config=None,
    parents={},
    libraries={},
    started_at_s=time.time(),
    seconds=0.0,
    peak_rss_bytes=0,
)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes into the folder of the user's own runs."""
    monkeypatch.setenv("HPML_HOME", str(tmp_path / "runs"))


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Of a real S3 server of this machine (moto's), which takes any key."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """The whole chain, run once."""
    return run_chain(tmp_path_factory.mktemp("chain"))


Hpml = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hpml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Hpml:
    """Run the command in `tmp_path`, in this process, which saves its start: hpml("run", "a.yaml", NAME="x").

    The console keeps the width and the colours of the first command that this process ran.
    """
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        status: Any = 0
        capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            try:
                main(list(arguments))
            except SystemExit as end:
                status = end.code
        said = capfd.readouterr()
        return subprocess.CompletedProcess(["hpml", *arguments], status, said.out, said.err)

    return run


RunStage = Callable[..., Artifact[Any]]


@pytest.fixture
def run_stage(tmp_path: Path) -> RunStage:
    """Run a stage for real, as its container does: run_stage(train.run, config, data=artifact)."""
    return _runner(tmp_path)


@pytest.fixture(scope="session")
def run_stage_once(tmp_path_factory: pytest.TempPathFactory) -> RunStage:
    """The same, for fixtures that live as long as the session."""
    return _runner(tmp_path_factory.mktemp("stages"))


def _runner(root: Path) -> RunStage:
    count = 0

    def run(stage_run: Any, config: Config, **inputs: Any) -> Artifact[Any]:
        nonlocal count
        count += 1
        place = root / f"stage-{count}"
        paths = {
            name: {key: str(item.path) for key, item in given.items()}
            if isinstance(given, dict)
            else str(given.path)
            for name, given in inputs.items()
        }
        job = Job(
            run=f"{stage_run.__module__}:{stage_run.__name__}",
            config=config.model_dump(mode="json"),
            inputs=paths,
            out=str(place),
            threads=1,
        )
        execute(job)
        return open_artifact(place, kind=signature(stage_run).output_kind)

    return run


@pytest.fixture(scope="session")
def digits_data(tmp_path_factory: pytest.TempPathFactory) -> Artifact[DatasetSpec]:
    """scikit-learn's 8x8 handwritten digits: 1257 train rows, 360 validation rows, 180 test rows."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images * (255 / 16)).round().astype(np.uint8)[..., None]
    labels = bunch.target.astype(np.int64)
    number = np.arange(len(labels))
    is_validation, is_test = number % 5 == 0, number % 10 == 1
    is_train = ~is_validation & ~is_test
    place = tmp_path_factory.mktemp("digits")
    splits = {}
    for split, rows in (("train", is_train), ("validation", is_validation), ("test", is_test)):
        np.save(place / f"{split}_images.npy", images[rows])
        np.save(place / f"{split}_labels.npy", labels[rows])
        counts = np.bincount(labels[rows], minlength=10)
        splits[split] = SplitSpec(rows=int(rows.sum()), class_counts=tuple(int(count) for count in counts))
    scaled = images[is_train] / 255
    task = ImageClassification(
        class_names=tuple("0123456789"),
        image_shape_hwc=(8, 8, 1),
        mean=(float(scaled.mean()),),
        std=(float(scaled.std()),),
    )
    spec = DatasetSpec(
        task=task.model_dump(mode="json"), splits=splits, source="digits", licence="BSD-3-Clause"
    )
    seal_artifact(place, spec=spec, metrics={}, lineage=LINEAGE)
    return open_artifact(place, kind="dataset")


@pytest.fixture(scope="session")
def small_model(
    digits_data: Artifact[DatasetSpec], tmp_path_factory: pytest.TempPathFactory
) -> Artifact[ModelSpec]:
    """The small CNN trained on the digits for a few seconds, to about 97 % top-1."""
    import torch
    from torch.nn import functional

    from hpml import models
    from hpml.tasks import task_of
    from hpml.training.loop import evaluate

    torch.manual_seed(0)
    task = task_of(digits_data.spec.task)
    architecture = ArchitectureSpec(name="cnn", arguments={"width": 16})
    model = models.build(architecture, task)
    stored = {
        name: torch.from_numpy(np.array(array)) for name, array in task.stored(digits_data, "train").items()
    }
    (x,) = task.training_features(stored)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(8):
        for rows in torch.randperm(len(x)).split(64):
            loss = functional.cross_entropy(model(x[rows]), stored["labels"][rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    parameters, macs = models.count(model, task)
    place = tmp_path_factory.mktemp("small-model")
    models.save(model, place)
    (place / "history.json").write_text("[]")
    spec = ModelSpec(
        architecture=architecture,
        task=digits_data.spec.task,
        operations=task.operations(model),
        parameters=parameters,
        macs=macs,
        quality=evaluate(model, digits_data),
    )
    seal_artifact(place, spec=spec, metrics={}, lineage=LINEAGE)
    return open_artifact(place, kind="model")
