"""The diagnosis of a run: profile each engine, put it under the roofs, ask the rules."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.diagnosis import DiagnosisSpec, EngineDiagnosis, LayerFigures
from hpml.artifacts.engine import EngineSpec, build_of
from hpml.artifacts.folder import Artifact
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec
from hpml.artifacts.peaks import PeaksSpec
from hpml.components.diagnose.config import DiagnoseConfig
from hpml.components.diagnose.facts import Facts, Peer, why_not_measured
from hpml.components.diagnose.layers import Profile
from hpml.components.diagnose.roofs import Device, LayerRoofline, Roofs, model_bound, share_of_roof, total
from hpml.components.diagnose.rules import findings
from hpml.components.diagnose.verdict import verdict
from hpml.core import hardware
from hpml.core.contract import Output, Result, validate
from hpml.core.errors import ConfigInvalid, HpmlError, Terminated
from hpml.targets import AnyTarget
from hpml.targets.onnx_session import single_requests
from hpml.tasks import task_of
from hpml.tasks.judging import rows_of

if TYPE_CHECKING:
    from hpml.targets.openvino import OpenVinoEngine
    from hpml.targets.tensorrt_engine import PlanSession

_ROWS = 32  # distinct validation rows that the requests cycle through

Engines = Mapping[str, Artifact[EngineSpec]]


def examine(
    config: DiagnoseConfig,
    engines: Engines,
    measured: MeasurementsSpec,
    peaks: PeaksSpec,
    data: Artifact[DatasetSpec],
    out: Output,
) -> Result[DiagnosisSpec]:
    """Diagnose all engines; see `hpml.components.diagnose.stage.run`."""
    roofs: dict[tuple[Device, int], Roofs] = {}
    diagnoses = {}
    notes = []
    built = {
        name: build_of(engine, measured.engines[name].variant) if name in measured.engines else engine
        for name, engine in engines.items()
    }
    for index, (name, engine) in enumerate(built.items()):
        reason = _why_not(name, engine, measured)
        if not reason:
            device, threads = _device(engine.spec), threads_of(measured.engines[name], measured)
            under = (device, threads if device == "cpu" else 1)
            roofs.setdefault(under, Roofs(peaks, threads=threads, device=device))
            try:
                profile = _profiled(config, engine, threads, data, out)
                facts = facts_of(name, built, measured, profile, roofs[under])
                diagnoses[name] = diagnosis_of(facts, layers=config.layers)
                notes += [f"{name}: {note}" for note in (*profile.notes, *above_roof(facts))]
            except Terminated:
                raise
            except Exception as error:  # whatever a runtime may raise: the other engines are diagnosed
                traceback.print_exc()
                named = str(error) if isinstance(error, HpmlError) else f"{type(error).__name__}: {error}"
                reason = " ".join(named.split())[:300]
        if reason:
            diagnoses[name] = EngineDiagnosis(status="not diagnosed", reason=reason)
        out.progress(index + 1, len(engines), "engines", name)
    notes = [note for of_device in roofs.values() for note in of_device.notes()] + notes
    spec = DiagnosisSpec(threads=measured.threads, engines=diagnoses, notes=tuple(notes))
    shares = {name: one.share_of_roof for name, one in diagnoses.items()}
    metrics = {f"share_of_roof/{name}": share for name, share in shares.items() if share is not None}
    return Result(spec, metrics=metrics)


def above_roof(facts: Facts) -> Iterator[str]:
    """Why some shares of a peak are not given."""
    above = [judged.layer.name for judged in facts.layers if judged.is_above_roof]
    if above:
        yield (
            f"{len(above)} of {len(facts.layers)} layers were faster than the peaks measured here, "
            f"such as {above[0]}: these are too low for them, and a share of them is not given"
        )


def _why_not(name: str, engine: Artifact[EngineSpec], measured: MeasurementsSpec) -> str:
    """Why an engine cannot be diagnosed; empty if it can."""
    spec, figures = engine.spec, measured.engines.get(name)
    if spec.status != "built":
        return f"not built: {spec.reason}"
    if figures is None or figures.latency_ms_p50 is None:
        return why_not_measured(figures, measured)
    try:
        return _target(spec).unprofiled_reason(spec, engine.manifest.files)
    except ConfigInvalid as error:  # of a target that is not here: the other engines are diagnosed
        return str(error)


def _target(engine: EngineSpec) -> AnyTarget:
    target: AnyTarget = validate(AnyTarget, engine.target, where="the target of the engine")
    return target


def threads_of(figures: EngineFigures, measured: MeasurementsSpec) -> int:
    """How many threads an engine was measured with."""
    return figures.settings.threads if figures.settings else measured.threads


def _device(engine: EngineSpec) -> Device:
    return "cpu" if engine.identity["device"].startswith("cpu") else "cuda"


def _profiled(
    config: DiagnoseConfig,
    engine: Artifact[EngineSpec],
    threads: int,
    data: Artifact[DatasetSpec],
    out: Output,
) -> Profile:
    task, operation = task_of(engine.spec.task), engine.spec.operations[0]
    split = task.stored(data, "validation")
    rows = data.spec.split("validation").rows
    stored = rows_of(split, np.linspace(0, rows - 1, min(_ROWS, rows)).astype(int))
    target = _target(engine.spec)
    session = target.load(engine.path, engine.spec, threads=threads)  # refuses what this machine cannot run
    requests = single_requests(task.requests(session, stored, operation))
    file = engine.path / (engine.spec.graphs or {operation.graph: engine.spec.file})[operation.graph]
    if target.profiler == "torch":
        from hpml.components.diagnose.profilers import torch_profile

        answer = partial(session.run, operation=operation.name)
        return torch_profile.profile(answer, requests, threads=threads, config=config)
    if target.profiler == "tensorrt":
        from hpml.components.diagnose.profilers import tensorrt_profile
        from hpml.targets.tensorrt import GRAPH

        return tensorrt_profile.profile(
            cast("PlanSession", session), engine.path / GRAPH, requests, config=config
        )
    if target.profiler == "openvino":
        from hpml.components.diagnose.profilers import openvino_profile

        runtime = cast("OpenVinoEngine", session).sessions[operation.name]
        return openvino_profile.profile(runtime, file, requests, config=config)
    assert target.profiler == "onnxruntime", target.profiler
    from hpml.components.diagnose.profilers import onnx_profile

    return onnx_profile.profile(file, requests, threads=threads, config=config, scratch=out.scratch)


# -------------------------------------------------------------------------------------------------- the facts


def facts_of(
    name: str, engines: Engines, measured: MeasurementsSpec, profile: Profile, roofs: Roofs
) -> Facts:
    """All that was measured of the engine `name`, its layers under `roofs`."""
    figures = measured.engines[name]
    alone = facts_of_file(
        name, figures, profile, roofs, threads=threads_of(figures, measured), states=measured.states
    )
    methods = figures.methods
    return replace(
        alone,
        spec=engines[name].spec,
        unit=measured.unit,
        unquantized=_peer(name, engines, measured, without={"quantize"}) if "quantize" in methods else None,
        # Distilling changes weights and no shape.
        unpruned=_peer(name, engines, measured, without={"prune", "distill"}) if "prune" in methods else None,
    )


def facts_of_file(
    name: str,
    figures: EngineFigures,
    profile: Profile,
    roofs: Roofs,
    *,
    threads: int,
    states: tuple[CoreState, ...],
) -> Facts:
    """The same of an engine that no other can be held against."""
    assert figures.latency_ms_p50 is not None
    time_us = 1e3 * figures.latency_ms_p50.value
    all_weight_bytes = sum(layer.weight_bytes for layer in profile.layers)
    layers = tuple(roofs.judge(layer, all_weight_bytes=all_weight_bytes) for layer in profile.layers)
    peaks = {precision: roofs.gflop_per_s(precision) for precision in ("fp32", "fp16", "bf16", "int8")}
    return Facts(
        name=name,
        spec=figures,
        figures=figures,
        profile=profile,
        layers=layers,
        time_us=time_us,
        roof_us=total([judged.roof_us for judged in layers]),
        bound=model_bound(layers, time_us),
        device=roofs.device,
        threads=threads,
        states=states,
        lanes=vector_lanes() if roofs.device == "cpu" else None,
        peaks={precision: peak for precision, peak in peaks.items() if peak is not None},
        sign_rates=roofs.sign_rates(),
    )


def vector_lanes() -> int:
    """How many fp32 numbers a vector of this CPU holds."""
    flags = hardware.cpu_flags()
    return 16 if "avx512f" in flags else 8 if "avx2" in flags else 4


def _peer(name: str, engines: Engines, measured: MeasurementsSpec, *, without: set[str]) -> Peer | None:
    """The measured engine on the same target whose network had the same done to it, but for `without`."""
    own = engines[name].spec
    wanted = tuple(method for method in own.methods if method not in without)
    for other, engine in engines.items():
        figures = measured.engines.get(other)
        same = engine.spec.target == own.target and engine.spec.methods == wanted
        if same and figures is not None and figures.latency_ms_p50 is not None:
            return Peer(other, engine.spec, figures)
    return None


# -------------------------------------------------------------------------------------------- what is written


def diagnosis_of(facts: Facts, *, layers: int) -> EngineDiagnosis:
    """The figures of the whole engine, and of its slowest `layers` in the order they run."""
    found = findings(facts)
    by_time = sorted(enumerate(facts.layers), key=lambda item: -item[1].layer.time_us)
    kept = sorted(index for index, _ in by_time[:layers])
    return EngineDiagnosis(
        status="diagnosed",
        device=facts.device,
        threads=facts.threads,
        flops=sum(judged.layer.flops for judged in facts.layers),
        bytes=sum(judged.layer.bytes for judged in facts.layers),
        time_us=round(facts.time_us, 3),
        profiled_us=round(facts.profiled_us, 3),
        roof_us=_rounded(facts.roof_us),
        share_of_roof=_rounded(share_of_roof(facts.roof_us, facts.time_us)),
        bound=facts.bound,
        layers=tuple(_layer_figures(facts.layers[index]) for index in kept),
        verdict=verdict(facts, found),
        findings=tuple(item.finding for item in found),
    )


def _layer_figures(judged: LayerRoofline) -> LayerFigures:
    layer = judged.layer
    return LayerFigures(
        name=layer.name,
        op=layer.op,
        precision=layer.precision,
        flops=layer.flops,
        bytes=layer.bytes,
        time_us=round(layer.time_us, 3),
        bound=judged.bound,
        share_of_roof=_rounded(judged.share_of_roof),
        nodes=layer.nodes,
        formats=layer.formats,
        kernel=layer.kernel,
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
