"""What `hpml bench` leaves in a folder: bench.json, samples.npz, bench.csv.

All figures follow from the samples and from what bench.json holds beside them: `analysed` computes them, the
first time as well as again from a folder.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, JsonValue, ValidationError, model_validator

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import (
    ConcurrencyFigures,
    EngineFigures,
    EngineSettings,
    MeasurementsSpec,
    OutputComparison,
    ScenarioFigures,
)
from hpml.core import regular_files
from hpml.core.contract import Config
from hpml.core.errors import ConfigInvalid
from hpml.measuring.config import BenchmarkConfig, Quiet

if TYPE_CHECKING:
    from hpml.measuring.rounds import Rounds
    from hpml.measuring.timed import Timed

RECORD, SAMPLES, TABLE, PAGE = "bench.json", "samples.npz", "bench.csv", "bench.html"
_LARGEST_SAMPLES = 2 * 1024**3  # bytes, unpacked
_LARGEST_RECORD = 64 * 1024**2
_RETIRED = ("requests_per_round", "images_per_round", "scenario_backend")
_ELSEWHERE = "not measured: it runs on a server"


class SubjectRecord(Config):
    """One subject: what it is, and what its launches told. Milliseconds, one entry a launch.

    known: what was known of it without measuring, as fields of `EngineFigures`. device: "cpu", "cuda", or
    "remote", a server's, of which only the time of its answers is measured.
    """

    kind: str
    known: dict[str, JsonValue]
    device: str = "cpu"
    settings: EngineSettings | None = None  # None of versions before
    cold_start_ms: tuple[float, ...] = ()
    load_ms: tuple[float, ...] = ()
    peak_rss_bytes: int = 0
    device_memory_bytes: int | None = None
    energy_mj_per_request: tuple[float, ...] = ()
    energy_source: str = ""
    scenarios: tuple[ScenarioFigures, ...] = ()
    concurrency: tuple[ConcurrencyFigures, ...] = ()


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
    outputs: dict[str, OutputComparison] = Field(
        default_factory=dict
    )  # of each subject, beside the reference's

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


def subject_record(name: str, kind: str, known: Mapping[str, Any], timed: Timed) -> SubjectRecord:
    """What was told of the subject `name`. Of one that runs elsewhere, our own process tells nothing."""
    launches, energy = timed.launches[name], timed.energy.get(name)
    common: dict[str, Any] = {
        "kind": kind,
        "known": known,
        "device": launches.device,
        "settings": timed.settings[name],
        "scenarios": timed.scenarios.get(name, ()),
        "concurrency": timed.concurrency.get(name, ()),
    }
    if launches.device == "remote":
        return SubjectRecord(**common, energy_source=_ELSEWHERE)
    return SubjectRecord(
        **common,
        cold_start_ms=tuple(launches.cold_start_ms),
        load_ms=tuple(launches.load_ms),
        peak_rss_bytes=launches.peak_rss_bytes,
        device_memory_bytes=launches.device_memory_bytes,
        energy_mj_per_request=energy.mj_per_request if energy else (),
        energy_source=energy.source if energy else "",
    )


def analysed(record: BenchRecord, rounds: Rounds) -> BenchRecord:
    """`record` with the figures that follow from `rounds`."""
    from hpml.measuring.bench import Launches
    from hpml.measuring.figures import timings
    from hpml.measuring.paired import Batch1Analysis, pairs
    from hpml.measuring.resources import Energy, resource_figures

    config, names = record.config, list(record.subjects)
    conditions = record.measurements.conditions
    timed = timings(rounds, config, names, fastest_fp32="", busy=conditions.busy)
    engines = {}
    for name, subject in record.subjects.items():
        launches = Launches(
            cold_start_ms=list(subject.cold_start_ms),
            load_ms=list(subject.load_ms),
            peak_rss_bytes=subject.peak_rss_bytes,
            device_memory_bytes=subject.device_memory_bytes,
        )
        energy = Energy(subject.energy_mj_per_request, subject.energy_source)
        resources = resource_figures(launches, energy, timed[name]["throughput"], config.price_per_hour)
        known = "latency_ms_p50" in timed[name]
        engines[name] = EngineFigures.model_validate(
            {
                "status": "measured" if known else "not measured",
                "reason": "" if known else conditions.busy,
                **subject.known,
                **timed[name],
                "settings": subject.settings,
                "resources": resources,
                "scenarios": subject.scenarios,
                "concurrency": subject.concurrency,
            }
        )
    at_1 = Batch1Analysis.of(rounds, names)
    found = {
        "engines": engines,
        "pairs": pairs(rounds, names, precision=config.precision),
        "states": at_1.states if rounds.states() else (),
        "rounds": len(at_1.state),
        "rounds_of_launches": tuple(at_1.launches),
    }
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

    batches = sorted({1, *record.config.batch_sizes})
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
    yield "speedup_vs_reference", 1, "", engine.speedup_vs_reference, ""
    for item in engine.throughput:
        yield "throughput", item.batch, "images/s", item.images_per_s, ""
    for scenario in engine.scenarios:
        unit = "ms" if scenario.metric.startswith("latency_ms") else "1/s"
        yield (
            f"{scenario.scenario} {scenario.metric}",
            scenario.samples_per_query,
            unit,
            scenario.value,
            scenario.reason,
        )
    if engine.resources:
        costs = engine.resources
        yield "cold_start", 1, "ms", costs.cold_start_ms, ""
        yield "load", 1, "ms", costs.load_ms, ""
        reason = "" if costs.energy_mj_per_request else costs.energy_source
        yield "energy", 1, "mJ/request", costs.energy_mj_per_request, reason
        yield "price_per_million", 1, "", costs.price_per_million, ""
