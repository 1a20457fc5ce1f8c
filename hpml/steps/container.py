"""What a container adds to a stage: artifacts by URI, waiting for outages, events on stdout, tracking.

Of the processes of a group (torchrun) only the first publishes, keeps checkpoints in the store, and reports;
the others work in folders of their own.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from hpml.artifacts.folder import MANIFEST, Manifest, read_manifest
from hpml.core import hardware
from hpml.core.contract import Events, canonical_json, each_input, of_inputs, signature, validate
from hpml.core.errors import HpmlError, StageFailed, Unavailable, UsageError, explained
from hpml.io import storage
from hpml.io.patience import patiently
from hpml.io.relay import Listener, print_event, relayed
from hpml.steps.job import Job, load_run, perform, rejection, scratch_of
from hpml.steps.step_tracking import Reported, StepTracking
from hpml.training.distributed import is_launched, rank, workers_on_this_machine

STDOUT = "-"  # as the place of events: lines on stdout
WORK = "{work}"  # in the URI of a scratch folder
_CHECKPOINTS = ("checkpoints-*/*", "rounds/*")  # of a scratch folder, what is worth keeping elsewhere


@contextmanager
def reporting(job: Job, reported: Reported | None) -> Iterator[Job]:
    """`job` with a file for its events; from there they go to stdout and to MLflow, as asked for."""
    if rank() > 0:
        yield replace(job, events="")
        return
    with tempfile.TemporaryDirectory(prefix="hpml-events-") as folder, ExitStack() as stack:
        listeners: list[Listener] = []
        if reported:
            place = Path(folder, "tracking")
            listeners.append(stack.enter_context(StepTracking(reported, job.config, place)).hear)
        if job.events == STDOUT:
            listeners.append(print_event)
        to_file = job.events not in ("", STDOUT)
        file = Path(job.events) if to_file else Path(folder, "events.jsonl")
        if listeners:
            stack.enter_context(relayed(file, listeners))
        yield replace(job, events=str(file) if listeners or to_file else "")


@contextmanager
def refusals_told(arguments: Sequence[str], reported: Reported | None) -> Iterator[None]:
    """What is wrong with a command line is told like what a stage fails of: as an event, and to MLflow."""
    try:
        yield
    except HpmlError:
        events = STDOUT if ("--events", STDOUT) in pairwise(arguments) else ""
        nothing = Job(run="", config={}, inputs={}, out="", events=events)
        with reporting(nothing, reported) as job, explained(record=events_of(job).write):
            raise


def events_of(job: Job) -> Events:
    """Where what becomes of `job` is told, beside what its stage tells."""
    return Events(Path(job.events) if job.events else None)


def tell_finished(events: Events, manifest: Manifest) -> None:
    """What an entrypoint tells when the artifact of its job is where it is to be."""
    events.write("finished", digest=manifest.digest, metrics=manifest.metrics, incomplete=manifest.incomplete)


def run(job: Job) -> Manifest:
    """Execute `job`, whose inputs, `out` and `scratch` may be s3:// URIs.

    An infrastructure that fails (Unavailable) is waited for, about two minutes. What an earlier attempt at
    the same work has finished is not repeated. `WORK` in `scratch` stands for what is done, see `_work`.
    Raises HpmlError like `execute`.
    """
    leads = rank() == 0
    if WORK in job.scratch:
        job = replace(job, scratch=job.scratch.replace(WORK, _work(job)))
    with tempfile.TemporaryDirectory(prefix="hpml-") as name:
        folder = Path(name)
        keeps = leads and storage.is_remote(job.scratch)
        finished = _finished_before(job, folder)
        if finished:
            if keeps and not finished.incomplete:
                storage.delete(job.scratch)
            return finished
        delivers = leads and storage.is_remote(job.out)
        here = replace(
            job,
            inputs=_fetched(job, folder / "inputs"),
            out=job.out if leads and not delivers else str(folder / "out"),
            scratch=job.scratch if leads and not storage.is_remote(job.scratch) else str(folder / "scratch"),
            threads=max(1, (job.threads or hardware.usable_cpus()) // workers_on_this_machine()),
            # What was downloaded is verified here, whoever verified it elsewhere.
            verified=() if any(map(storage.is_remote, each_input(job.inputs).values())) else job.verified,
        )
        with storage.mirrored(scratch_of(here), job.scratch, only=_CHECKPOINTS) if keeps else nullcontext():
            try:
                # A worker cannot try again alone: its launcher starts all of them again.
                manifest = (
                    perform(here) if is_launched() else patiently(lambda: perform(here), outage=Unavailable)
                )
            finally:
                if delivers and Path(here.out).exists():  # also what a gate refused
                    storage.upload(Path(here.out), job.out)
        if not manifest.incomplete:
            shutil.rmtree(scratch_of(here), ignore_errors=True)
            if keeps:
                storage.delete(job.scratch)
        return manifest


def _finished_before(job: Job, folder: Path) -> Manifest | None:
    """What an earlier attempt at this very work left at `job.out`, if anything: a pod may be started again.

    Raises GateFailed if a gate refused it, UsageError if something else is there.
    """
    manifest_uri = f"{job.out.rstrip('/')}/{MANIFEST}"
    if not storage.exists(manifest_uri):
        if not storage.is_remote(job.out) and _holds_something(Path(job.out)):
            raise UsageError(f"--out {job.out} exists already", fix="name a new folder")
        return None
    (folder / MANIFEST).write_text(storage.read_text(manifest_uri))
    found = read_manifest(folder)
    shape = signature(load_run(job.run))
    config = validate(shape.config_type, job.config, where=f"the config of {shape.stage}")
    ours = (shape.stage, job.code_digest, config.model_dump(mode="json"), _parents(job), dict(job.libraries))
    lineage = found.lineage
    theirs = (lineage.stage, lineage.code_digest, lineage.config, lineage.parents, lineage.libraries)
    if not job.code_digest or ours != theirs:
        raise UsageError(f"--out {job.out} exists already", why="it is of other work", fix="name a new place")
    if found.rejected:
        raise rejection(shape.stage, found.rejected)
    print(f"{job.out} was written by an earlier attempt at the same work", flush=True)
    return found


def installed_libraries() -> dict[str, str]:
    """The version of every installed distribution, under its normalised name (PEP 503)."""
    versions = {
        re.sub(r"[-_.]+", "-", found.name).lower(): found.version
        for found in importlib.metadata.distributions()
        if found.name
    }
    return dict(sorted(versions.items()))


def _work(job: Job) -> str:
    """One digest of what `job` does, for its scratch where no executor knows the inputs in advance.

    The next run of the same work, with the same libraries on the same hardware, then goes on from there.
    """
    here = (job.code_digest, installed_libraries(), hardware.identity())
    done = (job.run, job.config, _parents(job), here)
    return hashlib.sha256(canonical_json(done).encode()).hexdigest()


def _holds_something(place: Path) -> bool:
    return place.exists() and (not place.is_dir() or any(place.iterdir()))


def _parents(job: Job) -> dict[str, str]:
    """The content digest of each input, by its name or name/key, without fetching more than manifests."""
    return {name: _digest_at(uri) for name, uri in each_input(job.inputs).items()}


def _digest_at(uri: str) -> str:
    """The content digest of an input. Raises StageFailed if it is not there whole."""
    digest = storage.digest_at(uri)
    if not digest:
        raise StageFailed(
            f"there is no whole artifact at {uri}",
            why=f"it has no {MANIFEST}, which is written last",
            fix="run the step that writes it",
        )
    return digest


def _fetched(job: Job, folder: Path) -> dict[str, str | Mapping[str, str]]:
    """The inputs of `job` as paths of this machine."""
    inputs = enumerate(each_input(job.inputs).items())
    return of_inputs(job.inputs, {name: _fetch(uri, folder / str(number)) for number, (name, uri) in inputs})


def _fetch(uri: str, folder: Path) -> str:
    if not storage.is_remote(uri):
        return uri
    _digest_at(uri)
    storage.fetch(uri, folder)
    print(f"fetched {uri}", flush=True)
    return str(folder)
