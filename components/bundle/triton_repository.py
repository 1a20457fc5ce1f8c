"""Place the model of this bundle into a model repository of Triton, beside the versions that are there.

    python triton_repository.py REPOSITORY                 as the version it has in the model registry
    python triton_repository.py REPOSITORY --as-version N  as another one

With --unverified also where a goal of its recipe was not checked, for want of a measurement.
Needs nothing but Python. Nothing that is there is changed or replaced.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import uuid
from pathlib import Path

HERE = Path(__file__).resolve().parent
CONFIG = "config.pbtxt"
_OPTIONS = "[--as-version N] [--unverified]"

# What one config.pbtxt says for all versions of a model, and what of it a user may have tuned.
_SHARED = {
    "platform": r"platform: \S+",
    "default_model_filename": r"default_model_filename: \S+",
    "max_batch_size": r"max_batch_size: \d+",
    "input": r"input \[.*?\] ?\} ?\]",
    "output": r"output \[.*?\] ?\} ?\]",
    "kind": r"kind: \w+",
}
_THREADS = r'"intra_op_thread_count" value: \{ string_value: "(\d+)"'


class Refused(Exception):
    """Why the model cannot be placed there, and what to do."""


def place(
    bundle: Path, repository: Path, version: int | None = None, *, allow_unverified: bool = False
) -> str:
    """Add the model in `bundle` to `repository`; what was done, in one line.

    Raises Refused if that version is there with other content, if the versions there take or give something
    else, if a file of the bundle was changed, or if the bundle is not verified.
    """
    told = json.loads((bundle / "bundle.json").read_text())
    unverified = told.get("unverified")
    if unverified and not allow_unverified:
        raise Refused(
            f"not verified: {'; '.join(unverified)}: complete the measurement with hpml bench RUN, RUN being"
            " the run that made this bundle, or give --unverified"
        )
    name = told["model_name"]
    number = version or told["model_version"]
    source = (bundle / told["file"]).parent
    config = (source.parent / CONFIG).read_text()
    digests = {
        file.relative_to(source).as_posix(): told["files"][file.relative_to(bundle).as_posix()]
        for file in sorted(source.rglob("*"))
        if file.is_file()
    }
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise Refused(f"{name!r} cannot be the name of a folder")
    if not repository.is_dir():
        raise Refused(f"{repository} is no folder: create it, or name Triton's --model-repository")
    model = repository / name
    note = _agree(model / CONFIG, config)
    target = model / str(number)
    if target.exists():
        if _digests(target) == digests:
            return f"{target} is there already, the same"
        taken = [int(folder.name) for folder in model.iterdir() if folder.name.isdigit()]
        raise Refused(
            f"{target} is there with other content: place this one with --as-version {max(taken) + 1},"
            " or remove that one"
        )
    _copy(source, target, digests, config)
    return f"placed {target}{note}"


def _agree(there: Path, config: str) -> str:
    """Compare what both configurations say for all versions; notes on what is otherwise than in the bundle.

    Raises Refused naming what differs.
    """
    if not there.exists():
        return ""
    found, ours = (re.sub(r"\s+", " ", text) for text in (there.read_text(), config))
    for name, pattern in _SHARED.items():
        of_them, of_us = re.search(pattern, found), re.search(pattern, ours)
        if not of_them or not of_us or of_them[0] != of_us[0]:
            raise Refused(
                f"{there} holds for all versions and its {name} is not that of this bundle"
                f" ({of_them[0] if of_them else 'absent'}, here {of_us[0] if of_us else 'absent'}):"
                " register this model under another name (registry.model_name), or edit that file first"
            )
    notes = []
    if "version_policy" not in found:
        notes.append(f"; {there} has no version_policy, so Triton serves the highest version only")
    of_them, of_us = re.search(_THREADS, found), re.search(_THREADS, ours)
    if of_us and (not of_them or of_them[1] != of_us[1]):
        said = of_them[1] if of_them else "no"
        notes.append(f"; {there} says {said} intra_op_thread_count, this model was measured with {of_us[1]}")
    return "".join(notes)


def _digests(folder: Path) -> dict[str, str]:
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def _copy(source: Path, target: Path, digests: dict[str, str], config: str) -> None:
    """Copy whole or not at all: a server that polls ignores names with a dot, and sees no half a version."""
    model = target.parent
    model.mkdir(exist_ok=True)
    part = model / f".{target.name}.{uuid.uuid4().hex}"
    try:
        shutil.copytree(source, part)
        if _digests(part) != digests:
            raise Refused(f"a file in {source} was changed: its SHA-256 is not the one in bundle.json")
        if not (model / CONFIG).exists():
            (model / CONFIG).write_text(config)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if not any(model.iterdir()):
            model.rmdir()


def main() -> None:
    """The command line; the exit status is 2 for wrong arguments, 5 where the model was not placed."""
    allow_unverified = "--unverified" in sys.argv[1:]
    match [argument for argument in sys.argv[1:] if argument != "--unverified"]:
        case [repository]:
            version = None
        case [repository, "--as-version", number] if re.fullmatch("[1-9][0-9]{0,17}", number):
            version = int(number)
        case _:
            print(
                "usage: python triton_repository.py REPOSITORY [--as-version N] [--unverified]",
                file=sys.stderr,
            )
            raise SystemExit(2)
    try:
        print(place(HERE, Path(repository), version, allow_unverified=allow_unverified))
    except (Refused, OSError, KeyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(5) from None


if __name__ == "__main__":
    main()
