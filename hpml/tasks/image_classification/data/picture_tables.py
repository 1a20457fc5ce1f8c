"""Labelled pictures out of Parquet, Arrow and Feather files, which may hold anything."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from hpml.core.contract import Output
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.data_files.columns import SUFFIXES, Table
from hpml.data_files.split_names import by_split
from hpml.tasks.image_classification.data.class_labels import ClassLabels, label_of
from hpml.tasks.image_classification.data.loaded import Images, PicturesPreview
from hpml.tasks.image_classification.data.read_pictures import preview_pictures, read_pictures
from hpml.tasks.image_classification.picture_spec import PictureSpec
from hpml.tasks.image_classification.pictures import PictureError

IMAGE_NAMES, LABEL_NAMES = ("image", "img"), ("label", "labels")
MOST_LOOKED_AT = 200  # images of which a preview reads the header


@dataclass(frozen=True, slots=True)
class TablePicture:
    """A row of a table. value: the content of a picture's file, {"bytes": it}, or lists of pixels."""

    name: str
    label: int | str
    value: Any

    def file(self) -> io.BytesIO:
        """The content of the picture's file. Raises PictureError if the row has none."""
        value = self.value
        if isinstance(value, dict):
            if value.get("bytes") is None and value.get("path"):
                raise PictureError("the table has its path, not its content")
            value = value.get("bytes")
        return io.BytesIO(value) if isinstance(value, bytes) else _png(value)


def _png(value: Any) -> io.BytesIO:
    """Pixels as lists, (height, width) or (height, width, 1 or 3), as the file of a picture, without loss."""
    try:
        pixels = np.array(value)
    except ValueError:  # lists of different lengths
        raise PictureError("its rows of pixels are not of one length") from None
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    if pixels.ndim < 2 or pixels.ndim > 3 or (pixels.ndim == 3 and pixels.shape[2] != 3) or 0 in pixels.shape:
        raise PictureError("neither a picture's file nor lists of height x width, or with 1 or 3 channels")
    if not np.issubdtype(pixels.dtype, np.integer) or pixels.min() < 0 or pixels.max() > 255:
        raise PictureError("its pixels are not whole numbers from 0 to 255")
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG", compress_level=0)
    file.seek(0)
    return file


class PictureTables:
    """The files of each split, and which of their columns are the images and the labels.

    image, label: the names of these columns; "" where their names or what `datasets` noted of them tells.
    class_names: of labels that are numbers; none: what `datasets` noted. Raises StageFailed if there are no
    such files, ConfigInvalid if they have no such columns.
    """

    def __init__(self, root: Path, *, image: str, label: str, class_names: Sequence[str]) -> None:
        files = [root] if root.is_file() else sorted(root.rglob("*"))
        self._folder = root.parent if root.is_file() else root
        names = [self._name(file) for file in files if file.suffix.lower() in SUFFIXES]
        if not names:
            raise StageFailed(f"{root} has no tables", why=f"no file in it ends in {', '.join(SUFFIXES)}")
        self.splits = {
            split: [Table(self._folder / name) for name in of_split]
            for split, of_split in by_split(names).items()
        }
        first = self.splits["train"][0]
        features = first.features()
        self._columns = [
            _column(first, image, "image", IMAGE_NAMES, _of_type(features, "Image")),
            _column(first, label, "label", LABEL_NAMES, _of_type(features, "ClassLabel")),
        ]
        for table in chain.from_iterable(self.splits.values()):
            for name in self._columns:
                if name not in table.schema.names:
                    raise StageFailed(
                        f"{table.path} has no column {name!r}", why=f"it has {', '.join(table.schema.names)}"
                    )
        self.class_names = tuple(class_names) or _noted_names(features.get(self._columns[1]))

    @property
    def rows(self) -> int:
        """Of all splits; 0 where that is not known before they are read."""
        return sum(table.rows for table in chain.from_iterable(self.splits.values()))

    def pictures(self, split: str) -> Iterator[TablePicture]:
        """The pictures of a split, row by row. Raises StageFailed naming the row whose label is none."""
        image, label = self._columns
        for table in self.splits[split]:
            row = 0
            for batch in table.batches(self._columns):
                values, labels = batch.column(image), batch.column(label).to_pylist()
                for place, found in enumerate(labels):
                    name = f"{self._name(table.path)} row {row}"
                    yield TablePicture(name, _label(found, name), values[place].as_py())
                    row += 1

    def _name(self, file: Path) -> str:
        return file.relative_to(self._folder).as_posix()


def read_tables(
    tables: PictureTables, *, image_size: int | None, channels: int | None, out: Output
) -> tuple[dict[str, Images], tuple[str, ...], PictureSpec]:
    """The images of each split, the class names, and how pictures became pixels; see `read_pictures`."""
    class_labels = ClassLabels(tables.class_names)
    splits = {split: partial(tables.pictures, split) for split in tables.splits}
    images, facts = read_pictures(splits, class_labels, image_size=image_size, channels=channels, out=out)
    return images, class_labels.class_names, facts


def preview_tables(tables: PictureTables, *, channels: int | None) -> PicturesPreview | None:
    """What the first rows say; None where the classes are not known without reading all."""
    some = list(islice(tables.pictures("train"), MOST_LOOKED_AT))
    if not tables.class_names or not some:
        return None
    rows = max(tables.rows, len(some))
    return preview_pictures(some, classes=len(tables.class_names), images=rows, channels=channels)


def _of_type(features: Mapping[str, Any], kind: str) -> list[str]:
    """The columns that `datasets` noted to be of a kind."""
    return [name for name, of in features.items() if isinstance(of, dict) and of.get("_type") == kind]


def _noted_names(feature: Any) -> tuple[str, ...]:
    """The names of classes that `datasets` noted, in the order of their numbers; empty where it did not."""
    names = feature.get("names") if isinstance(feature, dict) else None
    is_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return tuple(names) if names and is_names else ()


def _column(table: Table, given: str, option: str, usual: Sequence[str], noted: Sequence[str]) -> str:
    """The column that is meant: the one that is given, or the one that is noted, or has a usual name."""
    names = table.schema.names
    candidates = [given] if given else noted or [name for name in names if name in usual]
    found = [name for name in candidates if name in names]
    if len(found) != 1:
        several = f"{' and '.join(found)} may be meant" if found else f"it has {', '.join(names)}"
        raise ConfigInvalid(
            f"the column of the {option}s is not known",
            why=f"of {table.path}: {several}",
            fix=f"set `{option}_column` under `data` to its name",
        )
    return found[0]


def _label(value: Any, name: str) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise StageFailed(
            f"the label of {name} is {'missing' if value is None else repr(value)[:40]}",
            why="a whole number or a text is needed, one class for each image",
            fix="set `label_column` under `data` to the column of the labels, or correct the row",
        )
    return label_of(value) if isinstance(value, str) else value
