"""`hpml bench ENGINE...`: measure anything together, and say what was found."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpml.artifacts.diagnosis import DiagnosisSpec
from hpml.artifacts.measurements import TOLERANCE, OutputComparison
from hpml.artifacts.peaks import PeaksSpec
from hpml.core import memory
from hpml.core.atomic_files import new_folder_beside, write_text_atomic
from hpml.core.contract import Events, Output, validate
from hpml.core.errors import (
    ConfigInvalid,
    GateFailed,
    Unavailable,
    UsageError,
    disk_full_explained,
    shortened,
)
from hpml.core.hardware import usable_cpus
from hpml.measuring.config import BenchmarkConfig, Quiet
from hpml.measuring.machine.environment import LIBRARIES, describe, versions
from hpml.pipelines.bench import record as records
from hpml.pipelines.bench.measurable import Measurable, check_batches
from hpml.pipelines.bench.record import BenchRecord, SubjectRecord
from hpml.pipelines.bench.sample_file import SampleFile
from hpml.pipelines.command_pages.bench import bench_page
from hpml.pipelines.command_pages.tables import differing
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.execution import MOST_TOLD
from hpml.pipelines.engine.run_record import RunRecord, StepRecord
from hpml.pipelines.engine.store import Store
from hpml.pipelines.terminal import console
from hpml.reporting.over_time import LatencyOverTime, read_over_time

_POOL_ROWS = 64  # distinct samples that the requests cycle through, more where a batch needs more
_POOL_BYTES = 256 * 1024**2  # of all of them together, at most
_SHARE_OF_MEMORY = 0.5
_MULTI_STREAM = 8  # samples of a query of MultiStream
_IMPORT_PATHS = "HPML_IMPORT_PATHS"
_LIBRARIES = ("hpml-pipeline", "onnx", *LIBRARIES)

_NOTE_SERVER = (
    "The latency of {names} includes the network and the server's own reading and writing of requests; the "
    "server's memory, start and energy were not measured."
)
_NOTE_SHARED = (
    "A server works beside the process that is timed, so that this waited for a CPU was no disturbance."
)
_COMPLETES = "stop what else runs here, or give a larger --budget-s"


@dataclass(frozen=True)
class BenchOptions:
    """How the engines are to be measured; None and empty: as the benchmark of a run does."""

    batches: tuple[int, ...] = ()
    scenarios: tuple[str, ...] = ()
    threads: int | None = None
    rounds: int | None = None
    launches: int | None = None
    budget_s: float | None = None
    precision: float | None = None
    max_waited: float | None = None
    reference: str = ""
    price_per_hour: float | None = None
    seed: int = 0
    tolerance: float = TOLERANCE  # of outputs, see `OutputFigures.verdict`


def measure(
    home: Path,
    found: Mapping[str, Measurable],
    options: BenchOptions,
    *,
    command: Sequence[str],
    folder: Path | None,
    samples: SampleFile | None = None,
) -> tuple[BenchRecord, Path]:
    """Measure all of `found` together; returns what was found, and the folder it is in.

    folder: where to write it, by default a new one in `home`/bench. samples: what the inputs of `found` are
    fed with; by default they are filled.
    Raises ConfigInvalid for options that cannot be met, Unavailable if a run of the workspace uses the
    machine, and StageFailed that names what crashed or answers wrongly.
    """
    from hpml.measuring.outputs import compare_outputs
    from hpml.measuring.samples import write_samples
    from hpml.measuring.timed import time_subjects

    config = _config(found, options)
    bench_id = run_record.new_run_id("bench")
    place = _new_place(folder or home / "bench" / bench_id)
    environment = describe()
    with _machine(home), tempfile.TemporaryDirectory(prefix="hpml-bench-") as scratch, _progress() as events:
        inputs = Path(scratch) / "inputs.npz"
        notes = _write_inputs(inputs, found, config, samples)
        out = Output(Path(scratch), Path(scratch), threads=usable_cpus(), events=events)
        subjects = {name: item.subject for name, item in found.items()}
        takes = {name: [tensor.samples for tensor in item.signature.inputs] for name, item in found.items()}
        with _importable(found):
            outputs = compare_outputs(config, subjects, takes, inputs, out)
            timed = time_subjects(config, subjects, inputs, environment, out)
        record = BenchRecord(
            id=bench_id,
            created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            command=tuple(command),
            config=config,
            libraries=versions(_LIBRARIES),
            notes=(*_notes(found), *notes, *not_finite(outputs)),
            samples=str(samples.file) if samples else "",
            inputs=inputs_in_words(found, samples),
            tolerance=options.tolerance,
            outputs=outputs,
            subjects={
                name: SubjectRecord(kind=item.subject.subject, known=item.known, **dict(timed.told[name]))
                for name, item in found.items()
            },
            # The figures of the engines are not there yet: see `analysed`.
            measurements=timed.measurements.model_copy(update={"operation": _operation(found) or "predict"}),
        )
        record = records.analysed(record, timed.rounds)
        _write(place, record, lambda file: write_samples(file, timed.rounds, list(found), config))
    return record, place


def with_diagnosis(
    place: Path, record: BenchRecord, diagnosis: DiagnosisSpec, peaks: PeaksSpec
) -> BenchRecord:
    """`record` with the diagnosis of its engines, in its folder too."""
    record = record.model_copy(update={"diagnosis": diagnosis, "peaks": peaks})
    with disk_full_explained(place):
        write_text_atomic(place / records.RECORD, record.model_dump_json(indent=1))
        over_time = read_over_time(place / records.SAMPLES, record.subjects)
        write_text_atomic(place / records.PAGE, page(record, over_time))
    return record


def reanalyse(folder: Path) -> BenchRecord:
    """The record of an earlier bench, its figures computed anew from its samples."""
    return records.read_again(folder)


def run_named(home: Path, arguments: Sequence[str]) -> RunRecord | None:
    """The run whose measurement is to be completed: the only argument is its id, or "latest".

    Raises UsageError if "latest" is asked for and there is none.
    """
    if len(arguments) > 1 or not (arguments[0] == "latest" or (home / arguments[0] / "run.json").is_file()):
        return None
    return run_record.load(home, arguments[0])


def refuse_differing(record: BenchRecord) -> None:
    """Raise GateFailed that names the engines whose outputs are not those of the reference."""
    reference = record.measurements.reference
    wrong = differing(record.outputs, reference, record.tolerance)
    if wrong:
        raise GateFailed(
            f"outputs are not those of {reference} to within {record.tolerance:g}",
            why="; ".join(f"{name}: {', '.join(which)}" for name, which in wrong.items()),
        )


def warn_incomplete(missing: str, *, strict: bool) -> None:
    """Say on stderr what is not measured, and why; `missing` is empty if nothing is.

    Raises GateFailed instead if `strict`.
    """
    if missing and strict:
        raise GateFailed("the measurement is incomplete", why=missing, fix=_COMPLETES)
    if missing:
        print(f"warning: the measurement is incomplete: {shortened(missing, MOST_TOLD)}", file=sys.stderr)
        print(f"to complete it: {_COMPLETES}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------ the config


def _config(found: Mapping[str, Measurable], options: BenchOptions) -> BenchmarkConfig:
    """The benchmark's config of these options, checked against what is measured and the machine."""
    batches = options.batches or _default_batches(found)
    check_batches(found, [*batches, *([_MULTI_STREAM] if "MultiStream" in options.scenarios else [])])
    if options.reference and options.reference not in found:
        raise UsageError(f"there is no engine {options.reference!r}", why=f"measured are {', '.join(found)}")
    fields = {
        "reference": options.reference or next(iter(found)),
        "batch_sizes": batches,
        "scenarios": options.scenarios,
        "concurrency": (),
        "seed": options.seed,
        "quiet": _quiet(found, options),
    }
    return _validated(fields, options)


