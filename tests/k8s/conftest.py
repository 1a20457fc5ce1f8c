"""The manifests as kustomize renders them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TEST_CLUSTER = Path.home() / ".cache" / "hpml-cluster" / "bin"

Objects = list[dict[str, Any]]


@cache
def _kustomize() -> list[str]:
    for command in (["kubectl", "kustomize"], ["kustomize", "build"]):
        program = shutil.which(command[0]) or shutil.which(command[0], path=str(TEST_CLUSTER))
        if program:
            return [program, *command[1:]]
    pytest.skip("neither kubectl nor kustomize is on PATH")


@pytest.fixture(scope="session")
def render(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Objects]:
    """Render a folder of k8s/, "overlays/kind", or the base with a component, "base+postgres"."""
    copy = tmp_path_factory.mktemp("manifests") / "k8s"
    shutil.copytree(ROOT / "k8s", copy)

    @cache
    def rendered(name: str) -> Objects:
        folder = copy / name
        if "+" in name:
            base, component = name.split("+")
            folder.mkdir()
            overlay = {"resources": [f"../{base}"], "components": [f"../components/{component}"]}
            (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
        answer = subprocess.run([*_kustomize(), str(folder)], capture_output=True, text=True, check=False)
        assert answer.returncode == 0, answer.stderr
        return [document for document in yaml.safe_load_all(answer.stdout) if document]

    return rendered
