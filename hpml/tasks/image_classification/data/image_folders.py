"""What lies in a folder of images: its classes, its splits, its files, and what is left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpml.core import regular_files
from hpml.core.errors import StageFailed
from hpml.data_files.split_names import SPLIT_NAMES, SPLITS
from hpml.tasks.image_classification.data.checks import refuse

# A file with one of these suffixes is meant to be an image: if it cannot be read, that is an error.
_IMAGE_SUFFIXES = {
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".apng", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".heic"),
    *(".heif", ".avif", ".jp2", ".jxl", ".ppm", ".pgm", ".pbm", ".ico", ".tga", ".dng", ".raw", ".svg"),
}
_IMAGE_BEGINNINGS = (b"\x89PNG", b"\xff\xd8\xff")
_LITTER = {"thumbs.db", "desktop.ini", "__macosx"}  # of Windows and macOS, beside names that begin with a dot


@dataclass(frozen=True, slots=True)
class LabelledFile:
    """An image file, by its path below the root, and the number of its class."""

    root: Path
    name: str
    label: int

    @property
    def path(self) -> Path:
        return self.root / self.name

    def file(self) -> Path:
        """The same, as what any picture is read from."""
        return self.path


@dataclass(frozen=True)
class ImageFolder:
    """The class names; the files of `train`, and of `validation` and `test` if the folder has these splits.

    left_out: the names, below the root, of what lies in it and is meant to be no image.
    """

    class_names: tuple[str, ...]
    splits: dict[str, list[LabelledFile]]
    left_out: tuple[str, ...]


def is_litter(name: str) -> bool:
    """Whether a system, rather than a user, put the file or folder `name` there."""
    last = name.rstrip("/").rpartition("/")[2]
    return last.startswith(".") or last.lower() in _LITTER


def images_among(folder: Path) -> list[Path]:
    """The folders, and the files that are meant to be images, in `folder`, sorted."""
    return sorted(
        path
        for path in folder.iterdir()
        if not is_litter(path.name) and (path.is_dir() or _is_meant_as_image(path))
    )


def list_images(root: Path) -> ImageFolder:
    """What lies in `root`, or in the one folder that holds the rest, in the order of class and name.

    Raises StageFailed where a folder, or an image, lies where none should be.
    """
    return _Listing(root).read()


class _Listing:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._left_out: list[str] = []

    def read(self) -> ImageFolder:
        top, folders = self._unwrapped()
        split_of = {name: SPLIT_NAMES[name] for name in folders if name in SPLIT_NAMES}
        if not split_of:
            splits = {"train": self._files(top, folders)}
            return ImageFolder(tuple(folders), splits, tuple(self._left_out))
        places = {split: top / name for name, split in split_of.items()}
        if len(split_of) < len(folders) or len(places) < len(folders) or "train" not in places:
            raise StageFailed(
                f"{top} has the folders {', '.join(folders)}",
                why="allowed are a folder per class, or train with or without validation and test, with a"
                " folder per class in each",
                fix="move what belongs together into train, validation and test",
            )
        class_names = self._folders(places["train"])
        for split, place in places.items():
            unknown = sorted(set(self._folders(place)) - set(class_names))
            if unknown:
                fix = "add them to train or remove them"
                refuse(f"{split} has classes that train has not", unknown, fix=fix, unit="class")
        splits = {split: self._files(places[split], class_names) for split in SPLITS if split in places}
        return ImageFolder(tuple(class_names), splits, tuple(self._left_out))

    def _unwrapped(self) -> tuple[Path, list[str]]:
        """The folder that holds the classes: an archive often holds one folder that holds the rest."""
        top = self._root
        while len(folders := self._folders(top)) == 1:  # one class alone would be of no use
            top = top / folders[0]
        return top, folders

    def _folders(self, folder: Path) -> list[str]:
        """The names of the folders in `folder`; no image may lie beside them."""
        entries = self._entries(folder)
        strays = [path.name for path in entries if not path.is_dir()]
        if strays:
            fix = "put each image into the folder of its class"
            refuse(f"{folder} holds files beside its folders", strays, fix=fix, unit="file")
        return [path.name for path in entries]

    def _files(self, split: Path, class_names: Sequence[str]) -> list[LabelledFile]:
        """The files of every class of a split, in the order of class and name."""
        files = [
            LabelledFile(self._root, self._name(path), label)
            for label, class_name in enumerate(class_names)
            if (split / class_name).is_dir()
            for path in self._entries(split / class_name)
        ]
        folders = [file.name for file in files if file.path.is_dir()]
        if folders:
            fix = "put the images into the class's folder"
            refuse("a class's folder holds folders", folders, fix=fix, unit="folder")
        unreadable = [f"{file.name} ({why})" for file in files if (why := regular_files.problem(file.path))]
        if unreadable:
            refuse("images cannot be read", unreadable, fix="replace or remove them", unit="file")
        return files

    def _entries(self, folder: Path) -> list[Path]:
        """The folders and images in `folder`, sorted; what is left out is noted."""
        kept = images_among(folder)
        others = sorted({*folder.iterdir()} - {*kept})
        self._left_out += [f"{self._name(path)}{'/' if path.is_dir() else ''}" for path in others]
        return kept

    def _name(self, path: Path) -> str:
        return path.relative_to(self._root).as_posix()


def _is_meant_as_image(path: Path) -> bool:
    """By its suffix, or by its first bytes."""
    if path.suffix.lower() in _IMAGE_SUFFIXES:
        return True
    if regular_files.problem(path):
        return False
    with path.open("rb") as file:
        return file.read(4).startswith(_IMAGE_BEGINNINGS)
