"""A bundle reads pictures as prepare did, bit for bit, and says when it cannot."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import logging
import re
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpml.components.bundle import stage as bundling
from hpml.components.bundle.config import BundleConfig
from hpml.core.contract import Output
from hpml.core.errors import GateFailed
from hpml.tasks import task_of
from hpml.tasks.image_classification import pictures
from hpml.tasks.image_classification.data.image_files import read_image_folder
from hpml.tasks.image_classification.data.picture_facts import facts_of, for_arrays
from tests.components.bundle.conftest import perform, resealed
from tests.draw_golden_pictures import ORIENTATION, chart

GREY = facts_of("pictures", 1, resize="shrink", fit_within_hw=(8, 8), size_hw=(8, 8))


def knowing(engine: Any, place: Path, facts: Any) -> Any:
    """The engine, as if its data had been prepared with these facts."""
    task = task_of(engine.spec.task).model_copy(update={"pictures": facts})
    return resealed(engine, place, spec=engine.spec.model_copy(update={"task": task.model_dump(mode="json")}))


@pytest.fixture(scope="module")
def made(deployable: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("pictures")
    engine = knowing(deployable.engine, place / "engine", GREY)
    return perform(
        place / "bundle", bundling.run, BundleConfig(), **deployable.with_others(engine=engine)
    ).path


@pytest.fixture
def bundle(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "elsewhere")
    return tmp_path / "elsewhere"


def script(bundle: Path) -> ModuleType:
    """bundle.py of a bundle, as `import bundle` there."""
    spec = importlib.util.spec_from_file_location("bundle", bundle / "bundle.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def relist(bundle: Path, name: str) -> None:
    """Give a changed file its new digest."""
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["files"][name] = hashlib.sha256((bundle / name).read_bytes()).hexdigest()
    (bundle / "bundle.json").write_text(json.dumps(manifest))


def rewrite(bundle: Path, name: str, old: str, new: str) -> None:
    text = (bundle / name).read_text()
    assert old in text
    (bundle / name).write_text(text.replace(old, new))
    relist(bundle, name)


# -------------------------------------------------------------------------------------- the same as prepare


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    return tags


def draw_all_kinds(folder: Path) -> None:
    """Every kind of file that prepare takes, of sizes above and below what they become."""
    folder.mkdir(parents=True)
    rgb, rgba = Image.fromarray(chart(40, 24, 3)), Image.fromarray(chart(40, 24, 4))
    for orientation in range(1, 9):
        rgb.save(folder / f"exif{orientation}.jpg", exif=exif(orientation))
        rgb.save(folder / f"exif{orientation}.png", exif=exif(orientation))
    palette = rgb.quantize(16)
    palette.save(folder / "palette.png")
    palette.info["transparency"] = 2
    palette.save(folder / "palette_transparent.png")
    rgb.save(folder / "colour_key.png", transparency=tuple(int(level) for level in chart(40, 24, 3)[3, 5]))
    rgba.save(folder / "rgba.png")
    rgba.convert("LA").save(folder / "la.png")
    rgb.convert("L").save(folder / "l.png")
    rgb.convert("L").save(folder / "l.jpg")
    rgb.convert("1").save(folder / "one_bit.png")
    Image.fromarray(chart(40, 24, 4), "CMYK").save(folder / "cmyk.jpg")
    rgb.save(folder / "progressive.jpg", progressive=True, quality=40, subsampling=2)
    for width, height in ((300, 7), (7, 300), (1, 1), (3, 5), (8, 8), (9, 8)):
        Image.fromarray(chart(width, height, 3)).save(folder / f"{width}x{height}.png")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Any]:
    """Files of every kind, and what prepare makes of them: facts, and pixels by the file's path."""
    root = tmp_path_factory.mktemp("all-kinds")
    draw_all_kinds(root / "a")
    draw_all_kinds(root / "b")
    for file in (root / "b").iterdir():
        if not file.stem.startswith("exif"):
            file.unlink()

    def prepare(channels: int, image_size: int) -> tuple[Any, dict[Path, np.ndarray]]:
        scratch = tmp_path_factory.mktemp("scratch")
        out = Output(scratch, scratch, threads=2)
        splits, _, facts = read_image_folder(root, image_size=image_size, channels=channels, out=out)
        [images] = splits.values()
        by_file = zip(images.names, images.images_nhwc, strict=True)
        return facts, {root / name: np.array(pixels) for name, pixels in by_file}

    return prepare


