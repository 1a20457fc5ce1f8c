"""What a step's result depends on, and the cache key made of it.

The code of a stage is every module it can reach by imports, found in the source without running it: ours by
content, other people's by version. An import path in a string, such as a row of ARCHITECTURES, is an import.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from components import hardware
from components.contract import canonical_json
from components.errors import ConfigInvalid
from pipelines.plan import Node
from pipelines.resources import resources_of

_ROOT = Path(__file__).resolve().parent.parent
_IMPORT_PATH = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")

# Distributions whose import name is not their own; every other is looked up by the import's name.
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "torch_pruning": "torch-pruning",
}

# A distribution that is installed in the place of another: the same modules, built for other hardware.
_INSTEAD = {"onnxruntime": "onnxruntime-gpu"}

# Libraries that describe and check but do not shape what a stage writes.
_WITHOUT_EFFECT = {"pydantic", "typer", "rich"}


@dataclass(frozen=True)
class Code:
    """Digests of the source files a stage can reach, by module, and the libraries that those import.

    libraries: the distribution that an import's name belongs to.
    """

    modules: Mapping[str, str]
    libraries: Mapping[str, str]

    @property
    def digest(self) -> str:
        """One digest of all source files."""
        return hashlib.sha256(canonical_json(dict(self.modules)).encode()).hexdigest()


@cache
def code_of(module: str, import_paths: tuple[str, ...] = ()) -> Code:
    """The code that `module` can reach, looked for beside this package and in `import_paths`.

    Read once a process: a run works with the code as it was when it looked first.
    """
    roots = (str(_ROOT), *import_paths)
    modules: dict[str, str] = {}
    libraries: dict[str, str] = {}
    pending = [module]
    visited: set[str] = set()
    while pending:
        name = pending.pop()
        if name in visited:
            continue
        visited.add(name)
        file = _source_file(name, roots)
        if file is None:
            _note_library(name.partition(".")[0], libraries)
            continue
        digest, imports = _read(file)
        modules[name] = digest
        pending.extend(_with_parents(name))
        for imported in imports:
            pending.extend(_resolve(imported, roots))
    return Code(dict(sorted(modules.items())), dict(sorted(libraries.items())))


@cache
def _source_file(module: str, roots: tuple[str, ...]) -> Path | None:
    relative = Path(*module.split("."))
    for root in roots:
        for candidate in (Path(root, relative, "__init__.py"), Path(root, relative).with_suffix(".py")):
            if candidate.is_file():
                return candidate
    return None


def _with_parents(module: str) -> Iterator[str]:
    parts = module.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))


def _resolve(imported: str, roots: tuple[str, ...]) -> list[str]:
    """`a.b.c` may be a module or a name in module `a.b`."""
    if _source_file(imported, roots):
        return [imported]
    parent = imported.rpartition(".")[0]
    if parent and _source_file(parent, roots):
        return [parent]
    return [imported.partition(".")[0]]


@cache
def _read(file: Path) -> tuple[str, tuple[str, ...]]:
    """The digest of a source file, and everything it imports, at any depth of its functions."""
    source = file.read_bytes()
    imports: set[str] = set()
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return hashlib.sha256(source).hexdigest(), ()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            imports.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = _IMPORT_PATH.fullmatch(node.value)
            if match and match[1].startswith("components."):
                imports.add(match[1])
    return hashlib.sha256(source).hexdigest(), tuple(sorted(imports))


def _note_library(name: str, libraries: dict[str, str]) -> None:
    if name not in sys.stdlib_module_names and name not in _WITHOUT_EFFECT:
        libraries[name] = _DISTRIBUTIONS.get(name, name)


@cache
def _version_here(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Surroundings:
    """What a step finds where it runs.

    python: its minor version. hardware: see hardware.identity. version: of an installed distribution, "" if
    it is absent. image: the digest of the container image; empty where there is none.
    """

    python: str
    hardware: Mapping[str, str]
    version: Callable[[str], str]
    image: str = ""

    def versions(self, code: Code) -> dict[str, str]:
        """The versions of the libraries that `code` imports, of those that are installed."""
        found = {
            name: self.version(distribution) or self.version(_INSTEAD.get(distribution, distribution))
            for name, distribution in code.libraries.items()
        }
        return {name: version for name, version in found.items() if version}


@cache
def here() -> Surroundings:
    """The surroundings of a process of this machine."""
    return Surroundings(_minor(sys.version_info), hardware.identity(), _version_here)


def of_image(name: str, about: Mapping[str, Any], digest: str) -> Surroundings:
    """The surroundings of a step in the image `name`, by what `python -m components --about` says there.

    Raises ConfigInvalid if the image holds other code than this installation.
    """
    from components.__main__ import source_digest

    if about["source"] != source_digest():
        raise ConfigInvalid(
            f"the image {name} holds other code than this installation of hpml",
            why="a step would run what you do not see here",
            fix="build it again: make images; and bring it to where it runs",
        )
    libraries: Mapping[str, str] = about["libraries"]  # by the name that PEP 503 makes of every name

    def version(distribution: str) -> str:
        return libraries.get(re.sub(r"[-_.]+", "-", distribution).lower(), "")

    return Surroundings(str(about["python"]), about["hardware"], version, digest)


def _minor(version: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in version[:2])


@dataclass(frozen=True)
class Material:
    """Everything a step's result depends on, by name; equal material, equal key."""

    fields: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The cache key."""
        return hashlib.sha256(canonical_json(dict(self.fields)).encode()).hexdigest()


def material_of(
    node: Node,
    input_digests: Mapping[str, Any],
    *,
    import_paths: tuple[str, ...],
    registry: str,
    surroundings: Surroundings,
) -> Material:
    """What the result of `node` depends on.

    input_digests: content digests of its inputs, shaped like `node.inputs`. registry: the identity of the
    model registry, for the steps that write to it. surroundings: of the place where it is to run.
    """
    needs = resources_of(node.stage)
    code = code_of(node.run.__module__, import_paths)
    fields: dict[str, Any] = {
        "stage": node.run_path,
        "config": node.config.model_dump(mode="json"),
        "inputs": dict(input_digests),
        "code": dict(code.modules),
        "libraries": surroundings.versions(code),
        "python": surroundings.python,
    }
    if surroundings.image:
        fields["image"] = surroundings.image
    outside = node.config.fingerprint()
    if outside:
        fields["files outside"] = outside
    users = _user_code(fields["config"], import_paths)
    if users:
        fields["your code"] = users
    if needs.hardware_bound:
        fields["hardware"] = dict(surroundings.hardware)
    if needs.registry:
        fields["registry"] = registry
    return Material(fields)


def _user_code(config: Any, import_paths: tuple[str, ...]) -> dict[str, str]:
    """Digests of the user's modules that a config names by import path."""
    found: dict[str, str] = {}
    pending = [config]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
        elif isinstance(value, str):
            match = _IMPORT_PATH.fullmatch(value)
            if match:
                found.update(code_of(match[1], import_paths).modules)
    return found


def explain(new: Material, old: Material | None) -> list[str]:
    """Why `new` is not `old`, a sentence for each thing that changed; empty if nothing did."""
    if old is None:
        return ["this step has not been run before"]
    reasons: list[str] = []
    for name in {**old.fields, **new.fields}:
        before, after = old.fields.get(name), new.fields.get(name)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            reasons.extend(_differences(name, before, after))
        else:
            reasons.append(f"{name} changed: {_short(before)} -> {_short(after)}")
    return reasons


def _differences(name: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for key in sorted({**before, **after}):
        if key not in after:
            yield f"{name}: {key} is gone (was {_short(before[key])})"
        elif key not in before:
            yield f"{name}: {key} is new ({_short(after[key])})"
        elif before[key] != after[key]:
            if isinstance(before[key], dict) and isinstance(after[key], dict):
                yield from _differences(f"{name}.{key}", before[key], after[key])
            else:
                yield f"{name}: {key} changed: {_short(before[key])} -> {_short(after[key])}"


def _short(value: Any) -> str:
    text = canonical_json(value)
    if re.fullmatch(r'"[0-9a-f]{64}"', text):
        return text[1:13]
    return text if len(text) <= 60 else text[:57] + "..."
