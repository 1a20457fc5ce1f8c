"""A bundle that is to be deployed, and what it needs of where it runs."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import JsonValue

from hpml.core.contract import validate
from hpml.core.errors import StageFailed
from hpml.measuring.subjects.bundle import BUNDLE, BundleFacts, BundleSubject
from hpml.pipelines.delivery.release import Release
from hpml.pipelines.delivery.smoke_limits import Benchmark
from hpml.targets import AnyTarget

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")  # as hpml serve takes them


@dataclass(frozen=True)
class Deployable:
    """The bundle in `folder`. home: the workspace that has the run that made it, if any has."""

    folder: Path
    home: Path

    @property
    def subject(self) -> BundleSubject:
        """It as what can be measured and checked."""
        return BundleSubject(folder=self.folder)

    @cached_property
    def facts(self) -> BundleFacts:
        """What bundle.json says. Raises StageFailed if it cannot be read."""
        return self.subject.facts()

    @cached_property
    def target(self) -> AnyTarget:
        """What built its engine."""
        target: AnyTarget = validate(AnyTarget, self.facts.engine.target, where="the target of the engine")
        return target

    @property
    def title(self) -> str:
        """The model and its version, for people."""
        return f"{self.facts.model_name} version {self.facts.model_version or '(none)'}"

    @property
    def name(self) -> str:
        """The model's name as far as it can be part of a host's; "" if nothing of it can."""
        return _as_label(self.facts.model_name)

    @property
    def revision(self) -> str:
        """What tells its versions apart beside the name."""
        return _as_label(f"v{self.facts.model_version}")

    @cached_property
    def digest(self) -> str:
        """Of all its content."""
        return self.subject.digest

    def released(self, uri: str, settings: dict[str, JsonValue]) -> Release:
        """It, as servers find it at `uri` and are told to serve it."""
        return Release(
            digest=self.digest,
            uri=uri,
            model_name=self.facts.model_name,
            model_version=str(self.facts.model_version),
            engine_digest=self.facts.engine_digest,
            verified=not self.facts.unverified,
            settings=settings,
        )

    @property
    def benchmark(self) -> Benchmark | None:
        """What its engine was registered with; None where that is not known."""
        latency, cpu = self.facts.measured.get("latency_ms_p50"), self.facts.measured_on
        value = latency.get("value") if isinstance(latency, dict) else None
        return Benchmark(float(value), cpu) if isinstance(value, int | float) and cpu else None

    @property
    def runs_on_gpu(self) -> bool:
        """Whether its engine was built for an NVIDIA GPU."""
        return self.facts.engine.identity.get("device", "cpu").startswith("cuda")

    @property
    def threads(self) -> int | None:
        """Those its engine was measured with; None if it was not, or runs on a GPU."""
        return self.facts.settings.threads if self.facts.settings and not self.runs_on_gpu else None

    @property
    def size_bytes(self) -> int:
        """Of its files together."""
        return sum((self.folder / name).stat().st_size for name in self.files)

    @property
    def files(self) -> Iterable[str]:
        """The names of its files."""
        return (*self.facts.files, BUNDLE)

    def check(self) -> None:
        """Raise StageFailed naming the file that is missing, changed, or not of the bundle, or the name that
        would be more than a name where it is written.
        """
        for text in (self.facts.model_name, str(self.facts.model_version) or "none"):
            if not _PLAIN.fullmatch(text):
                raise StageFailed("the bundle is not deployed", why=f"{text[:80]!r} is no name or version")
        self.subject.check_files(self.facts)

    def copy_to(self, place: Path) -> None:
        """Copy its files, and no other."""
        for name in self.files:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / name, place / name)


def _as_label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
