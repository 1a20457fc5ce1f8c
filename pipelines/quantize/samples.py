"""What a model is calibrated and judged with: arrays of an .npz file, or a folder of pictures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpml.core import regular_files
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.measuring.subjects.onnx import OnnxSubject
from hpml.measuring.subjects.tensors import Signature, Tensor
from hpml.pipelines.quantize.job import Preprocessing
from hpml.tasks.image_classification import pictures
from hpml.tasks.image_classification.data.image_folders import images_among, list_images
from hpml.tasks.image_classification.data.npz_arrays import read_arrays
from hpml.tasks.image_classification.data.picture_facts import MODES, POLICY

_LABELS = ("y", "labels")
_CHANNELS = (1, 3)

Named = dict[str, NDArray[Any]]
Feeds = Mapping[str, NDArray[Any]]
Rows = NDArray[np.int64]


class Samples(ABC):
    """Samples by number, for the inputs `inputs` of a model that takes only `batch`, if not None.

    labels: (rows,), or None. test: those to judge with, if the data says which.
    """

    inputs: tuple[Tensor, ...]
    sizes: Mapping[str, int]  # of the dimensions that it leaves open
    batch: int | None
    rows: int
    labels: NDArray[np.int64] | None = None
    test: Rows | None = None
    class_names: tuple[str, ...] = ()

    @abstractmethod
    def feeds(self, rows: Rows) -> Feeds:
        """The inputs of these samples, as the model takes them."""

    def divided(self, calibration_samples: int, seed: int) -> tuple[Rows, Rows]:
        """Which calibrate, at most half of all, and which judge: the test split, or all others.

        No sample is in both. Raises ConfigInvalid if there are too few for that.
        """
        order = np.random.default_rng(seed).permutation(self.rows)
        if self.test is not None:
            calibrating, judging = np.setdiff1d(order, self.test, assume_unique=True), self.test
        else:
            calibrating, judging = np.split(order, [min(calibration_samples, self.rows // 2)])
        if not len(calibrating) or not len(judging):
            split = "" if self.test is None else f", {len(judging)} of them in its test split"
            raise ConfigInvalid(
                "the data has too few samples",
                why=f"{self.rows:,} in all{split}; at least 2 are needed, one to calibrate with and another "
                "to judge with",
                fix="add samples to --data: a hundred or more give a verdict worth having",
            )
        return calibrating[:calibration_samples], judging


def read(file: Path, data: Path, sizes: Mapping[str, int], how: Preprocessing) -> Samples:
    """The samples in `data`, a folder of pictures or an .npz file, for the ONNX file `file`.

    Raises ConfigInvalid or StageFailed that says what does not fit the model.
    """
    subject = OnnxSubject(file=file)
    if data.is_dir():
        return Pictures(data, subject.signature(sizes), sizes, how)
    if why := regular_files.problem(data, or_folder=True):
        raise ConfigInvalid(
            f"--data {data} cannot be used", why=f"it {why}", fix="give a folder of pictures or an .npz"
        )
    return Arrays(data, subject, sizes, how)


# -------------------------------------------------------------------------------------------------- arrays


class Arrays(Samples):
    """Those of an .npz file named as the inputs are; with one input also x, or x_train and x_test.

    Inputs in `_pixels` are fed with pictures, which are preprocessed.
    """

    def __init__(
        self, file: Path, subject: OnnxSubject, sizes: Mapping[str, int], how: Preprocessing
    ) -> None:
        self._file, self._how, given = file, how, read_arrays(file)
        names = [name for name, *_ in subject.declared_inputs()]
        if len(names) == 1 and names[0] not in given:
            self._arrays, labels = self._of_x(names[0], given)
        elif lacking := [name for name in names if name not in given]:
            raise self._lacks(
                lacking[0],
                given,
                why=f"; the model takes {', '.join(names)}",
                fix="save them by the names of the inputs, labels as y",
            )
        else:
            self._arrays = {name: given[name] for name in names}
            labels = [given[name] for name in _LABELS if name in given and name not in names][:1]
        self._check(subject, sizes)
        if labels:
            self.labels = self._checked_labels(labels[0] if len(labels) == 1 else np.concatenate(labels))

    def _of_x(self, name: str, given: Named) -> tuple[Named, list[NDArray[Any]]]:
        """x, or both of its splits, as the input `name`; and as many labels, or none."""
        ends = [end for end in ("_train", "_test") if f"x{end}" in given]
        ends = ends or [end for end in ("",) if "x" in given]
        if not ends:
            fix = f"save the samples as {name} or x (or x_train and x_test), labels as y (y_train, y_test)"
            raise self._lacks(name, given, fix=fix)
        x = [given[f"x{end}"] for end in ends]
        if len({(array.shape[1:], array.dtype) for array in x}) > 1:
            raise ConfigInvalid(f"x_train and x_test of {self._file} differ in shape or type")
        if len(x) == 2:
            self.test = np.arange(len(x[0]), len(x[0]) + len(x[1]))
        labels = [given[f"y{end}"] for end in ends if f"y{end}" in given]
        together = x[0] if len(x) == 1 else np.concatenate(x)
        return {name: together}, labels if len(labels) == len(x) else []

    def _lacks(self, name: str, given: Named, *, why: str = "", fix: str) -> ConfigInvalid:
        return ConfigInvalid(
            f"{self._file} has no array for the input {name!r}",
            why=f"it has {', '.join(sorted(given)) or 'none'}{why}",
            fix=fix,
        )

    def _check(self, subject: OnnxSubject, sizes: Mapping[str, int]) -> None:
        """Raises ConfigInvalid for an array that does not fit its input, StageFailed for one with NaN."""
        counts = {name: array.shape[0] if array.ndim else 0 for name, array in self._arrays.items()}
        if len(set(counts.values())) > 1 or not min(counts.values()):
            told = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise ConfigInvalid(f"the arrays of {self._file} have no samples, or not equally many", why=told)
        self.rows = next(iter(counts.values()))
        self._pixels, known = set(), dict(sizes)
        for name, dtype, dimensions in subject.declared_inputs():
            array, shape = self._arrays[name], self._arrays[name].shape
            is_bytes = array.dtype == np.uint8 and dtype.startswith("float") and len(dimensions) == 4
            if is_bytes or not _fits(shape, dimensions):
                self._pixels.add(name)
                shape = _shape_of_pictures(self._file, name, array, dimensions)
            for axis, (size, dimension) in enumerate(zip(shape, dimensions, strict=True)):
                if axis and not isinstance(dimension, int):
                    known[dimension or f"{name}.{axis}"] = size
        taken = subject.signature(known)
        self.inputs, self.batch, self.sizes = taken.inputs, taken.batch, known
        for tensor in taken.inputs:
            is_pixels = tensor.name in self._pixels
            _check_numbers(self._file, tensor, self._arrays[tensor.name], is_pixels=is_pixels)

    def _checked_labels(self, labels: NDArray[Any]) -> NDArray[np.int64]:
        if labels.dtype.kind not in "iu" or labels.shape != (self.rows,) or labels.min() < 0:
            raise ConfigInvalid(
                f"the labels in {self._file} are {labels.dtype} {labels.shape}",
                why=f"one whole number from 0 for each of {self.rows} samples is needed, not one-hot",
            )
        return labels.astype(np.int64)

    def feeds(self, rows: Rows) -> Feeds:
        """Cast to the types that the model takes."""
        return {
            tensor.name: preprocessed(self._arrays[tensor.name][rows], tensor, self._how)
            if tensor.name in self._pixels
            else np.ascontiguousarray(self._arrays[tensor.name][rows], tensor.dtype)
            for tensor in self.inputs
        }


def _fits(shape: Sequence[int], dimensions: Sequence[int | str | None]) -> bool:
    """Whether an array (rows, ...) is what the model takes, as it is."""
    return len(shape) == len(dimensions) and all(
        not isinstance(dimension, int) or size == dimension
        for size, dimension in zip(shape[1:], dimensions[1:], strict=True)
    )


def _shape_of_pictures(
    file: Path, name: str, array: NDArray[Any], dimensions: Sequence[int | str | None]
) -> tuple[int, ...]:
    """The shape that pictures (rows, height, width[, channels]) have as this input.

    Raises ConfigInvalid if they are none, or do not fit.
    """
    shapes = [array.shape]
    nhwc = (*array.shape, 1) if array.ndim == 3 else array.shape
    if len(nhwc) == 4 and nhwc[3] in _CHANNELS:
        shapes += [(nhwc[0], nhwc[3], nhwc[1], nhwc[2]), nhwc]
    for shape in shapes:
        if _fits(shape, dimensions):
            return shape
    taken = ", ".join("?" if size is None else str(size) for size in dimensions)
    raise ConfigInvalid(
        f"the array for {name!r} in {file} does not fit the model",
        why=f"it is {array.dtype} {array.shape}, the model takes ({taken}), batch first",
    )


def _check_numbers(file: Path, tensor: Tensor, array: NDArray[Any], *, is_pixels: bool) -> None:
    wrong_kind = array.dtype.kind == "f" and not tensor.dtype.startswith("float") and not is_pixels
    if array.dtype.kind not in "fiub" or wrong_kind:
        raise ConfigInvalid(
            f"the array for {tensor.name!r} in {file} does not fit the model",
            why=f"it is {array.dtype}, the model takes {tensor.dtype}",
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        rows = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))
        raise StageFailed(
            f"the array for {tensor.name!r} in {file} holds NaN or infinity",
            why=f"in {len(rows)} of {len(array)} rows, the first is {rows[0]}",
        )
    highest = 1 if array.dtype.kind == "f" else 255
    if is_pixels and (array.min() < 0 or array.max() > highest):
        raise ConfigInvalid(
            f"the pictures for {tensor.name!r} in {file} are not {array.dtype} from 0 to {highest}",
            why=f"they go from {array.min():g} to {array.max():g}",
            fix=f"scale them, or save what the model takes: {tensor.dtype} (rows, {str(tensor.shape)[1:]}",
        )
    if not is_pixels and not tensor.dtype.startswith("float") and tensor.dtype != "bool":
        limits = np.iinfo(tensor.dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise ConfigInvalid(f"the array for {tensor.name!r} in {file} does not fit into {tensor.dtype}")


# ------------------------------------------------------------------------------------------------- pictures


def preprocessed(images: NDArray[Any], tensor: Tensor, how: Preprocessing) -> NDArray[Any]:
    """Pictures (rows, height, width[, channels]), or as the input lies already, as the input takes them.

    Floats are from 0 to 1, and taken for pixels / 255.
    """
    channels_first = tensor.shape[0] in _CHANNELS
    if images.shape[1:] == tensor.shape and channels_first:
        images = images.transpose(0, 2, 3, 1)
    elif images.ndim == 3:
        images = images[..., None]
    pixels = images.astype(np.float32) * np.float32(255 if images.dtype.kind == "f" else 1)
    if not tensor.dtype.startswith("float"):
        values = np.rint(pixels).astype(tensor.dtype)
    else:
        mean, std = (np.asarray(given, np.float32) for given in (how.mean, how.std))
        values = ((pixels / np.float32(how.scale) - mean) / std).astype(tensor.dtype)
    return np.ascontiguousarray(values.transpose(0, 3, 1, 2) if channels_first else values)


def _shape_hwc(tensor: Tensor) -> tuple[int, int, int]:
    """The sides and channels of the pictures that an input takes, (c, h, w) or (h, w, c).

    Raises ConfigInvalid if the input takes no pictures.
    """
    if len(tensor.shape) == 3:
        first, second, third = tensor.shape
        if first in _CHANNELS:
            return second, third, first
        if third in _CHANNELS:
            return first, second, third
    raise ConfigInvalid(
        f"the input {tensor.name!r} takes no pictures",
        why=f"a sample is {tensor.dtype} {tensor.shape}; a picture has 3 dimensions, 1 or 3 of them channels",
        fix="give an .npz file with arrays by the names of the inputs",
    )


class Pictures(Samples):
    """PNG and JPEG files: in one folder, or in one for each class, with or without train and test around."""

    def __init__(self, folder: Path, taken: Signature, sizes: Mapping[str, int], how: Preprocessing) -> None:
        inputs = taken.inputs
        if len(inputs) > 1:
            raise ConfigInvalid(
                "a model with several inputs cannot be fed with pictures",
                why=f"it takes {', '.join(tensor.name for tensor in inputs)}",
                fix="give an .npz file with arrays by the names of the inputs",
            )
        self.inputs, self.batch, self.sizes, self._how = inputs, taken.batch, sizes, how
        *self._size_hw, self._channels = _shape_hwc(inputs[0])
        for name, given in (("--mean", how.mean), ("--std", how.std)):
            if len(given) not in (1, self._channels):
                raise ConfigInvalid(
                    f"{name} has {len(given)} values, a picture has {self._channels} channels"
                )
        self._list(folder)

    def _list(self, folder: Path) -> None:
        entries = images_among(folder)
        if any(path.is_dir() for path in entries):
            found = list_images(folder)
            self.class_names, splits = found.class_names, found.splits
            listed = [file for split in splits.values() for file in split]
            self.labels = np.array([file.label for file in listed], np.int64)
            self._files = [file.path for file in listed]
            if "test" in splits:
                self.test = np.arange(len(listed) - len(splits["test"]), len(listed))
        else:
            self._files = entries
        self.rows = len(self._files)
        if not self._files:
            raise ConfigInvalid(f"{folder} has no pictures", fix="put PNG or JPEG files into it")

    def feeds(self, rows: Rows) -> Feeds:
        """As `prepare` reads them: upright, shrunk in proportion if larger, in the middle of black."""
        size_hw, mode = tuple(self._size_hw), MODES[self._channels]
        facts = POLICY | {"mode": mode, "resize": "shrink", "fit_within_hw": size_hw, "size_hw": size_hw}
        pixels = np.stack([_read_picture(self._files[row], facts) for row in rows])
        return {self.inputs[0].name: preprocessed(pixels, self.inputs[0], self._how)}


def _read_picture(file: Path, facts: Mapping[str, Any]) -> NDArray[np.uint8]:
    try:
        return pictures.read(file, facts)
    except pictures.PictureError as error:
        raise StageFailed(f"{file} cannot be read", why=str(error), fix="replace or remove it") from None
