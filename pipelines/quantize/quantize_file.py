"""`hpml quantize MODEL.onnx`: an int8 model that passed a gate, or why there is none, and a page."""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hpml.core.atomic_files import write_bytes_atomic, write_text_atomic
from hpml.core.contract import Config
from hpml.core.errors import GateFailed, HpmlError, Terminated, UsageError
from hpml.measuring.subjects import OnnxSubject
from hpml.pipelines.bench import session as bench
from hpml.pipelines.bench.measurable import Hints, measurables
from hpml.pipelines.bench.record import BenchRecord
from hpml.pipelines.bench.session import BenchOptions
from hpml.pipelines.quantize.job import Quantized, QuantizeJob
from hpml.pipelines.quantize.page import (
    Pair,
    gate_rows,
    how_in_words,
    model_rows,
    quantize_page,
    verdict_in_words,
)
from hpml.pipelines.terminal import bench_tables

_WORKER = "hpml.pipelines.quantize.worker"


class QuantizeRecord(Config):
    """`MODEL-int8.json`: what was asked, what was found.

    file: the int8 model; of one that was refused, where it was put aside. sha256: of both models, by file.
    speed: the bench of both, fp32 first; speed_reason: why it has no figures. facts: what all depends on.
    """

    format: Literal[1] = 1
    kind: Literal["quantize"] = "quantize"
    created_at: str  # ISO 8601, UTC
    command: tuple[str, ...]
    job: QuantizeJob
    found: Quantized
    file: str
    fp32_bytes: int
    sha256: dict[str, str]
    speed: BenchRecord | None = None
    speed_reason: str = ""
    facts: dict[str, str]

    @property
    def pair(self) -> Pair:
        """What tables and page show of it."""
        return Pair(
            (str(self.job.file), self.file),
            (self.fp32_bytes, self.found.size_bytes),
            self.found,
            self.job.bounds,
            self.speed.measurements if self.speed else None,
            self.speed_reason,
            self.speed.notes if self.speed else (),
        )


@dataclass(frozen=True)
class OutputPaths:
    """Where the results go. refused: where a model is put aside that the gate refuses."""

    model: Path
    refused: Path
    page: Path
    record: Path


def places(file: Path, out: Path | None, *, force: bool) -> OutputPaths:
    """`out`, by default MODEL-int8.onnx beside the model, and its neighbours.

    Raises UsageError if one of them is there already and `force` is not given, or `out` is no .onnx.
    """
    model = out or file.with_name(f"{file.stem}-int8.onnx")
    if model.suffix != ".onnx":
        raise UsageError(f"--out {model} is not valid", fix="give the name of an .onnx file")
    if model.resolve() == file.resolve():
        raise UsageError(f"--out {model} is the model itself", fix="give another name")
    if not model.resolve().parent.is_dir():
        raise UsageError(f"there is no folder {model.parent}", fix="make it, or give another --out")
    refused = model.with_name(f"{model.stem}.refused.onnx")
    found = OutputPaths(model, refused, model.with_suffix(".html"), model.with_suffix(".json"))
    there = [place for place in (found.model, found.refused, found.page, found.record) if place.exists()]
    if there and not force:
        raise UsageError(f"{there[0]} exists already", fix="give another --out, or --force to replace it")
    return found


