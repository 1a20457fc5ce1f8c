"""What gc leaves, and what it removes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from hpml.artifacts.folder import Manifest
from hpml.components.register.references import References
from hpml.core.errors import HpmlError


@dataclass(frozen=True)
class Needed:
    """What stays.

    digests: of the artifacts that kept runs made. keys: of the steps of kept runs, whose checkpoints stay
    where they did not finish. versions: in model registries.
    """

    digests: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    versions: tuple[References, ...] = ()

    def artifacts(self, manifest_of: Callable[[str], Manifest]) -> set[str]:
        """The digests of all artifacts that stay.

        Of a registered version these are its engine, what that was made from (model and data), and its
        measurements. manifest_of: raises StageFailed for what is not stored.
        """
        engines = with_sources({version.engine_digest for version in self.versions}, manifest_of)
        return {*self.digests, *engines, *(version.measurements_digest for version in self.versions)}


@dataclass(frozen=True)
class Removed:
    """What was removed, or would be: its name for a reader, and its size."""

    name: str
    size_bytes: int


def with_sources(digests: Iterable[str], manifest_of: Callable[[str], Manifest]) -> set[str]:
    """`digests` and those of all that they were made from, as far as `manifest_of` knows them."""
    found: set[str] = set()
    pending = list(digests)
    while pending:
        digest = pending.pop()
        if digest in found:
            continue
        found.add(digest)
        with suppress(HpmlError):  # it is not stored here, or no longer
            pending.extend(manifest_of(digest).lineage.parents.values())
    return found
