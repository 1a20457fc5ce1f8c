"""The only reader and writer of artifact directories.

An artifact is a folder of files plus `manifest.json`. The manifest lists every file with size and SHA-256,
carries a typed description (`spec`) of what the next reader needs, and says where it came from (`lineage`).
`digest` identifies the content (kind, spec, files): two steps that write the same bytes write the same
artifact. `seal` covers the whole manifest, lineage included. A folder is written beside its place, synced
and renamed, so it exists whole or not at all; every reader verifies what it reads.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import shutil
import stat
from pathlib import Path, PurePosixPath
from typing import Any, Generic, Literal

from pydantic import JsonValue, ValidationError

from hpml.core import regular_files
from hpml.core.atomic_files import _sync, write_text_atomic
from hpml.core.contract import Config, Metrics, SpecT, canonical_json
from hpml.core.errors import StageFailed

FORMAT_VERSION = 1
_RUN_AGAIN = "delete the artifact and run its step again"


MANIFEST = "manifest.json"
_FORMER_KINDS = {"ceilings": "peaks"}  # what artifacts of before call themselves


class FileEntry(Config):
    """One file of an artifact."""

    sha256: str
    size_bytes: int


class Lineage(Config):
    """Where an artifact came from."""

    stage: str
    code_digest: str
    config: JsonValue
    parents: dict[str, str]  # input name (or name/key) -> content digest
    libraries: dict[str, str]
    started_at_s: float
    seconds: float
    peak_rss_bytes: int  # 0: the system did not tell


class Manifest(Config):
    """`manifest.json`."""

    format: Literal[1]
    kind: str
    spec: dict[str, JsonValue]
    files: dict[str, FileEntry]
    digest: str
    lineage: Lineage
    metrics: dict[str, float]
    rejected: str = ""  # why a gate refused it; empty for an artifact in good standing
    incomplete: str = ""  # what is missing in it and why; it is read as any other, but is no cache hit
    seal: str


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(value: Any) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def content_digest(kind: str, spec: Any, files: dict[str, FileEntry], rejected: str) -> str:
    """The identity of an artifact's content; lineage and timing are not part of it."""
    listing = {name: entry.sha256 for name, entry in files.items()}
    return _digest_of(
        {"format": FORMAT_VERSION, "kind": kind, "spec": spec, "files": listing, "rejected": rejected}
    )


def _seal_of(fields: dict[str, Any]) -> str:
    return _digest_of({name: value for name, value in fields.items() if name != "seal"})


class Artifact(Generic[SpecT]):
    """A verified artifact on this machine's disk. Made by `open_artifact` only."""

    def __init__(self, path: Path, manifest: Manifest, spec: SpecT) -> None:
        self.path, self.manifest, self.spec = path, manifest, spec

    @property
    def digest(self) -> str:
        """The content digest."""
        return self.manifest.digest

    def file(self, name: str) -> Path:
        """The path of a file of this artifact.

        Raises StageFailed if the artifact has no such file.
        """
        if name not in self.manifest.files:
            raise StageFailed(
                f"the {self.manifest.kind} artifact {self.path} has no file {name!r}",
                why=f"it has {', '.join(sorted(self.manifest.files)) or 'none'}",
            )
        return self.path / name


def open_artifact(path: Path, *, kind: str, digest: str = "", verify: bool = True) -> Artifact[Any]:
    """Read and verify the artifact in `path`.

    digest: the content digest it must have; empty where none is known. verify: check every file's digest;
    without it only the manifest's own seal and the sizes are checked.
    Raises StageFailed naming the file that is missing, truncated or changed, or if the artifact is of
    another kind, another than the one asked for, or was rejected by a gate.
    """
    manifest, kind = read_manifest(path, digest=digest), _FORMER_KINDS.get(kind, kind)
    if _FORMER_KINDS.get(manifest.kind, manifest.kind) != kind:
        raise StageFailed(f"{path} is not a {kind}", why=f"its manifest says {manifest.kind!r}")
    if manifest.rejected:
        raise StageFailed(f"the {kind} in {path} was rejected by a gate", why=manifest.rejected)
    _verify_files(path, manifest, contents=verify)
    try:
        spec = spec_type(kind).model_validate({**manifest.spec, "kind": kind})
    except ValidationError as error:
        raise StageFailed(
            f"the description in {path / MANIFEST} is not that of a {kind}", why=str(error)
        ) from None
    return Artifact(path, manifest, spec)


