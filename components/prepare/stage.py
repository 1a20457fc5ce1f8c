"""Load labelled images, split them, refuse a poisoned set, and write the dataset that all stages read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpml.artifacts.dataset import DatasetSpec, SplitSpec
from hpml.components.prepare.sources import AnySource, Loaded
from hpml.core.contract import Output, Result

if TYPE_CHECKING:
    from hpml.components.prepare.splits import Split


def run(config: AnySource, *, out: Output) -> Result[DatasetSpec]:
    """Write `<split>_images.npy`, uint8 NHWC, and `<split>_labels.npy`, int64, for the splits train and test.

    Raises StageFailed that lists the offending rows if the data breaks the contract (see `checks`), and
    ConfigInvalid if `image_size` is smaller than the images.
    """
    from hpml.components.prepare import arrays, checks, picture_facts

    loaded = config.load(out)
    classes = len(loaded.class_names)
    checks.check_class_names(loaded.class_names)
    splits = _split(loaded, test_fraction=config.test_fraction, seed=config.seed)
    checks.check_shapes(splits)
    checks.check_labels(splits, classes)
    shape_hwc = arrays.padded_shape(loaded.train.images_nhwc.shape[1:], config.image_size)
    duplicates = checks.find_duplicates(splits)
    if config.duplicates == "refuse":
        checks.refuse_duplicates(splits, duplicates)
    kept, notes = checks.drop_duplicates(splits, duplicates)
    notes = (*notes, *_tell_left_out(loaded.left_out, out))
    checks.check_class_counts(kept, loaded.class_names)

    for name, split in kept.items():
        arrays.write_split(split, name, shape_hwc, out.path)
    mean, std = arrays.channel_statistics(out.path / "train_images.npy")
    spec = DatasetSpec(
        class_names=loaded.class_names,
        image_shape_hwc=shape_hwc,
        splits={
            name: SplitSpec(
                rows=len(split.rows), class_counts=tuple(checks.class_counts(split, classes).tolist())
            )
            for name, split in kept.items()
        },
        mean=mean,
        std=std,
        source=config.source,
        licence=loaded.licence,
        notes=notes,
        pictures=loaded.pictures or picture_facts.for_arrays(loaded.train.images_nhwc.shape[1:], shape_hwc),
    )
    metrics = {
        "train_rows": len(kept["train"].rows),
        "test_rows": len(kept["test"].rows),
        "classes": classes,
        "dropped_rows": sum(len(splits[name].rows) - len(split.rows) for name, split in kept.items()),
        "repeated_train_rows": duplicates.repeats_in_train,
        "left_out_files": len(loaded.left_out),
    }
    return Result(spec, metrics)


def _split(loaded: Loaded, *, test_fraction: float, seed: int) -> dict[str, Split]:
    """The source's own splits, or two made from its one."""
    from hpml.components.prepare.splits import Split, stratified, whole

    if loaded.test is not None:
        return {"train": whole(loaded.train), "test": whole(loaded.test)}
    train, test = stratified(loaded.train.labels, test_fraction=test_fraction, seed=seed)
    return {"train": Split(loaded.train, train), "test": Split(loaded.train, test)}


def _tell_left_out(names: tuple[str, ...], out: Output) -> tuple[str, ...]:
    """Tell the user of all files that were left out; returns what to note of those that a user put there.

    What a system put there comes and goes as the folder is looked at, and should not make another dataset.
    """
    from hpml.components.prepare.checks import counted
    from hpml.components.prepare.image_folders import is_litter

    if names:
        out.note(f"left out, as no images: {counted(names, 'file')}")
    users = [name for name in names if not is_litter(name)]
    return (f"left out, as no images: {counted(users, 'file')}",) if users else ()
