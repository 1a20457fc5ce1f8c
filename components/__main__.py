"""The entrypoint of every image: python -m hpml.components STAGE --config JSON --<input> URI... --out URI.

The flags of a stage are derived from the signature of its `run`; `arguments_of` is the inverse. An executor
that forks calls `run_job` instead, with the same job.

    --set KEY=VALUE      on top of --config, as in `hpml run`; an empty VALUE (an unset parameter of a
                         Kubeflow pipeline) leaves the key as it is
    --check STAGE.KEY=VALUE
                         refuse a value that a later step of the run, of that stage, would refuse
    --events -           events as lines "#hpml {...}" on stdout, among the lines of the log
    --lineage JSON       what the executor knows: {"code_digest": ..., "libraries": {...}} for the artifact's
                         manifest, {"parents": {...}, "verified": [...]} of the inputs; see hpml.steps.job.Job
    --scratch URI        where a next attempt goes on from; {work} in it stands for a digest
                         of what is done, where no executor knows the inputs in advance
    --left-out JSON      {"engines/int8/onnx": why, ...}, inputs whose steps failed
    --executor-input JSON, --names JSON
                         a step of Kubeflow Pipelines, see components/executor_input.py, and which of its
                         artifacts each input is: {"model": "train", "engines": {"int8/onnx": "export_onnx"}}

A URI is a path, or s3://BUCKET/PREFIX. `python -m hpml.components --about` says what this image is.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import Field

import hpml
from hpml.artifacts.folder import Manifest
from hpml.components import STAGES
from hpml.components.executor_input import ExecutorInput, Named, read_executor_input
from hpml.core import hardware, memory
from hpml.core.contract import Config, StageSignature, signature, validate
from hpml.core.errors import ConfigInvalid, UsageError, explained
from hpml.core.process import import_paths, spin_briefly
from hpml.io.overrides import with_overrides
from hpml.steps import container
from hpml.steps.job import Job, execute, load_run, run_job, stop_on_sigterm
from hpml.steps.step_tracking import reported
from hpml.training.distributed import rank

__all__ = ["STAGES", "Job", "about", "arguments_of", "execute", "main", "run_job", "source_digest"]

_CODE = (".py", ".html", ".css")
_LINKS = ("components", "pipelines", "serving")  # folders of hpml that a clone has beside it


# ---------------------------------------------------------------------------------------------- command line


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line as UsageError."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, fix=f"see {self.prog} --help")


class _Given(Config):
    """What --lineage says of the code and of the inputs: not known inside of an image."""

    code_digest: str = ""
    libraries: dict[str, str] = Field(default_factory=dict)
    parents: dict[str, str] = Field(default_factory=dict)
    verified: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """What the command line asks for. kubeflow: the executor input, if it is a step of Kubeflow Pipelines."""

    job: Job
    stage: str
    kubeflow: ExecutorInput | None


def _run_path(stage: str) -> str:
    return f"hpml.components.{stage}.stage:run"


def arguments_of(job: Job) -> list[str]:
    """The command line that stands for `job`, without `python -m hpml.components`.

    The import paths of `job` are not in it: HPML_IMPORT_PATHS says them. Inputs and `out` that are empty are
    Kubeflow's to say. Raises UsageError if its `run` is not one of STAGES.
    """
    stage = next((name for name in STAGES if _run_path(name) == job.run), None)
    if stage is None:
        raise UsageError(f"{job.run} is no stage of an image", why=f"the stages are {', '.join(STAGES)}")
    arguments = [stage, "--config", json.dumps(job.config)]
    for name, given in job.inputs.items():
        arguments.append(f"--{name}")
        arguments += [given] if isinstance(given, str) else [f"{key}={uri}" for key, uri in given.items()]
    lineage = _Given.model_validate({name: getattr(job, name) for name in _Given.model_fields})
    optional = {
        "--out": job.out,
        "--scratch": job.scratch,
        "--events": job.events,
        "--threads": str(job.threads or ""),
        "--lineage": lineage.model_dump_json(exclude_defaults=True) if lineage != _Given() else "",
        "--left-out": json.dumps(dict(job.left_out)) if job.left_out else "",
    }
    return arguments + [part for flag, value in optional.items() if value for part in (flag, value)]


def _parser() -> Parser:
    parser = Parser(prog="python -m hpml.components", description="Run one stage of the pipeline.")
    parser.add_argument("--about", action="store_true", help="say as JSON what this image is")
    stages = parser.add_subparsers(dest="stage", required=True, metavar="STAGE", parser_class=Parser)
    for stage in STAGES:
        module = importlib.import_module(f"hpml.components.{stage}.stage")
        shape = signature(module.run)
        summary = (module.__doc__ or "").strip().partition("\n")[0]
        flags = stages.add_parser(stage, help=summary, description=summary, allow_abbrev=False)
        flags.add_argument("--config", default="{}", metavar="JSON", help="the stage's config")
        flags.add_argument(
            "--set", action="append", default=[], metavar="KEY=VALUE", help="on top of --config"
        )
        flags.add_argument(
            "--check", action="append", default=[], metavar="STAGE.KEY=VALUE", help="of a later step"
        )
        for name, kind in shape.input_kinds.items():
            if shape.inputs[name]:
                flags.add_argument(f"--{name}", nargs="+", metavar="NAME=URI", help=f"{kind} artifacts")
            else:
                flags.add_argument(f"--{name}", metavar="URI", help=f"a {kind} artifact")
        flags.add_argument("--out", metavar="URI", help=f"the new {shape.output_kind}")
        flags.add_argument("--scratch", default="", metavar="URI", help="checkpoints, for a next attempt")
        flags.add_argument("--threads", type=int, default=0, metavar="N", help="0 (default): one a CPU")
        flags.add_argument("--events", default="", metavar="-|PATH", help="-: as lines on stdout")
        flags.add_argument("--lineage", default="{}", metavar="JSON", help="what the executor knows")
        flags.add_argument(
            "--left-out", default="{}", metavar="JSON", help="inputs that are missing since a step failed"
        )
        flags.add_argument("--executor-input", metavar="JSON", help="Kubeflow's; instead of inputs and --out")
        flags.add_argument("--names", default="{}", metavar="JSON", help="of its artifacts, by input")
        flags.add_argument("--debug", action="store_true", help="show tracebacks")
        flags.set_defaults(shape=shape)
    return parser


def parse(arguments: list[str]) -> Command:
    """What the command line asks for. Raises UsageError, ConfigInvalid."""
    parsed = _parser().parse_args(arguments)
    shape: StageSignature = parsed.shape
    kubeflow = read_executor_input(parsed.executor_input) if parsed.executor_input else None
    if kubeflow and parsed.out:
        raise UsageError(
            "--out does not go with --executor-input", why="which says where the artifact is to be"
        )
    if not kubeflow and not parsed.out:
        raise UsageError("the following arguments are required: --out", fix=f"see {shape.stage} --help")
    if parsed.threads < 0:
        raise UsageError(f"--threads {parsed.threads} is negative")
    for given in parsed.check:
        _check(given)
    job = Job(
        run=_run_path(parsed.stage),
        config=_config(shape, _json("--config", parsed.config), parsed.set),
        inputs=_inputs(shape, parsed, kubeflow),
        out=parsed.out or (kubeflow.out() if kubeflow else ""),
        scratch=parsed.scratch,
        events=parsed.events,
        threads=parsed.threads,
        import_paths=import_paths(),
        left_out=_json("--left-out", parsed.left_out, dict[str, str]),
        **_json("--lineage", parsed.lineage, _Given).model_dump(),
    )
    return Command(job, parsed.stage, kubeflow)


def _json(flag: str, text: str, expected: Any = None) -> Any:
    """The JSON that follows `flag`, as an `expected` if that is said."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{flag} is not JSON", why=str(error)) from None
    return validate(expected, value, where=flag) if expected else value