@pytest.mark.parametrize(("channels", "side"), [(1, 8), (3, 8), (1, 32), (3, 32)])
def test_every_kind_of_picture_gets_the_pixels_that_prepare_gave_it(
    made: Path, prepared: Callable[[int, int], Any], channels: int, side: int
) -> None:
    facts, expected = prepared(channels, side)
    module = script(made).Model()._pictures  # the bundle's copy
    assert Path(module.__file__) == made / "pictures.py"
    as_in_the_bundle = json.loads(facts.model_dump_json())
    assert len(expected) > 40
    for file, pixels in expected.items():
        for given in (file, io.BytesIO(file.read_bytes())):
            found = module.read(given, as_in_the_bundle)
            assert found.dtype == np.uint8 and np.array_equal(found, pixels), file.name
    if side == 8 and channels == 1:
        assert json.loads((made / "preprocessing.json").read_text())["pictures"] == as_in_the_bundle


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ('Image.Resampling[facts["resampling"].upper()]', "Image.Resampling.BICUBIC"),
        ('ImageOps.exif_transpose(opened) if facts["exif_transpose"] else opened.copy()', "opened.copy()"),
        ("if image.has_transparency_data:", "if False:"),
        ("(width - image.width) // 2", "0"),
        ('image.convert(facts["mode"])', 'image.convert("RGB").getchannel(0)'),
    ],
)
def test_a_copy_that_reads_pictures_otherwise_does_not_pass_its_own_check(
    bundle: Path, part: str, other: str, prepared: Callable[[int, int], Any]
) -> None:
    rewrite(bundle, "pictures.py", part, other)
    module = script(bundle)
    model = module.Model()
    with pytest.raises(module.BundleError, match=r"has other pixels here than where the data were prepared$"):
        model.check()
    _, expected = prepared(1, 8)
    assert any(not np.array_equal(model.read(file)[0], pixels) for file, pixels in expected.items())


def test_bundle_refuses_where_pictures_are_read_otherwise_than_by_prepare(
    deployable: Any, run_stage: Callable[..., Any], tmp_path: Path
) -> None:
    digests = (("cmyk.jpg", "0" * 64), *GREY.golden_sha256)
    facts = GREY.model_copy(update={"golden_sha256": digests, "pillow": "11.0.0"})
    engine = knowing(deployable.engine, tmp_path / "engine", facts)
    with pytest.raises(GateFailed, match=r"cmyk\.jpg has other pixels here .* and was 11\.0\.0 there"):
        run_stage(bundling.run, BundleConfig(), **deployable.with_others(engine=engine))


# -------------------------------------------------------------------------------------------- what is in it


def test_the_bundle_has_the_module_of_prepare_and_golden_pictures(made: Path) -> None:
    assert (made / "pictures.py").read_bytes() == Path(pictures.__file__).read_bytes()
    assert {file.name for file in (made / "golden_pictures").iterdir()} == {
        name for name, _ in GREY.golden_sha256
    }
    assert f"pillow=={pictures.PILLOW_VERSION}" in (made / "requirements.txt").read_text()
    verified = json.loads((made / "manifest.json").read_text())["spec"]["verified"]
    assert "the pixels of 9 golden pictures, bit for bit" in verified
    assert script(made).Model().check()["golden_pictures"] == 9
    assert "## Pictures" in (made / "README.md").read_text()
    assert "as the training pictures were, bit for bit" in (made / "README.md").read_text()


def test_the_golden_pictures_are_of_every_kind() -> None:
    modes, orientations, sizes = set(), set(), set()
    for file in pictures.golden_files():
        with Image.open(file) as image:
            modes.add(image.mode)
            orientations.add(image.getexif().get(ORIENTATION, 1))
            sizes.add(image.size)
            if image.mode == "P":
                assert image.has_transparency_data
    assert modes == {"1", "L", "LA", "P", "RGB", "RGBA", "CMYK"}
    assert {6, 7} <= orientations  # turned; turned and mirrored
    assert any(width > 1024 for width, _ in sizes)  # larger than the largest image_size: resampled by all


