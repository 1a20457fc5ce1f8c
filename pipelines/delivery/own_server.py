"""What destinations share that run `hpml serve` in a container."""

from __future__ import annotations

import importlib.metadata
import math

from hpml.core import regular_files
from hpml.core.errors import ConfigInvalid, UsageError
from hpml.pipelines.delivery.deploy_options import DeployOptions
from hpml.pipelines.delivery.deployable import Deployable
from hpml.serving.config import ServerConfig

LIVE, READY = "/v2/health/live", "/v2/health/ready"
_SERVER_MIB = 1024  # Python, the bodies in memory, and JSON, which takes 20 times its size while it is read
_ENGINE_TIMES = 3  # its file, the runtime's copy, and one in the layout of its kernels
_END_S = 5  # of the process, once its last request is answered


def check_can_serve(bundle: Deployable, options: DeployOptions) -> None:
    """Raise ConfigInvalid for an engine that `hpml serve` does not open, UsageError for a missing image or
    token."""
    target = bundle.target
    if not target.is_standalone:
        others = (
            "hpml deploy --to triton serves it" if target.triton_platform else "export it to onnx as well"
        )
        raise ConfigInvalid(
            f"hpml serve does not open the engine of {bundle.title}",
            why=f"it is of target {target.target}: opening it can run code, and only ONNX graphs are opened",
            fix=others,
        )
    if bundle.runs_on_gpu and not options.image:
        raise UsageError(
            f"the engine of {bundle.title} runs on a GPU, and --image is not given",
            why="the image hpml-serving has ONNX Runtime for CPUs",
            fix="give an image with hpml-pipeline[serving] and onnxruntime-gpu",
        )
    if options.token_file and (why := regular_files.problem(options.token_file)):
        raise UsageError(f"the token in {options.token_file} cannot be used", why=f"it {why}")


def image(options: DeployOptions) -> str:
    """The server's: by default that of this version, as `docker/build serving` names it."""
    return options.image or f"hpml-serving:{importlib.metadata.version('hpml-pipeline')}"


def arguments(
    bundle: Deployable, options: DeployOptions, place: str, *, token: str, drain_s: float
) -> list[str]:
    """Those of `hpml serve`, whose image has the first: what is not its default, and what says where.

    place: of the bundle in the container. token: of its file there.
    """
    told = [place, "--port", str(options.port), *settings(bundle, options)]
    if drain_s:
        told += ["--drain-s", f"{drain_s:g}"]
    return [*told, "--token-file", token] if options.token_file else told


def settings(bundle: Deployable, options: DeployOptions) -> list[str]:
    """Of these arguments, what does not depend on where the server is."""
    told = []
    threads = max(1, math.floor(cpus(bundle, options)))
    if bundle.threads and threads < bundle.threads:
        told += ["--threads", str(threads)]  # more would wait for each other
    for name in ("max_batch", "max_queue_ms"):
        if options.given(name):
            told += [f"--{name.replace('_', '-')}", f"{getattr(options, name):g}"]
    return [*told, "--run-code"] if options.run_code else told


def cpus(bundle: Deployable, options: DeployOptions) -> float:
    """What was asked for; else one for each thread that the engine was measured with."""
    return options.cpus or bundle.threads or 1


def memory_mib(bundle: Deployable, options: DeployOptions) -> int:
    """What was asked for; else what such an engine and the server's bounds take, in whole 128 MiB."""
    needed = _SERVER_MIB + _ENGINE_TIMES * bundle.size_bytes / 2**20
    return options.memory_mib or math.ceil(needed / 128) * 128


def stop_s(drain_s: float) -> int:
    """How long the server may take to end: it drains, answers what it has accepted, and goes."""
    return math.ceil(drain_s + ServerConfig().stop_s) + _END_S
