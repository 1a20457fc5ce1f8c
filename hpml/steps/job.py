"""One execution of a stage on this machine: config checked, inputs verified, artifact published."""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hpml.artifacts.folder import Artifact, Lineage, Manifest, open_artifact, seal_artifact
from hpml.core import hardware, memory
from hpml.core.atomic_files import new_folder_beside, publish
from hpml.core.contract import Events, Output, Result, each_input, of_inputs, signature, validate
from hpml.core.errors import ConfigInvalid, GateFailed, Terminated, disk_full_explained, explained
from hpml.core.process import peak_rss_bytes


@dataclass(frozen=True)
class Job:
    """One execution of a stage.

    run: import path of the stage's function, "hpml.components.train.stage:run".
    config: the stage's config as JSON values; `inputs`: paths of artifacts by parameter name.
    out: where the artifact is to be; scratch: what outlives a failed attempt (default: beside `out`).
    events: the file that progress and metrics are appended to. threads: 0 for as many as there are CPUs.
    import_paths: folders of the user's own modules. left_out: see contract.Output.
    parents: the content digest that each input must have, by its name or name/key, as far as the executor
    knows it. verified: content digests of artifacts whose files this run has verified already.

    On the command line of a container, `inputs`, `out` and `scratch` may be s3:// URIs, and `events` may be
    "-"; see `hpml.steps.container`.
    """

    run: str
    config: Any
    inputs: Mapping[str, str | Mapping[str, str]]
    out: str
    scratch: str = ""
    events: str = ""
    threads: int = 0
    import_paths: tuple[str, ...] = ()
    code_digest: str = ""
    libraries: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    parents: Mapping[str, str] = field(default_factory=dict)
    verified: tuple[str, ...] = ()


def load_run(path: str) -> Any:
    """The function at an import path such as "hpml.components.train.stage:run"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def execute(job: Job) -> Manifest:
    """Run one stage: check its config, open and verify its inputs, run it, publish its artifact.

    The scratch folder of an incomplete one stays, for the next attempt. Raises HpmlError; nothing is at
    `job.out` then, except an artifact that a gate rejected, which is published with its reason and which no
    reader opens.
    """
    manifest = perform(job)
    if not manifest.incomplete:
        shutil.rmtree(scratch_of(job), ignore_errors=True)
    return manifest


def perform(job: Job) -> Manifest:
    """`execute`, without clearing the scratch folder of what an attempt left for the next."""
    _add_import_paths(job.import_paths)
    threads = job.threads or hardware.usable_cpus()
    _limit_threads(threads)
    run = load_run(job.run)
    shape = signature(run)
    config: Any = validate(shape.config_type, job.config, where=f"the config of {shape.stage}")
    unsupported_reason = config.unsupported_reason()
    if unsupported_reason:
        raise ConfigInvalid(f"{shape.stage} cannot run on this machine", why=unsupported_reason)

    opened = {
        name: _open_input(job, name, path, shape.input_kinds[name.partition("/")[0]])
        for name, path in each_input(job.inputs).items()
    }
    artifacts = of_inputs(job.inputs, opened)
    place = Path(job.out)
    scratch = scratch_of(job)
    scratch.mkdir(parents=True, exist_ok=True)
    folder = new_folder_beside(place)
    try:
        with disk_full_explained(folder):
            started_at_s, begun_s = time.time(), time.monotonic()
            events = Events(Path(job.events) if job.events else None)
            out = Output(folder, scratch, threads, events, job.left_out)
            result: Result[Any] = run(config, **artifacts, out=out)
            lineage = Lineage(
                stage=shape.stage,
                code_digest=job.code_digest,
                config=config.model_dump(mode="json"),
                parents={name: artifact.digest for name, artifact in opened.items()},
                libraries=dict(job.libraries),
                started_at_s=started_at_s,
                seconds=time.monotonic() - begun_s,
                peak_rss_bytes=_peak_rss_bytes(),
            )
            manifest = seal_artifact(folder, lineage=lineage, **vars(result))
            publish(folder, place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if result.rejected:
        raise rejection(shape.stage, result.rejected)
    return manifest


def _open_input(job: Job, name: str, path: str, kind: str) -> Artifact[Any]:
    digest = job.parents.get(name, "")
    return open_artifact(Path(path), kind=kind, digest=digest, verify=digest not in job.verified)


def scratch_of(job: Job) -> Path:
    """Where an attempt at `job` leaves what the next one can use."""
    place = Path(job.out)
    return Path(job.scratch) if job.scratch else place.with_name(f".{place.name}.scratch")


def rejection(stage: str, reason: str) -> GateFailed:
    """What is raised when a stage's gate refuses what it wrote."""
    return GateFailed(f"{stage} was refused by its gate", why=reason)


def _add_import_paths(paths: Iterable[str]) -> None:
    """For this process and, through the environment, for those it starts; see hpml/__init__.py."""
    os.environ["HPML_IMPORT_PATHS"] = os.pathsep.join(paths)
    sys.path += [path for path in paths if path not in sys.path]


def run_job(**fields: Any) -> None:
    """`execute` in a process of its own: a failure becomes a line on stderr, an event, and a status."""
    job = Job(**fields)
    with explained(record=Events(Path(job.events)).write):
        stop_on_sigterm()
        memory.limit_process()
        manifest = execute(job)
        print(json.dumps({"digest": manifest.digest, "metrics": manifest.metrics}, indent=1))


def _limit_threads(threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch = sys.modules.get("torch")  # preloaded by the fork server, it has read the variable already
    if torch is not None:
        torch.set_num_threads(threads)


def _peak_rss_bytes() -> int:
    """The largest resident set of this process or of one of its finished children; 0 where it is not told.

    What the children inherit in their `ru_maxrss` is at most our own peak.
    """
    own = peak_rss_bytes()
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return max(own, of_children) if own else 0


def stop_on_sigterm() -> None:
    """Make SIGTERM end a stage through its `finally` blocks; `train` saves a checkpoint instead."""

    def handle(_signal: int, _frame: object) -> NoReturn:
        raise Terminated("stopped by SIGTERM", fix="run again to resume")

    signal.signal(signal.SIGTERM, handle)
