"""The import rules, read from the source: what may import what, and what the command may import."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpml.components import STAGES

ROOT = Path(__file__).resolve().parents[1]
# The library, from the bottom up: each imports what stands before it.
LIBRARY = (
    *("core", "artifacts", "io", "data_files", "tasks", "models", "training", "targets"),
    *("measuring", "reporting", "steps"),
)
VENDOR = {"tensorrt", "openvino", "modelopt", "torch_pruning"}


@dataclass(frozen=True)
class Import:
    """`import a.b` or `from a import b`, both as a.b."""

    name: str
    line: int
    is_top_level: bool

    @property
    def package(self) -> str:
        return self.name.split(".")[0]


class Module:
    """A file of the product, read and parsed once for all the rules."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.name = file.relative_to(ROOT).as_posix()
        self.source = file.read_text()
        tree = ast.parse(self.source)
        self.nodes = list(ast.walk(tree))
        top_level = set(tree.body)
        self.imports = [
            Import(name, node.lineno, node in top_level)
            for node in self.nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in _imported(node)
        ]

    @property
    def module(self) -> str:
        """The name that it is imported by."""
        parts = self.file.relative_to(ROOT).with_suffix("").parts
        parts = parts if parts[0] == "hpml" else ("hpml", *parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def stage(self) -> str:
        """The stage that it belongs to, or nothing."""
        top, _, rest = self.name.partition("/")
        folder = rest.split("/")[0]
        return folder if top == "components" and folder in STAGES else ""

    def at(self, line: int, what: str) -> str:
        """What was found, as pytest's reader wants it: file:line."""
        return f"{self.name}:{line}: {what}"


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] if node.module else []


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    files = (
        file for top in ("hpml", "components", "serving", "pipelines") for file in (ROOT / top).rglob("*.py")
    )
    return [Module(file) for file in sorted(files)]


@pytest.fixture(scope="module")
def imports(modules: list[Module]) -> dict[str, set[str]]:
    """Module -> the modules of ours that it imports anywhere, function bodies included."""
    names = {module.module for module in modules}

    def ours(one: Import) -> str:
        return one.name if one.name in names else one.name.rpartition(".")[0]

    return {
        module.module: ({ours(one) for one in module.imports} & names) - {module.module} for module in modules
    }


def test_each_layer_imports_what_stands_below_it(imports: dict[str, set[str]]) -> None:
    """`pipelines` on `serving` on `components` on the library; a stage imports no other."""

    def height(module: str) -> int:
        folder = [*module.split("."), ""][1]
        return [*LIBRARY, "components", "serving", "pipelines"].index(folder) if folder else -1

    forbidden = [
        f"{module} imports {other}"
        for module, others in imports.items()
        for other in others
        if height(other) > height(module)
    ]
    assert not forbidden


def test_what_is_imported_of_ours_is_there(modules: list[Module]) -> None:
    """An import in the body of a function fails only when that runs."""
    names = {module.module for module in modules}
    missing = [
        module.at(one.line, one.name)
        for module in modules
        for one in module.imports
        if one.package == "hpml" and not {one.name, one.name.rpartition(".")[0]} & names
    ]
    assert not missing


def test_a_stage_imports_no_other(modules: list[Module]) -> None:
    may_import = {"bundle": {"kubernetes"}, "register": {"mlflow"}}
    forbidden = []
    for module in modules:
        stage = module.stage
        if not stage:
            continue
        packages = {"kfp", "argparse", "kubernetes", "mlflow"} - may_import.get(stage, set())
        own = f"hpml.components.{stage}"
        for one in module.imports:
            of_another = one.name.startswith("hpml.components.") and not f"{one.name}.".startswith(f"{own}.")
            if of_another or one.package in packages:
                forbidden.append(module.at(one.line, one.name))
    assert not forbidden


def test_no_imports_in_a_circle(imports: dict[str, set[str]]) -> None:
    left = {module: set(others) for module, others in imports.items()}
    while free := {module for module, others in left.items() if not others & set(left)}:
        left = {module: others for module, others in left.items() if module not in free}
    assert not left, "circles, or what stands on one"


def test_no_folder_is_wide(modules: list[Module]) -> None:
    files = Counter(module.file.parent for module in modules if module.file.name != "__init__.py")
    assert not [str(folder) for folder, count in files.items() if count > 15]


def test_no_two_names_differ_by_a_letter(modules: list[Module]) -> None:
    def is_a_letter_more(longer: str, shorter: str) -> bool:
        return any(longer[:at] + longer[at + 1 :] == shorter for at in range(len(longer)))

    def differ_by_a_letter(one: str, other: str) -> bool:
        if len(one) == len(other):
            return sum(a != b for a, b in zip(one, other, strict=True)) == 1
        return is_a_letter_more(*sorted((one, other), key=len, reverse=True))

    names = {module.file.stem for module in modules} | {module.file.parent.name for module in modules}
    found = {pair for pair in itertools.combinations(sorted(names), 2) if differ_by_a_letter(*pair)}
    # The artifact, and the folder of architectures; what a task is, and the folder of them.
    assert found <= {("model", "models"), ("task", "tasks")}


