"""Which key led to which content: what the stores on a disk and in S3 have in common.

<root>/keys/<key>.json      a Record
<root>/newest/<step>        the key of the newest result of a step of that name
"""

from __future__ import annotations

from pydantic import JsonValue, ValidationError

from hpml.core.contract import Config
from hpml.core.errors import StageFailed
from hpml.io import storage
from hpml.pipelines.engine.cache_keys import CacheKeyInputs


class Record(Config):
    """What a key led to. uri: of the artifact, where its digest does not say where it is."""

    digest: str
    uri: str = ""
    material: dict[str, JsonValue]
    incomplete: str = ""  # what is missing in the artifact; it is no cache hit then


class Keys:
    """The keys below `root`, a path or a URI."""

    def __init__(self, root: str) -> None:
        self._root = root

    def incomplete(self, key: str) -> str:
        """What is missing in the artifact that `key` led to, and why; empty if nothing is."""
        record = self._record(key)
        return record.incomplete if record else ""

    def last_key_inputs(self, step: str) -> CacheKeyInputs | None:
        """What the newest result of a step of this name was made of."""
        uri = f"{self._root}/newest/{step}"
        record = self._record(storage.read_text(uri)) if storage.exists(uri) else None
        return CacheKeyInputs(record.material) if record else None

    def _record(self, key: str) -> Record | None:
        uri = f"{self._root}/keys/{key}.json"
        try:
            return Record.model_validate_json(storage.read_text(uri)) if storage.exists(uri) else None
        except (OSError, ValidationError, StageFailed):  # damaged, or of another version
            return None

    def _write_record(self, key: str, record: Record) -> None:
        storage.write_text(f"{self._root}/keys/{key}.json", record.model_dump_json(exclude_defaults=True))

    def _remember(self, key: str, record: Record, step: str) -> None:
        """Have `key` lead to the result of `step` from now on."""
        self._write_record(key, record)
        storage.write_text(f"{self._root}/newest/{step}", key)
