"""The part of bundle.py that all tasks share: files are checked, graphs opened, operations asked.

A task's script, such as arrays_script.py, imports it here; in a bundle the two are one file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # ONNX Runtime reads it when it is imported

import numpy as np
import onnxruntime

HERE = Path(__file__).resolve().parent
INSTALL = "pip install -r requirements.txt"
AGAIN = "copy the whole bundle again from where it was made"
_log = logging.getLogger("bundle")


class BundleError(Exception):
    """The bundle is damaged, or does not answer as it did when it was made."""


class Engine:
    """The graphs of a bundle, its files checked."""

    def __init__(self, folder: Path = HERE, *, threads: int = 0, spinning: bool | None = None) -> None:
        """Open it with the settings it was measured with, or with those given.

        threads: 0 for the measured ones, or ONNX Runtime's default where none were measured. spinning:
        whether waiting threads spin, which answers sooner and keeps their CPUs busy.
        Raises BundleError if a file is missing, changed, or not of the bundle, or cannot be opened.
        """
        self.folder = folder
        self.bundle = read_json(folder / "bundle.json", AGAIN)
        try:
            self._load(threads, spinning)
        except (KeyError, TypeError, AttributeError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else "is not what a bundle has"
            raise BundleError(f"bundle.json {what}: {AGAIN}") from None

    def _load(self, threads: int, spinning: bool | None) -> None:
        folder = self.folder
        check_files(folder, self.bundle["files"])
        self.preprocessing = read_json(folder / "preprocessing.json", AGAIN)
        self.operations: dict[str, dict[str, Any]] = {one["name"]: one for one in self.bundle["operations"]}
        measured = self.bundle["settings"] or {"threads": 0, "spinning": None}
        self._sessions = {
            file: _open(
                folder / file,
                self.bundle["providers"],
                threads or measured["threads"],
                measured["spinning"] if spinning is None else spinning,
            )
            for file in {one["file"]: None for one in self.bundle["operations"]}
        }
        for told in (self.bundle, *self.bundle["operations"]):
            _check_signature(self._sessions[told["file"]], told)

    def run(self, inputs: Mapping[str, np.ndarray], operation: str = "") -> dict[str, np.ndarray]:
        """The outputs of an operation by name, of its inputs by name; "" is the first operation.

        Raises BundleError for inputs without rows, which a runtime may not survive, for numbers that are not
        finite, as an engine in int8 would answer them with ordinary ones, and for ids that there are not: of
        negative ones ONNX takes those from the end.
        """
        for name, array in inputs.items():
            if not len(array):
                raise BundleError(f"{name} has no rows")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise BundleError(f"{name} holds numbers that are not finite, such as NaN")
        told = self.operations[operation] if operation else self.bundle["operations"][0]
        for one in told["inputs"]:
            array, below = inputs[one["name"]], one.get("below")
            if below is not None and array.size and not (array.min() >= 0 and array.max() < below):
                wrong = array[(array < 0) | (array >= below)][0]
                raise BundleError(f"{one['name']} holds the id {wrong}: give ids from 0 to {below - 1}")
        names = [one["name"] for one in told["outputs"]]
        outputs = self._sessions[told["file"]].run(names, dict(inputs))
        return dict(zip(names, outputs, strict=True))

    def golden(self, operation: Mapping[str, Any], kind: str) -> dict[str, np.ndarray]:
        """The golden "inputs" or "outputs" of an operation of bundle.json, by name."""
        return {
            one["name"]: np.load(self.folder / operation["golden"][one["name"]], allow_pickle=False)
            for one in operation[kind]
        }

    def module(self, name: str, needs: str) -> Any:
        """A Python module of the bundle. Raises BundleError where a library is missing that it `needs`."""
        loader = SourceAlone(name, str(self.folder / f"{name}.py"))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec
        module = importlib.util.module_from_spec(spec)
        try:
            loader.exec_module(module)
        except ImportError as error:
            raise BundleError(f"{needs} ({error}): {INSTALL}") from None
        return module


class SourceAlone(SourceFileLoader):
    """Runs a file as it was checked: bytecode in a __pycache__ beside it is neither read nor written."""

    def get_code(self, fullname: str) -> Any:
        """The compiled source."""
        return self.source_to_code(self.get_data(self.path), self.path)


def read_json(file: Path, fix: str) -> Any:
    """What is in `file`. Raises BundleError, with `fix`, if it cannot be read or is not JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BundleError(f"{file} cannot be read ({error.strerror}): {fix}") from None
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{file} is not JSON ({error}): {fix}") from None


