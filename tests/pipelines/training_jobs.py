"""Trainings as test subjects, and the real definitions of the kinds of jobs that are made of them."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hpml.components.__main__ import Job
from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.operators.base import Training
from hpml.pipelines.operators.launcher import training_of

Json = dict[str, Any]


def training(cluster: Json | None = None, run: str = "20260101-run", **config: Any) -> Training:
    """The step `train` of a run, on two nodes unless `config` says otherwise."""
    job = Job(
        run="hpml.components.train.stage:run",
        config={"model": "cnn", "nodes": 2, "epochs": 3, **config},
        inputs={"data": "s3://hpml/data"},
        out="s3://hpml/out",
        scratch="s3://hpml/scratch",
        threads=1,
    )
    return training_of(job, ClusterConfig.model_validate(cluster or {}), run, "train")


@functools.lru_cache
def definition(module: str, plural: str) -> Json:
    """The definition of a kind that a Go module ships; skips the test where it cannot be had."""
    go = shutil.which("go")
    if not go:
        pytest.skip("no go: the definition comes with the operator's Go module")
    with tempfile.TemporaryDirectory() as folder:
        command = [go, "mod", "download", "-json", module]
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    if answer.returncode:
        pytest.skip(f"{module} cannot be had: {(answer.stderr or answer.stdout).strip()[:200]}")
    [file] = Path(json.loads(answer.stdout)["Dir"], "manifests", "base", "crds").glob(f"*_{plural}.yaml")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same in C: there are 400 kB
    found: Json = yaml.load(file.read_text(), Loader=loader)
    return found


def check_against(kind: Json, item: Json) -> None:
    """Raises jsonschema.ValidationError if `item` lacks a field, or has one that its kind does not know."""
    [version] = [
        version
        for version in kind["spec"]["versions"]
        if item["apiVersion"] == f"{kind['spec']['group']}/{version['name']}"
    ]
    assert item["kind"] == kind["spec"]["names"]["kind"]
    schema = _strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.Draft202012Validator(schema).validate(item)


def _strict(schema: Any) -> Any:
    """A structural schema of Kubernetes as JSON Schema: unknown fields, which it would drop, are errors."""
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    strict = {
        key: {name: _strict(inner) for name, inner in value.items()}
        if key == "properties"
        else _strict(value)
        for key, value in schema.items()
        if not key.startswith("x-kubernetes-")
    }
    is_closed = "properties" in schema and "additionalProperties" not in schema
    if is_closed and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict["additionalProperties"] = False
    return strict
