"""What is served and deployed: the folder of a bundle, a run, or a version of a registered model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpml.artifacts.folder import MANIFEST, read_manifest
from hpml.core.errors import HpmlError, UsageError
from hpml.io.tracking import store_of
from hpml.measuring.subjects.bundle import BUNDLE, BundleSubject
from hpml.pipelines.engine import run_record

if TYPE_CHECKING:
    from hpml.artifacts.engine import EngineSpec
    from hpml.artifacts.folder import Artifact
    from hpml.serving.model import ServedModel

_REGISTERED = re.compile(r"(?P<name>[^@:/]+)(@(?P<alias>[\w.-]+)|/(?P<version>\d+))")
_KINDS = "the folder of a bundle, the id of a run, or a registered model as NAME@champion or NAME/VERSION"


def served_source(argument: str, home: Path, *, threads: int, run_code: bool) -> Callable[[], ServedModel]:
    """What opens the model that `argument` names, as it is whenever it is called.

    Raises UsageError if it names none.
    """
    folder = Path(argument)
    if (folder / BUNDLE).is_file():
        return lambda: _served_bundle(folder, threads, run_code=run_code)
    if match := _REGISTERED.fullmatch(argument):
        return lambda: _served_version(match, home, threads)
    _refuse_other_folder(argument)
    _bundle_of(home, argument)
    return lambda: _served_bundle(_bundle_of(home, argument), threads, run_code=run_code)


def bundle_folder(argument: str, home: Path) -> Path:
    """The folder of the bundle that `argument` names: of a registered model, that of the run that made it.

    Raises UsageError if there is none.
    """
    folder = Path(argument)
    if (folder / BUNDLE).is_file():
        return folder
    if match := _REGISTERED.fullmatch(argument):
        return _bundle_of_version(match, home)
    _refuse_other_folder(argument)
    return _bundle_of(home, argument)


def _refuse_other_folder(argument: str) -> None:
    folder = Path(argument)
    if folder.is_dir():
        kind = read_manifest(folder).kind if (folder / MANIFEST).is_file() else "folder without bundle.json"
        raise UsageError(f"{argument} cannot be served", why=f"it is a {kind}", fix=f"give {_KINDS}")


def _bundle_of(home: Path, run: str) -> Path:
    """Of the run as it is now: "latest" may be another by and by. Raises UsageError if it has none."""
    record = run_record.load(home, run)
    bundle = home / record.id / "bundle"
    if not (bundle / BUNDLE).is_file():
        raise UsageError(
            f"run {record.id} has no bundle here",
            why="it did not get as far, or ran elsewhere",
            fix=f"give {_KINDS}",
        )
    return bundle


def _bundle_of_version(match: re.Match[str], home: Path) -> Path:
    """The registry holds engines; what is deployed is the bundle, which the run has that registered it."""
    engine, number = _registered(match, home)
    sha256 = engine.manifest.files[engine.spec.file].sha256
    for file in sorted(home.glob(f"*/bundle/{BUNDLE}")):
        with suppress(HpmlError):  # that of a run of another version of ours
            facts = BundleSubject(folder=file.parent).facts()
            version = (facts.model_name, str(facts.model_version), facts.files.get(facts.file))
            if version == (match["name"], number, sha256):
                return file.parent
    raise UsageError(
        f"no run in {home} has the bundle of {match['name']}/{number}",
        why="the registry holds its engine alone",
        fix="give the folder of the bundle, or --home of the workspace that registered it",
    )


def _served_bundle(folder: Path, threads: int, *, run_code: bool) -> ServedModel:
    from hpml.serving.model import open_bundle
    from hpml.serving.trial import try_open

    folder = folder.resolve()  # a link may point elsewhere by and by
    try_open("bundle", folder, threads=threads)
    return open_bundle(folder, threads=threads, run_code=run_code)


def _served_version(match: re.Match[str], home: Path, threads: int) -> ServedModel:
    from hpml.serving.model import open_engine
    from hpml.serving.trial import try_open

    engine, number = _registered(match, home)
    try_open("engine", engine.path, threads=threads)
    return open_engine(engine, name=match["name"], version=number, threads=threads)


def _registered(match: re.Match[str], home: Path) -> tuple[Artifact[EngineSpec], str]:
    """The engine and the number of a version in the registry: MLFLOW_TRACKING_URI's, or the workspace's."""
    from hpml.components.register.retrieval import registered_engine

    uri = os.environ.get("MLFLOW_TRACKING_URI") or store_of(home)
    alias, version = match["alias"] or "", match["version"] or ""
    return registered_engine(uri, match["name"], alias=alias, version=version, folder=home / ".served")