def _config(shape: StageSignature, fields: Any, overrides: Iterable[str]) -> Any:
    """The config with --set on top."""
    given = []
    for override in overrides:
        key, separator, value = override.partition("=")
        if separator and not value:
            print(f"--set {override} has no value: {key} stays as it is", flush=True)
        else:
            given.append(override)
    where = f"the config of {shape.stage}"
    return with_overrides(shape.config_type, fields, given, where=where) if given else fields


def _check(given: str) -> None:
    """Raise ConfigInvalid if `given`, STAGE.KEY=VALUE, is a value that this stage would refuse."""
    key, _, value = given.partition("=")
    stage, _, name = key.partition(".")
    if stage not in STAGES:
        raise UsageError(f"--check {given}: {stage!r} is no stage", why=f"they are {', '.join(STAGES)}")
    fields = signature(load_run(_run_path(stage))).config_type.model_fields
    if name not in fields:
        raise UsageError(f"--check {given}: {stage} has no {name!r}", why=f"it has {', '.join(fields)}")
    if value:
        checked = with_overrides(dict[str, Any], {}, [f"{name}={value}"], where=key)
        validate(Annotated[fields[name].annotation, fields[name]], checked[name], where=key)


def _inputs(
    shape: StageSignature, parsed: argparse.Namespace, kubeflow: ExecutorInput | None
) -> dict[str, Named]:
    """From the flags and, as far as these say nothing, from Kubeflow."""
    names = _json("--names", parsed.names, dict[str, str | dict[str, str]])
    inputs: dict[str, Named] = kubeflow.input_paths(names) if kubeflow else {}
    for name, many in shape.inputs.items():
        value = getattr(parsed, name)
        if value is not None:
            inputs[name] = dict(_split_named(name, item) for item in value) if many else value
    absent = [f"--{name}" for name in shape.inputs if name not in {*inputs, *shape.optional}]
    if absent:
        raise UsageError(f"the following arguments are required: {', '.join(absent)}")
    return {name: inputs[name] for name in shape.inputs if name in inputs}


