"""The only reader and writer of artifact directories.

An artifact is a folder of files plus `manifest.json`. The manifest lists every file with size and SHA-256,
carries a typed description (`spec`) of what the next reader needs, and says where it came from (`lineage`).
`digest` identifies the content (kind, spec, files): two steps that write the same bytes write the same
artifact. `seal` covers the whole manifest, lineage included. A folder is written beside its place, synced
and renamed, so it exists whole or not at all; every reader verifies what it reads.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import uuid
from pathlib import Path, PurePosixPath
from typing import Any, Generic, Literal

from pydantic import Field, JsonValue, ValidationError

from components import regular_files
from components.contract import Config, SpecT, canonical_json
from components.errors import StageFailed
from components.measurements import CeilingsSpec, DiagnosisSpec, MeasurementsSpec

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


# ------------------------------------------------------------------------------------- what each kind carries


class SplitSpec(Config):
    """One split of a dataset: `<split>_images.npy` uint8 NHWC and `<split>_labels.npy` int64."""

    rows: int
    class_counts: tuple[int, ...]


class PictureSpec(Config):
    """How a picture's file becomes uint8 HWC pixels: noted by `prepare`, done by components/pictures.py.

    Where the data came as arrays, no picture was read, and this is a convention for whoever serves the model.
    Colour profiles are ignored. Grey (mode L) is (299 R + 587 G + 114 B) / 1000.
    """

    data_from: Literal["pictures", "arrays"]
    formats: tuple[str, ...]
    max_pixels: int  # larger pictures are refused undecoded
    exif_transpose: bool
    background: int = Field(ge=0, le=255)  # level of grey below what is transparent, and around
    mode: Literal["L", "RGB"]
    resize: Literal["shrink", "none"]  # in proportion and never enlarged; none: other sizes are refused
    resampling: Literal["lanczos"]
    reducing_gap: float  # of Pillow's `thumbnail`
    fit_within_hw: tuple[int, int]
    size_hw: tuple[int, int]  # with the background around
    pillow: str  # its version; another may decode or resample otherwise
    golden_sha256: tuple[tuple[str, str], ...]  # of the pixels that each of components/golden_pictures became


class DatasetSpec(Config):
    """A labelled image set as memory-mappable arrays; splits are named `train` and `test`."""

    kind: Literal["dataset"] = "dataset"
    class_names: tuple[str, ...]
    image_shape_hwc: tuple[int, int, int]
    splits: dict[str, SplitSpec]
    mean: tuple[float, ...]  # per channel, of pixel / 255 over the train split
    std: tuple[float, ...]
    source: str
    licence: str
    notes: tuple[str, ...] = ()  # what was left out of the source, and why
    pictures: PictureSpec | None = None  # None in artifacts of before this was noted


class ArchitectureSpec(Config):
    """How to build a network before its channel plan: a name of ours or `package.module:callable`."""

    name: str
    arguments: dict[str, JsonValue] = Field(default_factory=dict)


class InputSpec(Config):
    """What a model takes: `x_nchw` float32, (pixel / 255 - mean) / std per channel; the batch is free."""

    name: str = "x_nchw"
    shape_chw: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pictures: PictureSpec | None = None  # as the dataset has it


class QuantizationSpec(Config):
    """What an exporter has to quantize, and with which samples of the train split it calibrates."""

    scheme: Literal["static"]
    weights: Literal["int8-per-channel", "int8-per-tensor"]
    activations: Literal["auto", "uint8", "int8"]  # auto: the benchmark chooses
    calibration: Literal["minmax", "percentile"]
    calibration_rows: tuple[int, ...]
    excluded_layers: tuple[str, ...] = ()


class ModelSpec(Config):
    """A trained network: `model.safetensors`, and `history.json` with the curves of its training.

    `channel_plan` maps a layer's name to the sizes it has after pruning, for example
    {"layer1.0.conv1": {"in_channels": 16, "out_channels": 8}}; None where nothing was removed.
    One that is "not built", because a method does not apply to its network, has no files and no figures.
    """

    kind: Literal["model"] = "model"
    status: Literal["built", "not built"] = "built"
    reason: str = ""  # why it was not built
    architecture: ArchitectureSpec
    input: InputSpec
    class_names: tuple[str, ...]
    methods: tuple[str, ...] = ()
    channel_plan: dict[str, dict[str, int]] | None = None
    quantization: QuantizationSpec | None = None
    parameters: int
    macs: int  # multiply-accumulates for one sample
    accuracy_top1: float  # of the network in torch, on the test split


class EngineSpec(Config):
    """What a runtime loads, with golden samples: `golden_x_nchw.npy` and `golden_logits.npy`.

    `test_logits.npy`, float32 (rows, classes), is what the engine says of the whole test split.

    variants: the same engine built otherwise, where only a measurement can say which is faster; each in a
    folder of that name, with files of the same names.
    """

    kind: Literal["engine"] = "engine"
    target: dict[str, JsonValue]  # the resolved config of the target that built it
    status: Literal["built", "not built"]
    reason: str = ""  # why it was not built
    file: str = ""  # what the runtime opens
    precision: str
    methods: tuple[str, ...]
    input: InputSpec
    class_names: tuple[str, ...]
    identity: dict[str, str] = Field(default_factory=dict)  # runtime, version, ISA or GPU it is bound to
    notes: tuple[str, ...] = ()  # choices made while building that a reader should know
    size_bytes: int = 0
    parameters: int = 0
    macs: int = 0
    accuracy_top1: float = 0.0  # measured on this engine, on the test split
    max_abs_error: float = 0.0  # of logits, against the model in torch
    top1_agreement: float = 0.0  # with the model in torch
    variants: dict[str, EngineSpec] = Field(default_factory=dict)

    def of_variant(self, name: str) -> EngineSpec:
        """The engine as it is in the folder `name`, alone; "" is the one that is not in a folder."""
        return self.variants[name] if name else self.model_copy(update={"variants": {}})


class ReportSpec(Config):
    """`report.html` (self-contained, no scripts), `figures.json` and `figures.csv`."""

    kind: Literal["report"] = "report"
    title: str


class RegistrationSpec(Config):
    """A version in the model registry."""

    kind: Literal["registration"] = "registration"
    registry: str  # the tracking URI, without credentials
    model_name: str
    version: int
    aliases: tuple[str, ...]
    engine_digest: str
    champion_reason: str


class BundleSpec(Config):
    """A deployable bundle: engine, preprocessing.json, bundle.json, golden samples, README.md."""

    kind: Literal["bundle"] = "bundle"
    model_name: str
    engine_name: str
    engine_digest: str
    file: str
    verified: tuple[str, ...]  # what was checked in a clean process


SPECS: dict[str, type[Config]] = {
    spec.model_fields["kind"].default: spec
    for spec in (
        DatasetSpec,
        ModelSpec,
        EngineSpec,
        MeasurementsSpec,
        CeilingsSpec,
        DiagnosisSpec,
        ReportSpec,
        RegistrationSpec,
        BundleSpec,
    )
}


# ---------------------------------------------------------------------------------------------- the manifest


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


# ------------------------------------------------------------------------------------------- reading, writing


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
    manifest = read_manifest(path, digest=digest)
    if manifest.kind != kind:
        raise StageFailed(f"{path} is not a {kind}", why=f"its manifest says {manifest.kind!r}")
    if manifest.rejected:
        raise StageFailed(f"the {kind} in {path} was rejected by a gate", why=manifest.rejected)
    _verify_files(path, manifest, contents=verify)
    try:
        spec = SPECS[kind].model_validate(manifest.spec)
    except ValidationError as error:
        raise StageFailed(
            f"the description in {path / MANIFEST} is not that of a {kind}", why=str(error)
        ) from None
    return Artifact(path, manifest, spec)


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
            f"{where} is truncated or not a manifest of format {FORMAT_VERSION}",
            fix="delete the artifact and run its step again",
        ) from None
    expected = content_digest(manifest.kind, manifest.spec, manifest.files, manifest.rejected)
    if manifest.seal != _seal_of(fields) or manifest.digest != expected:
        raise StageFailed(
            f"{where} was changed after it was written",
            why="its seal does not match",
            fix="delete the artifact and run its step again",
        )
    return manifest


def _verify_files(path: Path, manifest: Manifest, *, contents: bool) -> None:
    for name, entry in manifest.files.items():
        _check_file_name(name)
        file = path / name
        problem = ""
        if not file.is_file() or file.is_symlink():
            problem = "it is missing"
        elif file.stat().st_size != entry.size_bytes:
            problem = f"it has {file.stat().st_size} bytes instead of {entry.size_bytes}"
        elif contents and _sha256(file) != entry.sha256:
            problem = "its SHA-256 differs from the manifest's"
        if problem:
            raise StageFailed(
                f"{file} is damaged", why=problem, fix="delete the artifact and run its step again"
            )


def _check_file_name(name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not name or name == MANIFEST:
        raise StageFailed(f"an artifact lists a file outside itself: {name!r}")


def new_folder_beside(path: Path) -> Path:
    """A fresh, empty, hidden folder on the same file system as `path`, to be renamed to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    folder.mkdir()
    return folder


