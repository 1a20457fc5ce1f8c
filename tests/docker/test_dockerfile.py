"""The Dockerfile and what goes into a build, read as text: nothing is built here."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hpml.pipelines.cluster.config import FAMILIES
from hpml.pipelines.cluster.pods import UID

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Stage:
    """One FROM of a Dockerfile: its base as written, and its instructions as (name, rest of the line)."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, name: str) -> list[str]:
        return [rest for instruction, rest in self.instructions if instruction == name]


def instructions(file: Path) -> Iterator[tuple[str, str]]:
    """The instructions of a Dockerfile, continued lines joined, comments left out."""
    lines = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, " ".join(rest.split())


@pytest.fixture(scope="module")
def arguments() -> dict[str, str]:
    """The ARGs before the first FROM: the base images."""
    found: dict[str, str] = {}
    for name, rest in instructions(ROOT / "docker" / "Dockerfile"):
        if name == "FROM":
            break
        assert name == "ARG"
        key, _, value = rest.partition("=")
        found[key] = value
    return found


@pytest.fixture(scope="module")
def stages() -> dict[str, Stage]:
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for name, rest in instructions(ROOT / "docker" / "Dockerfile"):
        if name == "FROM":
            base, _, alias = rest.partition(" AS ")
            current = found[alias] = Stage(base)
        elif current:
            current.instructions.append((name, rest))
    return found


def lineage(stages: dict[str, Stage], name: str) -> list[tuple[str, str]]:
    """The instructions that make the image `name`, those of its bases first."""
    stage = stages[name]
    inherited = lineage(stages, stage.base) if stage.base in stages else []
    return inherited + stage.instructions


def last(stages: dict[str, Stage], family: str, instruction: str) -> str:
    return [rest for name, rest in lineage(stages, family) if name == instruction][-1]


def test_bases_are_pinned_by_digest(arguments: dict[str, str], stages: dict[str, Stage]) -> None:
    for base in arguments.values():
        assert re.fullmatch(r"[a-z.]+/[a-z/]+:\d[\w.-]+@sha256:[0-9a-f]{64}", base), base
    for name, stage in stages.items():
        assert stage.base in stages or stage.base[2:-1] in arguments, f"{name} is from {stage.base}"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_of_a_recipe_has_an_image(stages: dict[str, Stage], family: str) -> None:
    assert last(stages, family, "USER") == f"{UID}:{UID}"
    entrypoint = '["hpml"]' if family == "client" else '["python", "-m", "hpml.components"]'
    assert last(stages, family, "ENTRYPOINT") == entrypoint
    environment = last(stages, family, "ENV") if family != "gpu" else last(stages, "runtime", "ENV")
    assert environment == last(stages, "runtime", "ENV")
    labels = last(stages, family, "LABEL")
    for name in ("title", "licenses", "version", "revision", "source"):
        assert f"org.opencontainers.image.{name}=" in labels
    assert f'"hpml-{family}"' in labels


@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_of_code_leaves_the_packages_of_an_image_alone(
    stages: dict[str, Stage], family: str
) -> None:
    steps = lineage(stages, family)
    installed = next(
        index for index, (_, rest) in enumerate(steps) if "install-locked" in rest and "RUN" in _
    )
    for name, rest in steps[: installed + 1]:
        assert name != "COPY" or rest.startswith("docker/"), f"{rest} comes before the packages"
        assert name != "LABEL", "the labels change with every commit"


def test_nothing_is_fetched_that_no_lock_lists(stages: dict[str, Stage]) -> None:
    for name, stage in stages.items():
        assert not stage.all("ADD"), f"{name}: COPY says what enters, ADD fetches and unpacks"
        for command in stage.all("RUN"):
            assert not re.search(r"\b(curl|wget|apt-get|git)\b", command), command
            assert "pip install" not in command or "--require-hashes" in command, command
    for script in ("install-locked", "install-code"):
        for line in (ROOT / "docker" / script).read_text().splitlines():
            assert "pip install" not in line or "--require-hashes" in line or "/wheel/*.whl" in line, line


def test_what_installs_is_in_no_image(stages: dict[str, Stage]) -> None:
    for family in FAMILIES:
        for name, rest in lineage(stages, family):
            if name == "COPY":
                assert "--from=tools" not in rest and "/opt/tools" not in rest, rest


# ------------------------------------------------------------------------------------------- .dockerignore


def enters(path: str) -> bool:
    """Whether .dockerignore lets `path` into a build: of the patterns that match it, the last one decides."""
    inside = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!")
            expression = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            if re.fullmatch(f"{expression}(/.*)?", path):
                inside = line.startswith("!")
    return inside


def test_a_build_gets_what_it_copies_and_nothing_else(stages: dict[str, Stage]) -> None:
    copied = {
        source
        for stage in stages.values()
        for rest in stage.all("COPY")
        if not rest.startswith("--from")
        for source in rest.split()[:-1]
    }
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = [path for path in listed.splitlines() if (ROOT / path).exists()]
    tracked += [str(file.relative_to(ROOT)) for file in (ROOT / "docker").iterdir()]
    for path in tracked:
        needed = any(path == source or path.startswith(f"{source}/") for source in copied)
        assert enters(path) == needed, path
    assert sum(map(enters, tracked)) > 100, "the sources enter"


@pytest.mark.parametrize(
    "path",
    [
        ".env",
        ".git/config",
        ".venv/bin/python",
        "runs/2026/tracking.jsonl",
        "docker/.env",
        "docker/token",
        "kubeconfig",
        "components/__pycache__/errors.cpython-311.pyc",
        "components/train/__pycache__/stage.cpython-311.pyc",
        "hpml_pipeline.egg-info/PKG-INFO",
    ],
)
def test_what_lies_about_a_checkout_does_not_enter(path: str) -> None:
    assert not enters(path)