def test_no_module_is_imported_by_a_name_of_many(modules: list[Module]) -> None:
    """A user's own `components` and `pipelines` are theirs."""
    found = [
        module.at(one.line, one.name)
        for module in modules
        for one in module.imports
        if one.package in ("components", "pipelines")
    ]
    assert not found


def test_only_the_tracking_and_the_registry_import_mlflow(modules: list[Module]) -> None:
    found = [
        module.at(one.line, one.name)
        for module in modules
        if not module.name.startswith(("hpml/io/tracking.py", "components/register/"))
        for one in module.imports
        if one.package == "mlflow"
    ]
    assert not found


def test_few_components_read_the_environment(modules: list[Module]) -> None:
    may_read_environment = {
        "hpml/__init__.py",
        "components/__main__.py",
        "hpml/steps/job.py",
        "hpml/io/storage.py",
        "hpml/io/tracking.py",
        "hpml/core/process.py",
        "hpml/tasks/packaging/engine_script.py",  # of a bundle: it and the README turn telemetry off
        "components/bundle/readme.py",
        "hpml/training/distributed.py",
    }
    found = [
        module.at(number, line.strip())
        for module in modules
        if not module.name.startswith("pipelines/") and module.name not in may_read_environment
        for number, line in enumerate(module.source.splitlines(), start=1)
        if "os.environ" in line or "getenv" in line
    ]
    assert not found


def test_no_module_is_called_utils(modules: list[Module]) -> None:
    assert not [module.name for module in modules if module.file.name == "utils.py"]


def test_a_module_with_a_vendors_library_on_top_is_imported_inside_functions_only(
    modules: list[Module],
) -> None:
    bound = {
        module.name.removesuffix(".py").replace("/", ".")
        for module in modules
        if any(one.is_top_level and one.package in VENDOR for one in module.imports)
    }
    assert bound
    on_top = [(module, one) for module in modules for one in module.imports if one.is_top_level]
    assert not [
        module.at(one.line, one.name)
        for module, one in on_top
        if any(one.name == name or one.name.startswith(f"{name}.") for name in bound)
    ]


def test_nothing_that_executes_data(modules: list[Module]) -> None:
    libraries = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    functions = {"eval", "exec", "torch.load", "os.system", "yaml.unsafe_load"}
    found = []
    for module in modules:
        found += [module.at(one.line, one.name) for one in module.imports if one.package in libraries]
        for call in (node for node in module.nodes if isinstance(node, ast.Call)):
            is_on = {
                keyword.arg
                for keyword in call.keywords
                if isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            }
            if ast.unparse(call.func) in functions or is_on & {"shell", "allow_pickle"}:
                found.append(module.at(call.lineno, ast.unparse(call)))
    assert not found


def test_the_command_imports_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "onnx", "onnxruntime", "mlflow", "sklearn", "PIL", "pandas")
    ours = ("__main__", "graph", "recipe", "executors.process", "terminal.results")
    code = (
        f"import sys, {', '.join('hpml.pipelines.' + name for name in ours)};"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


def test_every_stage_of_the_graph_has_an_entrypoint_and_says_what_it_needs() -> None:
    source = (ROOT / "pipelines" / "graph.py").read_text()
    called = re.findall(r"step\(\s*(\w+)\.run", source)
    assert set(called) == set(STAGES)
    for stage in STAGES:
        assert (ROOT / "components" / stage / "needs.py").is_file()


def test_the_graph_names_each_stage_once() -> None:
    """One definition: a stage is called in one place (export in two: the reference, and the variants)."""
    called = re.findall(r"step\(\s*(\w+)\.run", (ROOT / "pipelines" / "graph.py").read_text())
    assert sorted(called) == sorted([*STAGES, "export"])


def test_telemetry_is_off_before_any_library_is_imported() -> None:
    code = (
        "import os;"
        "print(os.environ['ORT_DISABLE_TELEMETRY'], os.environ['MLFLOW_DISABLE_TELEMETRY'],"
        " os.environ['NNCF_DISABLE_TELEMETRY'])"
    )
    for package in ("hpml", "hpml.components", "hpml.pipelines"):
        answer = subprocess.run(
            [sys.executable, "-c", f"import {package}; {code}"],
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
        if (ROOT / name).is_dir():  # a link
            continue
        text = (ROOT / name).read_text(errors="ignore")
        assert not re.search(r"https?://(files\.|[^/ ]*(pypi|registry|proxy|mirror))", text), name