def check_files(folder: Path, digests: dict[str, str]) -> None:
    """Compare the files in `folder` with their SHA-256.

    Raises BundleError naming the file that is missing, changed, or that nobody listed: a server would serve
    an added model as willingly as ours.
    """
    for name, digest in digests.items():
        path = PurePosixPath(name)
        file = folder / name
        if path.is_absolute() or ".." in path.parts or file.is_symlink() or not file.is_file():
            raise BundleError(f"{name} is missing: {AGAIN}")
        if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise BundleError(f"{name} was changed: its SHA-256 is not the one in bundle.json; {AGAIN}")
    known = {*digests, "bundle.json", "manifest.json"}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        is_ours = file.is_dir() or name in known or "__pycache__" in file.parts
        if file.is_symlink() or not is_ours:
            raise BundleError(f"{name} does not belong to the bundle: remove it")


def distance(answer: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference of two arrays; infinite if their shapes differ, NaN if one has a NaN."""
    if answer.shape != expected.shape:
        return float("inf")
    return float(np.abs(answer.astype(np.float64) - expected.astype(np.float64)).max(initial=0))


def _open(
    file: Path, providers: list[Any], threads: int, spinning: bool | None
) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    if spinning is not None:
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
    options.log_severity_level = 4  # it raises what else it would log
    named = [tuple(provider) if isinstance(provider, list) else provider for provider in providers]
    try:
        return onnxruntime.InferenceSession(file, options, providers=named)
    except Exception as error:  # ONNX Runtime's derive from nothing narrower
        version = onnxruntime.__version__
        raise BundleError(
            f"onnxruntime {version} cannot open {file.name} ({of_runtime(error)}): {INSTALL}"
        ) from None


def of_runtime(error: Exception) -> str:
    """What ONNX Runtime says, without its own status codes, nodes and source files."""
    said = " ".join(str(error).split()).rpartition("Status Message: ")[2].rpartition(" : ")[2]
    return said.rpartition(") ")[2][:120] or type(error).__name__


def _check_signature(session: onnxruntime.InferenceSession, told: Mapping[str, Any]) -> None:
    """Compare what a graph takes and gives with bundle.json; a free size is -1 there.

    An operation may fix a size that its graph leaves free, as one that takes a single token.
    """
    for kind, found in (("inputs", session.get_inputs()), ("outputs", session.get_outputs())):
        shapes = {node.name: [d if isinstance(d, int) else -1 for d in node.shape] for node in found}
        said = {node["name"]: node["shape"] for node in told[kind]}
        if shapes.keys() != said.keys() or not all(_fits(said[name], shapes[name]) for name in said):
            raise BundleError(f"the {kind} of the engine are {shapes}, bundle.json says {said}")


def _fits(shape: list[int], free: list[int]) -> bool:
    """Whether `shape` is `free`, with other sizes where that has -1."""
    return len(shape) == len(free) and all(size in (own, -1) for own, size in zip(shape, free, strict=True))


def warn_of_doubts(model: Engine) -> None:
    """Say on stderr which goals the engine was not checked for."""
    if model.bundle.get("unverified"):
        _log.warning("warning: not verified: %s", "; ".join(model.bundle["unverified"]))


def in_words(error: Exception) -> str:
    """What went wrong, for a user."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}; check the path"
    return str(error)


def main(run: Callable[[list[str]], int]) -> NoReturn:
    """The command line; the exit status is 5 where something is not as it should be, 2 for a wrong option."""
    try:
        status = run(sys.argv[1:])
    except (BundleError, OSError, ValueError, EOFError) as error:
        print(f"error: {in_words(error)}", file=sys.stderr)
        status = 5
    raise SystemExit(status)
