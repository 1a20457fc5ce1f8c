"""Data at s3:// URIs: read as the same files are on a disk, and known again by their ETags."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from PIL import Image

from hpml.core.contract import Output
from hpml.core.errors import StageFailed
from hpml.tasks.image_classification.sources import Folder, Npz
from hpml.tasks.image_classification.sources.webdataset import WebDataset


@pytest.fixture(scope="module")
def s3(s3_endpoint: str) -> Iterator[Any]:
    """A client of an S3 that the environment leads to, with the bucket `data`."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "someone")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "something")
        environment.setenv("AWS_REGION", "us-east-1")
        environment.setenv("AWS_ENDPOINT_URL", s3_endpoint)
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="data")
        yield client


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six images in two classes."""
    root = tmp_path_factory.mktemp("digits")
    for label in ("zero", "one"):
        (root / label).mkdir()
        for number in range(3):
            pixels = np.random.default_rng(hash(label) % 7 + number).integers(0, 256, (8, 8), np.uint8)
            Image.fromarray(pixels).save(root / label / f"{number}.png")
    return root


def out(folder: Path) -> Output:
    (folder / "out").mkdir()
    (folder / "scratch").mkdir()
    return Output(folder / "out", folder / "scratch")


def test_a_folder_of_objects_is_the_folder(s3: Any, digits: Path, tmp_path: Path) -> None:
    for file in digits.rglob("*.png"):
        s3.upload_file(str(file), "data", f"digits/{file.relative_to(digits).as_posix()}")
    there = Folder(path="s3://data/digits").load(out(tmp_path))
    (tmp_path / "local").mkdir()
    here = Folder(path=digits).load(out(tmp_path / "local"))
    assert there.class_names == here.class_names == ("one", "zero")
    np.testing.assert_array_equal(there.splits["train"].images_nhwc, here.splits["train"].images_nhwc)


def test_an_archive_is_one_object(s3: Any, digits: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "digits.tar.gz", "w:gz") as archive:
        archive.add(digits, arcname=".")
    s3.upload_file(str(tmp_path / "digits.tar.gz"), "data", "archives/digits.tar.gz")
    there = Folder(path="s3://data/archives/digits.tar.gz").load(out(tmp_path))
    assert len(there.splits["train"].labels) == 6


@pytest.mark.parametrize("path", ["s3://data/shards", "s3://data/shards/train-{0..1}.tar"])
def test_shards_of_a_prefix_or_a_pattern(path: str, s3: Any, digits: Path, tmp_path: Path) -> None:
    for number in range(2):
        with tarfile.open(tmp_path / "shard.tar", "w") as shard:
            for label in ("zero", "one"):
                shard.add(digits / label / f"{number}.png", arcname=f"{label}.png")
                (tmp_path / "label").write_text(label)
                shard.add(tmp_path / "label", arcname=f"{label}.cls")
        s3.upload_file(str(tmp_path / "shard.tar"), "data", f"shards/train-{number}.tar")
    source = WebDataset(path=path)
    loaded = source.load(out(tmp_path))
    assert loaded.class_names == ("one", "zero")
    assert loaded.splits["train"].labels.tolist() == [1, 0, 1, 0]
    assert source.fingerprint() == WebDataset(path=path).fingerprint() != ""


def test_arrays_and_what_became_of_them(s3: Any, tmp_path: Path) -> None:
    source = Npz(path="s3://data/arrays.npz")
    for value in (1, 2):
        np.savez(tmp_path / "arrays.npz", x=np.full((4, 8, 8), value, np.uint8), y=np.arange(4))
        s3.upload_file(str(tmp_path / "arrays.npz"), "data", "arrays.npz")
        folder = tmp_path / str(value)
        folder.mkdir()
        assert source.load(out(folder)).splits["train"].images_nhwc.max() == value
        if value == 1:
            before = source.fingerprint()
            assert before == source.fingerprint()
    assert source.fingerprint() != before


def test_nothing_there(s3: Any, tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match=r"there is nothing at s3://data/absent\.npz"):
        Npz(path="s3://data/absent.npz").load(out(tmp_path))
