"""Why bare ONNX files are not faster: `hpml diagnose FILE.onnx`, `hpml bench --diagnose`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from hpml.artifacts.diagnosis import DiagnosisSpec, EngineDiagnosis
from hpml.artifacts.measurements import MeasurementsSpec
from hpml.artifacts.peaks import PeaksSpec
from hpml.components.diagnose.facts import why_not_measured
from hpml.core.errors import ConfigInvalid
from hpml.measuring.subjects import OnnxSubject
from hpml.measuring.subjects.tensors import write_arrays
from hpml.pipelines.bench import machine as bench_machine
from hpml.pipelines.bench import session as bench
from hpml.pipelines.bench.measurable import Hints, Measurable, measurables
from hpml.pipelines.bench.record import BenchRecord
from hpml.pipelines.bench.sample_file import SampleFile
from hpml.pipelines.bench.session import BenchOptions
from hpml.pipelines.executors.base import Watcher

_WORKER = "hpml.components.diagnose.onnx_file"
LIMIT_S = 300.0  # of profiling a file, by default
_REQUESTS = 32  # distinct ones that the profile cycles through


def diagnose(
    home: Path,
    file: Path,
    sizes: Mapping[str, int],
    options: BenchOptions,
    watcher: Watcher,
    *,
    limit_s: float,
    samples: SampleFile | None = None,
) -> tuple[DiagnosisSpec, PeaksSpec]:
    """Measure the file and the machine, profile its layers, and judge them.

    samples: what it is fed with. limit_s: for the profile; then its process is ended. What the machine is too
    busy to measure is not diagnosed. Raises what `bench` does.
    """
    name = str(file)
    found = measurables([name], Hints(home, sizes=sizes, samples=samples))
    if not isinstance(found[name].subject, OnnxSubject):
        raise ConfigInvalid(f"{file} is not an ONNX file")
    record, _ = bench.measure(home, found, options, command=("diagnose", name), folder=None, samples=samples)
    spec, peaks = diagnose_measured(home, found, record, watcher, limit_s=limit_s, samples=samples)
    if spec.engines[name].status == "diagnosed":
        warnings = (note.rstrip(".") for note in record.notes)
        told = (f"input {line}" for line in record.inputs)
        spec = spec.model_copy(update={"notes": (*spec.notes, *warnings, *told)})
    return spec, peaks


def diagnose_measured(
    home: Path,
    found: Mapping[str, Measurable],
    record: BenchRecord,
    watcher: Watcher,
    *,
    limit_s: float,
    samples: SampleFile | None = None,
) -> tuple[DiagnosisSpec, PeaksSpec]:
    """The ONNX files among what a bench measured, under the peaks of the machine.

    Those are taken from the workspace where they are known, and measured where one file can be diagnosed.
    """
    measured = record.measurements
    reasons = {name: _why_not(item, name, measured) for name, item in found.items()}
    engines = {
        name: EngineDiagnosis(status="not diagnosed", reason=reason) for name, reason in reasons.items()
    }
    if all(reasons.values()):
        return DiagnosisSpec(threads=measured.threads, engines=engines), PeaksSpec(
            hardware={}, bandwidths=(), gemms=()
        )
    machine = bench_machine.measure_peaks(home.resolve(), watcher, force=False)
    peaks = bench_machine.peaks_of(home.resolve(), machine).spec
    told_of: dict[str, list[str]] = {}  # what is noted -> of which engines
    for name, item in found.items():
        if reasons[name]:
            continue
        alone = measured.model_copy(update={"engines": {name: measured.engines[name]}})
        engines[name], notes = _in_a_process(item, alone, peaks, limit_s, samples)
        for note in notes:
            told_of.setdefault(note, []).append(name)
    everywhere = [name for name, reason in reasons.items() if not reason]
    told = (note if names == everywhere else f"{', '.join(names)}: {note}" for note, names in told_of.items())
    return DiagnosisSpec(threads=measured.threads, engines=engines, notes=tuple(told)), peaks


def _why_not(item: Measurable, name: str, measured: MeasurementsSpec) -> str:
    """Why it cannot be diagnosed; empty if it can."""
    if not isinstance(item.subject, OnnxSubject) or item.subject.device != "cpu":
        return "only ONNX files on the CPU are profiled here; hpml diagnose RUN has the engines of a run"
    figures = measured.engines.get(name)
    if figures is None or figures.latency_ms_p50 is None:
        return why_not_measured(figures, measured)
    return ""


def _in_a_process(
    found: Measurable,
    measured: MeasurementsSpec,
    peaks: PeaksSpec,
    limit_s: float,
    samples: SampleFile | None = None,
) -> tuple[EngineDiagnosis, list[str]]:
    """The model is somebody's: it gets a process that can be ended and has a memory limit."""
    from hpml.measuring.process.engine_process import EngineProcess

    assert isinstance(found.subject, OnnxSubject)
    file, (figures,) = str(found.subject.file), measured.engines.values()
    tensors = found.signature.inputs
    with tempfile.TemporaryDirectory(prefix="hpml-diagnose-") as folder:
        inputs, log = Path(folder) / "inputs.npz", Path(folder) / "process.log"
        if samples:
            arrays = samples.arrays(tensors, _REQUESTS)
            write_arrays(inputs, {tensor.name: arrays[tensor.array] for tensor in tensors})
        else:
            write_arrays(inputs, {tensor.name: tensor.draw(_REQUESTS, seed=0) for tensor in tensors})
        with EngineProcess(file, log, reply_limit_s=limit_s, worker=_WORKER) as process:
            told = process.ask(
                "diagnose",
                "being profiled",
                name=file,
                file=file,
                inputs=str(inputs),
                figures=figures.model_dump(mode="json"),
                states=[state.model_dump(mode="json") for state in measured.states],
                peaks=peaks.model_dump(mode="json"),
                threads=figures.settings.threads if figures.settings else measured.threads,
            )
    return EngineDiagnosis.model_validate(told["diagnosis"]), told["notes"]
