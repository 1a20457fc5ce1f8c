"""docker/build: which program it takes, and what it asks of it. The programs here only note what they got."""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
RECORDS = """#!/bin/sh
[ "$1" = info ] && exit {works}
[ "$1" = images ] && {{ echo "386 MB"; exit 0; }}
printf '%s\\n' "{name} $*" >> {log}
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "asked"


def builders(folder: Path, log: Path, **works: bool) -> str:
    """A PATH on which each named builder answers `info` as given, with the programs a shell script needs."""
    for name in ("bash", "sh", "sed", "git", "dirname"):
        found = next(Path(place, name) for place in os.defpath.split(":") if Path(place, name).exists())
        (folder / name).symlink_to(found)
    for name, answers in works.items():
        (folder / name).write_text(RECORDS.format(name=name, works=int(not answers), log=log))
        (folder / name).chmod(0o755)
    return str(folder)


def build(path: str, *families: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path, "HOME": "/nonexistent", **variables}
    command = [str(ROOT / "docker" / "build"), *families]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_docker_command_without_an_engine_is_passed_over(tmp_path: Path, log: Path) -> None:
    path = builders(tmp_path, log, docker=False, podman=True, buildah=True)
    done = build(path)
    assert done.returncode == 0, done.stderr
    assert "building with podman" in done.stdout
    cpu, client = log.read_text().splitlines()
    assert cpu.startswith("podman build") and f"--target cpu --tag hpml-cpu:{VERSION} ." in cpu
    assert f"--target client --tag hpml-client:{VERSION} ." in client
    images = (f"hpml-cpu:{VERSION}", f"hpml-client:{VERSION}")
    assert done.stdout.splitlines()[-2:] == [f"{image:<50} 386 MB" for image in images]


def test_names_and_bases_are_the_callers(tmp_path: Path, log: Path) -> None:
    path = builders(tmp_path, log, buildah=True)
    done = build(path, "gpu", TAG="t1", PREFIX="registry.example/team/", BASE="mirror/python:3")
    assert done.returncode == 0, done.stderr
    asked = log.read_text()
    assert "--tag registry.example/team/hpml-gpu:t1" in asked and "--build-arg BASE=mirror/python:3" in asked
    assert "TENSORRT_BASE" not in asked and f"VERSION={VERSION}" in asked


def test_the_revision_is_that_of_the_checkout(tmp_path: Path, log: Path) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    build(builders(tmp_path, log, docker=True), "client")
    assert f"REVISION={head.stdout.strip()}" in log.read_text()


def test_without_a_builder_one_line_says_so(tmp_path: Path, log: Path) -> None:
    done = build(builders(tmp_path, log, docker=False))
    assert done.returncode == 6
    assert done.stderr == (
        "error: no image can be built: none of docker, podman, buildah works here -> install or start one\n"
    )


def test_an_unknown_family_is_refused_before_anything_is_built(tmp_path: Path, log: Path) -> None:
    done = build(builders(tmp_path, log, docker=True), "cpu", "gpus")
    assert done.returncode == 2 and "no family 'gpus'" in done.stderr
    assert not log.exists()
