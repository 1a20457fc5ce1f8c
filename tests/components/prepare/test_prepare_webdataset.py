"""webdataset: shards of pictures with their labels beside them, and what may be wrong with them."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpml.core.contract import Output
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.data_files import archive
from hpml.data_files.shards import expanded
from hpml.tasks import task_of
from hpml.tasks.image_classification.sources.webdataset import WebDataset


def png(image: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def write_shard(file: Path, members: Mapping[str, bytes]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as shard:
        for name, content in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            shard.addfile(header, io.BytesIO(content))


def samples_of(images: Any, labels: Any, first: int = 0) -> dict[str, bytes]:
    return {
        f"{first + at:06}.{kind}": content
        for at, (image, label) in enumerate(zip(images, labels, strict=True))
        for kind, content in (("png", png(image)), ("cls", str(label).encode()), ("txt", b"a caption"))
    }


def pixels(splits: dict[str, Any]) -> set[tuple[bytes, int]]:
    return {
        (image.tobytes(), int(label)) for x, y in splits.values() for image, label in zip(x, y, strict=True)
    }


@pytest.fixture
def shards(digits: Any, tmp_path: Path) -> Path:
    """Two shards to train with, one each to validate and to test with."""
    x, y = digits
    rows_of = {
        "train-000000": (0, 30),
        "train-000001": (30, 60),
        "val-000000": (60, 80),
        "test-000000": (80, 100),
    }
    for name, (first, last) in rows_of.items():
        write_shard(tmp_path / f"shards/{name}.tar", samples_of(x[first:last], y[first:last], first))
    return tmp_path / "shards"


def test_shards_keep_splits_and_order(
    shards: Path, digits: Any, prepare: Callable[..., Any], splits_of: Callable[..., Any]
) -> None:
    x, y = digits
    data = prepare(source="webdataset", path=shards)
    splits = splits_of(data)
    for name, rows in (("train", slice(60)), ("validation", slice(60, 80)), ("test", slice(80, None))):
        assert np.array_equal(splits[name][0][..., 0], x[rows])
        assert np.array_equal(splits[name][1], y[rows])
    assert task_of(data.spec.task).pictures.data_from == "pictures"
    names = tuple(f"digit {label}" for label in range(10))
    preview = WebDataset(path=shards, class_names=names).preview()
    assert preview.task.image_shape_hwc == task_of(data.spec.task).image_shape_hwc == (8, 8, 1)


@pytest.mark.parametrize("pattern", ["train-{000000..000001}.tar", "{train-000000,train-000001}.tar"])
def test_a_pattern_names_shards(
    pattern: str, shards: Path, prepare: Callable[..., Any], splits_of: Callable[..., Any]
) -> None:
    data = prepare(source="webdataset", path=shards / pattern)
    assert sum(split.rows for split in data.spec.splits.values()) == 60
    before = WebDataset(path=shards / pattern).fingerprint()
    (shards / "train-000001.tar").touch()
    assert before != WebDataset(path=shards / pattern).fingerprint() != ""


def test_a_shard_of_a_pattern_that_is_missing_is_a_config_error(
    shards: Path, prepare: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigInvalid, match=r"train-000002\.tar does not exist"):
        prepare(source="webdataset", path=shards / "train-{000000..000002}.tar")


def test_patterns() -> None:
    assert expanded("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expanded("{train,val}/{0..1}.tar") == ["train/0.tar", "train/1.tar", "val/0.tar", "val/1.tar"]
    assert expanded("plain.tar") == ["plain.tar"]
    for wrong in ("{}.tar", "{3..1}.tar", "{a..c}.tar"):
        with pytest.raises(ConfigInvalid, match="ascending"):
            expanded(wrong)
    for many in ("{0..999999999}.tar", "{0..999}{0..999}{0..999}{0..999}.tar"):
        with pytest.raises(ConfigInvalid, match="more than 100000 shards"):
            expanded(many)


@pytest.mark.parametrize(
    ("kind", "content", "options"),
    [
        ("json", lambda label: json.dumps({"label": int(label), "more": [1]}), {}),
        ("json", lambda label: json.dumps({"kind": f"n{label}"}), {"label_field": "kind"}),
        ("cls", lambda label: f"n{label}\n", {}),
        ("cls.txt", lambda label: f"{label}", {}),
        ("target.TXT", lambda label: f"{label}", {"label_field": "target.txt"}),
    ],
)
def test_ways_to_store_labels(
    kind: str,
    content: Callable[[int], str],
    options: dict[str, str],
    digits: Any,
    tmp_path: Path,
    prepare: Callable[..., Any],
    splits_of: Callable[..., Any],
) -> None:
    x, y = digits
    members = {}
    for at, (image, label) in enumerate(zip(x, y, strict=True)):
        members |= {f"./part/{at}.img.png": png(image), f"./part/{at}.{kind}": content(label).encode()}
    write_shard(tmp_path / "all.tar", members)
    data = prepare(source="webdataset", path=tmp_path / "all.tar", **options)
    assert len(task_of(data.spec.task).class_names) == 10
    assert pixels(splits_of(data)) == {
        (image.tobytes(), int(label)) for image, label in zip(x, y, strict=True)
    }


IMAGE = png(np.zeros((8, 8), np.uint8))


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"7.cls": b"1"}, "the sample s.tar 7 has no picture"),
        ({"7.png": IMAGE, "7.jpg": IMAGE, "7.cls": b"1"}, "the sample s.tar 7 has png and jpg"),
        ({"7.png": IMAGE}, "the sample s.tar 7 has no label: looked for in .cls, .cls.txt, and in .json"),
        ({"7.png": IMAGE, "7.json": b"["}, "the sample s.tar 7 has no label"),
        ({"7.png": IMAGE, "7.json": b"[" * 10**5}, "the sample s.tar 7 has no label"),
        ({"7.png": IMAGE, "7.json": b'{"label": [1]}'}, "the sample s.tar 7 has no label"),
        ({"7.png": IMAGE, "7.cls": b"\xff"}, "the sample s.tar 7 has no label"),
        ({"7.png": b"GIF89a", "7.cls": b"1"}, "1 file: s.tar 7 (not a PNG or JPEG)"),
        ({"7.png": IMAGE, "7.PNG": IMAGE, "7.cls": b"1"}, "'7.PNG' twice"),
        (
            {"7.png": IMAGE, "7.cls": b"1", "8.png": IMAGE, "8.cls": b"one"},
            "some are names: such as 1 and 'one'",
        ),
    ],
)
def test_a_sample_that_lacks_something_is_named(
    members: dict[str, bytes], reason: str, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    write_shard(tmp_path / "s.tar", members)
    with pytest.raises(StageFailed, match=re.escape(reason)) as caught:
        prepare(source="webdataset", path=tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.97])
def test_a_truncated_shard_is_refused(share: float, shards: Path, prepare: Callable[..., Any]) -> None:
    file = shards / "train-000001.tar"
    file.write_bytes(file.read_bytes()[: int(30 * 3 * 1024 * share)])
    with pytest.raises(StageFailed, match=r"train-000001\.tar is truncated"):
        prepare(source="webdataset", path=shards)


def test_hostile_shards_are_refused(
    tmp_path: Path, prepare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as shard:
        link = tarfile.TarInfo("7.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        shard.addfile(link)
    with pytest.raises(StageFailed, match=r"'7.png' is a link"):
        prepare(source="webdataset", path=tmp_path)
    write_shard(tmp_path / "s.tar", {"7.png": bytes(2000), "7.cls": b"1"})
    monkeypatch.setattr(archive, "MOST_BYTES_HELD", 1999)
    with pytest.raises(StageFailed, match=r"'7.png' has more than 1999 bytes"):
        prepare(source="webdataset", path=tmp_path)
    monkeypatch.setattr(archive, "MOST_MEMBERS", 1)
    monkeypatch.setattr(archive, "MOST_BYTES_HELD", 2000)
    with pytest.raises(StageFailed, match="more than 1 members"):
        prepare(source="webdataset", path=tmp_path)


def test_a_name_that_leads_outside_is_a_name_and_nothing_more(
    digits: Any, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    members = {f"../../{name}": content for name, content in samples_of(*digits).items()}
    write_shard(tmp_path / "in/s.tar", members)
    before = sorted(tmp_path.iterdir())
    assert prepare(source="webdataset", path=tmp_path / "in").spec.splits["test"].rows == 20
    assert [path for path in sorted(tmp_path.iterdir()) if path.suffix in (".png", ".cls")] == []
    assert set(before) <= set(tmp_path.iterdir())


def test_splits_in_some_names_only_are_refused(shards: Path, prepare: Callable[..., Any]) -> None:
    (shards / "train-000001.tar").rename(shards / "more.tar")
    with pytest.raises(StageFailed, match=r"some files are of no split: 1 file: more\.tar"):
        prepare(source="webdataset", path=shards)


def test_a_decompression_bomb_in_a_shard_is_refused_undecoded(
    tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    big = io.BytesIO()
    Image.new("L", (8000, 8000)).save(big, "PNG")
    write_shard(tmp_path / "s.tar", {"7.png": big.getvalue(), "7.cls": b"1"})
    with pytest.raises(StageFailed, match="8000x8000 are more than 50000000 pixels"):
        prepare(source="webdataset", path=tmp_path)


def test_no_more_pictures_are_held_than_threads_need(tmp_path: Path, out: Output) -> None:
    """A reader that runs ahead of the decoder would hold the whole set."""
    from hpml.tasks.image_classification.data.picture_shards import PictureShards
    from hpml.tasks.image_classification.data.read_pictures import AT_ONCE, for_each

    images = np.random.default_rng(0).integers(0, 256, (3 * AT_ONCE, 4, 4), np.uint8)
    write_shard(tmp_path / "s.tar", samples_of(images, [0] * len(images)))
    taken = 0

    def counted() -> Any:
        nonlocal taken
        for picture in PictureShards(tmp_path, ["s.tar"], label="").pictures("train"):
            taken += 1
            yield picture

    for done, _ in enumerate(for_each(counted(), lambda picture: picture.name, out), start=1):
        assert taken - done < AT_ONCE
    assert taken == len(images)
