"""The store of a workspace: artifacts by content, and which key led to which content.

    <home>/.store/objects/<content digest>/   artifacts, read-only
    <home>/.store/keys/<key>.json             {"digest", "material", "incomplete"}
    <home>/.store/newest/<step>               the key of the newest result of a step of that name
    <home>/.store/incoming/                   what a running step is about to deliver
    <home>/.store/scratch/<key>/              checkpoints of unfinished and incomplete steps
    <home>/.store/locks/                      one lock a key, and one for gc

Safe for several runs at once: a step is computed under the lock of its key, everything appears by rename, and
locks are the kernel's, so that a killed process leaves none behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpml.artifacts.folder import Artifact, Manifest, open_artifact, read_manifest
from hpml.core.atomic_files import publish
from hpml.core.errors import HpmlError, StageFailed, Unavailable
from hpml.pipelines.engine.cache_keys import CacheKeyInputs
from hpml.pipelines.engine.garbage import Needed, Removed
from hpml.pipelines.engine.keys import Keys, Record


class Store(Keys):
    """The artifacts of the workspace `home`."""

    def __init__(self, home: Path) -> None:
        self.root = home / ".store"
        super().__init__(str(self.root))
        try:
            for folder in ("objects", "keys", "newest", "incoming", "scratch", "locks"):
                (self.root / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(
                f"cannot use {home} as the workspace", why=str(error), fix="give another --home"
            ) from None

    # -------------------------------------------------------------------------------------- keys and objects

    def lookup(self, key: str) -> str | None:
        """The content digest that `key` led to, if that artifact is still whole (sizes and seal checked).

        None for one that was incomplete: whoever needs it makes it again, from what its scratch has.
        """
        record = self._record(key)
        if record is None or record.incomplete:
            return None
        try:
            self.open(record.digest, verify=False)
        except HpmlError:
            return None
        return record.digest

    def object_path(self, digest: str) -> Path:
        """Where the artifact with this content digest is, or would be."""
        return self.root / "objects" / digest

    def location(self, digest: str) -> str:
        """What a step is told to read the artifact from."""
        return str(self.object_path(digest))

    def manifest(self, digest: str) -> Manifest:
        """The manifest of the artifact with this content digest.

        Raises StageFailed if it is absent or damaged, or if another artifact was put in its place.
        """
        return read_manifest(self.object_path(digest), digest=digest)

    def open(self, digest: str, *, verify: bool = True) -> Artifact[Any]:
        """The artifact with this content digest, verified.

        Raises StageFailed if it is absent or damaged, or if another artifact was put in its place.
        """
        kind = self.manifest(digest).kind
        return open_artifact(self.object_path(digest), kind=kind, digest=digest, verify=verify)

    def incoming(self, step: str) -> str:
        """A fresh path for a step to deliver its artifact to."""
        return str(self.root / "incoming" / f"{step}-{uuid.uuid4().hex[:12]}")

    def accept(self, delivered: str, key: str, key_inputs: CacheKeyInputs, step: str) -> str:
        """Move a delivered artifact to its place, remember that `key` leads there, and return its digest."""
        incomplete = read_manifest(Path(delivered)).incomplete
        digest = self.add(Path(delivered))
        material = dict(key_inputs.fields)
        self._remember(key, Record(digest=digest, material=material, incomplete=incomplete), step)
        return digest

    def add(self, delivered: Path) -> str:
        """Move an artifact to its place, and return its digest.

        What is damaged there, or another artifact, is replaced.
        """
        manifest = read_manifest(delivered)
        place = self.object_path(manifest.digest)
        if place.exists():
            try:
                self.open(manifest.digest)
            except HpmlError:
                place.rename(self.root / "incoming" / f"damaged-{uuid.uuid4().hex[:12]}")
        publish(delivered, place)
        _make_read_only(place)
        return manifest.digest

    def keep_rejected(self, delivered: str, folder: Path) -> bool:
        """Move what a gate refused to `folder`, for a look; returns whether there was anything."""
        if not Path(delivered).exists():
            return False
        folder.parent.mkdir(exist_ok=True)
        shutil.move(delivered, folder)
        return True

    def scratch(self, key: str) -> str:
        """The folder that outlives failed and incomplete attempts at `key`."""
        return str(self.root / "scratch" / key)

    # ------------------------------------------------------------------------------------------------- locks

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold off gc while a run is under way, or what is stored is read or measured."""
        file = os.open(self.root / "locks" / "store.lock", os.O_RDONLY | os.O_CREAT, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_SH)
            yield
        finally:
            os.close(file)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep runs waiting while something is removed. Raises Unavailable while the store is in use."""
        with self._open_lock("store") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Unavailable(
                    "a run or a benchmark is under way in this workspace", fix="try gc when it has ended"
                ) from None
            yield

    def try_begin(self, key: str, *, alone: bool) -> ExitStack | None:
        """The right to compute `key`, and a share of this workspace's use of the machine, or all of it.

        None if other runs have one of them. Closing it lets them; so does the end of the process.
        """
        with ExitStack() as held:
            for name, kind in ((key, fcntl.LOCK_EX), ("machine", fcntl.LOCK_EX if alone else fcntl.LOCK_SH)):
                try:
                    fcntl.flock(held.enter_context(self._open_lock(name)), kind | fcntl.LOCK_NB)
                except BlockingIOError:
                    return None
            return held.pop_all()

    def _open_lock(self, name: str) -> Any:
        return (self.root / "locks" / f"{name}.lock").open("a+")

    # ---------------------------------------------------------------------------------------------------- gc

    def collect(self, needed: Needed, *, dry_run: bool = False) -> list[Removed]:
        """Remove every artifact that is not needed, and what crashed runs left behind. To be called `alone`.

        The checkpoints of steps that a kept run did not finish, or left incomplete, stay.
        """
        keep = needed.artifacts(self.manifest)
        objects, incoming, scratch = (
            sorted((self.root / name).iterdir()) for name in ("objects", "incoming", "scratch")
        )
        doomed = {path: f"{_kind(path)} {path.name[:12]}" for path in objects if path.name not in keep}
        doomed |= {path: f"undelivered {path.name}" for path in incoming}
        doomed |= {path: f"checkpoints {path.name[:12]}" for path in scratch if path.name not in needed.keys}
        removed = [Removed(name, _disk_bytes(path)) for path, name in doomed.items()]
        if not dry_run:
            for path in doomed:
                shutil.rmtree(path)
            for key in (self.root / "keys").glob("*.json"):
                record = self._record(key.stem)
                if record is None or record.digest not in keep:
                    key.unlink()
            for lock in (self.root / "locks").glob("*.lock"):
                if lock.stem not in ("store", "machine"):
                    lock.unlink()
        return removed


def _kind(path: Path) -> str:
    try:
        return read_manifest(path).kind
    except HpmlError:
        return "damaged artifact"


def _make_read_only(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(0o444)


def _disk_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def copy_out(artifact: Artifact[Any], folder: Path) -> None:
    """Copy the files of an artifact, without its manifest, to `folder`, replacing it, whole or not at all.

    Raises StageFailed if the disk does not take them.
    """
    try:
        with TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as beside:
            new = Path(beside, "new")
            for name in artifact.manifest.files:
                place = new / name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(artifact.path / name, place)
            if folder.exists():
                folder.rename(Path(beside, "old"))
            new.rename(folder)
    except OSError as error:
        raise StageFailed(f"cannot write {folder}", why=str(error)) from None