def _split_named(flag: str, item: str) -> tuple[str, str]:
    name, separator, uri = item.partition("=")
    if not separator:
        raise UsageError(f"--{flag} {item!r} is not NAME=URI")
    return name, uri


# ------------------------------------------------------------------------------------------------------ main


def about() -> dict[str, Any]:
    """What this image, or this machine, is: what a step that runs here depends on.

    hardware: see hardware.identity. python: the minor version. libraries: see
    container.installed_libraries. source: the digest of our own code.
    """
    return {
        "hardware": hardware.identity(),
        "python": ".".join(str(part) for part in sys.version_info[:2]),
        "libraries": container.installed_libraries(),
        "source": source_digest(),
    }


def source_digest() -> str:
    """One digest of all Python files and templates that a step can run, by their paths."""
    root = Path(hpml.__file__).parent
    stages = root / "components"  # a link in a clone, which rglob does not follow
    library = (file for file in root.rglob("*") if file.relative_to(root).parts[0] not in _LINKS)
    digest = hashlib.sha256()
    for file in sorted(file for file in [*library, *stages.rglob("*")] if file.suffix in _CODE):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(root).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def main(arguments: list[str] | None = None) -> None:
    """Run the stage named on the command line; the digest of what it wrote goes to stdout."""
    given = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in given
    spin_briefly()
    with explained(debug=debug):
        if given == ["--about"]:
            print(json.dumps(about()))
            return
        stop_on_sigterm()
        memory.limit_process()
        with container.refusals_told(given, reported(os.environ)):
            command = parse(given)
        with container.reporting(command.job, reported(os.environ)) as job:
            events = container.events_of(job)
            with explained(debug=debug, record=events.write):
                manifest = container.run(job)
                if command.kubeflow:
                    command.kubeflow.deliver(command.stage, manifest)
                container.tell_finished(events, manifest)
        if rank() == 0:
            tell(manifest)


def tell(manifest: Manifest) -> None:
    """Print what every entrypoint prints last: the digest and the metrics of what it made."""
    if manifest.incomplete:
        print(f"incomplete: {manifest.incomplete}", file=sys.stderr, flush=True)
    print(json.dumps({"digest": manifest.digest, "metrics": manifest.metrics}), flush=True)


if __name__ == "__main__":
    main()
