"""docs/add-a-method.md, followed to the letter in a copy of the code: one file and one row are enough."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact, open_artifact
from hpml.artifacts.model import ModelSpec

ROOT = Path(__file__).resolve().parents[1]


def test_a_method_is_one_file_and_one_row(
    tmp_path: Path, small_model: Artifact[ModelSpec], digits_data: Artifact[DatasetSpec]
) -> None:
    for package in ("components", "pipelines", "serving", "hpml"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True, ignore=ignored)
    page = (ROOT / "docs" / "add-a-method.md").read_text()
    code = re.search(r"<!-- sparsify.py -->\n +```python\n(.*?)```", page, re.DOTALL)
    assert code
    folder = tmp_path / "components" / "compress"
    (folder / "sparsify.py").write_text(textwrap.dedent(code[1]))
    table = (folder / "__init__.py").read_text()
    row = "from hpml.components.compress.sparsify import Sparsify\n"
    table = table.replace("from hpml.core.contract", row + "from hpml.core.contract", 1)
    opening = "METHODS: dict[str, type[Method]] = {"
    assert opening in table
    table = table.replace(opening, opening + '"sparsify": Sparsify,')
    (folder / "__init__.py").write_text(table)

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )

    done = python(
        *("-m", "hpml.components", "compress", "--config", json.dumps({"method": "sparsify", "share": 0.3})),
        *("--model", str(small_model.path), "--teacher", str(small_model.path)),
        *("--data", str(digits_data.path), "--out", str(tmp_path / "sparse")),
    )
    assert done.returncode == 0, done.stderr
    sparse = open_artifact(tmp_path / "sparse", kind="model")
    assert sparse.spec.methods == ("sparsify30",)
    assert sparse.spec.quality["accuracy_top1"] > 0.8

    variants = "{a: [{method: sparsify, share: 0.3}], b: [sparsfy]}"
    (tmp_path / "a.yaml").write_text(f"data: digits\nvariants: {variants}\n")
    refused = python("-m", "hpml.pipelines", "run", "a.yaml", "--dry-run")
    assert refused.returncode == 3 and "did you mean 'sparsify'?" in refused.stderr
