"""The import rules, read from the source: what may import what, and what the command may wake."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from components.__main__ import STAGES

ROOT = Path(__file__).resolve().parents[1]
HALLWAY = {
    "errors",
    "contract",
    "artifacts",
    "images",
    "models",
    "targets",
    "training",
    "goals",
    "hardware",
    "process",
    "measurements",
    "page",
}
MODULES = sorted([*ROOT.glob("components/**/*.py"), *ROOT.glob("pipelines/**/*.py")])
VENDOR = {"tensorrt", "openvino", "modelopt", "torch_pruning"}


def imports(file: Path, *, top_level_only: bool = False) -> Iterator[str]:
    tree = ast.parse(file.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(file: Path) -> str:
    """The folder below components/ that a module belongs to."""
    return file.relative_to(ROOT / "components").parts[0]


def stage_modules() -> list[Path]:
    return [file for file in MODULES if file.is_relative_to(ROOT / "components") and room(file) in STAGES]


@pytest.mark.parametrize("file", stage_modules(), ids=lambda file: str(file.relative_to(ROOT)))
def test_a_stage_imports_its_own_folder_and_the_hallway(file: Path) -> None:
    for imported in imports(file):
        top, _, rest = imported.partition(".")
        assert top not in {"pipelines", "kfp", "argparse"}, imported
        assert top != "kubernetes" or room(file) == "deploy", imported
        assert top != "mlflow" or room(file) == "register", imported
        if top == "components":
            allowed = HALLWAY | {room(file), ""}  # "": the package itself, for its place
            may_reach = {"register": {"tracking"}, "prepare": {"storage"}}.get(room(file), set())
            assert rest.split(".")[0] in allowed | may_reach, imported


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_rules_for_every_module(file: Path) -> None:
    relative = file.relative_to(ROOT).as_posix()
    source = file.read_text()
    if relative.startswith("components/"):
        assert not any(name.split(".")[0] == "pipelines" for name in imports(file))
    if relative not in {"components/tracking.py"} and not relative.startswith("components/register/"):
        assert not any(name.split(".")[0] == "mlflow" for name in imports(file))
    may_read_environment = {
        "components/__init__.py",
        "components/__main__.py",
        "components/job.py",
        "components/storage.py",
        "components/tracking.py",
        "components/process.py",
        "components/deploy/standalone.py",  # a bundle's own script: it and the README turn telemetry off
        "components/deploy/readme.py",
        "components/training/distributed.py",
    }
    if relative.startswith("components/") and relative not in may_read_environment:
        assert "os.environ" not in source and "getenv" not in source
    assert file.name != "utils.py"


def test_a_module_with_a_vendors_library_on_top_is_imported_inside_functions_only() -> None:
    on_top = {file: set(imports(file, top_level_only=True)) for file in MODULES}
    bound = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file, names in on_top.items()
        if {name.split(".")[0] for name in names} & VENDOR
    ]
    for module in bound:
        for names in on_top.values():
            assert not any(name == module or name.startswith(f"{module}.") for name in names)


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_that_executes_data(file: Path) -> None:
    for name in imports(file):
        assert name.split(".")[0] not in {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load", "os.system", "yaml.unsafe_load"}
            for keyword in node.keywords:
                is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                assert not (keyword.arg in {"shell", "allow_pickle"} and is_true)


def test_the_command_wakes_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "onnx", "onnxruntime", "mlflow", "sklearn", "PIL", "pandas")
    ours = ("__main__", "graph", "recipe", "local", "results")
    code = (
        f"import sys, {', '.join('pipelines.' + name for name in ours)};"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_every_stage_of_the_graph_has_an_entrypoint_and_a_row_of_resources() -> None:
    from pipelines.resources import RESOURCES

    source = (ROOT / "pipelines" / "graph.py").read_text()
    called = re.findall(r"step\(\s*(\w+)\.run", source)
    assert set(called) == set(STAGES) == set(RESOURCES)
    for stage in STAGES:
        assert (ROOT / "components" / stage / "stage.py").is_file()


def test_the_graph_names_each_stage_once() -> None:
    """One definition: a stage is called in one place (export in two: the reference, and the variants)."""
    called = re.findall(r"step\(\s*(\w+)\.run", (ROOT / "pipelines" / "graph.py").read_text())
    assert sorted(called) == sorted([*STAGES, "export"])


def test_telemetry_is_off_before_any_library_is_imported() -> None:
    code = (
        "import os, components;"
        "print(os.environ['ORT_DISABLE_TELEMETRY'], os.environ['MLFLOW_DISABLE_TELEMETRY'],"
        " os.environ['NNCF_DISABLE_TELEMETRY'])"
    )
    for package in ("components", "pipelines"):
        answer = subprocess.run(
            [sys.executable, "-c", code.replace("import os, components", f"import os, {package}")],
            capture_output=True,
            text=True,
            check=True,
            env={"PATH": "/usr/bin:/bin", "ORT_DISABLE_TELEMETRY": "0"},
        )
        assert answer.stdout.split() == ["1", "true", "1"]


def test_no_address_of_a_registry_and_no_path_of_a_machine_is_committed() -> None:
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in files:
        text = (ROOT / name).read_text(errors="ignore")
        assert not re.search(r"https?://(files\.|[^/ ]*(pypi|registry|proxy|mirror))", text), name
