"""Labelled images split, checked for what poisons a training, and written as arrays."""

from __future__ import annotations

from typing import Literal

from hpml.artifacts.dataset import DatasetSpec, SplitSpec
from hpml.core.contract import Output, Result
from hpml.core.words import counted
from hpml.tasks.image_classification.data import arrays, checks, picture_facts
from hpml.tasks.image_classification.data.image_folders import is_litter
from hpml.tasks.image_classification.data.loaded import Loaded
from hpml.tasks.image_classification.data.splits import Split, divided, whole
from hpml.tasks.image_classification.task import ImageClassification


def prepare(
    loaded: Loaded,
    out: Output,
    *,
    source: str,
    image_size: int | None,
    test_fraction: float,
    validation_fraction: float,
    seed: int,
    duplicates: Literal["refuse", "drop"],
) -> Result[DatasetSpec]:
    """Write the splits of `loaded`; see `ImageSource.prepare`."""
    classes = len(loaded.class_names)
    checks.check_class_names(loaded.class_names)
    splits, repeats = _split(
        loaded, test_fraction=test_fraction, validation_fraction=validation_fraction, seed=seed
    )
    checks.check_shapes(splits)
    checks.check_labels(splits, classes)
    unpadded_hwc = splits["train"].images.images_nhwc.shape[1:]
    shape_hwc = arrays.padded_shape(unpadded_hwc, image_size)
    found = checks.find_duplicates(splits)
    if duplicates == "refuse":
        checks.refuse_duplicates(splits, found)
    kept, notes = checks.drop_duplicates(splits, found)
    if repeats:
        notes = (*notes, f"left {repeats} rows out of validation whose image is also in train")
    notes = (*notes, *_tell_left_out(loaded.left_out, out))
    checks.check_class_counts(kept, loaded.class_names)

    for name, split in kept.items():
        arrays.write_split(split, name, shape_hwc, out.path)
    mean, std = arrays.channel_statistics(out.path / "train_images.npy")
    task = ImageClassification(
        class_names=loaded.class_names,
        image_shape_hwc=shape_hwc,
        mean=mean,
        std=std,
        pictures=loaded.pictures or picture_facts.for_arrays(unpadded_hwc, shape_hwc),
    )
    spec = DatasetSpec(
        task=task.model_dump(mode="json"),
        splits={
            name: SplitSpec(
                rows=len(split.rows), class_counts=tuple(checks.class_counts(split, classes).tolist())
            )
            for name, split in kept.items()
        },
        source=source,
        licence=loaded.licence,
        notes=notes,
    )
    metrics = {
        **{f"{name}_rows": len(split.rows) for name, split in kept.items()},
        "classes": classes,
        "dropped_rows": sum(len(splits[name].rows) - len(split.rows) for name, split in kept.items()),
        "repeated_train_rows": found.repeats_in_train + repeats,
        "left_out_files": len(loaded.left_out),
    }
    return Result(spec, metrics)


def _split(
    loaded: Loaded, *, test_fraction: float, validation_fraction: float, seed: int
) -> tuple[dict[str, Split], int]:
    """The source's own splits, and those that it lacks made from its training rows.

    And how many of these are in none, because validation would repeat train.
    """
    own = {name: whole(images) for name, images in loaded.splits.items()}
    train, test, validation = own["train"], own.get("test"), own.get("validation")
    repeats = 0
    if test is None:
        train, test = divided(train, fraction=test_fraction, seed=seed)
    if validation is None:
        train, validation = divided(train, fraction=validation_fraction, seed=seed)
        drawn, validation = len(validation.rows), checks.without_repeats_of(validation, train)
        repeats = drawn - len(validation.rows)
    return {"train": train, "validation": validation, "test": test}, repeats


def _tell_left_out(names: tuple[str, ...], out: Output) -> tuple[str, ...]:
    """Tell the user of all files that were left out; returns what to note of those that a user put there.

    What a system put there comes and goes as the folder is looked at, and should not make another dataset.
    """
    if names:
        out.note(f"left out, as no images: {counted(names, 'file')}")
    users = [name for name in names if not is_litter(name)]
    return (f"left out, as no images: {counted(users, 'file')}",) if users else ()
