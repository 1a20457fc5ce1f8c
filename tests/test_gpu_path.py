"""make test-gpu: what of it a CPU can run, and that torch, numpy and pydantic are enough for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpml.core import hardware
from tests.gpu import __main__ as gpu

ROOT = Path(__file__).resolve().parents[1]
# All that the pipeline can use beside torch, numpy and pydantic.
ABSENT = (
    *("boto3", "hypothesis", "kfp", "kubernetes", "mlflow", "mlxtend", "moto", "onnx", "onnxruntime"),
    *(
        "onnxscript",
        "PIL",
        "pynvml",
        "rich",
        "safetensors",
        "sklearn",
        "tensorrt",
        "torch_pruning",
        "typer",
        "yaml",
    ),
)


@pytest.fixture
def bare_python(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python in which none of ABSENT can be imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Without:\n"
        "    def __init__(self, finder): self.finder = finder\n"
        "    def __getattr__(self, name): return getattr(self.finder, name)\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        absent = name.partition('.')[0] in {ABSENT!r}\n"
        "        return None if absent else self.finder.find_spec(name, path, target)\n"
        "sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]\n"
    )
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def rows(printed: str) -> dict[str, str]:
    """What the table says of each part."""
    lines = printed[printed.index("\npart ") :].splitlines()[2:]
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines}


@pytest.mark.slow  # trains and measures in another Python; the parts have tests of their own
def test_torch_numpy_and_pydantic_are_enough_to_train_to_run_and_to_measure(
    bare_python: dict[str, str], tmp_path: Path
) -> None:
    parts = "training-fp32,images,eager,peaks,onnxruntime,pytest"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "gpu"), "--device", "cpu", "--parts", parts],
        cwd=tmp_path,
        env=bare_python,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(done.stdout)
    assert list(found) == parts.split(",")
    assert found["training-fp32"].startswith("passed") and "images/s" in found["training-fp32"]
    assert found["eager"].startswith("passed") and "100.00% of the classes agree" in found["eager"]
    assert found["peaks"].startswith("passed") and "Gflop/s" in found["peaks"]
    assert found["images"].startswith("passed")
    assert found["onnxruntime"] == "not run no onnx here"
    assert found["pytest"] == "not run no hypothesis here"


@pytest.mark.skipif(bool(hardware.gpu_names()), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("no NVIDIA GPU here: nothing was shown\n")
    assert set(rows(printed)) == set(gpu.PARTS)
    assert all(row.startswith("not run") for row in rows(printed).values())


def test_without_torch_or_pydantic_it_says_which(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "NEEDED", ("torch", "no_such_package"))
    assert gpu.main(["--device", "cpu"]) == 0
    assert (
        "no no_such_package here: nothing was shown; pip install no_such_package" in capsys.readouterr().out
    )


def test_a_part_that_hangs_is_killed_and_named_and_one_that_breaks_is_told(tmp_path: Path) -> None:
    slow, late = gpu.run_parts(
        ["installed", "peaks"], "cpu", tmp_path, total_s=0.2, limits_s={"installed": 60.0, "peaks": 60.0}
    )
    assert slow.state == "failed" and slow.said.startswith("killed after 0 s: ")
    assert (late.state, late.said) == ("not run", "the 0 s for all parts were over")
    (tmp_path / "data").write_text("in the way")
    [broken] = gpu.run_parts(["training-fp32"], "cpu", tmp_path, total_s=100.0)
    assert broken.state == "failed" and broken.said.startswith("exit code 1: ")
    assert "failed" in gpu.table([slow, late, broken])
