"""`hpml bench`, `quantize` and `compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import typer.core

from hpml.core.errors import UsageError
from hpml.pipelines.commands.options import (
    HOME,
    AllowNoise,
    Dims,
    Format,
    Home,
    Html,
    MarkdownFormat,
    SampleData,
    Strict,
    app,
    strictly,
    told_as_retired,
)
from hpml.pipelines.commands.run import end_of_run, execute, settings_of

if TYPE_CHECKING:
    from hpml.pipelines.engine.run_record import RunRecord


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
    requests: Annotated[int | None, typer.Option(hidden=True, callback=told_as_retired("--requests"))] = None,
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
    dims: Dims = None,
    data: SampleData = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Outputs may differ by so much of the reference's largest number and count as the same, by "
            "default 0.01; given, others end with exit code 5.",
        ),
    ] = None,
    diagnose: Annotated[
        bool,
        typer.Option(
            "--diagnose", help="Of ONNX files also the share of the machine's peak, and why no more."
        ),
    ] = False,
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
    operation: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Of engines that have several, such as prefill; by default the first."
        ),
    ] = "",
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
    home: Home = HOME,
    output: Format = "table",
) -> None:
    """Measure anything together: latency, throughput and ratios with their intervals."""
    from hpml.artifacts.measurements import TOLERANCE
    from hpml.pipelines.bench import diagnose_file, measurable
    from hpml.pipelines.bench import session as benches
    from hpml.pipelines.bench.sample_file import SampleFile
    from hpml.pipelines.engine.store import Store
    from hpml.pipelines.terminal import bench_tables, console

    if earlier and (data or diagnose):
        raise UsageError(
            "--data and --diagnose cannot be given with --from", why="nothing is measured or run again"
        )
    if earlier:
        record, place = benches.reanalyse(earlier), earlier
        if tolerance is not None:
            record = record.model_copy(update={"tolerance": tolerance})
    elif arguments and (run := benches.run_named(home, arguments)):
        _complete(home, run, _engine_options(context), strict=strict, output=output)
        return
    elif arguments:
        sizes, tensors = measurable.parse_sizes(dims or ()), measurable.parse_inputs(inputs or ())
        samples = SampleFile(data) if data else None
        hints = measurable.Hints(
            home,
            sizes=sizes,
            inputs=tensors,
            arguments=measurable.parse_arguments(argument or ()),
            recipe=recipe,
            operation=operation,
            model=model,
            device=device,
            samples=samples,
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
            tolerance=TOLERANCE if tolerance is None else tolerance,
        )
        with Store(home).in_use():  # gc waits until they are measured
            hints = measurable.with_network(hints, arguments)
            samples = hints.samples
            found = measurable.measurables(arguments, hints)
            record, place = benches.measure(
                home, found, options, command=sys.argv[1:], folder=folder, samples=samples
            )
        if diagnose:
            with console.watcher() as watcher:
                limit_s = diagnose_file.LIMIT_S
                told = diagnose_file.diagnose_measured(
                    home, found, record, watcher, limit_s=limit_s, samples=samples
                )
            record = benches.with_diagnosis(place, record, *told)
    else:
        raise UsageError(
            "nothing to measure", fix="name engines, or --from FOLDER; see hpml bench engines --help"
        )
    bench_tables.show(record, place, output)
    if tolerance is not None:
        benches.refuse_differing(record)
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
    from hpml.pipelines.kubeflow import remote_runs as kubeflow_runs

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
    if record.rebuilt_from:
        raise UsageError(
            f"run {record.id} has the networks of {record.rebuilt_from}",
            why="its recipe would train others on this machine",
            fix=f"hpml deploy {record.rebuilt_from} --to DESTINATION --rebuild measures on",
        )
    loaded = recipes.load_of_run(home, record, strictly(strict))
    steps = plan.trace(graph.graph, loaded.recipe)
    steps = plan.Plan({name: node for name, node in steps.nodes.items() if name in record.steps})
    if not any(node.stage == "benchmark" for node in steps.nodes.values()):
        raise UsageError(f"run {record.id} measures nothing", why=f"it has {', '.join(record.steps)}")
    executor = "kubernetes" if record.store else record.executor
    settings = settings_of(home, loaded, executor, force=None, max_parallel=None, tracking=True)
    execute(loaded, steps, settings, executor, output, home=home, again=f"hpml bench {record.id}")


@bench.command()
def machine(
    home: Home = HOME,
    force: Annotated[bool, typer.Option("--force", help="Measure although it is known.")] = False,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0, help="Watch the distance between the CPUs for so long.")
    ] = 30.0,
    html: Html = None,
    output: Format = "table",
) -> None:
    """Measure this machine: memory bandwidth, GEMM throughput, latency between its cores."""
    from hpml.pipelines.bench import machine as bench_machine
    from hpml.pipelines.terminal import console

    with console.watcher() as watcher:
        record = bench_machine.measure(home.resolve(), watcher, force=force, seconds=seconds)
    end_of_run(record, "hpml bench machine", completed_by="hpml bench machine")
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
    dims: Dims = None,
    threads: Annotated[int | None, typer.Option(min=1, help="By default all CPUs.")] = None,
    limit_s: Annotated[
        float, typer.Option(min=1, help="Quantizing and judging are ended after so many seconds.")
    ] = 900.0,
    budget_s: Annotated[float | None, typer.Option(help="Of measuring both, as in hpml bench.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn to calibrate.")] = 0,
    strict: Strict = False,
    allow_noise: AllowNoise = False,
    home: Home = HOME,
    output: Annotated[Literal["table", "json"], typer.Option("--output", help="What stdout gets.")] = "table",
) -> None:
    """Make an int8 model of an ONNX file: calibrated, judged against it, measured beside it."""
    from hpml.core.contract import validate
    from hpml.core.hardware import usable_cpus
    from hpml.pipelines.bench import measurable
    from hpml.pipelines.bench import session as benches
    from hpml.pipelines.quantize import quantize_file as quantization
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
    home: Home = HOME,
    html: Html = None,
    fail_slower: Annotated[
        str,
        typer.Option(
            metavar="SHARE", help="Exit with 5 if B is established to be slower by more, such as 5%."
        ),
    ] = "",
    output: MarkdownFormat = "table",
) -> None:
    """Say what changed between two measurements: faster, slower or tied, with intervals."""
    from hpml.pipelines.bench import compare as comparison

    allowed = comparison.parse_share(fail_slower) if fail_slower else None
    found = comparison.compare(home, before, after)
    if html:
        comparison.write_page(found, html)
    comparison.show(found, output)
    if allowed is not None:
        for sentence in comparison.undecided(found, allowed):
            print(f"undecided: {sentence}", file=sys.stderr)
        comparison.refuse_slower(found, allowed)
