"""What a step's result depends on, and the cache key made of it.

The code of a stage is every module it can reach by imports, absolute or relative, found in the source
without running it: ours and the user's by content, other people's by version. An import path in a string,
such as a row of ARCHITECTURES, is an import. The templates of a package that it reaches are code, too.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import hpml
from hpml.core import hardware
from hpml.core.contract import canonical_json, texts_in
from hpml.core.errors import ConfigInvalid
from hpml.pipelines.plan import Node
from hpml.pipelines.stage_needs import needs_of

_ROOT = Path(hpml.__file__).parents[1]
_OURS = "hpml"  # below _ROOT, which has all other libraries too where we are installed
# A stage that reaches these runs the user's own code: what builds a network, and what finds a user's task.
_NETWORKS, _USERS_TASKS = "hpml.models", "hpml.tasks.users_code"
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
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

# By these the user makes the libraries choose other kernels than the CPU or the GPU calls for.
_KERNEL_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
)


@dataclass(frozen=True)
class Code:
    """Digests of what a stage can reach, by module or template, and the libraries that the modules import.

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
    while pending:
        name = pending.pop()
        if name in modules:
            continue
        file = _source_file(name, roots)
        if file is None:
            library = name.partition(".")[0]
            if library not in sys.stdlib_module_names | _WITHOUT_EFFECT:
                libraries[library] = _DISTRIBUTIONS.get(library, library)
            continue
        source = _read(file, name)
        modules[name] = source.digest
        modules |= _templates(file, name)
        pending += [name[: dot.start()] for dot in re.finditer(r"\.", name)]  # the packages that it is in
        pending += [_resolve(imported, roots) for imported in source.imports]
        pending += [path for path in source.mentions if _source_file(path, roots)]
    return Code(dict(sorted(modules.items())), dict(sorted(libraries.items())))


def _templates(file: Path, module: str) -> dict[str, str]:
    """What a package of ours renders pages by, which is code, too: the digest of each file."""
    if file.name != "__init__.py" or module.partition(".")[0] != _OURS:
        return {}
    templates = sorted((file.parent / "templates").glob("*"))
    return {f"{module}/{one.name}": hashlib.sha256(one.read_bytes()).hexdigest() for one in templates}


@cache
def _source_file(module: str, roots: tuple[str, ...]) -> Path | None:
    relative = Path(*module.split("."))
    for root in roots:
        if root == str(_ROOT) and relative.parts[0] != _OURS:
            continue
        for candidate in (Path(root, relative, "__init__.py"), Path(root, relative).with_suffix(".py")):
            if candidate.is_file():
                return candidate
    return None


def _resolve(imported: str, roots: tuple[str, ...]) -> str:
    """`a.b.c` may be a module or a name in module `a.b`; else it is of library `a`."""
    for module in (imported, imported.rpartition(".")[0]):
        if module and _source_file(module, roots):
            return module
    return imported.partition(".")[0]


@dataclass(frozen=True)
class _Source:
    """A source file: the digest of its syntax tree, what it imports, import paths in its strings."""

    digest: str
    imports: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()


@cache
def _read(file: Path, module: str) -> _Source:
    """What is in the source of `module`, at any depth of its functions."""
    source = file.read_bytes()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return _Source(hashlib.sha256(source).hexdigest())  # what imports it will say so
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    imports: set[str] = set()
    mentions: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False):
            del node.body[0]
        if isinstance(node, ast.Import):
            imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = _absolute("." * node.level + (node.module or ""), package)
            imports.update(f"{origin}.{alias.name}" for alias in node.names if origin)
        elif isinstance(node, ast.Call):
            imports.update(_imported_by_call(node, package))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = _IMPORT_PATH.fullmatch(node.value)
            if match:
                mentions.add(match[1])
    digest = hashlib.sha256(ast.dump(tree).encode()).hexdigest()  # without comments, docstrings and layout
    return _Source(digest, tuple(sorted(imports)), tuple(sorted(mentions)))


def _absolute(name: str, package: str) -> str:
    """The absolute name of what is imported as `name` in `package`; "" if it leads out of it."""
    try:
        return importlib.util.resolve_name(name, package)
    except ImportError:
        return ""


