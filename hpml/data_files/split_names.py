"""Which split a file is of, by its name: train-00000-of-00012.parquet, val/000000.tar, t10k-images.idx."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hpml.core.errors import StageFailed
from hpml.core.words import counted

SPLITS = ("train", "validation", "test")
SPLIT_NAMES = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "t10k"), "test"),
}


def by_split(names: Iterable[str]) -> dict[str, list[str]]:
    """Relative paths of files by the split that their names, or those of their folders, say; all in order.

    Where none says one, all are for training. Raises StageFailed where only some do, or one says several, or
    none is for training.
    """
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        said = {SPLIT_NAMES[word] for word in re.split(r"[^a-z0-9]+", name.lower()) if word in SPLIT_NAMES}
        if len(said) > 1:
            raise StageFailed(
                f"the file {name!r} is of several splits", why=", ".join(sorted(said)), fix="rename it"
            )
        found.setdefault(said.pop() if said else "", []).append(name)
    unsaid = found.pop("", [])
    if not found:
        return {"train": unsaid} if unsaid else {}
    if unsaid or "train" not in found:
        raise StageFailed(
            "some files are of no split" if unsaid else "no file is for training",
            why=counted(unsaid or next(iter(found.values())), "file"),
            fix="have train, validation or test in the name of every file or of its folder, or of none",
        )
    return {split: found[split] for split in SPLITS if split in found}
