"""folder: PNG and JPEG files in a folder per class, and what may be wrong with them."""

from __future__ import annotations

import dataclasses
import os
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pytest
from PIL import Image

from hpml.components.prepare import stage
from hpml.core.contract import Events, Output
from hpml.core.errors import StageFailed
from hpml.tasks import task_of
from hpml.tasks.image_classification.sources.cifar10 import Cifar10
from hpml.tasks.image_classification.sources.folder import Folder
from hpml.tasks.image_classification.sources.npz import Npz


def png(width: int, height: int, pixels: bytes = b"") -> bytes:
    """A grey PNG that claims a size, whatever its pixels are."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def test_a_folder_per_class_becomes_a_stratified_dataset(
    image_folder: Path, digits: Any, prepare: Callable[..., Any], splits_of: Callable[..., Any]
) -> None:
    data = prepare(source="folder", path=image_folder)
    assert task_of(data.spec.task).class_names == ("one", "two", "zero")
    assert task_of(data.spec.task).image_shape_hwc == (8, 8, 1)
    assert data.spec.splits["train"].class_counts == (7, 7, 7)
    assert data.spec.splits["validation"].class_counts == (1, 1, 1)
    assert data.spec.splits["test"].class_counts == (2, 2, 2)
    images, labels = digits
    expected = {
        (images[row].tobytes(), ("zero", "one", "two")[labels[row]]) for row in range(100) if labels[row] < 3
    }
    found = {
        (image.tobytes(), task_of(data.spec.task).class_names[label])
        for images, labels in splits_of(data).values()
        for image, label in zip(images, labels, strict=True)
    }
    assert found == expected


def test_the_order_of_the_file_system_plays_no_part(
    image_folder: Path, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    other = tmp_path / "again"
    for file in sorted(image_folder.rglob("*.png"), reverse=True):
        (other / file.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, other / file.parent.name / file.name)
    assert prepare(source="folder", path=other).digest == prepare(source="folder", path=image_folder).digest


def test_folders_train_and_test_are_its_own_split(
    image_folder: Path, tmp_path: Path, prepare: Callable[..., Any], splits_of: Callable[..., Any]
) -> None:
    root = tmp_path / "split"
    for file in image_folder.rglob("*.png"):
        place = root / ("test" if file.stem < "03" else "train") / file.parent.name
        place.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place / file.name)
    data = prepare(source="folder", path=root)
    assert data.spec.splits["train"].class_counts == (6, 6, 6)
    assert data.spec.splits["validation"].class_counts == (1, 1, 1)
    assert data.spec.splits["test"].class_counts == (3, 3, 3)
    first = np.asarray(Image.open(root / "test/one/00.png"))
    assert np.array_equal(splits_of(data)["test"][0][0, :, :, 0], first)


@pytest.mark.parametrize("form", ["zip", "gztar", "tar"])
def test_an_archive_of_the_folder_is_as_good(
    form: str, image_folder: Path, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    (image_folder / ".DS_Store").write_bytes(b"hidden")
    (image_folder.parent / "__MACOSX").mkdir()
    packed = shutil.make_archive(str(tmp_path / "packed"), form, image_folder.parent, image_folder.name)
    assert prepare(source="folder", path=packed).digest == prepare(source="folder", path=image_folder).digest


def test_images_of_any_size_are_shrunk_to_fit_and_padded_in_the_middle(
    tmp_path: Path, prepare: Callable[..., Any], splits_of: Callable[..., Any]
) -> None:
    for label in ("dark", "light"):
        folder = tmp_path / "shapes" / label
        folder.mkdir(parents=True)
        shade = 100 if label == "dark" else 200
        for number, size in enumerate([(4, 4), (16, 8), (64, 128), (300, 20)]):
            Image.new("RGB", size, (shade, number + 1, shade // 2)).save(folder / f"{number}.png")
    data = prepare(source="folder", path=tmp_path / "shapes", image_size=16)
    assert task_of(data.spec.task).image_shape_hwc == (16, 16, 3)
    extents = {}
    for images, _ in splits_of(data).values():
        for image in images:
            lit = np.argwhere(image.any(axis=2))
            extents[int(image[..., 1].max())] = (*lit.min(axis=0), *lit.max(axis=0))
    assert extents == {
        1: (6, 6, 9, 9),  # smaller: padded, not enlarged
        2: (4, 0, 11, 15),
        3: (0, 4, 15, 11),
        4: (7, 0, 7, 15),
    }


def test_modes_become_grey_or_colour_and_what_is_transparent_is_black(
    tmp_path: Path, prepare: Callable[..., Any], splits_of: Callable[..., Any]
) -> None:
    generator = np.random.default_rng(0)
    for label in ("a", "b"):
        folder = tmp_path / "modes" / label
        folder.mkdir(parents=True)
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA"):
            noise = Image.fromarray(generator.integers(0, 256, (8, 8, 4), dtype=np.uint8), "RGBA")
            noise.putpixel((0, 0), (255, 255, 255, 0))
            noise.convert(mode).save(folder / f"{mode}.png")
        noise.convert("CMYK").save(folder / "cmyk.jpg")
    assert task_of(prepare(source="folder", path=tmp_path / "modes").spec.task).image_shape_hwc == (8, 8, 3)
    grey = prepare(source="folder", path=tmp_path / "modes", channels=1)
    assert task_of(grey.spec.task).image_shape_hwc == (8, 8, 1)
    corners = [image[0, 0, 0] for images, _ in splits_of(grey).values() for image in images]
    assert corners.count(0) >= 4  # LA and RGBA of both classes


def test_a_photograph_is_turned_upright(
    tmp_path: Path, prepare: Callable[..., Any], splits_of: Callable[..., Any]
) -> None:
    for label, shade in (("a", 100), ("b", 200)):
        folder = tmp_path / "photos" / label
        folder.mkdir(parents=True)
        for number in range(3):
            photo = Image.new("L", (16, 8), shade + 20 * number)
            exif = Image.Exif()
            exif[0x0112] = 6
            photo.save(folder / f"{number}.jpg", exif=exif)
    assert task_of(prepare(source="folder", path=tmp_path / "photos").spec.task).image_shape_hwc == (16, 8, 1)


def test_how_pictures_became_pixels_is_noted(tmp_path: Path, prepare: Callable[..., Any]) -> None:
    generator = np.random.default_rng(0)
    for label in ("a", "b"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(3):
            noise = Image.fromarray(generator.integers(0, 256, (4, 6, 3), dtype=np.uint8))
            noise.save(tmp_path / "photos" / label / f"{number}.png")
    resized = prepare(source="folder", path=tmp_path / "photos", image_size=5, channels=1)
    resized = task_of(resized.spec.task).pictures
    assert (resized.data_from, resized.mode, resized.resize) == ("pictures", "L", "shrink")
    assert resized.size_hw == resized.fit_within_hw == (5, 5)
    assert resized.pillow == PIL.__version__ and len(resized.golden_sha256) == 9
    as_is = task_of(prepare(source="folder", path=tmp_path / "photos").spec.task).pictures
    assert (as_is.mode, as_is.resize, as_is.size_hw) == ("RGB", "none", (4, 6))
    assert as_is.golden_sha256 != resized.golden_sha256


def test_for_data_that_came_as_arrays_it_is_a_convention(prepare: Callable[..., Any]) -> None:
    noted = task_of(prepare(source="digits", image_size=10).spec.task).pictures
    assert (noted.data_from, noted.mode, noted.resize) == ("arrays", "L", "shrink")
    assert (noted.fit_within_hw, noted.size_hw) == ((8, 8), (10, 10))
    assert {noted: "the benchmark groups engines by what they take"}


# ------------------------------------------------------------------------------------------------ bad folders


def test_every_unusable_image_is_listed_with_its_reason(
    image_folder: Path, prepare: Callable[..., Any]
) -> None:
    whole = (image_folder / "one/00.png").read_bytes()
    (image_folder / "one/cut.png").write_bytes(whole[: len(whole) // 2])
    (image_folder / "one/empty.png").write_bytes(b"")
    (image_folder / "one/flipped.png").write_bytes(whole[:45] + bytes([whole[45] ^ 1]) + whole[46:])
    (image_folder / "two/notes.txt").write_text("not an image")
    Image.new("L", (8, 8)).save(image_folder / "two/image.gif")
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(image_folder / "two/deep.png")
    with pytest.raises(StageFailed, match="5 files: ") as caught:
        prepare(source="folder", path=image_folder)
    message = str(caught.value)
    for expected in (
        "one/cut.png (",
        "one/empty.png (not a PNG or JPEG)",
        "one/flipped.png (",
        "two/image.gif (not a PNG or JPEG)",
        "two/deep.png (mode I;16",
    ):
        assert expected in message
    assert "\n" not in message and "notes.txt" not in message


def test_a_truncated_jpeg_is_refused(image_folder: Path, prepare: Callable[..., Any]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), dtype=np.uint8)
    place = image_folder / "one/cut.jpg"
    Image.fromarray(noise).save(place)
    place.write_bytes(place.read_bytes()[:1500])
    with pytest.raises(StageFailed, match=r"1 file: one/cut\.jpg \(.*truncated"):
        prepare(source="folder", path=image_folder, image_size=8)


@pytest.mark.parametrize("side", [8000, 30_000, 2**31 - 1])
def test_a_decompression_bomb_is_refused_undecoded(
    side: int, image_folder: Path, prepare: Callable[..., Any]
) -> None:
    (image_folder / "one/bomb.png").write_bytes(png(side, side))
    with pytest.raises(StageFailed, match=r"1 file: one/bomb\.png \(.*pixels"):
        prepare(source="folder", path=image_folder)


def test_images_of_different_sizes_need_image_size(image_folder: Path, prepare: Callable[..., Any]) -> None:
    Image.new("L", (9, 8), 7).save(image_folder / "two/wide.png")
    with pytest.raises(StageFailed, match=r"two/wide\.png \(9x8 pixels, one/00\.png has 8x8\)") as caught:
        prepare(source="folder", path=image_folder)
    assert "image_size" in str(caught.value)
    assert task_of(prepare(source="folder", path=image_folder, image_size=9).spec.task).image_shape_hwc == (
        9,
        9,
        1,
    )


def test_an_empty_class_is_named(image_folder: Path, prepare: Callable[..., Any]) -> None:
    (image_folder / "three").mkdir()
    (image_folder / "three/.keep").touch()
    with pytest.raises(StageFailed, match=r"1 folder: three \(no images\)"):
        prepare(source="folder", path=image_folder)


def test_a_class_with_one_image_cannot_be_in_both_splits(
    image_folder: Path, prepare: Callable[..., Any]
) -> None:
    (image_folder / "three").mkdir()
    Image.new("L", (8, 8), 3).save(image_folder / "three/only.png")
    with pytest.raises(StageFailed, match=r"1 folder: three \(1 image\)"):
        prepare(source="folder", path=image_folder)


def test_a_folder_without_images_or_with_one_class_is_refused(
    image_folder: Path, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    (tmp_path / "none/a").mkdir(parents=True)
    (tmp_path / "none/b").mkdir()
    with pytest.raises(StageFailed, match="has no images"):
        prepare(source="folder", path=tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StageFailed, match="has no images"):
        prepare(source="folder", path=tmp_path / "empty")
    for name in ("one", "two"):
        shutil.rmtree(image_folder / name)
    (image_folder / "zero/more").mkdir()
    with pytest.raises(StageFailed, match="holds files beside its folders"):
        prepare(source="folder", path=image_folder)


ODD = (".DS_Store", "README.md", "one/Thumbs.db", "one/._00.png", "two/paper.pdf")


def test_files_that_are_no_images_are_left_out_and_named(
    image_folder: Path, out: Output, prepare: Callable[..., Any]
) -> None:
    clean = prepare(source="folder", path=image_folder)
    for name in ODD:
        (image_folder / name).write_bytes(b"%PDF-1.7")
    (image_folder / "__MACOSX/one").mkdir(parents=True)
    events = Events(out.path / "events.jsonl")
    result = stage.run(Folder(path=image_folder), out=dataclasses.replace(out, events=events))
    assert result.metrics["left_out_files"] == 6
    told = (
        "left out, as no images: 6 files: .DS_Store, README.md, __MACOSX/, one/._00.png, one/Thumbs.db, two"
    )
    assert told in (out.path / "events.jsonl").read_text()
    assert result.spec.notes == ("left out, as no images: 2 files: README.md, two/paper.pdf",)
    assert {split.rows for split in result.spec.splits.values()} == {21, 3, 6}
    for name in ("README.md", "two/paper.pdf"):
        (image_folder / name).unlink()
    assert prepare(source="folder", path=image_folder).digest == clean.digest


def test_an_image_is_one_by_its_content_where_its_name_does_not_say(
    image_folder: Path, prepare: Callable[..., Any]
) -> None:
    for file in sorted(image_folder.rglob("*.png")):
        file.rename(file.with_suffix(""))
    assert prepare(source="folder", path=image_folder).spec.splits["train"].rows == 21


def test_a_pipe_or_a_device_among_the_images_is_never_opened(
    image_folder: Path, prepare: Callable[..., Any]
) -> None:
    os.mkfifo(image_folder / "notes")  # would wait for a writer
    os.mkfifo(image_folder / "one/pipe.png")
    (image_folder / "one/zero.png").symlink_to("/dev/zero")
    (image_folder / "one/gone.png").symlink_to("nowhere")
    with pytest.raises(StageFailed, match="3 files: ") as caught:
        prepare(source="folder", path=image_folder)
    for reason in ("gone.png (does not exist)", "pipe.png (is a named pipe", "zero.png (is a device"):
        assert reason in str(caught.value)


def test_a_folder_linked_into_itself_is_walked_once(image_folder: Path) -> None:
    before = Folder(path=image_folder).fingerprint()
    for name in ("a", "b"):
        (image_folder / name).symlink_to(image_folder, target_is_directory=True)
    assert Folder(path=image_folder).fingerprint() == before


@pytest.mark.parametrize("kind", [Folder, Npz, Cifar10])
@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "absent", "n" * 300])
def test_only_regular_files_are_data(kind: Any, path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    said = kind(path=tmp_path / path).unsupported_reason()
    assert any(why in said for why in ("regular file", "does not exist", "File name too long")), said
    assert kind(path=tmp_path / path).fingerprint() == ""


def test_files_and_folders_out_of_place_are_listed(image_folder: Path, prepare: Callable[..., Any]) -> None:
    shutil.copy(image_folder / "one/00.png", image_folder / "stray")
    with pytest.raises(StageFailed, match=r"1 file: stray"):
        prepare(source="folder", path=image_folder)
    (image_folder / "stray").unlink()
    (image_folder / "one/deeper").mkdir()
    with pytest.raises(StageFailed, match="1 folder: one/deeper"):
        prepare(source="folder", path=image_folder)


@pytest.mark.parametrize(
    "names", [("train", "test", "one"), ("test", "one"), ("val", "test"), ("train", "val", "valid")]
)
def test_a_half_made_split_is_refused(
    names: tuple[str, ...], tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    for name in names:
        (tmp_path / "root" / name).mkdir(parents=True)
    with pytest.raises(StageFailed, match="a folder per class, or train with or without"):
        prepare(source="folder", path=tmp_path / "root")


def test_a_class_that_is_in_one_split_only_is_refused(
    image_folder: Path, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    shutil.copytree(image_folder, tmp_path / "root/train")
    shutil.copytree(image_folder, tmp_path / "root/test")
    (tmp_path / "root/test/two").rename(tmp_path / "two")
    with pytest.raises(StageFailed, match=r"1 folder: test/two \(no images\)"):
        prepare(source="folder", path=tmp_path / "root")
    (tmp_path / "root/test/nine").mkdir()
    with pytest.raises(StageFailed, match="1 class: nine"):
        prepare(source="folder", path=tmp_path / "root")


def test_a_name_unfit_for_a_terminal_is_refused_and_never_printed(
    image_folder: Path, prepare: Callable[..., Any]
) -> None:
    (image_folder / "one").rename(image_folder / "\x1b[2Jone")
    with pytest.raises(StageFailed, match="unprintable") as caught:
        prepare(source="folder", path=image_folder)
    assert str(caught.value).isprintable()
    (image_folder / "\x1b[2Jone").rename(image_folder / "one")
    (image_folder / "one/\x1b[2J.png").touch()
    with pytest.raises(StageFailed, match="not a PNG or JPEG") as caught:
        prepare(source="folder", path=image_folder)
    assert str(caught.value).isprintable()


def test_a_file_that_is_neither_folder_nor_archive_is_refused(
    tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    (tmp_path / "photos.rar").write_bytes(b"Rar!")
    with pytest.raises(StageFailed, match=r"not a \.tar, \.tar\.gz or \.zip"):
        prepare(source="folder", path=tmp_path / "photos.rar")


# ------------------------------------------------------------------------------------------------ fingerprint


def test_the_fingerprint_follows_names_sizes_and_times(image_folder: Path) -> None:
    config = Folder(path=image_folder)
    seen = {config.fingerprint()}
    assert config.fingerprint() in seen

    def is_new() -> bool:
        fresh = config.fingerprint() not in seen
        seen.add(config.fingerprint())
        return fresh

    (image_folder / "one/00.png").rename(image_folder / "one/renamed.png")
    assert is_new()
    (image_folder / "one/renamed.png").unlink()
    assert is_new()
    with (image_folder / "one/01.png").open("ab") as file:
        file.write(b"\0")
    assert is_new()
    os.utime(image_folder / "one/02.png", ns=(0, 0))
    assert is_new()
    (image_folder / "two").rename(image_folder / "three")
    assert is_new()
    assert not is_new()


def test_a_path_that_is_not_there_is_unmet_and_has_no_fingerprint(tmp_path: Path) -> None:
    config = Folder(path=tmp_path / "gone")
    assert "gone does not exist" in config.unsupported_reason()
    assert config.fingerprint() == ""
    assert Folder(path=tmp_path).unsupported_reason() == ""