def check_figures(options: BenchOptions) -> None:
    """Raise ConfigInvalid for numbers that no measurement can use, before what has to come first is done."""
    _validated({"reference": "the first"}, options)


def _validated(fields: Mapping[str, Any], options: BenchOptions) -> BenchmarkConfig:
    same_names = ("rounds", "launches", "threads", "precision", "price_per_hour")
    told = {"time_budget_s": options.budget_s, **{name: getattr(options, name) for name in same_names}}
    given = {name: value for name, value in told.items() if value is not None}
    config: BenchmarkConfig = validate(BenchmarkConfig, {**fields, **given}, where="the command line")
    if why := config.unsupported_reason():
        raise ConfigInvalid("this machine cannot do that", why=why)
    return config


def _default_batches(found: Mapping[str, Measurable]) -> tuple[int, ...]:
    """1, 8 and 32; with something that takes one sample at a time, only that, which is said."""
    single = [name for name, item in found.items() if item.signature.batch == 1]
    if not single:
        return 1, 8, 32
    console.err.print(f"only batch 1 is measured: {', '.join(single)} takes one at a time", markup=False)
    return (1,)


def _quiet(found: Mapping[str, Measurable], options: BenchOptions) -> Quiet:
    """What counts as a disturbance; a server beside the measured process would."""
    if options.max_waited is not None:
        return validate(Quiet, {"max_waited": options.max_waited}, where="--max-waited")
    shared = any(item.subject.subject == "server" for item in found.values())
    return Quiet(max_waited=1.0) if shared else Quiet()


