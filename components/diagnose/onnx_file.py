"""The diagnosis of a bare ONNX file, in a process of its own: what it runs is the user's model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hpml.artifacts.core_state import CoreState
from hpml.artifacts.diagnosis import EngineDiagnosis
from hpml.artifacts.measurements import EngineFigures
from hpml.artifacts.peaks import PeaksSpec
from hpml.components.diagnose.config import DiagnoseConfig
from hpml.components.diagnose.examine import above_roof, diagnosis_of, facts_of_file
from hpml.components.diagnose.profilers import onnx_profile
from hpml.components.diagnose.roofs import Roofs
from hpml.core.contract import validate
from hpml.core.process import serve
from hpml.targets.onnx_session import single_requests

# Remedies that a recipe has otherwise.
_REMEDIES = {
    "near-arithmetic-peak": "only less arithmetic makes it faster: int8 where it is not yet (hpml "
    "quantize), or a network with fewer channels",
    "memory": "move fewer bytes: int8 (hpml quantize), smaller activations, elementwise steps that can be "
    "fused",
    "fp32-in-int8": "replace these operations by ones that the runtime has in int8, or exclude fewer nodes",
    "signed-activations": "use unsigned activations: hpml quantize --activations uint8, from the fp32 model",
    "idle-threads": "give it one thread, and run one such session on each core",
}


def diagnose(
    name: str,
    file: str,
    inputs: str,
    figures: dict[str, Any],
    states: list[dict[str, Any]],
    peaks: dict[str, Any],
    threads: int,
) -> dict[str, Any]:
    """Profile `file` and judge it under `peaks`.

    inputs: an .npz file of its inputs by name. figures, states, peaks: an `EngineFigures` with its
    latency, each `CoreState` of the measurement, and a `PeaksSpec`. Answers an `EngineDiagnosis` and notes
    on it.
    """
    config = DiagnoseConfig()
    with np.load(inputs, allow_pickle=False) as arrays:
        cycled = single_requests({key: arrays[key] for key in arrays.files})
    with tempfile.TemporaryDirectory(dir=Path(inputs).parent) as scratch:
        profile = onnx_profile.profile(
            Path(file), cycled, threads=threads, config=config, scratch=Path(scratch)
        )
    roofs = Roofs(validate(PeaksSpec, peaks, where="the peaks"), threads=threads)
    measured: EngineFigures = validate(EngineFigures, figures, where="the figures")
    seen: tuple[CoreState, ...] = tuple(
        validate(CoreState, state, where="a state of the cores") for state in states
    )
    facts = facts_of_file(name, measured, profile, roofs, threads=threads, states=seen)
    found = diagnosis_of(facts, layers=config.layers)
    notes = [*roofs.notes(), *profile.notes, *above_roof(facts)]
    return {"diagnosis": _with_remedies_of_files(found).model_dump(mode="json"), "notes": notes}


def _with_remedies_of_files(found: EngineDiagnosis) -> EngineDiagnosis:
    findings = tuple(
        finding.model_copy(update={"remedy": _REMEDIES.get(finding.rule, finding.remedy)})
        for finding in found.findings
    )
    return found.model_copy(update={"findings": findings})


if __name__ == "__main__":
    serve({"diagnose": diagnose})
