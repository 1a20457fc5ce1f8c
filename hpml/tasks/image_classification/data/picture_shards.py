"""Labelled pictures out of WebDataset shards, which may hold anything."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from hpml.core.contract import Output
from hpml.core.errors import StageFailed
from hpml.core.words import printable
from hpml.data_files.shards import samples
from hpml.data_files.split_names import by_split
from hpml.tasks.image_classification.data.class_labels import ClassLabels, label_of
from hpml.tasks.image_classification.data.loaded import Images, PicturesPreview
from hpml.tasks.image_classification.data.read_pictures import preview_pictures, read_pictures
from hpml.tasks.image_classification.picture_spec import PictureSpec

IMAGE_KINDS = {"jpg", "jpeg", "png"}
LABEL_KINDS = ("cls", "cls.txt")
LABEL_FIELDS = ("label", "cls")  # of .json
MOST_LOOKED_AT = 200  # images of which a preview reads the header


@dataclass(frozen=True, slots=True)
class ShardPicture:
    """A sample: what its picture's file held, and its label."""

    name: str
    label: int | str
    content: bytes

    def file(self) -> io.BytesIO:
        """Anew each time, as a picture's file is."""
        return io.BytesIO(self.content)


class PictureShards:
    """The shards of each split, by their names below `folder`.

    label: the kind of file that holds the label (cls), or the field of .json; "" for the usual ones.
    """

    def __init__(self, folder: Path, names: Sequence[str], *, label: str) -> None:
        if not names:
            raise StageFailed(f"{folder} has no shards", why="no file in it ends in .tar")
        self._folder = folder
        self.splits = by_split(names)
        self._kinds = (label,) if label else LABEL_KINDS
        self._fields = (label,) if label else LABEL_FIELDS

    def pictures(self, split: str) -> Iterator[ShardPicture]:
        """The samples of a split in order. Raises StageFailed naming one that lacks picture or label."""
        for shard in self.splits[split]:
            for key, sample in samples(self._folder / shard, self._is_wanted):
                name = f"{shard} {printable(key)}"
                images = [kind for kind in sample if _is_image(kind)]
                if len(images) != 1:
                    raise StageFailed(
                        f"the sample {name} has {' and '.join(images) or 'no picture'}",
                        why="one file that ends in .jpg, .jpeg or .png is needed, beside its label",
                        fix="write the shard again",
                    )
                yield ShardPicture(name, self._label(sample, name), sample[images[0]])

    def _is_wanted(self, kind: str) -> bool:
        return _is_image(kind) or kind in self._kinds or kind == "json"

    def _label(self, sample: Mapping[str, bytes], name: str) -> int | str:
        try:
            for kind in self._kinds:
                if kind in sample and (text := sample[kind].decode().strip()):
                    return label_of(text)
            noted: Any = json.loads(sample["json"]) if "json" in sample else {}
            fields = (
                [noted[field] for field in self._fields if field in noted] if isinstance(noted, dict) else []
            )
        except (ValueError, RecursionError):
            fields = []
        if fields and isinstance(fields[0], int | str) and not isinstance(fields[0], bool):
            return label_of(fields[0]) if isinstance(fields[0], str) else fields[0]
        raise StageFailed(
            f"the sample {name} has no label",
            why=f"looked for in .{', .'.join(self._kinds)}, and in .json as {', '.join(self._fields)}",
            fix="set `label_field` under `data` to the kind of file, or the field of .json, that it is in",
        )


def _is_image(kind: str) -> bool:
    return kind.rpartition(".")[2] in IMAGE_KINDS


def read_shards(
    shards: PictureShards,
    class_names: Sequence[str],
    *,
    image_size: int | None,
    channels: int | None,
    out: Output,
) -> tuple[dict[str, Images], tuple[str, ...], PictureSpec]:
    """The images of each split, the class names, and how pictures became pixels; see `read_pictures`."""
    class_labels = ClassLabels(class_names)
    splits = {split: partial(shards.pictures, split) for split in shards.splits}
    images, facts = read_pictures(splits, class_labels, image_size=image_size, channels=channels, out=out)
    return images, class_labels.class_names, facts


def preview_shards(
    shards: PictureShards, class_names: Sequence[str], *, channels: int | None
) -> PicturesPreview | None:
    """What the first samples say; None where the classes are not known without reading all."""
    if not class_names:
        return None
    some = list(islice(shards.pictures("train"), MOST_LOOKED_AT))
    return preview_pictures(some, classes=len(class_names), images=len(some), channels=channels)