def spec_type(kind: str) -> type[Config]:
    """What describes an artifact of `kind`: the class of that kind in the file here that is named after it.

    So no reader knows them all, and a stage depends on those alone that it reads and writes.
    Raises StageFailed if there is no such kind.
    """
    try:
        found = vars(importlib.import_module(f"hpml.artifacts.{kind}")) if kind.isidentifier() else {}
    except ModuleNotFoundError:
        found = {}
    classes = (value for value in found.values() if isinstance(value, type) and issubclass(value, Config))
    for spec in classes:
        if "kind" in spec.model_fields and spec.model_fields["kind"].default == kind:
            return spec
    raise StageFailed(f"there is no kind of artifact called {kind[:40]!r}")


def read_manifest(path: Path, *, digest: str = "") -> Manifest:
    """The manifest of the artifact in `path`, its seal and digest checked.

    digest: the content digest it must have; empty where none is known. Raises StageFailed if it is absent,
    unreadable, of another format or tampered with, or if it is that of another artifact.
    """
    file = path / MANIFEST
    try:
        why = regular_files.problem(file)
        if why:
            raise OSError(f"it {why}")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StageFailed(
            f"{path} is not an artifact",
            why=f"cannot read {MANIFEST}: {error}",
            fix="give the folder that a stage wrote",
        ) from None
    manifest = parse_manifest(text, where=str(file))
    if digest and manifest.digest != digest:
        raise StageFailed(
            f"{path} holds another artifact than the one asked for",
            why=f"its digest is {manifest.digest[:12]}, not {digest[:12]}",
            fix="delete it and run its step again",
        )
    return manifest


def parse_manifest(text: str, *, where: str) -> Manifest:
    """The manifest in `text`, its seal and digest checked; `where` it is from is for the message.

    Raises StageFailed if it is unreadable, of another format or tampered with.
    """
    try:
        fields = json.loads(text)
        manifest = Manifest.model_validate(fields)
    except (ValueError, ValidationError):
        raise StageFailed(
            f"{where} is truncated or not a manifest of format {FORMAT_VERSION}", fix=_RUN_AGAIN
        ) from None
    expected = content_digest(manifest.kind, manifest.spec, manifest.files, manifest.rejected)
    if manifest.seal != _seal_of(fields) or manifest.digest != expected:
        raise StageFailed(
            f"{where} was changed after it was written", why="its seal does not match", fix=_RUN_AGAIN
        )
    return manifest


def _verify_files(path: Path, manifest: Manifest, *, contents: bool) -> None:
    for name, entry in manifest.files.items():
        _check_file_name(name)
        file = path / name
        if not file.is_file() or file.is_symlink():
            why = "it is missing"
        elif file.stat().st_size != entry.size_bytes:
            why = f"it has {file.stat().st_size} bytes instead of {entry.size_bytes}"
        elif contents and _sha256(file) != entry.sha256:
            why = "its SHA-256 differs from the manifest's"
        else:
            continue
        raise StageFailed(f"{file} is damaged", why=why, fix=_RUN_AGAIN)


def _check_file_name(name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not name or name == MANIFEST:
        raise StageFailed(f"an artifact lists a file outside itself: {name!r}")


def seal_artifact(
    folder: Path,
    *,
    spec: Config,
    metrics: Metrics,
    lineage: Lineage,
    rejected: str = "",
    incomplete: str = "",
) -> Manifest:
    """Write the manifest over what is in `folder` and sync it all to disk; the folder is then whole."""
    files: dict[str, FileEntry] = {}
    for file in sorted(folder.rglob("*")):
        mode = file.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):
            raise StageFailed(f"a stage wrote something that is not a plain file: {file}")
        name = file.relative_to(folder).as_posix()
        files[name] = FileEntry(sha256=_sha256(file), size_bytes=file.stat().st_size)
        _sync(file)
    kind = str(type(spec).model_fields["kind"].default)
    fields: dict[str, Any] = {
        "format": FORMAT_VERSION,
        "kind": kind,
        "spec": spec.model_dump(mode="json"),
        "files": {name: entry.model_dump() for name, entry in files.items()},
        "lineage": lineage.model_dump(mode="json"),
        "metrics": {name: float(value) for name, value in metrics.items()},
        "rejected": rejected,
    }
    if incomplete:
        fields["incomplete"] = incomplete
    fields["digest"] = content_digest(kind, fields["spec"], files, rejected)
    fields["seal"] = _seal_of(fields)
    write_text_atomic(folder / MANIFEST, json.dumps(fields, indent=1, sort_keys=True))
    return Manifest.model_validate(fields)


def copy_files(source: Artifact[Any], folder: Path) -> None:
    """Put every file of `source` into `folder`, as hard links where the file system allows it."""
    for name in source.manifest.files:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            place.hardlink_to(source.path / name)
        except OSError:
            shutil.copyfile(source.path / name, place)
