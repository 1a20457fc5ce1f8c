"""docker/*.lock: what the images hold, pinned by hash, in the versions that the tests here run with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {file.stem: file for file in sorted((ROOT / "docker").glob("*.lock"))}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"client": ["cluster"], "serving": ["serving"], "cpu": ["stages", "data"], "gpu": ["stages", "data"]}
OF_CUDA = re.compile(r"(nvidia|cuda)-.*|triton")  # what torch brings along, in the gpu lock only


def requirements(file: Path) -> list[str]:
    """The logical lines of a lock: a requirement, its marker, its hashes."""
    return file.read_text().replace("\\\n", " ").splitlines()


def pins(file: Path) -> set[tuple[str, str, str]]:
    """(name, version, marker) of all that a lock lists."""
    found = set()
    for line in requirements(file):
        requirement = Requirement(line.partition(" --hash")[0])
        (specifier,) = requirement.specifier
        assert specifier.operator == "==", line
        found.add((requirement.name, specifier.version, str(requirement.marker or "")))
    return found


def versions(file: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version, _ in pins(file):
        found.setdefault(name, set()).add(version)
    return found


def declared(extras: list[str]) -> list[Requirement]:
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


def test_there_is_a_lock_for_each_family_and_for_what_installs() -> None:
    assert set(LOCKS) == {*EXTRAS, "tools"}


@pytest.mark.parametrize("name", LOCKS)
def test_every_requirement_has_hashes_and_no_address(name: str) -> None:
    for line in requirements(LOCKS[name]):
        assert re.fullmatch(r"[^ ]+==[^ ]+( ; [^#]*?)?( +--hash=sha256:[0-9a-f]{64})+ *", line), line
        assert "://" not in line


@pytest.mark.parametrize("name", LOCKS)
def test_versions_are_those_of_the_project_lock(name: str) -> None:
    tested = versions(ROOT / "requirements.lock")
    for package, found in versions(LOCKS[name]).items():
        if package == "onnxruntime-gpu":  # the same library, built for GPUs
            assert found == tested["onnxruntime"]
        elif package == "torch":  # a machine chooses its build, so the project lock has none
            continue
        elif not (package == "uv" and name == "tools") and not (OF_CUDA.fullmatch(package) and name == "gpu"):
            assert found <= tested[package], (
                f"{package} is {found} here and {tested[package]} there: make lock"
            )


@pytest.mark.parametrize("family", EXTRAS)
def test_what_the_project_declares_is_in_the_lock(family: str) -> None:
    locked = versions(LOCKS[family])
    for requirement in declared(EXTRAS[family]):
        name = canonicalize_name(requirement.name)
        name = "onnxruntime-gpu" if (family, name) == ("gpu", "onnxruntime") else name
        assert name in locked, f"{requirement} is not in docker/{family}.lock: make lock"
        assert all(requirement.specifier.contains(version) for version in locked[name]), requirement


@pytest.mark.parametrize("family", EXTRAS)
def test_an_image_holds_no_development_tools(family: str) -> None:
    wanted = {canonicalize_name(requirement.name) for requirement in declared(EXTRAS[family])}
    tools = {canonicalize_name(requirement.name) for requirement in declared(["dev"])} - wanted
    assert not tools & set(versions(LOCKS[family]))


def test_the_client_is_light() -> None:
    assert not {"torch", "numpy", "mlflow", "onnxruntime", "scipy"} & set(versions(LOCKS["client"]))


def test_one_build_of_torch_and_of_onnx_runtime_an_image() -> None:
    cpu, gpu = versions(LOCKS["cpu"]), versions(LOCKS["gpu"])
    (of_cpu,), (of_gpu,) = cpu["torch"], gpu["torch"]
    assert of_cpu == f"{of_gpu}+cpu"
    assert "onnxruntime-gpu" not in cpu and "onnxruntime" not in gpu
    assert not [name for name in cpu if OF_CUDA.fullmatch(name)]
    assert [name for name in gpu if name.startswith("nvidia-cudnn")]
