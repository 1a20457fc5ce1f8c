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
from hpml.artifacts.model_input import InputSpec
from hpml.components.__main__ import Job, execute
from hpml.core.contract import Config, signature
from hpml.core.process import spin_briefly
from hpml.pipelines.__main__ import main
from tests.chain import Chain, run_chain

# Where tests are started in the background (nohup, a shell's &), Ctrl-C is ignored by whatever they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

spin_briefly()  # tests train in this process, as steps do in theirs
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
            threads=2,
        )
        execute(job)
        return open_artifact(place, kind=signature(stage_run).output_kind)

    return run


@pytest.fixture(scope="session")
def digits_data(tmp_path_factory: pytest.TempPathFactory) -> Artifact[DatasetSpec]:
    """scikit-learn's 8x8 handwritten digits: 1437 train rows, 360 test rows."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images * (255 / 16)).round().astype(np.uint8)[..., None]
    labels = bunch.target.astype(np.int64)
    is_test = np.arange(len(labels)) % 5 == 0
    place = tmp_path_factory.mktemp("digits")
    splits = {}
    for split, rows in (("train", ~is_test), ("test", is_test)):
        np.save(place / f"{split}_images.npy", images[rows])
        np.save(place / f"{split}_labels.npy", labels[rows])
        counts = np.bincount(labels[rows], minlength=10)
        splits[split] = SplitSpec(rows=int(rows.sum()), class_counts=tuple(int(count) for count in counts))
    scaled = images[~is_test] / 255
    spec = DatasetSpec(
        class_names=tuple("0123456789"),
        image_shape_hwc=(8, 8, 1),
        splits=splits,
        mean=(float(scaled.mean()),),
        std=(float(scaled.std()),),
        source="digits",
        licence="BSD-3-Clause",
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
    from hpml.tasks.images import load_split, predict_split, to_x_nchw, top1_accuracy

    torch.manual_seed(0)
    inputs = InputSpec(shape_chw=(1, 8, 8), mean=digits_data.spec.mean, std=digits_data.spec.std)
    architecture = ArchitectureSpec(name="cnn", arguments={"width": 16})
    model = models.build(architecture, in_channels=1, num_classes=10)
    images, labels = load_split(digits_data, "train")
    x, y = torch.from_numpy(to_x_nchw(images, inputs)), torch.from_numpy(labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(8):
        for rows in torch.randperm(len(x)).split(64):
            loss = functional.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()

    def predict(batch: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(batch)).numpy()

    test_images, test_labels = load_split(digits_data, "test")
    accuracy = top1_accuracy(predict_split(predict, test_images, inputs), test_labels)
    parameters, macs = models.count(model, inputs)
    place = tmp_path_factory.mktemp("small-model")
    models.save(model, place)
    (place / "history.json").write_text("[]")
    spec = ModelSpec(
        architecture=architecture,
        input=inputs,
        class_names=digits_data.spec.class_names,
        parameters=parameters,
        macs=macs,
        accuracy_top1=accuracy,
    )
    seal_artifact(place, spec=spec, metrics={}, lineage=LINEAGE)
    return open_artifact(place, kind="model")