def _notes(found: Mapping[str, Measurable]) -> Iterator[str]:
    servers = [name for name, item in found.items() if item.subject.subject == "server"]
    if servers:
        yield _NOTE_SERVER.format(names=" and ".join(servers))
        yield _NOTE_SHARED
    for name, item in found.items():
        if item.operations:
            measured, *others = item.operations
            yield f"{name} was measured in its operation {measured}; with --operation in {', '.join(others)}."


def _operation(found: Mapping[str, Measurable]) -> str:
    """What is measured, for those who compare this with another bench."""
    return " and ".join(dict.fromkeys(item.operations[0] for item in found.values() if item.operations))


# ----------------------------------------------------------------------------------------- inputs and outputs


def _write_inputs(
    file: Path, found: Mapping[str, Measurable], config: BenchmarkConfig, samples: SampleFile | None = None
) -> list[str]:
    """The arrays that subjects are given: those that take the same get the same. Returns notes."""
    from hpml.measuring.subjects.tensors import write_arrays

    tensors = {tensor.array: tensor for item in found.values() for tensor in item.signature.inputs}
    largest = max(1, *config.batch_sizes, *([_MULTI_STREAM] if config.scenarios else []))
    row_bytes = sum(tensor.bytes_per_row for tensor in tensors.values())
    fitting = max(largest, _POOL_BYTES // max(row_bytes, 1))
    rows = min(fitting, samples.rows) if samples else min(fitting, max(largest, _POOL_ROWS))
    _check_room(max(rows, largest) * row_bytes)
    if samples:
        arrays = samples.arrays(tensors.values(), rows)
    else:
        arrays = {name: tensor.draw(rows, seed=config.seed) for name, tensor in tensors.items()}
    write_arrays(file, arrays)
    return list(_notes_on_samples(samples, rows, largest)) if samples else []


def _notes_on_samples(samples: SampleFile, rows: int, largest: int) -> Iterator[str]:
    if rows < samples.rows:
        yield (
            f"The first {rows:,} of {samples.rows:,} samples of {samples.file} were used: all would take too "
            "much memory in each engine's process."
        )
    if rows < largest:
        yield f"Of {samples.file} there are {rows:,} rows: in larger batches, up to {largest}, they repeat."


def inputs_in_words(found: Mapping[str, Measurable], samples: SampleFile | None) -> tuple[str, ...]:
    """A line for each input: what the requests hold, and how that was decided."""
    told: dict[str, tuple[dict[str, None], str]] = {}
    for tensor in (tensor for item in found.values() for tensor in item.signature.inputs):
        what = (
            f"{samples.rows:,} sample{'s' if samples.rows > 1 else ''} of {samples.file}"
            if samples
            else tensor.filling.in_words(tensor.shape)
        )
        shape = f"{tensor.dtype} ({', '.join(map(str, ('batch', *tensor.shape)))})"
        told.setdefault(tensor.samples, ({}, f"{shape}: {what}"))[0][tensor.name] = None
    return tuple(f"{' or '.join(names)} {what}" for names, what in told.values())


def _check_room(size_bytes: int) -> None:
    """Raise ConfigInvalid if inputs of `size_bytes`, here and in a process, do not fit into the memory."""
    available = memory.available_bytes()
    if 2 * size_bytes > _SHARE_OF_MEMORY * available:
        raise ConfigInvalid(
            f"the inputs take {size_bytes / 1e9:.3g} GB",
            why=f"{available / 1e9:.3g} GB of memory are available",
            fix="give smaller batches: --batch 1",
        )


@contextmanager
def _importable(found: Mapping[str, Measurable]) -> Iterator[None]:
    """Let the measured processes import what lies beside the recipes; see hpml/__init__.py."""
    before = os.environ.get(_IMPORT_PATHS, "")
    folders = [before, *(path for item in found.values() for path in item.import_paths)]
    os.environ[_IMPORT_PATHS] = os.pathsep.join(folder for folder in dict.fromkeys(folders) if folder)
    try:
        yield
    finally:
        os.environ[_IMPORT_PATHS] = before


def not_finite(outputs: Mapping[str, OutputComparison]) -> tuple[str, ...]:
    """Which outputs hold numbers that are not finite, in words."""
    found = []
    for name, comparison in outputs.items():
        for one in comparison.outputs:
            counts = {"NaN": one.nan, "infinity": one.infinite}
            if said := " and ".join(f"{kind} {count:,} times" for kind, count in counts.items() if count):
                where = f"{one.name!r} at batch {one.batch}"
                found.append(f"{name} answers {said} in {where}, of {one.numbers:,} numbers.")
    return tuple(found)


def _new_place(place: Path) -> Path:
    """`place`, if nothing is there yet.

    Raises UsageError if something is, and Unavailable if it cannot be written to.
    """
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UsageError(f"{place} exists already", fix="give --out a folder that is new or empty")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(f"cannot write to {place}", why=str(error)) from None
    return place


def _write(place: Path, record: BenchRecord, write_samples: Callable[[Path], None]) -> None:
    """All files, in a folder that is there whole or not at all."""
    folder = new_folder_beside(place)
    try:
        with disk_full_explained(folder):
            (folder / records.RECORD).write_text(record.model_dump_json(indent=1))
            (folder / records.TABLE).write_text(records.figures_csv(record.measurements), newline="")
            write_samples(folder / records.SAMPLES)
            (folder / records.PAGE).write_text(
                page(record, read_over_time(folder / records.SAMPLES, record.subjects))
            )
            folder.rename(place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def page(record: BenchRecord, over_time: LatencyOverTime | None = None) -> str:
    """The record as a page. over_time: of its rounds; None where its samples do not say when they were."""
    return bench_page(
        record.measurements,
        facts=facts(record),
        notes=record.notes,
        inputs=record.inputs,
        has_samples=bool(record.samples),
        diagnosed=(record.diagnosis, record.peaks) if record.diagnosis and record.peaks else None,
        outputs=record.outputs,
        tolerance=record.tolerance,
        over_time=over_time,
    )


def machine_facts() -> dict[str, str]:
    """What figures of this machine depend on, in words."""
    return {**describe(), **_in_words(versions(_LIBRARIES))}


def _in_words(libraries: Mapping[str, str]) -> dict[str, str]:
    return {f"{name} version": version for name, version in libraries.items()}


def facts(record: BenchRecord) -> dict[str, str]:
    """What the figures depend on, in words."""
    devices = {name: subject.device for name, subject in record.subjects.items()}
    return {
        "measured at": record.created_at,
        "command": shlex.join(["hpml", *record.command]),
        "device": "; ".join(sorted(set(devices.values()))),
        **record.measurements.environment,
        **_in_words(record.libraries),
    }


@contextmanager
def _machine(home: Path) -> Iterator[None]:
    """The machine for us alone among the runs of the workspace.

    Raises Unavailable if one of them is at work.
    """
    held = Store(home).try_begin("bench", alone=True)
    if held is None:
        raise Unavailable(
            f"a run in {home} is using this machine", fix="wait until it has ended: hpml status --all"
        )
    with held:
        yield


@contextmanager
def _progress() -> Iterator[Events]:
    """Events that move a bar, or now and then print a line."""
    with console.watcher() as watcher:

        class Shown(Events):
            def write(self, kind: str, **fields: Any) -> None:
                if kind == "progress":
                    watcher.progressed("bench", fields)

        watcher.step_changed("bench", StepRecord(stage="bench", status="running"))
        yield Shown(None)
