"""parquet: tables of pictures as Hugging Face and pyarrow write them, and what may be wrong with them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import feather, ipc
from pyarrow import parquet as pq

from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.tasks import task_of
from hpml.tasks.image_classification.sources.parquet import Parquet

NAMES = tuple(f"digit {label}" for label in range(10))


def png(image: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def structs(images: Any) -> pa.Array:
    """As `datasets` stores pictures."""
    of = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    return pa.array([{"bytes": png(image), "path": None} for image in images], of)


def noted(names: tuple[str, ...] = NAMES) -> dict[str, str]:
    """What `datasets` notes of such columns."""
    features = {"picture": {"_type": "Image"}, "digit": {"_type": "ClassLabel", "names": list(names)}}
    return {"huggingface": json.dumps({"info": {"features": features}})}


def hub_table(x: Any, y: Any) -> pa.Table:
    columns = {"picture": structs(x), "digit": pa.array(y), "caption": pa.array(["a digit"] * len(y))}
    return pa.table(columns).replace_schema_metadata(noted())


def pixels(splits: dict[str, Any]) -> set[tuple[bytes, int]]:
    return {
        (image.tobytes(), int(label)) for x, y in splits.values() for image, label in zip(x, y, strict=True)
    }


@pytest.fixture
def expected(digits: Any) -> set[tuple[bytes, int]]:
    return {(image.tobytes(), int(label)) for image, label in zip(*digits, strict=True)}


def test_shards_as_on_the_hub_keep_their_splits_and_the_names_that_are_noted(
    digits: Any,
    expected: set[Any],
    tmp_path: Path,
    prepare: Callable[..., Any],
    splits_of: Callable[..., Any],
) -> None:
    x, y = digits
    shards = {"train-00000-of-00002": slice(30), "train-00001-of-00002": slice(30, 60)}
    shards |= {"validation-00000-of-00001": slice(60, 80), "test-00000-of-00001": slice(80, None)}
    (tmp_path / "hub/data").mkdir(parents=True)
    for name, rows in shards.items():
        pq.write_table(hub_table(x[rows], y[rows]), tmp_path / f"hub/data/{name}.parquet", row_group_size=7)
    data = prepare(source="parquet", path=tmp_path / "hub")
    assert task_of(data.spec.task).class_names == NAMES
    assert {name: split.rows for name, split in data.spec.splits.items()} == {
        "train": 60,
        "validation": 20,
        "test": 20,
    }
    splits = splits_of(data)
    assert np.array_equal(splits["train"][0][..., 0], x[:60])
    assert np.array_equal(splits["test"][1], y[80:])
    assert pixels(splits) == expected
    preview = Parquet(path=tmp_path / "hub").preview()
    assert preview.rows == 100 and preview.task.class_names == tuple(map(str, range(10)))
    assert preview.task.image_shape_hwc == (8, 8, 1) and not preview.problems


def writers() -> Iterator[tuple[str, Callable[[pa.Table, Path], None]]]:
    yield "t.parquet", lambda table, file: pq.write_table(table, file, compression="zstd")
    yield "t.feather", lambda table, file: feather.write_feather(table, file)
    yield "file.arrow", lambda table, file: _write(ipc.new_file, table, file)
    yield "stream.arrow", lambda table, file: _write(ipc.new_stream, table, file)


def _write(new: Any, table: pa.Table, file: Path) -> None:
    with new(str(file), table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(("name", "write"), list(writers()), ids=[name for name, _ in writers()])
def test_every_kind_of_file_gives_the_same_pictures(
    name: str,
    write: Any,
    digits: Any,
    expected: set[Any],
    tmp_path: Path,
    prepare: Callable[..., Any],
    splits_of: Callable[..., Any],
) -> None:
    write(hub_table(*digits), tmp_path / name)
    assert pixels(splits_of(prepare(source="parquet", path=tmp_path / name))) == expected


@pytest.mark.parametrize("column", ["bytes", "large bytes", "lists", "lists with a channel"])
@pytest.mark.parametrize("labels", ["numbers", "names"])
def test_other_columns_of_images_and_labels(
    column: str,
    labels: str,
    digits: Any,
    tmp_path: Path,
    prepare: Callable[..., Any],
    splits_of: Callable[..., Any],
) -> None:
    x, y = digits
    images = {
        "bytes": lambda: pa.array([png(image) for image in x]),
        "large bytes": lambda: pa.array([png(image) for image in x], pa.large_binary()),
        "lists": lambda: pa.array(x.tolist(), pa.list_(pa.list_(pa.uint8()))),
        "lists with a channel": lambda: pa.array(x[..., None].tolist()),
    }[column]()
    said = [f"n{label}" for label in y] if labels == "names" else y
    pq.write_table(pa.table({"img": images, "labels": said}), tmp_path / "set.parquet")
    data = prepare(source="parquet", path=tmp_path / "set.parquet")
    names = task_of(data.spec.task).class_names
    assert names == tuple(f"n{label}" if labels == "names" else str(label) for label in range(10))
    assert pixels(splits_of(data)) == {
        (image.tobytes(), int(label)) for image, label in zip(x, y, strict=True)
    }


def test_columns_that_cannot_be_told_are_asked_for(
    digits: Any, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    x, y = digits
    table = pa.table({"front": structs(x), "image": structs(x), "img": structs(x), "kind": y})
    pq.write_table(table, tmp_path / "set.parquet")
    with pytest.raises(ConfigInvalid, match=r"image and img may be meant.*set `image_column`"):
        prepare(source="parquet", path=tmp_path / "set.parquet")
    with pytest.raises(ConfigInvalid, match="it has front, image, img, kind -> set `label_column`"):
        prepare(source="parquet", path=tmp_path / "set.parquet", image_column="front")
    data = prepare(source="parquet", path=tmp_path / "set.parquet", image_column="front", label_column="kind")
    assert data.spec.splits["test"].rows == 20


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (b"not a picture", r"row 3 \(not a PNG or JPEG\)"),
        (None, "row 3 "),
    ],
)
def test_a_row_that_is_no_picture_is_named(
    image: bytes | None, reason: str, digits: Any, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    x, y = digits
    content = [png(one) for one in x]
    content[3] = image
    pq.write_table(pa.table({"image": pa.array(content, pa.binary()), "label": y}), tmp_path / "set.parquet")
    with pytest.raises(StageFailed, match=rf"1 file: set\.parquet {reason}") as caught:
        prepare(source="parquet", path=tmp_path / "set.parquet")
    assert "\n" not in str(caught.value)


def test_paths_in_place_of_pictures_are_named(
    digits: Any, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    images = [{"bytes": None, "path": "/etc/passwd"}] * 100
    of = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    pq.write_table(pa.table({"image": pa.array(images, of), "label": digits[1]}), tmp_path / "set.parquet")
    with pytest.raises(StageFailed, match=r"100 files: .*the table has its path, not its content"):
        prepare(source="parquet", path=tmp_path / "set.parquet")


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ([None] + [1] * 99, "the label of set.parquet row 0 is missing"),
        ([0.5] * 100, "the label of set.parquet row 0 is 0.5"),
        (
            [-1] + list(range(10)) * 9 + [0] * 9,
            r"labels are not in 0 to 9: 1 row: set\.parquet row 0 \(label -1\)",
        ),
        (
            [10**12] + list(range(10)) * 9 + [0] * 9,
            "labels are higher than there are rows: 1 label: 1000000000000",
        ),
    ],
)
def test_a_label_that_is_none_is_named(
    labels: list[Any], reason: str, digits: Any, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    pq.write_table(pa.table({"image": structs(digits[0]), "label": labels}), tmp_path / "set.parquet")
    with pytest.raises(StageFailed, match=reason):
        prepare(source="parquet", path=tmp_path / "set.parquet")


def test_labels_are_held_against_the_names_of_classes(
    digits: Any, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    x, y = digits
    table = pa.table({"image": structs(x), "label": [f"n{label}" for label in y]})
    pq.write_table(table, tmp_path / "set.parquet")
    with pytest.raises(StageFailed, match="labels are none of its class names: 1 label: 'n9'"):
        prepare(source="parquet", path=tmp_path / "set.parquet", class_names=[f"n{at}" for at in range(9)])


@pytest.mark.parametrize("name", ["set.parquet", "set.arrow"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_table_is_refused(
    name: str, share: float, digits: Any, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    file = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(hub_table(*digits), file)
    else:
        _write(ipc.new_file, hub_table(*digits), file)
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(StageFailed, match="truncated, corrupt or no file of Parquet") as caught:
        prepare(source="parquet", path=file)
    assert "\n" not in str(caught.value)


def test_offsets_that_lead_outside_of_a_file_are_noticed(
    digits: Any, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    table = pa.table({"image": pa.array([png(image) for image in digits[0]]), "label": digits[1]})
    _write(ipc.new_stream, table, tmp_path / "set.arrow")
    content = (tmp_path / "set.arrow").read_bytes()
    offsets = table.column("image").chunk(0).buffers()[1].to_pybytes()
    wrong = offsets[:40] + (2**31 - 1).to_bytes(4, "little") + offsets[44:]
    (tmp_path / "set.arrow").write_bytes(content.replace(offsets[:400], wrong[:400]))
    with pytest.raises(StageFailed, match="truncated, corrupt or no file of Parquet"):
        prepare(source="parquet", path=tmp_path / "set.arrow")


def test_a_table_that_expands_too_far_is_refused(tmp_path: Path, prepare: Callable[..., Any]) -> None:
    zeros = pa.array([bytes(2**20 + at) for at in range(8)])  # each differs, so none is stored once
    table = pa.table({"image": pa.concat_arrays([zeros] * 8), "label": [0, 1] * 32})
    pq.write_table(table, tmp_path / "bomb.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(StageFailed, match=r"expands to \d+ bytes"):
        prepare(source="parquet", path=tmp_path / "bomb.parquet")


def test_a_folder_without_tables_or_of_files_that_differ_is_refused(
    digits: Any, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    (tmp_path / "README.md").touch()
    with pytest.raises(StageFailed, match="has no tables"):
        prepare(source="parquet", path=tmp_path)
    pq.write_table(hub_table(*digits), tmp_path / "a.parquet")
    pq.write_table(pa.table({"other": [1]}), tmp_path / "b.parquet")
    with pytest.raises(StageFailed, match=re.escape("b.parquet has no column 'picture': it has other")):
        prepare(source="parquet", path=tmp_path)
