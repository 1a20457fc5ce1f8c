"""The store of runs whose steps are in a cluster: artifacts by content in S3, beside a workspace on disk.

    <uri>/artifacts/<step>-<hex>/   artifacts, as the steps delivered them
    <uri>/keys/<key>.json           {"digest", "uri", "material", "incomplete"}, written anew whenever it is
                                    used by a run
    <uri>/newest/<step>             the key of the newest result of a step of that name
    <uri>/scratch/<key>/            checkpoints of unfinished and incomplete steps
    <uri>/handover/<run>/<step>/    what a launcher in Kubeflow hands to its workers; left there if it fails

S3 has no rename: an artifact's manifest is written last, so that what has one is whole. It has no locks
either, and none are needed: two runs that compute the same key deliver to places of their own, and whichever
remembers its result last is the one that is found. The work was done twice, and nothing is wrong; not with
their checkpoints either, which have names by their content.

gc has no lock to wait for either, and runs of other workspaces are not known to it. So it leaves all that was
written or used within a time of grace, which is to be longer than a run. A run that comes to use a result in
the very second in which gc removes it, after that time, finds nothing at its place: its step fails, and the
next run makes it again.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

from hpml.artifacts.folder import MANIFEST, Artifact, Manifest, open_artifact, parse_manifest
from hpml.core.errors import HpmlError, StageFailed
from hpml.io import storage
from hpml.pipelines.engine.cache_keys import CacheKeyInputs
from hpml.pipelines.engine.garbage import Needed, Removed
from hpml.pipelines.engine.keys import Keys, Record
from hpml.pipelines.engine.store import Store

_READ_BY_STEPS_ONLY = {"dataset", "model", "engine"}  # the large ones; all other kinds are brought here


class ObjectStore(Keys):
    """The artifacts below `uri` (s3://bucket/prefix), for the workspace `home`.

    What commands such as `hpml report` read is also put into the workspace's own store. say: is told what the
    user should know. Every method raises Unavailable if S3 does not answer.
    """

    def __init__(self, home: Path, uri: str, say: Callable[[str], None]) -> None:
        self._local, self._uri, self._say = Store(home), uri.rstrip("/"), say
        super().__init__(self._uri)
        self._manifests: dict[str, Manifest] = {}  # by content digest, of all that this run came to know
        self._uris: dict[str, str] = {}

    def in_use(self) -> AbstractContextManager[None]:
        """Keep what is in the workspace's store. In S3 what was used lately is kept; see `collect`."""
        return self._local.in_use()

    # -------------------------------------------------------------------------------------- keys and objects

    def lookup(self, key: str) -> str | None:
        """The content digest that `key` led to, if all files of that artifact are still there.

        None for one that was incomplete: whoever needs it makes it again, from what its scratch has.
        """
        record = self._record(key)
        if record is None or record.incomplete:
            return None
        self._write_record(key, record)  # so gc sees that it is used
        try:
            manifest = self._read_manifest(record.uri)
            if manifest.digest != record.digest or set(manifest.files) - set(storage.list_names(record.uri)):
                return None
            self._note(manifest, record.uri)
        except StageFailed:  # it is gone or damaged
            return None
        return manifest.digest

    def _record(self, key: str) -> Record | None:
        record = super()._record(key)
        return record if record and record.uri.startswith(f"{self._uri}/artifacts/") else None

    def _read_manifest(self, uri: str) -> Manifest:
        file = f"{uri}/{MANIFEST}"
        return parse_manifest(storage.read_text(file), where=file)

    def _note(self, manifest: Manifest, uri: str) -> None:
        self._manifests[manifest.digest], self._uris[manifest.digest] = manifest, uri
        if manifest.kind not in _READ_BY_STEPS_ONLY:
            self.open(manifest.digest)

    def location(self, digest: str) -> str:
        """The URI of an artifact that was looked up or accepted."""
        return self._uris[digest]

    def manifest(self, digest: str) -> Manifest:
        """The manifest of an artifact that was looked up or accepted."""
        return self._manifests[digest]

    def open(self, digest: str) -> Artifact[Any]:
        """An artifact that was looked up or accepted, verified, from the workspace's store.

        It is downloaded if it is not there. Raises StageFailed if it is damaged.
        """
        try:
            return self._local.open(digest)
        except StageFailed:  # it is not here, or not whole
            folder = Path(self._local.incoming("fetched"))
            storage.fetch(self._uris[digest], folder)
            found = open_artifact(folder, kind=self._manifests[digest].kind)
            if found.digest != digest:
                raise StageFailed(
                    f"{self._uris[digest]} holds another artifact than a moment ago",
                    why=f"its digest is {found.digest[:12]}, not {digest[:12]}",
                    fix="run again; ask who else writes to this store",
                ) from None
            self._local.add(folder)
            return self._local.open(digest)

    def incoming(self, step: str) -> str:
        """A fresh URI for a step to deliver its artifact to."""
        return f"{self._uri}/artifacts/{step}-{uuid4().hex[:12]}"

    def accept(self, delivered: str, key: str, key_inputs: CacheKeyInputs, step: str) -> str:
        """Remember that `key` leads to the artifact at `delivered`, and return its content digest.

        Raises StageFailed if there is no artifact, or it is damaged.
        """
        manifest = self._read_manifest(delivered)
        self._note(manifest, delivered)
        fields = dict(key_inputs.fields)
        record = Record(
            digest=manifest.digest, uri=delivered, material=fields, incomplete=manifest.incomplete
        )
        self._remember(key, record, step)
        return manifest.digest

    def keep_rejected(self, delivered: str, folder: Path) -> bool:
        """Download what a gate refused to `folder`, for a look; returns whether there was anything."""
        part = Path(self._local.incoming("rejected"))
        try:
            if not storage.exists(f"{delivered}/{MANIFEST}"):
                return False
            storage.fetch(delivered, part)
        except HpmlError as error:  # the step's own failure is what matters
            self._say(f"what was refused is left at {delivered}: {error}")
            return False
        folder.parent.mkdir(exist_ok=True)
        shutil.move(part, folder)
        return True

    def scratch(self, key: str) -> str:
        """The URI of the folder that outlives failed and incomplete attempts at `key`."""
        return f"{self._uri}/scratch/{key}"

    # ------------------------------------------------------------------------------------------------- locks

    def try_begin(self, key: str, *, alone: bool) -> ExitStack:
        """Always granted: see the module's docstring; the machines are Kubernetes' to share out."""
        return ExitStack()

    # ---------------------------------------------------------------------------------------------------- gc

    def collect(self, needed: Needed, *, grace_s: float, dry_run: bool = False) -> list[Removed]:
        """Remove results, deliveries, handovers and checkpoints, if nobody needs them, older than `grace_s`.

        A result is as old as its last use by any run. Raises Unavailable.
        """
        ages = _Ages(self._uri)
        records = {name: self._record(name.removesuffix(".json")) for name in ages.folders("keys")}
        uris = {record.digest: record.uri for record in records.values() if record}

        def manifest_of(digest: str) -> Manifest:
            if digest not in uris:
                raise StageFailed(f"there is no artifact {digest[:12]} in {self._uri}")
            return self._read_manifest(uris[digest])

        keep = needed.artifacts(manifest_of)
        ages = _Ages(self._uri)  # anew: a run may have used something while the records were read
        stale = {
            name
            for name, record in records.items()
            if ages.youngest_s("keys", name) > grace_s
            and name.removesuffix(".json") not in needed.keys
            and (record is None or record.digest not in keep)
        }
        used = {record.uri for name, record in records.items() if record and name not in stale}
        kept = {
            "artifacts": {uri.removeprefix(f"{self._uri}/artifacts/") for uri in used},
            "scratch": needed.keys,
            "handover": frozenset[str](),
        }
        doomed = [
            (kind, name)
            for kind, names in kept.items()
            for name in ages.folders(kind)
            if name not in names and ages.youngest_s(kind, name) > grace_s
        ]
        if not dry_run:
            for name in stale:  # first, so that no run finds what is about to go
                storage.delete(f"{self._uri}/keys/{name}")
            for kind, name in doomed:
                storage.delete(f"{self._uri}/{kind}/{name}/{MANIFEST}")  # without one it is no artifact
                storage.delete(f"{self._uri}/{kind}/{name}")
        return [Removed(f"{kind}/{name}", ages.size_bytes(kind, name)) for kind, name in doomed]


class _Ages:
    """How old and how large what is below the folders of a store is, at the moment of its making."""

    def __init__(self, uri: str) -> None:
        self._found: dict[tuple[str, str], list[storage.Stored]] = defaultdict(list)
        for kind in ("artifacts", "keys", "scratch", "handover"):
            for path, found in storage.stored(f"{uri}/{kind}").items():
                self._found[kind, path.partition("/")[0]].append(found)

    def folders(self, kind: str) -> list[str]:
        """The names in the folder `kind`."""
        return [name for folder, name in self._found if folder == kind]

    def youngest_s(self, kind: str, name: str) -> float:
        """The age of the youngest object in it; of one that is gone, none."""
        return min((found.age_s for found in self._found.get((kind, name), ())), default=0.0)

    def size_bytes(self, kind: str, name: str) -> int:
        """Of all objects in it."""
        return sum(found.size_bytes for found in self._found[kind, name])