def test_a_bundle_for_another_runtime_reads_pictures_too(
    deployable_eager: Any, run_stage: Callable[..., Any], tmp_path: Path
) -> None:
    engine = knowing(deployable_eager.engine, tmp_path / "engine", GREY)
    bundle = run_stage(bundling.run, BundleConfig(), **deployable_eager.with_others(engine=engine))
    assert bundle.spec.verified[-1] == "the pixels of 9 golden pictures, bit for bit"
    shutil.copyfile(bundle.path / "golden_pictures" / "cmyk.jpg", bundle.path / "photo.jpg")
    [snippet, *_] = re.findall(r"```python\n(.*?)```", bundle.file("README.md").read_text(), flags=re.DOTALL)
    snippet += "import sys; sys.stdout.buffer.write(images_nhwc.tobytes())"
    done = subprocess.run([sys.executable, "-c", snippet], cwd=bundle.path, capture_output=True, check=True)
    assert hashlib.sha256(done.stdout).hexdigest() == dict(GREY.golden_sha256)["cmyk.jpg"]


def test_arrays_are_a_convention_that_the_readme_names(
    deployable: Any, run_stage: Callable[..., Any], tmp_path: Path
) -> None:
    facts = for_arrays((6, 6, 1), (8, 8, 1))
    engine = knowing(deployable.engine, tmp_path / "engine", facts)
    place = run_stage(bundling.run, BundleConfig(), **deployable.with_others(engine=engine)).path
    assert "by convention: the training images came as arrays" in (place / "README.md").read_text()
    Image.new("RGB", (60, 60), (0, 200, 0)).save(tmp_path / "green.png")
    pixels = script(place).Model().read(tmp_path / "green.png")[0, :, :, 0]
    grey = Image.new("RGB", (1, 1), (0, 200, 0)).convert("L").getpixel((0, 0))
    assert (
        pixels[1:7, 1:7] == grey
    ).all() and pixels.sum() == 36 * grey  # where the arrays were, black around


# ----------------------------------------------------------------------------------------- the command line


@pytest.fixture
def command(bundle: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`python bundle.py ...` in this process: exit status, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = script(bundle)._run(list(arguments))
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def digit(made: Path, tmp_path: Path) -> tuple[Path, str]:
    """A golden image as a PNG file, and its class."""
    image = np.load(made / "golden_images_nhwc.npy")[3, :, :, 0]
    Image.fromarray(image).save(tmp_path / "digit 3.png")
    logits = np.load(made / "golden_logits.npy")[3]
    return tmp_path / "digit 3.png", str(logits.argmax())


def test_a_picture_gets_its_class_and_probability(
    command: Callable[..., Any], digit: tuple[Path, str], made: Path
) -> None:
    file, expected = digit
    logits = np.load(made / "golden_logits.npy")[3].astype(float)
    probability = np.exp(logits).max() / np.exp(logits).sum()
    status, out, err = command(str(file), str(file))
    assert (status, err) == (0, "")
    assert out == f"{file}: {expected}, probability {probability:.3f}\n" * 2
    status, out, _ = command("--json", str(file))
    assert status == 0
    [answer] = json.loads(out)
    assert answer["probability"] == pytest.approx(probability, abs=1e-6)
    assert (answer["class"], answer["file"]) == (expected, str(file))
    status, out, _ = command("--json", str(made / "golden_images_nhwc.npy"))
    assert [row["row"] for row in json.loads(out)] == list(range(16))


def bomb(side: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def bad_pictures(folder: Path) -> Iterator[tuple[Path, str]]:
    whole = io.BytesIO()
    Image.fromarray(chart(64, 64, 3)).save(whole, "JPEG")
    deep = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint16)).save(deep, "PNG")
    gif = io.BytesIO()
    Image.new("L", (8, 8)).save(gif, "GIF")
    for name, content, complaint in (
        ("text.jpg", b"not a picture", "not a PNG or JPEG"),
        ("empty.png", b"", "not a PNG or JPEG"),
        ("a.gif", gif.getvalue(), "not a PNG or JPEG"),
        ("cut.jpg", whole.getvalue()[:900], "truncated"),
        ("large.png", bomb(8000), "8000x8000 are more than 50000000 pixels"),
        ("warned.png", bomb(10_000), "10000x10000 are more than 50000000 pixels"),
        ("bomb.png", bomb(60_000), "pixels"),
        ("deep.png", deep.getvalue(), "mode I;16, 8 bits per channel are read"),
    ):
        (folder / name).write_bytes(content)
        yield folder / name, complaint
    (folder / "folder.png").mkdir()
    yield folder / "folder.png", "not a regular file"
    yield folder / "absent.png", "No such file"


