"""What `hpml bench` leaves in a folder: bench.json, samples.npz, bench.csv.

All figures follow from the samples and from what bench.json holds beside them: `analysed` computes them, the
first time as well as again from a folder.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, JsonValue, ValidationError, model_validator

from hpml.artifacts.diagnosis import DiagnosisSpec
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import TOLERANCE, EngineFigures, MeasurementsSpec, OutputComparison
from hpml.artifacts.peaks import PeaksSpec
from hpml.core import regular_files
from hpml.core.contract import Config
from hpml.core.errors import ConfigInvalid
from hpml.measuring.config import BenchmarkConfig, Quiet
from hpml.measuring.resources import LaunchRecord

if TYPE_CHECKING:
    from hpml.measuring.rounds import Rounds

RECORD, SAMPLES, TABLE, PAGE = "bench.json", "samples.npz", "bench.csv", "bench.html"
_LARGEST_SAMPLES = 2 * 1024**3  # bytes, unpacked
_LARGEST_RECORD = 64 * 1024**2
_RETIRED = ("requests_per_round", "images_per_round", "scenario_backend")


class SubjectRecord(LaunchRecord):
    """One subject: what it is, and what its launches told.

    known: what was known of it without measuring, as fields of `EngineFigures`.
    """

    kind: str
    known: dict[str, JsonValue]


class BenchRecord(Config):
    """`bench.json`. The environment is in `measurements`; `libraries` are their versions."""

    format: Literal[1] = 1
    kind: Literal["bench"] = "bench"
    id: str
    created_at: str  # ISO 8601, UTC
    command: tuple[str, ...]
    config: BenchmarkConfig
    libraries: dict[str, str]
    notes: tuple[str, ...] = ()  # what a reader of the figures should know
    subjects: dict[str, SubjectRecord]
    measurements: MeasurementsSpec
    samples: str = ""  # the file that they are of; empty where inputs were filled
    inputs: tuple[str, ...] = ()  # what the requests held, in words, a line for each input
    outputs: dict[str, OutputComparison] = Field(default_factory=dict)  # of each, beside the reference's
    tolerance: float = TOLERANCE  # of outputs, see `OutputFigures.verdict`
    diagnosis: DiagnosisSpec | None = None  # of the ONNX files, where it was asked for
    peaks: PeaksSpec | None = None  # that it is under

    @model_validator(mode="before")
    @classmethod
    def _of_versions_before(cls, given: Any) -> Any:
        """Without the settings of the benchmark that only versions before had."""
        config = given.get("config") if isinstance(given, dict) else None
        if not isinstance(config, dict):
            return given
        kept = {key: value for key, value in config.items() if key not in _RETIRED}
        limits = {key: value for key, value in kept.get("quiet", {}).items() if key in Quiet.model_fields}
        return {**given, "config": {**kept, "quiet": limits}}


def analysed(record: BenchRecord, rounds: Rounds) -> BenchRecord:
    """`record` with the figures that follow from `rounds`."""
    from hpml.measuring.figures import engine_figures, timings
    from hpml.measuring.paired import compared

    config, names = record.config, list(record.subjects)
    busy = record.measurements.conditions.busy
    timed = timings(rounds, config, names, fastest_fp32="", busy=busy)
    engines = {
        name: engine_figures(subject.known, timed[name], subject, config, busy)
        for name, subject in record.subjects.items()
    }
    found = {"engines": engines, **compared(rounds, names, precision=config.precision)}
    return record.model_copy(update={"measurements": record.measurements.model_copy(update=found)})


# ------------------------------------------------------------------------------------------ reading a folder


def read_record(path: Path) -> BenchRecord:
    """The record of a bench, by its folder or its bench.json.

    Raises ConfigInvalid if there is none, or it is none of this version's.
    """
    file = path / RECORD if path.is_dir() else path
    why = regular_files.problem(file)
    if why:
        raise ConfigInvalid(
            f"{path} is not a bench", why=f"{file.name} {why}", fix="give a folder that hpml bench wrote"
        )
    try:
        if file.stat().st_size > _LARGEST_RECORD:
            raise ConfigInvalid(f"{file} is not the record of a bench", why="it is too large")
        return BenchRecord.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigInvalid(
            f"{file} is not the record of a bench", why=f"{where}: {first['msg']}" if where else first["msg"]
        ) from None


def read_again(folder: Path) -> BenchRecord:
    """The record in `folder` with its figures computed anew from the samples beside it.

    Raises ConfigInvalid if the samples are not there, or not those of the record.
    """
    record = read_record(folder)
    file = folder / SAMPLES if folder.is_dir() else folder.with_name(SAMPLES)
    if not record.measurements.rounds and not file.exists():  # one of a version that kept none of them
        return record
    return analysed(record, _read_rounds(file, record))


def _read_rounds(file: Path, record: BenchRecord) -> Rounds:
    from hpml.measuring.samples import read_samples

    batches = record.config.timed_batches
    why = regular_files.problem(file)
    if why:
        raise ConfigInvalid(f"the samples in {file} cannot be read", why=f"it {why}")
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > _LARGEST_SAMPLES:
            raise ConfigInvalid(f"{file} is too large", why=f"{unpacked:,} bytes unpacked")
        rounds = read_samples(file, list(record.subjects), batches, record.measurements.rounds_of_launches)
    except (OSError, ValueError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigInvalid(f"the samples in {file} cannot be read", why=str(error)) from None
    except KeyError as error:
        raise ConfigInvalid(f"{file} lacks samples of {RECORD}", why=str(error.args[0])) from None
    _check_rounds(rounds, record, file)
    return rounds


def _check_rounds(rounds: Rounds, record: BenchRecord, file: Path) -> None:
    """Raise ConfigInvalid unless all are positive milliseconds of as many rounds as the record says."""
    import numpy as np

    if record.config.reference not in record.subjects or len(rounds.at(1)) != record.measurements.rounds:
        raise ConfigInvalid(f"{file.with_name(RECORD)} contradicts itself")
    for one in rounds.all:
        for name, latency_ms in one.latency_ms.items():
            there = latency_ms.ndim == 1 and latency_ms.dtype == np.float64 and latency_ms.size > 0
            known = latency_ms[~np.isnan(latency_ms)] if there else latency_ms
            if not there or not known.size or not (np.isfinite(known) & (known > 0)).all():
                raise ConfigInvalid(
                    f"the samples in {file} are not latencies",
                    why=f"{name} at batch {one.batch}: {latency_ms.dtype} {latency_ms.shape}",
                )


# ------------------------------------------------------------------------------------------------- the table


def figures_csv(measurements: MeasurementsSpec) -> str:
    """One row for each figure: engine, figure, batch, unit, value and bounds, or why there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("engine", "figure", "batch", "unit", "value", "low", "high", "reason"))
    for name, engine in measurements.engines.items():
        for figure, batch, unit, interval, reason in _rows(engine):
            bounds = (interval.value, interval.low, interval.high) if interval else ("", "", "")
            writer.writerow((name, figure, batch, unit, *bounds, reason))
    return text.getvalue()


def _rows(engine: EngineFigures) -> Iterator[tuple[str, int, str, Interval | None, str]]:
    for figure in ("latency_ms_p50", "latency_ms_p90", "latency_ms_p99"):
        yield figure, 1, "ms", getattr(engine, figure), engine.unquoted.get(figure, "")
    speedup = "speedup_vs_reference"
    yield speedup, 1, "", engine.speedup_vs_reference, engine.unquoted.get(speedup, "")
    for item in engine.throughput:
        yield "throughput", item.batch, "samples/s", item.rows_per_s, ""
    for scenario in engine.scenarios:
        figure = f"{scenario.scenario} {scenario.metric}"
        unit = "ms" if scenario.metric.startswith("latency_ms") else "1/s"
        yield figure, scenario.samples_per_query, unit, scenario.value, scenario.reason
    if costs := engine.resources:
        yield "cold_start", 1, "ms", costs.cold_start_ms, ""
        yield "load", 1, "ms", costs.load_ms, ""
        reason = "" if costs.energy_mj_per_request else costs.energy_source
        yield "energy", 1, "mJ/request", costs.energy_mj_per_request, reason
        yield "price_per_million", 1, "", costs.price_per_million, ""
