"""The entrypoint of every image: python -m components STAGE --config JSON --<input> PATH... --out PATH.

The flags of a stage are derived from the signature of its `run`. The local executor calls `execute` with the
same job in a forked process.
"""

from __future__ import annotations

import argparse
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

from components import hardware
from components.artifacts import (
    Lineage,
    Manifest,
    new_folder_beside,
    open_artifact,
    publish,
    seal_artifact,
)
from components.contract import Events, Output, Result, signature, validate
from components.errors import ConfigInvalid, GateFailed, Terminated, UsageError, explained

STAGES = tuple(sorted(file.parent.name for file in Path(__file__).parent.glob("*/stage.py")))


@dataclass(frozen=True)
class Job:
    """One execution of a stage.

    run: import path of the stage's function, "components.train.stage:run".
    config: the stage's config as JSON values; `inputs`: paths of artifacts by parameter name.
    out: where the artifact is to be; scratch: what outlives a failed attempt (default: beside `out`).
    import_paths: folders of the user's own modules.
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


def load_run(path: str) -> Any:
    """The function at an import path such as "components.train.stage:run"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def execute(job: Job) -> Manifest:
    """Run one stage: check its config, open and verify its inputs, run it, publish its artifact.

    Raises HpmlError; nothing is at `job.out` then, except an artifact that a gate rejected, which is
    published with its reason and which no reader opens.
    """
    _add_import_paths(job.import_paths)
    threads = job.threads or hardware.usable_cpus()
    _limit_threads(threads)
    run = load_run(job.run)
    shape = signature(run)
    config: Any = validate(shape.config_type, job.config, where=f"the config of {shape.stage}")
    unmet = config.unmet()
    if unmet:
        raise ConfigInvalid(f"{shape.stage} cannot run on this machine", why=unmet)

    artifacts: dict[str, Any] = {}
    parents: dict[str, str] = {}
    for name, given in job.inputs.items():
        kind = shape.input_kinds[name]
        if isinstance(given, str):
            artifacts[name] = open_artifact(Path(given), kind=kind)
            parents[name] = artifacts[name].digest
        else:
            artifacts[name] = {key: open_artifact(Path(path), kind=kind) for key, path in given.items()}
            parents |= {f"{name}/{key}": artifact.digest for key, artifact in artifacts[name].items()}

    place = Path(job.out)
    scratch = Path(job.scratch) if job.scratch else place.with_name(f".{place.name}.scratch")
    scratch.mkdir(parents=True, exist_ok=True)
    folder = new_folder_beside(place)
    try:
        started_at_s = time.time()
        out = Output(folder, scratch, threads, Events(Path(job.events) if job.events else None))
        result: Result[Any] = run(config, **artifacts, out=out)
        metrics = {name: float(value) for name, value in result.metrics.items()}
        lineage = Lineage(
            stage=shape.stage,
            code_digest=job.code_digest,
            config=config.model_dump(mode="json"),
            parents=parents,
            libraries=dict(job.libraries),
            started_at_s=started_at_s,
            seconds=time.time() - started_at_s,
            peak_rss_bytes=peak_rss_bytes(),
        )
        manifest = seal_artifact(
            folder, spec=result.spec, metrics=metrics, lineage=lineage, rejected=result.rejected
        )
        publish(folder, place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if result.rejected:
        raise GateFailed(f"{shape.stage} was refused by its gate", why=result.rejected)
    shutil.rmtree(scratch, ignore_errors=True)
    return manifest


def _add_import_paths(paths: Iterable[str]) -> None:
    """For this process and, through the environment, for those it starts; see components/__init__.py."""
    os.environ["HPML_IMPORT_PATHS"] = os.pathsep.join(paths)
    sys.path += [path for path in paths if path not in sys.path]


def run_job(**fields: Any) -> None:
    """`execute` in a process of its own: a failure becomes a line on stderr, an event, and a status."""
    job = Job(**fields)
    with explained(record=Events(Path(job.events)).write):
        stop_on_sigterm()
        manifest = execute(job)
        print(json.dumps({"digest": manifest.digest, "metrics": manifest.metrics}, indent=1))


def _limit_threads(threads: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch = sys.modules.get("torch")  # preloaded by the fork server, it has read the variable already
    if torch is not None:
        torch.set_num_threads(threads)


def peak_rss_bytes() -> int:
    """The largest resident set of this process or of one of its finished children, in bytes."""
    kib = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return kib * 1024


def stop_on_sigterm() -> None:
    """Make SIGTERM end a stage through its `finally` blocks; `train` saves a checkpoint instead."""

    def handle(_signal: int, _frame: object) -> NoReturn:
        raise Terminated("stopped by SIGTERM", fix="run again to resume")

    signal.signal(signal.SIGTERM, handle)


# ---------------------------------------------------------------------------------------------- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, fix=f"see {self.prog} --help")


def _parse(arguments: list[str]) -> tuple[Job, bool]:
    parser = _Parser(prog="python -m components", description="Run one stage of the pipeline.")
    stages = parser.add_subparsers(dest="stage", required=True, metavar="STAGE", parser_class=_Parser)
    for stage in STAGES:
        module = importlib.import_module(f"components.{stage}.stage")
        shape = signature(module.run)
        flags = stages.add_parser(stage, help=(module.__doc__ or "").strip().partition("\n")[0])
        flags.add_argument("--config", default="{}", metavar="JSON", help="the stage's config")
        for name, many in shape.inputs.items():
            kind = shape.input_kinds[name]
            if many:
                flags.add_argument(
                    f"--{name}", nargs="+", required=True, metavar="NAME=PATH", help=f"{kind} artifacts"
                )
            else:
                flags.add_argument(f"--{name}", required=True, metavar="PATH", help=f"a {kind} artifact")
        flags.add_argument("--out", required=True, metavar="PATH", help=f"the new {shape.output_kind}")
        flags.add_argument("--debug", action="store_true", help="show tracebacks")
        flags.set_defaults(shape=shape)
    parsed = parser.parse_args(arguments)

    inputs: dict[str, str | dict[str, str]] = {}
    for name, many in parsed.shape.inputs.items():
        value = getattr(parsed, name)
        inputs[name] = dict(_split_named(name, item) for item in value) if many else value
    try:
        config = json.loads(parsed.config)
    except ValueError as error:
        raise ConfigInvalid("--config is not JSON", why=str(error)) from None
    if Path(parsed.out).exists():
        raise UsageError(f"--out {parsed.out} exists already", fix="name a new folder")
    run = f"components.{parsed.stage}.stage:run"
    return Job(run=run, config=config, inputs=inputs, out=parsed.out), parsed.debug


def _split_named(flag: str, item: str) -> tuple[str, str]:
    name, separator, path = item.partition("=")
    if not separator:
        raise UsageError(f"--{flag} {item!r} is not NAME=PATH")
    return name, path


def main(arguments: list[str] | None = None) -> None:
    """Run the stage named on the command line; the digest of what it wrote goes to stdout."""
    given = sys.argv[1:] if arguments is None else arguments
    with explained(debug="--debug" in given):
        job, _ = _parse(given)
        stop_on_sigterm()
        manifest = execute(job)
        print(json.dumps({"digest": manifest.digest, "metrics": manifest.metrics}))


if __name__ == "__main__":
    main()
