"""`hpml diagnose FILE.onnx`: why a bare ONNX file is not faster, measured here and now."""

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
from hpml.pipelines.bench.measurable import Hints, Measurable, measurable
from hpml.pipelines.bench.session import BenchOptions
from hpml.pipelines.executors.base import Watcher

_WORKER = "hpml.components.diagnose.onnx_file"
_REQUESTS = 32  # distinct ones that the profile cycles through


def diagnose(
    home: Path,
    file: Path,
    sizes: Mapping[str, int],
    options: BenchOptions,
    watcher: Watcher,
    *,
    limit_s: float,
) -> tuple[DiagnosisSpec, PeaksSpec]:
    """Measure the file and the machine, profile its layers, and judge them.

    The peaks of the machine are taken from the workspace where they are known. limit_s: for the profile;
    then its process is ended. What the machine is too busy to measure is not diagnosed. Raises what `bench`
    does.
    """
    name = str(file)
    found = measurable(name, Hints(home, sizes=sizes))
    if not isinstance(found.subject, OnnxSubject):
        raise ConfigInvalid(f"{file} is not an ONNX file")
    record, _ = bench.measure(home, {name: found}, options, command=("diagnose", name), folder=None)
    measured = record.measurements
    figures = measured.engines.get(name)
    if figures is None or figures.latency_ms_p50 is None:
        reason = why_not_measured(figures, measured)
        nothing = EngineDiagnosis(status="not diagnosed", reason=reason)
        no_peaks = PeaksSpec(hardware={}, bandwidths=(), gemms=())
        return DiagnosisSpec(threads=measured.threads, engines={name: nothing}), no_peaks
    machine = bench_machine.measure_peaks(home.resolve(), watcher, force=False)
    peaks = bench_machine.peaks_of(home.resolve(), machine).spec
    one, notes = _in_a_process(found, measured, peaks, limit_s)
    warnings = (note.rstrip(".") for note in record.notes)
    return DiagnosisSpec(threads=measured.threads, engines={name: one}, notes=(*notes, *warnings)), peaks


def _in_a_process(
    found: Measurable, measured: MeasurementsSpec, peaks: PeaksSpec, limit_s: float
) -> tuple[EngineDiagnosis, list[str]]:
    """The model is somebody's: it gets a process that can be ended and has a memory limit."""
    from hpml.measuring.process.engine_process import EngineProcess

    assert isinstance(found.subject, OnnxSubject)
    file, (figures,) = str(found.subject.file), measured.engines.values()
    with tempfile.TemporaryDirectory(prefix="hpml-diagnose-") as folder:
        inputs, log = Path(folder) / "inputs.npz", Path(folder) / "process.log"
        write_arrays(
            inputs, {tensor.name: tensor.draw(_REQUESTS, seed=0) for tensor in found.signature.inputs}
        )
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