def _imported_by_call(call: ast.Call, package: str) -> Iterator[str]:
    """The module of `import_module("...")`, if the name is written out."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = call.args[0] if call.args else None
    if function in ("import_module", "__import__") and isinstance(given, ast.Constant):
        absolute = _absolute(given.value, package) if isinstance(given.value, str) else ""
        yield from [absolute] if absolute else []


@cache
def _version_here(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class RuntimeEnvironment:
    """What a step finds where it runs.

    python: its minor version. hardware: see hardware.identity. version: of an installed distribution, "" if
    it is absent. image: the digest of the container image; empty where there is none. kernels: environment
    variables that make libraries choose other kernels than the hardware calls for.
    """

    python: str
    hardware: Mapping[str, str]
    version: Callable[[str], str]
    image: str = ""
    kernels: Mapping[str, str] = field(default_factory=dict)

    def versions(self, code: Code) -> dict[str, str]:
        """The versions of the libraries that `code` imports, of those that are installed."""
        found = {
            name: self.version(distribution) or self.version(_INSTEAD.get(distribution, distribution))
            for name, distribution in code.libraries.items()
        }
        return {name: version for name, version in found.items() if version}


def here() -> RuntimeEnvironment:
    """The runtime environment of a process of this machine."""
    kernels = {name: os.environ[name] for name in _KERNEL_VARIABLES if name in os.environ}
    return RuntimeEnvironment(_minor(sys.version_info), hardware.identity(), _version_here, kernels=kernels)


def of_image(name: str, about: Mapping[str, Any], digest: str) -> RuntimeEnvironment:
    """That of a step in the image `name`, by what `python -m hpml.components --about` says there.

    Raises ConfigInvalid if the image holds other code than this installation.
    """
    from hpml.components.__main__ import source_digest

    if about["source"] != source_digest():
        raise ConfigInvalid(
            f"the image {name} holds other code than this installation of hpml",
            why="a step would run what you do not see here",
            fix="build it again: make images; and bring it to where it runs",
        )
    libraries: Mapping[str, str] = about["libraries"]  # by the name that PEP 503 makes of every name

    def version(distribution: str) -> str:
        return libraries.get(re.sub(r"[-_.]+", "-", distribution).lower(), "")

    return RuntimeEnvironment(str(about["python"]), about["hardware"], version, digest)


def _minor(version: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in version[:2])


@dataclass(frozen=True)
class CacheKeyInputs:
    """Everything a step's result depends on, by name; equal inputs, equal key."""

    fields: Mapping[str, Any]

    @property
    def key(self) -> str:
        """The cache key."""
        return hashlib.sha256(canonical_json(dict(self.fields)).encode()).hexdigest()


def builds_networks(node: Node) -> bool:
    """Whether a step can build the network of its run."""
    return _NETWORKS in code_of(node.run.__module__).modules


def cache_key_inputs(
    node: Node,
    input_digests: Mapping[str, Any],
    *,
    ancestors: Iterable[Node],
    import_paths: tuple[str, ...],
    registry: str,
    runtime_environment: RuntimeEnvironment,
    threads: int,
) -> CacheKeyInputs:
    """What the result of `node` depends on.

    input_digests: content digests of its inputs, shaped like `node.inputs`. ancestors: the steps whose
    results it reads, directly or not: what builds a network, or asks a task, runs the user's code that one of
    them names.
    registry: the identity of the model registry, for the steps that write to it. runtime_environment: what
    it finds where it is to run, with `threads`.
    """
    needs = needs_of(node.stage)
    code = code_of(node.run.__module__, import_paths)
    namers = [node]
    for one in ancestors:
        if _NETWORKS in code.modules or (one.stage == "prepare" and _USERS_TASKS in code.modules):
            namers.append(one)
    users = _users_code([each.config.model_dump(mode="json") for each in namers], import_paths)
    fields: dict[str, Any] = {
        "stage": node.run_path,
        "config": node.config.model_dump(mode="json", exclude=set(needs.gates)),
        "inputs": dict(input_digests),
        "code": dict(code.modules),
        "libraries": runtime_environment.versions(Code({}, {**users.libraries, **code.libraries})),
        "python": runtime_environment.python,
    }
    if runtime_environment.image:
        fields["image"] = runtime_environment.image
    outside = node.config.fingerprint()
    if outside:
        fields["files outside"] = outside
    if users.modules:
        fields["your code"] = dict(users.modules)
    if needs.hardware_bound:
        fields["hardware"] = {**runtime_environment.hardware, **runtime_environment.kernels}
    if needs.numerics_depend_on_threads:
        kernels = {name: runtime_environment.hardware.get(name, "") for name in ("cpu_flags", "gpus")}
        fields["arithmetic"] = {"threads": threads, **kernels, **runtime_environment.kernels}
    if needs.registry:
        fields["registry"] = registry
    return CacheKeyInputs(fields)


def _users_code(configs: list[Any], import_paths: tuple[str, ...]) -> Code:
    """The user's modules that `configs` name by import path, and what these import."""
    modules: dict[str, str] = {}
    libraries: dict[str, str] = {}
    for text in texts_in(configs):
        match = _IMPORT_PATH.fullmatch(text)
        if match and (code := code_of(match[1], import_paths)).modules:
            modules |= code.modules
            libraries |= code.libraries
    return Code(modules, libraries)


def explain(new: CacheKeyInputs, old: CacheKeyInputs | None) -> list[str]:
    """Why `new` is not `old`, a sentence for each thing that changed; empty if nothing did."""
    if old is None:
        return ["this step has not been run before"]
    reasons: list[str] = []
    for name in {**old.fields, **new.fields}:
        before, after = old.fields.get(name), new.fields.get(name)
        if before == after:
            continue
        if isinstance(before or {}, dict) and isinstance(after or {}, dict):
            reasons.extend(_differences(name, before or {}, after or {}))
        else:
            reasons.append(f"{name} changed: {_short(before)} -> {_short(after)}")
    return reasons


def _differences(name: str, before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for key in sorted({**before, **after}):
        old, new = before.get(key), after.get(key)
        if key not in after:
            yield f"{name}: {key} is gone (was {_short(old)})"
        elif key not in before:
            yield f"{name}: {key} is new ({_short(new)})"
        elif isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(f"{name}.{key}", old, new)
        elif old != new:
            yield f"{name}: {key} changed: {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = canonical_json(value)
    if re.fullmatch(r'"[0-9a-f]{64}"', text):
        return text[1:13]
    return text if len(text) <= 60 else text[:57] + "..."