def seal_artifact(
    folder: Path,
    *,
    spec: Config,
    metrics: dict[str, float],
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
        "metrics": metrics,
        "rejected": rejected,
    }
    if incomplete:
        fields["incomplete"] = incomplete
    fields["digest"] = content_digest(kind, fields["spec"], files, rejected)
    fields["seal"] = _seal_of(fields)
    write_text_atomic(folder / MANIFEST, json.dumps(fields, indent=1, sort_keys=True))
    return Manifest.model_validate(fields)


def publish(folder: Path, path: Path) -> None:
    """Rename a sealed `folder` to its place `path`.

    If `path` exists already, it holds the same content (places are named by content or are new), and the
    second copy is dropped.
    """
    try:
        folder.rename(path)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        shutil.rmtree(folder)
        return
    _sync(path.parent)


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the new one, never a part."""
    write_bytes_atomic(path, text.encode())


def write_bytes_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees the old file or the new one, never a part."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a failed write does not say of which file
        raise
    finally:
        part.unlink(missing_ok=True)
    _sync(path.parent)


def copy_files(source: Artifact[Any], folder: Path) -> None:
    """Put every file of `source` into `folder`, as hard links where the file system allows it."""
    for name in source.manifest.files:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            place.hardlink_to(source.path / name)
        except OSError:
            shutil.copyfile(source.path / name, place)


def build_of(engine: Artifact[EngineSpec], variant: str) -> Artifact[EngineSpec]:
    """The build `variant` of an engine as an artifact of its own (no golden inputs); "" is `engine`."""
    if not variant:
        return engine
    folder = f"{variant}/"
    files = {
        name.removeprefix(folder): entry
        for name, entry in engine.manifest.files.items()
        if name.startswith(folder)
    }
    manifest = engine.manifest.model_copy(update={"files": files})
    return Artifact(engine.path / variant, manifest, engine.spec.of_variant(variant))


def copy_engine(source: Artifact[EngineSpec], variant: str, folder: Path) -> EngineSpec:
    """Put one of the builds of an engine into `folder`, "" for that which is no variant; its description."""
    copy_files(source, folder)
    if variant:
        for file in (folder / variant).iterdir():
            file.replace(folder / file.name)
    for name in source.spec.variants:
        shutil.rmtree(folder / name)
    return source.spec.of_variant(variant)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