def quantize(
    home: Path,
    job: QuantizeJob,
    place: OutputPaths,
    options: BenchOptions,
    *,
    limit_s: float,
    command: Sequence[str],
) -> QuantizeRecord:
    """Quantize, judge, measure both, and write all results.

    limit_s: for quantizing and judging; then the process is ended.
    Raises StageFailed or ConfigInvalid where there is nothing to judge. A refusal is in the record.
    """
    bench.check_figures(options)
    with tempfile.TemporaryDirectory(prefix="hpml-quantize-") as folder:
        builds = _in_a_process(job, Path(folder), limit_s)
        files = {name: Path(folder) / f"{name}.onnx" for name in builds}
        found = next(iter(builds.values()))
        refused = bool(found.judgement.refusal)
        target = place.refused if refused else place.model
        write_bytes_atomic(target, next(iter(files.values())).read_bytes())
        speed, reason = None, "the gate refused it"
        if not refused:
            variants = dict(list(files.items())[1:])
            speed, reason = _speed(home, (job.file, target), variants, found, options, command)
        if len(builds) > 1:
            name, note = _chosen(speed, str(target), tuple(builds))
            write_bytes_atomic(target, files[name].read_bytes())
            found = builds[name].model_copy(update={"notes": (*builds[name].notes, note)})
    created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    record = QuantizeRecord(
        created_at=created_at,
        command=tuple(command),
        job=job,
        found=found,
        file=str(target),
        fp32_bytes=OnnxSubject(file=job.file).known()["size_bytes"],
        sha256={str(file): _sha256(file) for file in (job.file, target)},
        speed=speed,
        speed_reason=reason,
        facts={"quantized at": created_at, "command": " ".join(command), **bench.machine_facts()},
    )
    write_text_atomic(place.record, record.model_dump_json(indent=1))
    write_text_atomic(place.page, quantize_page(record.pair, facts=record.facts))
    return record


def _in_a_process(job: QuantizeJob, folder: Path, limit_s: float) -> dict[str, Quantized]:
    """What `hpml.pipelines.quantize.worker` answers, in a process that can be ended and has a memory limit.

    The model and the data are somebody's.
    """
    from hpml.measuring.process.engine_process import EngineProcess

    log = folder / "log"
    absolute = job.model_copy(update={"file": job.file.resolve(), "data": job.data.resolve()})
    with EngineProcess(str(job.file), log, reply_limit_s=limit_s, worker=_WORKER, tells_all=True) as process:
        told = process.ask(
            "quantize", "being quantized", job=absolute.model_dump(mode="json"), place=str(folder)
        )
    return {name: Quantized.model_validate(one) for name, one in told.items()}


def _speed(
    home: Path,
    files: tuple[Path, Path],
    variants: Mapping[str, Path],
    found: Quantized,
    options: BenchOptions,
    command: Sequence[str],
) -> tuple[BenchRecord | None, str]:
    """The bench of both, and why it has no figures; what was made is handed over all the same.

    variants: other builds of the int8 model, among which the bench chooses.
    """
    try:
        subjects = measurables([str(file) for file in files], Hints(home, sizes=found.sizes))
        int8 = subjects[str(files[1])]
        several = int8.subject.model_copy(update={"variants": variants})
        subjects[str(files[1])] = replace(int8, subject=several)
        record, _ = bench.measure(home, subjects, options, command=command, folder=None)
    except Terminated:
        raise
    except HpmlError as error:
        return None, str(error)
    return record, record.measurements.incomplete


def _chosen(speed: BenchRecord | None, model: str, names: Sequence[str]) -> tuple[str, str]:
    """Which of the builds of `model` is kept, and why: that which the bench chose, else the first."""
    figures = speed.measurements.engines.get(model) if speed else None
    if figures is None or figures.settings is None:
        return names[0], "whether signed activations would be faster was not measured"
    return figures.settings.variant or names[0], "of signed and unsigned activations the faster were kept"


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def show(record: QuantizeRecord, place: OutputPaths, output: str) -> None:
    """Print what came of it on stdout."""
    if output == "json":
        print(json.dumps(record.model_dump(mode="json"), indent=2))
        return
    for rows in (model_rows(record.pair), gate_rows(record.found.judgement, record.job.bounds)):
        cells = [[cell.lines for cell in row.values()] for row in rows]
        bench_tables.print_figures(list(rows[0]), cells, right=range(1, len(rows[0])))
    for sentence in (
        verdict_in_words(record.pair),
        *how_in_words(record.found),
        *record.pair.warnings,
        f"model: {record.file}",
        f"page: {place.page}",
    ):
        bench_tables.say(sentence)


def refuse(record: QuantizeRecord) -> None:
    """Raise GateFailed if the gate refused the model."""
    refusal = record.found.judgement.refusal
    if refusal:
        raise GateFailed(
            f"the int8 model of {record.job.file} is refused",
            why=refusal,
            fix=f"it is put aside as {record.file}; try --calibration percentile, more "
            "--calibration-samples, --exclude NODE, or other bounds",
        )
