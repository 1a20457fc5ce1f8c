"""The `hpml` command. Data goes to stdout, all else to stderr; heavy imports wait for their command."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import typer.core

from hpml.core.errors import StageFailed, UsageError, explained

if TYPE_CHECKING:
    from hpml.pipelines.engine.execution import Settings
    from hpml.pipelines.engine.run_record import RunRecord, StepRecord
    from hpml.pipelines.plan import Plan
    from hpml.pipelines.recipe import LoadedRecipe

app = typer.Typer(
    name="hpml",
    help="Data to a chosen, registered, deployable model: an MLOps pipeline for high-performance ML.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _EnginesByDefault(typer.core.TyperGroup):
    """`hpml bench ENGINE...` is `hpml bench engines ENGINE...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["engines", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    help="Measure engines, together; what a run lacks; or the machine. Options: hpml bench engines --help.",
    cls=_EnginesByDefault,
    subcommand_metavar="ENGINE... | RUN | machine",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(bench, name="bench")

Home = Annotated[
    Path, typer.Option("--home", envvar="HPML_HOME", help="The workspace: store, runs, MLflow database.")
]
Run = Annotated[str, typer.Option("--run", help="A run's id.")]
RunArgument = Annotated[str, typer.Argument(metavar="[RUN]", help="A run's id.")]
Format = Annotated[Literal["table", "json"], typer.Option("--output", "-o", help="What stdout gets.")]
RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe's YAML file.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as train.epochs=3."),
]
Host = Annotated[
    str, typer.Option("--host", metavar="URL", help="Kubeflow Pipelines; by default KF_PIPELINES_ENDPOINT.")
]
RemoteHost = Annotated[
    str, typer.Option("--host", metavar="URL", help="Of a run in Kubeflow: where that is reached by now.")
]
InCluster = Annotated[
    bool, typer.Option("--in-cluster", help="The Kubeflow of the cluster that this pod runs in.")
]
Experiment = Annotated[str, typer.Option(metavar="E", help="Of Kubeflow; by default the recipe's name.")]
Namespace = Annotated[str, typer.Option(help="Yours, in a Kubeflow that has many users.")]

Strict = Annotated[bool, typer.Option("--strict", help="Exit with 5 if something is not measured.")]

_HOME = Path("runs")

# typer raises click's UsageError, its own copy of click's since 0.26; BadParameter is the public door to it.
_WrongUsage: Any = typer.BadParameter.__bases__[0]


def _told_as_retired(option: str) -> Any:
    """A callback for an option that is taken as before and does nothing any more."""

    def tell(given: Any) -> None:
        from hpml.pipelines import retired

        if given:
            retired.tell([option])

    return tell


AllowNoise = Annotated[
    bool, typer.Option("--allow-noise", hidden=True, callback=_told_as_retired("--allow-noise"))
]


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"hpml {importlib.metadata.version('hpml-pipeline')}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command; `main` reads --debug."""


# ------------------------------------------------------------------------------------------------------- run


@app.command()
def run(
    recipe: RecipeFile,
    overrides: Set = None,
    home: Home = _HOME,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and why.")] = False,
    only: Annotated[str, typer.Option(metavar="STEP", help="Run this step and what it needs.")] = "",
    force: Annotated[
        list[str] | None, typer.Option(metavar="STEP", help="Run this step although it is cached.")
    ] = None,
    max_parallel: Annotated[
        int | None, typer.Option(min=1, help="Steps at once; by default as many as there are CPUs.")
    ] = None,
    tracking: Annotated[bool, typer.Option(help="Record the run in MLflow.")] = True,
    executor: Annotated[
        Literal["process", "container", "kubernetes"],
        typer.Option(help="Run steps as processes or containers of this machine, or as Jobs of a cluster."),
    ] = "process",
    strict: Strict = False,
    output: Format = "table",
) -> None:
    """Run a recipe: data to a chosen, registered, deployable model."""
    from hpml.pipelines import graph, plan
    from hpml.pipelines import recipe as recipes

    loaded = recipes.load(recipe, (*(overrides or ()), *_strictly(strict)))
    steps = plan.trace(graph.graph, loaded.recipe)
    if only:
        steps = steps.needed_for(only)
    for step in force or ():
        steps.needed_for(step)
    settings = _settings(home, loaded, executor, force=force, max_parallel=max_parallel, tracking=tracking)
    if dry_run:
        _forecast(loaded, steps, settings, executor, output)
    else:
        _execute(loaded, steps, settings, executor, output, home=home, again=f"hpml run {recipe}")


def _strictly(strict: bool) -> tuple[str, ...]:
    """What --strict sets in a recipe."""
    return ("benchmark.require_quiet=true",) if strict else ()


def _forecast(loaded: LoadedRecipe, steps: Plan, settings: Settings, executor: str, output: str) -> None:
    """Print what a run would do, and why."""
    from hpml.pipelines.engine import run_record
    from hpml.pipelines.engine.execution import forecast
    from hpml.pipelines.executors import named as executors
    from hpml.pipelines.preflight import applicability
    from hpml.pipelines.preflight import checks as preflight
    from hpml.pipelines.terminal import console

    with console.watcher() as watcher:
        run_id = run_record.new_run_id(loaded.recipe.name)
        opened = executors.open_executor(executor, loaded, settings, run_id, watcher)
        if executor == "process":
            forecasts, problems = preflight.forecast_checked(loaded, steps, settings, opened, watcher)
        else:
            opened.check(steps)
            applicability.tell(loaded, steps, settings, opened, watcher)
            forecasts, problems = forecast(steps, settings, opened), []
        opened.close("done")
        _print_forecast(forecasts, output)
        preflight.refuse(problems)


def _execute(
    loaded: LoadedRecipe,
    steps: Plan,
    settings: Settings,
    executor: str,
    output: str,
    *,
    home: Path,
    again: str,
) -> None:
    """Run `steps` of a recipe, and print what they found. again: the command that resumes it."""
    from hpml.pipelines import recipe as recipes
    from hpml.pipelines.engine import run_record
    from hpml.pipelines.engine.execution import Execution
    from hpml.pipelines.executors import named as executors
    from hpml.pipelines.preflight import applicability
    from hpml.pipelines.terminal import console, results

    with console.watcher() as watcher:
        run_id = run_record.new_run_id(loaded.recipe.name)
        opened = executors.open_executor(executor, loaded, settings, run_id, watcher)
        if executor == "process":
            recipes.check_targets(loaded.recipe)
        opened.check(steps)
        applicability.tell(loaded, steps, settings, opened, watcher)
        store = loaded.recipe.cluster.store if executor == "kubernetes" else ""
        record = run_record.start(
            home, run_id, loaded.recipe.name, str(loaded.file), steps, executor=executor, store=store
        )
        results.store_recipe(home, record, loaded)
        record = Execution(steps, record, settings, watcher, opened).execute()
    results.show(home, record, output)
    _end_of_run(record, again, completed_by=f"hpml bench {record.id}")


def _settings(
    home: Path,
    loaded: Any,
    executor: str,
    *,
    force: list[str] | None,
    max_parallel: int | None,
    tracking: bool,
) -> Settings:
    from hpml.pipelines.engine.execution import Settings

    home = home.resolve()
    registry = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home}/mlflow.db"
    if executor == "kubernetes":  # what its pods reach
        registry = loaded.recipe.cluster.tracking_uri or registry
    return Settings(
        home=home,
        import_paths=loaded.import_paths,
        max_parallel=max_parallel,
        force=frozenset(force or ()),
        tracking_uri=registry if tracking else "",
        registry_uri=registry,
    )


def _print_forecast(forecasts: list[Any], output: str) -> None:
    import dataclasses

    from hpml.pipelines.terminal import console

    if output == "json":
        _print_json([dataclasses.asdict(item) for item in forecasts])
    else:
        rows = [(item.step, item.outcome, "; ".join(item.reasons[:3])) for item in forecasts]
        console.print_table(("step", "outcome", "why"), rows)


def _end_of_run(record: RunRecord, again: str, *, completed_by: str) -> None:
    """Raise the first failure with its exit code; say how a run is resumed, or its measurement completed."""
    _raise_failure(record)
    if record.status == "interrupted":
        print(f"interrupted; resume with: {again}", file=sys.stderr)
        raise SystemExit(record.exit_code)
    _warn_incomplete(record, completed_by)


def _warn_incomplete(record: RunRecord, completed_by: str) -> None:
    """Say what lacks something and why, and the command that completes it."""
    from hpml.pipelines.engine.execution import incomplete_steps

    missing = incomplete_steps(record)
    if missing:
        print(f"warning: {'; '.join(missing)}", file=sys.stderr)
        print(f"to complete it: {completed_by}", file=sys.stderr)


def _raise_failure(record: RunRecord, where: str = "") -> None:
    """Raise the first failure with its exit code, after a warning for each that is not the run's."""
    from hpml.core.errors import ExitCode
    from hpml.pipelines.engine.execution import first_failure, not_shown

    for sentence in not_shown(record):
        print(f"warning: {sentence}", file=sys.stderr)
    failure = first_failure(record)
    if failure:
        name, step = failure
        error = StageFailed(f"step {name} failed", why=step.error, fix=f"its log: hpml logs {name}{where}")
        error.exit_code = ExitCode(step.exit_code)
        raise error


# ------------------------------------------------------------------------------------------------- Kubeflow


@app.command("compile")
def compile_recipe(
    recipe: RecipeFile,
    file: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The pipeline to write, YAML.")
    ] = Path("pipeline.yaml"),
    overrides: Set = None,
) -> None:
    """Compile a recipe for Kubeflow Pipelines."""
    from hpml.core.atomic_files import write_text_atomic
    from hpml.pipelines import recipe as recipes
    from hpml.pipelines.kubeflow.compile import compile_pipeline

    compiled = compile_pipeline(recipes.load(recipe, tuple(overrides or ())))
    write_text_atomic(file, compiled.text)
    names = ", ".join(parameter.name for parameter in compiled.parameters)
    size_kib = len(compiled.text.encode()) / 1024
    print(f"{len(compiled.tasks)} steps, {size_kib:.0f} KiB; parameters: {names}", file=sys.stderr)
    print(file)


@app.command()
def submit(
    recipe: RecipeFile,
    overrides: Set = None,
    host: Host = "",
    in_cluster: InCluster = False,
    experiment: Experiment = "",
    namespace: Namespace = "",
    wait: Annotated[
        bool, typer.Option("--wait", help="Show the run until it is over, and fetch its report.")
    ] = False,
    home: Home = _HOME,
) -> None:
    """Run a recipe on Kubeflow Pipelines; stdout gets the run's id, for hpml status and hpml logs."""
    from hpml.pipelines import recipe as recipes
    from hpml.pipelines.kubeflow import runs as kubeflow_runs
    from hpml.pipelines.preflight import applicability
    from hpml.pipelines.terminal import console

    loaded = recipes.load(recipe, tuple(overrides or ()))
    target = kubeflow_runs.find_target(
        host, in_cluster=in_cluster, experiment=experiment, namespace=namespace
    )
    with console.watcher() as watcher:
        applicability.warn(loaded, watcher)
        record = kubeflow_runs.submit(home, loaded, target, watcher)
        print(record.id, flush=True)
        remote = kubeflow_runs.remote_run(home, record.id)
        if wait and remote:
            record = kubeflow_runs.wait(home, record, remote, watcher)
    if wait:
        _end_of_remote_run(record, completed_by=f"hpml submit {home / record.id / recipes.STORED}")


def _end_of_remote_run(record: RunRecord, *, completed_by: str) -> None:
    """Raise the first failure with its exit code; say that a run was stopped, or what completes it."""
    _raise_failure(record, where=f" --run {record.id}")
    if record.status == "interrupted":
        print("the run was stopped in Kubeflow", file=sys.stderr)
        raise SystemExit(record.exit_code)
    _warn_incomplete(record, completed_by)


@app.command()
def schedule(
    recipe: RecipeFile,
    cron: Annotated[
        str,
        typer.Option(
            metavar="'M H D M W'", help="When, such as '0 3 * * 1-5'; in UTC unless Kubeflow says otherwise."
        ),
    ],
    overrides: Set = None,
    host: Host = "",
    in_cluster: InCluster = False,
    experiment: Experiment = "",
    namespace: Namespace = "",
) -> None:
    """Have Kubeflow Pipelines run a recipe again and again; stdout gets the schedule's id."""
    from hpml.pipelines import recipe as recipes
    from hpml.pipelines.kubeflow import runs as kubeflow_runs
    from hpml.pipelines.terminal import console

    loaded = recipes.load(recipe, tuple(overrides or ()))
    target = kubeflow_runs.find_target(
        host, in_cluster=in_cluster, experiment=experiment, namespace=namespace
    )
    with console.watcher() as watcher:
        print(kubeflow_runs.schedule(loaded, target, cron, watcher))


# --------------------------------------------------------------------------------------------------- measure


@bench.command()
def engines(
    context: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ENGINE... | RUN",
            help="Files .onnx, folders of bundles or engines, http://HOST:PORT/v2/models/NAME, "
            "package.module:callable, RUN:VARIANT. A RUN alone: what is not measured in it.",
        ),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="SingleStream, MultiStream, Offline or Server; may be repeated."),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="1,32", help="Batch sizes; by default 1,8,32.")] = "",
    threads: Annotated[int | None, typer.Option(min=1, help="Of each engine; by default all CPUs.")] = None,
    rounds: Annotated[int | None, typer.Option(help="In each, every engine is timed once.")] = None,
    launches: Annotated[
        int | None, typer.Option(help="Fresh processes over which rounds are spread.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(hidden=True, callback=_told_as_retired("--requests"))
    ] = None,
    budget_s: Annotated[float | None, typer.Option(help="No new round after so many seconds.")] = None,
    precision: Annotated[
        float | None, typer.Option(help="Rounds go on until ratios are known to within so much: 0.01 is 1 %.")
    ] = None,
    max_waited: Annotated[
        float | None,
        typer.Option(help="Of its time that an engine may wait for a CPU and still count; 0.02 by default."),
    ] = None,
    reference: Annotated[str, typer.Option(help="Ratios are to this engine; by default the first.")] = "",
    price_per_hour: Annotated[float | None, typer.Option(help="Of this machine, in any currency.")] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="3x32x32", help="An input of torch modules; 128:int64 for integers."),
    ] = None,
    dims: Annotated[
        list[str] | None,
        typer.Option("--dim", metavar="NAME=SIZE", help="A size that a model leaves open, beside the batch."),
    ] = None,
    argument: Annotated[
        list[str] | None,
        typer.Option("--arg", metavar="KEY=VALUE", help="An argument of torch modules' callables: width=32."),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A recipe; its network gets train.model.arguments, its data says the input."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="The model of a server that is given without one.")] = "",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Of ONNX files and torch modules.")] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs and the order of the engines.")] = 0,
    strict: Strict = False,
    allow_noise: AllowNoise = False,
    earlier: Annotated[
        Path | None, typer.Option("--from", metavar="FOLDER", help="Analyse the samples of an earlier bench.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where to write; by default HOME/bench/ID.")
    ] = None,
    home: Home = _HOME,
    output: Format = "table",
) -> None:
    """Measure anything together: latency, throughput and ratios with their intervals."""
    from hpml.pipelines.commands import bench as benches
    from hpml.pipelines.commands import measurable
    from hpml.pipelines.engine.store import Store
    from hpml.pipelines.terminal import bench_tables

    if earlier:
        record, place = benches.again(earlier), earlier
    elif arguments and (run := benches.run_named(home, arguments)):
        _complete(home, run, _engine_options(context), strict=strict, output=output)
        return
    elif arguments:
        sizes, tensors = measurable.parse_sizes(dims or ()), measurable.parse_inputs(inputs or ())
        hints = measurable.Hints(
            home,
            sizes=sizes,
            inputs=tensors,
            arguments=measurable.parse_arguments(argument or ()),
            recipe=recipe,
            model=model,
            device=device,
        )
        options = benches.BenchOptions(
            batches=measurable.parse_batches(batch) if batch else (),
            scenarios=tuple(scenario or ()),
            threads=threads,
            rounds=rounds,
            launches=launches,
            budget_s=budget_s,
            precision=precision,
            max_waited=max_waited,
            reference=reference,
            price_per_hour=price_per_hour,
            seed=seed,
        )
        with Store(home).in_use():  # gc waits until they are measured
            found = measurable.measurables(arguments, hints)
            record, place = benches.measure(home, found, options, command=sys.argv[1:], folder=folder)
    else:
        raise UsageError(
            "nothing to measure", fix="name engines, or --from FOLDER; see hpml bench engines --help"
        )
    bench_tables.show(record, place, output)
    benches.warn_incomplete(record.measurements.incomplete, strict=strict)


def _engine_options(context: typer.Context) -> list[str]:
    """The options on the command line of `hpml bench` that say how engines are measured."""
    others = ("arguments", "home", "output", "strict", "allow_noise", "requests")
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name not in others
        and getattr(context.get_parameter_source(str(parameter.name)), "name", "") == "COMMANDLINE"
    ]


def _complete(home: Path, record: RunRecord, options: list[str], *, strict: bool, output: str) -> None:
    """Do what a run lacks: its recipe again, in which what is stored is not done twice."""
    from hpml.pipelines import graph, plan
    from hpml.pipelines import recipe as recipes
    from hpml.pipelines.kubeflow import runs as kubeflow_runs

    if options:
        raise UsageError(
            f"{', '.join(options)} cannot be given for run {record.id}",
            why="it is measured as its recipe says",
            fix=f"leave that out, or name engines of it: {record.id}:VARIANT",
        )
    if kubeflow_runs.remote_run(home, record.id):
        raise UsageError(
            f"run {record.id} cannot be completed from here",
            why="it ran in Kubeflow, where its measurements are",
            fix=f"hpml submit {home / record.id / recipes.STORED}",
        )
    loaded = recipes.load_of_run(home, record, _strictly(strict))
    steps = plan.trace(graph.graph, loaded.recipe)
    steps = plan.Plan({name: node for name, node in steps.nodes.items() if name in record.steps})
    if not any(node.stage == "benchmark" for node in steps.nodes.values()):
        raise UsageError(f"run {record.id} measures nothing", why=f"it has {', '.join(record.steps)}")
    executor = "kubernetes" if record.store else record.executor
    settings = _settings(home, loaded, executor, force=None, max_parallel=None, tracking=True)
    _execute(loaded, steps, settings, executor, output, home=home, again=f"hpml bench {record.id}")


@bench.command()
def machine(
    home: Home = _HOME,
    force: Annotated[bool, typer.Option("--force", help="Measure although it is known.")] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, help="Watch the distance between the CPUs for so long.")
    ] = 30.0,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with pictures.")
    ] = None,
    output: Format = "table",
) -> None:
    """Measure this machine: its memory, its products, the distance between its CPUs."""
    from hpml.pipelines.commands import bench_machine
    from hpml.pipelines.terminal import console

    with console.watcher() as watcher:
        record = bench_machine.measure(home.resolve(), watcher, force=force, seconds=seconds)
    _end_of_run(record, "hpml bench machine", completed_by="hpml bench machine")
    measured = bench_machine.found(home.resolve(), record)
    bench_machine.show(measured, output)
    if html:
        bench_machine.write_page(measured, html)


@app.command()
def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="The fp32 model.")],
    data: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER|FILE.npz",
            help="Pictures, in a folder for each class or in one; or arrays by the names of the inputs "
            "(or x), labels as y.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="By default MODEL-int8.onnx beside it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
    mean: Annotated[
        str, typer.Option(metavar="M[,M,M]", help="Of pictures: (pixel / scale - mean) / std, by channel.")
    ] = "0",
    std: Annotated[str, typer.Option(metavar="S[,S,S]", help="See --mean.")] = "1",
    scale: Annotated[float, typer.Option(help="See --mean; 1 leaves pixels from 0 to 255.")] = 255.0,
    calibration: Annotated[
        Literal["minmax", "percentile"],
        typer.Option(help="minmax: all calibrated values fit; percentile: outliers are clipped."),
    ] = "minmax",
    calibration_samples: Annotated[int, typer.Option(help="At most half of all.")] = 256,
    activations: Annotated[
        Literal["auto", "uint8", "int8"],
        typer.Option(help="auto: both are timed; int8 is kept if it is more than 5 % faster."),
    ] = "auto",
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Keep this node in fp32; may be repeated.")
    ] = None,
    max_accuracy_drop: Annotated[
        float | None, typer.Option(help="The gate, where there are labels: 0.01 is one point; default 0.02.")
    ] = None,
    min_agreement: Annotated[
        float | None,
        typer.Option(help="The gate: share of samples with the fp32 model's class; default 0.97."),
    ] = None,
    max_relative_error: Annotated[
        float | None, typer.Option(help="The gate of outputs that are no classes (RMS); default 0.1.")
    ] = None,
    dims: Annotated[
        list[str] | None,
        typer.Option(
            "--dim", metavar="NAME=SIZE", help="A size that the model leaves open, beside the batch."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="By default all CPUs.")] = None,
    limit_s: Annotated[
        float, typer.Option(min=1, help="Quantizing and judging are ended after so many seconds.")
    ] = 900.0,
    budget_s: Annotated[float | None, typer.Option(help="Of measuring both, as in hpml bench.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn to calibrate.")] = 0,
    strict: Strict = False,
    allow_noise: AllowNoise = False,
    home: Home = _HOME,
    output: Annotated[Literal["table", "json"], typer.Option("--output", help="What stdout gets.")] = "table",
) -> None:
    """Make an int8 model of an ONNX file: calibrated, judged against it, measured beside it."""
    from hpml.core.contract import validate
    from hpml.core.hardware import usable_cpus
    from hpml.pipelines.commands import bench as benches
    from hpml.pipelines.commands import measurable
    from hpml.pipelines.quantize import command as quantization
    from hpml.pipelines.quantize.job import QuantizeJob

    place = quantization.places(model, out, force=force)
    bounds = {
        "max_accuracy_drop": max_accuracy_drop,
        "min_top1_agreement": min_agreement,
        "max_relative_error": max_relative_error,
    }
    job: QuantizeJob = validate(
        QuantizeJob,
        {
            "file": model,
            "data": data,
            "sizes": measurable.parse_sizes(dims or ()),
            "preprocessing": {"scale": scale, "mean": mean.split(","), "std": std.split(",")},
            "calibration": calibration,
            "calibration_samples": calibration_samples,
            "activations": activations,
            "excluded_nodes": exclude or (),
            "bounds": {name: bound for name, bound in bounds.items() if bound is not None},
            "threads": threads or usable_cpus(),
            "seed": seed,
        },
        where="the command line",
    )
    options = benches.BenchOptions(threads=threads, budget_s=budget_s)
    record = quantization.quantize(home, job, place, options, limit_s=limit_s, command=sys.argv[1:])
    quantization.show(record, place, output)
    quantization.refuse(record)
    benches.warn_incomplete(record.speed_reason, strict=strict)


@app.command()
def compare(
    before: Annotated[str, typer.Argument(metavar="A", help="A run's id, or the folder of a bench.")],
    after: Annotated[str, typer.Argument(metavar="B", help="What to compare with it.")],
    home: Home = _HOME,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with pictures.")
    ] = None,
    fail_slower: Annotated[
        str,
        typer.Option(
            metavar="SHARE", help="Exit with 5 if B is established to be slower by more, such as 5%."
        ),
    ] = "",
    output: Annotated[
        Literal["table", "json", "markdown"], typer.Option("--output", "-o", help="What stdout gets.")
    ] = "table",
) -> None:
    """Say what changed between two measurements: faster, slower or tied, with intervals."""
    from hpml.pipelines.commands import compare as comparison

    allowed = comparison.parse_share(fail_slower) if fail_slower else None
    found = comparison.compare(home, before, after)
    if html:
        comparison.write_page(found, html)
    comparison.show(found, output)
    if allowed is not None:
        for sentence in comparison.undecided(found, allowed):
            print(f"undecided: {sentence}", file=sys.stderr)
        comparison.refuse_slower(found, allowed)


# ---------------------------------------------------------------------------------------- looking at a run


@app.command()
def status(
    run: RunArgument = "latest",
    home: Home = _HOME,
    all_runs: Annotated[bool, typer.Option("--all", help="List the runs instead.")] = False,
    host: RemoteHost = "",
    output: Format = "table",
) -> None:
    """Show the steps of a run, or with --all the runs."""
    from hpml.pipelines.engine import run_record
    from hpml.pipelines.kubeflow import runs as kubeflow_runs
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
    home: Home = _HOME,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the step has ended.")] = False,
    traceback: Annotated[bool, typer.Option(help="Also the traceback of a failure.")] = False,
    host: RemoteHost = "",
) -> None:
    """Print the log of a step."""
    from hpml.io.relay import EventTail
    from hpml.pipelines.engine import run_record
    from hpml.pipelines.kubeflow import runs as kubeflow_runs

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
    home: Home = _HOME,
    output: Annotated[
        Literal["table", "json", "markdown"], typer.Option("--output", "-o", help="What stdout gets.")
    ] = "table",
    host: RemoteHost = "",
) -> None:
    """Print the variants of a run, which was chosen and why, and where the report and the bundle are."""
    from hpml.pipelines.engine import run_record
    from hpml.pipelines.kubeflow import runs as kubeflow_runs
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
    threads: Annotated[int | None, typer.Option(min=1, help="Of a file; by default all CPUs.")] = None,
    budget_s: Annotated[float | None, typer.Option(help="Of measuring a file, as in hpml bench.")] = None,
    limit_s: Annotated[
        float, typer.Option(min=1, help="The profile of a file is ended after so many seconds.")
    ] = 300.0,
    allow_noise: AllowNoise = False,
    home: Home = _HOME,
    output: Annotated[
        Literal["table", "json", "markdown", "html"], typer.Option("--output", "-o", help="What stdout gets.")
    ] = "table",
) -> None:
    """Say why the engines of a run, or an ONNX file, are not faster, and what to do about it."""
    from hpml.pipelines.commands import bench as benches
    from hpml.pipelines.commands import diagnose as diagnosis
    from hpml.pipelines.commands import diagnose_file, measurable
    from hpml.pipelines.engine import run_record
    from hpml.pipelines.terminal import console

    if run.endswith(".onnx"):
        if variant:
            raise UsageError(f"{run} has no engines", fix="give the file alone")
        options = benches.BenchOptions(threads=threads, budget_s=budget_s)
        sizes = measurable.parse_sizes(dims or ())
        with console.watcher() as watcher:
            found, peaks = diagnose_file.diagnose(home, Path(run), sizes, options, watcher, limit_s=limit_s)
        variant = run
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
    home: Home = _HOME,
    output: Format = "table",
) -> None:
    """Say why a step was taken from the store or had to be run."""
    from hpml.pipelines.engine import run_record

    known = _step(run_record.load(home, run), step)
    if output == "json":
        _print_json({"step": step, "status": known.status, "key": known.key, "reasons": known.reasons})
    elif known.status == "cached":
        print(f"{step} was taken from the store: nothing it depends on has changed (key {known.key[:12]})")
    elif not known.key:
        print(f"{step} was not looked up: it is {known.status}")
    else:
        print(f"{step} had to be run:")
        for reason in known.reasons:
            print(f"  {reason}")


# -------------------------------------------------------------------------------------------------- the rest


@app.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Look for what its cluster section names.")
    ] = None,
    output: Format = "table",
) -> None:
    """Say what is here and what to install: Python, torch, GPUs, container engine, the cluster."""
    from hpml.pipelines import recipe as recipes
    from hpml.pipelines.cluster.config import ClusterConfig
    from hpml.pipelines.commands import doctor as examination

    cluster = recipes.load(recipe).recipe.cluster if recipe else ClusterConfig()
    examination.show(examination.examine(cluster), output)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""
    from hpml.pipelines.recipe import Recipe

    _print_json(Recipe.model_json_schema())


@app.command()
def gc(
    home: Home = _HOME,
    keep_runs: Annotated[int, typer.Option(min=0, help="Keep what the newest N runs made.")] = 10,
    keep_registered: Annotated[
        bool, typer.Option(help="Keep what versions in the model registry were made from.")
    ] = True,
    recipe: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Clear the store of its cluster section instead.")
    ] = None,
    grace_days: Annotated[
        float, typer.Option(min=1, help="In a cluster's store: keep what any run used in the last N days.")
    ] = 14,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would go.")] = False,
) -> None:
    """Remove stored artifacts that none of the newest runs made, and what crashed runs left behind."""
    from hpml.pipelines import recipe as recipes
    from hpml.pipelines.commands import collect

    cluster = recipes.load(recipe).recipe.cluster if recipe else None
    if cluster:
        removed = collect.collect_cluster(
            home, cluster, keep_runs, keep_registered=keep_registered, grace_days=grace_days, dry_run=dry_run
        )
    else:
        removed = collect.collect_workspace(home, keep_runs, keep_registered=keep_registered, dry_run=dry_run)
    collect.show(removed, dry_run=dry_run)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The new recipe.")],
    data: Annotated[str, typer.Option(help="mnist5k, digits, or a folder, archive or .npz of yours.")] = "",
    model: Annotated[str, typer.Option(help="cnn, resnet18, vit, or package.module:callable.")] = "",
    max_accuracy_drop: Annotated[
        float | None, typer.Option(help="Top-1 accuracy you would trade for speed; 0.01: one point.")
    ] = None,
) -> None:
    """Write a new recipe from three answers."""
    from hpml.pipelines.commands import init as initialisation

    remarks = initialisation.write(file, *initialisation.ask(data, model, max_accuracy_drop))
    print(file)
    for remark in remarks:
        print(remark, file=sys.stderr)


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2))


def main(arguments: list[str] | None = None) -> None:
    """Run the command; every failure is one line on stderr and an exit code of hpml.core.contract."""
    given = sys.argv[1:] if arguments is None else arguments
    with explained(debug="--debug" in given):
        try:
            status = app(args=given, prog_name="hpml", standalone_mode=False)
        except _WrongUsage as error:
            command = error.ctx.command_path if error.ctx else "hpml"
            raise UsageError(error.format_message(), fix=f"see {command} --help") from None
        except typer.Abort:
            raise KeyboardInterrupt from None
        if isinstance(status, int) and status:
            raise SystemExit(status)


if __name__ == "__main__":
    main()
