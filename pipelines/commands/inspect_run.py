"""What became of a run: `hpml status`, `logs`, `report`, `diagnose`, `explain`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hpml.core.errors import UsageError
from hpml.pipelines.commands.options import (
    HOME,
    AllowNoise,
    Format,
    Home,
    MarkdownFormat,
    RemoteHost,
    Run,
    RunArgument,
    SampleData,
    app,
    print_json,
)

if TYPE_CHECKING:
    from hpml.pipelines.engine.run_record import RunRecord, StepRecord


@app.command()
def status(
    run: RunArgument = "latest",
    home: Home = HOME,
    all_runs: Annotated[bool, typer.Option("--all", help="List the runs instead.")] = False,
    host: RemoteHost = "",
    output: Format = "table",
) -> None:
    """Show the steps of a run, or with --all the runs."""
    from hpml.pipelines.engine import run_record
    from hpml.pipelines.kubeflow import remote_runs as kubeflow_runs
    from hpml.pipelines.terminal import console, status_tables

    if all_runs:
        status_tables.show_runs(run_record.list_runs(home), output)
        return
    record = run_record.load(home, run)
    remote = kubeflow_runs.remote_run(home, record.id, host)
    if remote:
        print(f"in Kubeflow: {remote.page}", file=sys.stderr)
        with console.watcher() as watcher:
            record = kubeflow_runs.refresh(home, record, remote, watcher)
    status_tables.show_steps(record, output)


@app.command()
def logs(
    step: Annotated[str, typer.Argument(metavar="STEP")],
    run: Run = "latest",
    home: Home = HOME,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the step has ended.")] = False,
    traceback: Annotated[bool, typer.Option(help="Also the traceback of a failure.")] = False,
    host: RemoteHost = "",
) -> None:
    """Print the log of a step."""
    from hpml.io.relay import EventTail
    from hpml.pipelines.engine import run_record
    from hpml.pipelines.kubeflow import remote_runs as kubeflow_runs

    record = run_record.load(home, run)
    known = _step(record, step)
    remote = kubeflow_runs.remote_run(home, record.id, host)
    if remote:
        for text in kubeflow_runs.log(remote, step, follow=follow, traceback=traceback):
            sys.stdout.write(text)
            sys.stdout.flush()
        return
    folder = home / record.id / "logs"
    log = folder / f"{step}.log"
    if not log.exists():
        raise UsageError(f"step {step} has no log in run {record.id}", why=f"it is {known.status} there")
    with log.open(errors="replace") as file:
        sys.stdout.write(file.read())
        while follow and _step(run_record.load(home, record.id), step).status == "running":
            time.sleep(0.2)
            sys.stdout.write(file.read())
            sys.stdout.flush()
        sys.stdout.write(file.read())
    if traceback:
        tail = EventTail(folder / f"{step}.events.jsonl")
        tail.read()
        if tail.failure:
            sys.stdout.write(str(tail.failure["traceback"]))


def _step(record: RunRecord, step: str) -> StepRecord:
    """The record of a step.

    Raises UsageError if the run has no such step.
    """
    if step not in record.steps:
        raise UsageError(f"run {record.id} has no step {step!r}", why=f"it has {', '.join(record.steps)}")
    return record.steps[step]


@app.command()
def report(
    run: RunArgument = "latest",
    home: Home = HOME,
    output: MarkdownFormat = "table",
    host: RemoteHost = "",
) -> None:
    """Print the variants of a run, which was chosen and why, and where the report and the bundle are."""
    from hpml.pipelines.engine import run_record
    from hpml.pipelines.kubeflow import remote_runs as kubeflow_runs
    from hpml.pipelines.terminal import console, results

    record = run_record.load(home, run)
    remote = kubeflow_runs.remote_run(home, record.id, host)
    if remote:
        with console.watcher() as watcher:
            kubeflow_runs.refresh(home, record, remote, watcher)
        page = home / record.id / "report" / "report.html"
        print(page.resolve() if page.exists() else remote.page)
        return
    if not results.show(home, record, output):
        raise UsageError(f"run {record.id} has no measurements", why=f"it is {record.status}")


@app.command()
def diagnose(
    run: Annotated[
        str, typer.Argument(metavar="[RUN | FILE.onnx]", help="A run's id, or a file to measure now.")
    ] = "latest",
    variant: Annotated[
        str, typer.Argument(metavar="[VARIANT]", help="An engine, such as int8/onnx; without it, all.")
    ] = "",
    dims: Annotated[
        list[str] | None,
        typer.Option("--dim", metavar="NAME=SIZE", help="Of a file: a size that it leaves open."),
    ] = None,
    data: SampleData = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Of a file; by default all CPUs.")] = None,
    budget_s: Annotated[float | None, typer.Option(help="Of measuring a file, as in hpml bench.")] = None,
    limit_s: Annotated[
        float, typer.Option(min=1, help="The profile of a file is ended after so many seconds.")
    ] = 300.0,
    allow_noise: AllowNoise = False,
    home: Home = HOME,
    output: Annotated[
        Literal["table", "json", "markdown", "html"], typer.Option("--output", "-o", help="What stdout gets.")
    ] = "table",
) -> None:
    """Say why the engines of a run, or an ONNX file, are not faster, and what to do about it."""
    from hpml.pipelines.bench import diagnose_file, diagnosis, measurable
    from hpml.pipelines.bench import session as benches
    from hpml.pipelines.bench.sample_file import SampleFile
    from hpml.pipelines.engine import run_record
    from hpml.pipelines.terminal import console

    if run.endswith(".onnx"):
        if variant:
            raise UsageError(f"{run} has no engines", fix="give the file alone")
        options = benches.BenchOptions(threads=threads, budget_s=budget_s)
        sizes = measurable.parse_sizes(dims or ())
        with console.watcher() as watcher:
            found, peaks = diagnose_file.diagnose(
                home,
                Path(run),
                sizes,
                options,
                watcher,
                limit_s=limit_s,
                samples=SampleFile(data) if data else None,
            )
        variant = run
    elif data:
        raise UsageError("--data is for an ONNX file", why="a run is diagnosed with its own test samples")
    else:
        record = run_record.load(home, run)
        found, peaks = diagnosis.find(home, record), None
    if output in ("markdown", "html"):
        peaks = peaks or diagnosis.peaks_of(home, record)
        diagnosis.show_document(f"Run {run}", found, peaks, variant, output)
    else:
        diagnosis.show(found, variant, output)


@app.command()
def explain(
    step: Annotated[str, typer.Argument(metavar="STEP")],
    run: Run = "latest",
    home: Home = HOME,
    output: Format = "table",
) -> None:
    """Say why a step was taken from the store or had to be run."""
    from hpml.pipelines.engine import run_record

    known = _step(run_record.load(home, run), step)
    if output == "json":
        print_json({"step": step, "status": known.status, "key": known.key, "reasons": known.reasons})
    elif known.status == "cached":
        print(f"{step} was taken from the store: nothing it depends on has changed (key {known.key[:12]})")
    elif not known.key:
        print(f"{step} was not looked up: it is {known.status}")
    else:
        print(f"{step} had to be run:")
        for reason in known.reasons:
            print(f"  {reason}")