def test_what_is_no_usable_picture_gets_one_line_and_the_others_their_answers(
    command: Callable[..., Any], digit: tuple[Path, str], tmp_path: Path
) -> None:
    bad = list(bad_pictures(tmp_path))
    status, out, err = command(*(str(file) for file, _ in bad), str(digit[0]))
    assert status == 5
    lines = err.splitlines()
    assert len(lines) == len(bad)
    for line, (file, complaint) in zip(lines, bad, strict=True):
        assert line.startswith(f"error: {file}: ") and complaint in line
    assert out.startswith(f"{digit[0]}: {digit[1]}, ")


@pytest.mark.parametrize("arguments", [("--jsno",), ("--json",), ("-h",)])
def test_a_wrong_option_is_a_usage_error(command: Callable[..., Any], arguments: tuple[str, ...]) -> None:
    status, out, err = command(*arguments)
    assert (status, out) == (2, "") and err.startswith("usage: ")


def test_another_size_is_refused_where_no_training_picture_was_resized(
    bundle: Path, command: Callable[..., Any], tmp_path: Path
) -> None:
    facts = json.loads((bundle / "preprocessing.json").read_text())
    facts["pictures"]["resize"] = "none"
    (bundle / "preprocessing.json").write_text(json.dumps(facts))
    relist(bundle, "preprocessing.json")
    Image.new("L", (9, 8)).save(tmp_path / "wide.png")
    status, _, err = command(str(tmp_path / "wide.png"))
    assert status == 5 and "9x8 pixels; the training pictures were all 8x8, and none was resized" in err
    assert command()[0] == 0  # the golden pictures are resized all the same


# ---------------------------------------------------------------------------- another Pillow, an old bundle


def test_another_pillow_is_named_in_one_line(
    bundle: Path, digit: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(bundle, "pictures.py", "PILLOW_VERSION = PIL.__version__", 'PILLOW_VERSION = "1.1.7"')
    model = script(bundle).Model()
    with caplog.at_level(logging.WARNING):
        model.read(digit[0])
        model.read(digit[0])
    [record] = caplog.records
    message = record.getMessage()
    assert f"Pillow is 1.1.7 here, the data were prepared with {pictures.PILLOW_VERSION}" in message
    assert "pip install -r requirements.txt" in message and "\n" not in message
    assert model.check()["golden_pictures"] == 9  # it reads them as the other one did


def test_without_pillow_the_engine_is_checked_and_the_rest_named(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    module = script(bundle)
    with caplog.at_level(logging.WARNING):
        assert module.Model().check()["golden_pictures"] == 0
    assert "the golden pictures were not checked: pictures need Pillow" in caplog.text
    with pytest.raises(module.BundleError, match="pictures need Pillow"):
        module.Model().read("photo.jpg")


def test_a_bundle_of_data_without_these_facts_takes_no_pictures(
    deployed: Any, digit: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    module = script(deployed.path)
    assert set(module.Model().check()) == {"max_abs_error", "top1_agreement"}
    assert module._run([str(digit[0])]) == 5
    said = capsys.readouterr().err
    assert said.startswith("error: this bundle takes no pictures") and len(said.splitlines()) == 1
    assert "takes pixels and no picture files" in deployed.file("README.md").read_text()
    assert "pillow" not in deployed.file("requirements.txt").read_text()
