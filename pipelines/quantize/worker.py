"""The process that quantizes: what it runs is the user's model. See `engine_process`."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from hpml.artifacts.model import QuantizationSpec
from hpml.core.contract import validate
from hpml.core.errors import ConfigInvalid, HpmlError, StageFailed
from hpml.core.process import serve
from hpml.pipelines.quantize import samples as data
from hpml.pipelines.quantize.job import Judgement, Quantized, QuantizeJob
from hpml.pipelines.quantize.judge import answers_of_fp32, batches, judge
from hpml.targets import onnx_file
from hpml.targets.onnx_int8 import SEVEN_BITS, candidate_activations, needs_7_bits, quantize_graph, variant_of
from hpml.targets.onnx_session import OnnxSession

_LEAST_OPSET = 13  # from it on weights have a scale for each channel
_MOST_JUDGED = 10_000  # samples
_NAMED = 12  # nodes in a message
_CHANCE = 1.5  # an accuracy below so many times that of guessing is no accuracy


def quantize(job: dict[str, Any], place: str) -> dict[str, Any]:
    """Write the int8 models of a `QuantizeJob` into the folder `place`, as NAME.onnx.

    Answers a `Quantized` for each by its name, the one to use without a measurement first. One that the gate
    refuses is there only if it refuses them all.
    Raises ConfigInvalid for a model or data that cannot be used, StageFailed where quantizing it fails.
    """
    asked: QuantizeJob = validate(QuantizeJob, job, where="the job")
    model = onnx_file.load_whole(asked.file)
    _check(asked, model)
    samples = data.read(asked.file, asked.data, asked.sizes, asked.preprocessing)
    batch = samples.batch
    calibrating, judging = samples.divided(asked.calibration_samples, asked.seed)
    calibrated = len(calibrating)
    if batch:  # full ones only: what is left over is dropped, or too few are repeated
        calibrating = np.resize(calibrating, max(1, calibrated // batch) * batch)
        calibrated = min(calibrated, len(calibrating))
    notes = []
    if len(judging) > _MOST_JUDGED:
        notes.append(f"judged on {_MOST_JUDGED:,} of {len(judging):,} samples, drawn at random")
        judging = np.sort(np.random.default_rng(asked.seed).permutation(judging)[:_MOST_JUDGED])
    kinds = candidate_activations(asked.activations)
    files = {kind: Path(place) / f"{variant_of(kind)}.onnx" for kind in kinds}
    with tempfile.TemporaryDirectory(dir=place) as folder:
        scratch = Path(folder)
        notes += _prepare(model, scratch / "fp32.onnx")
        spec = QuantizationSpec(
            scheme="static",
            weights="int8-per-channel",
            activations=asked.activations,
            calibration=asked.calibration,
            calibration_rows=tuple(map(int, calibrating)),
        )
        feeds = samples.feeds(calibrating)

        try:
            for kind, file in files.items():
                quantize_graph(
                    scratch / "fp32.onnx",
                    file,
                    spec,
                    feeds,
                    activations=kind,
                    excluded_nodes=list(asked.excluded_nodes),
                    batch=batch,
                    reduce_range=needs_7_bits(kind),
                    fold=True,
                )
        except HpmlError:
            raise
        except Exception as error:  # whatever ONNX Runtime's quantizer meets in a model
            fp32 = OnnxSession(asked.file, device="cpu", threads=asked.threads)
            for part in batches(calibrating, batch):
                answers_of_fp32(fp32, samples.feeds(part))
            named = [node.name for node in model.graph.node if node.name and node.name in str(error)]
            raise StageFailed(
                f"{asked.file} cannot be quantized",
                why=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                fix=f"keep in fp32 what it names: --exclude {max(named, key=len)}" if named else "",
            ) from None
    fp32 = OnnxSession(asked.file, device="cpu", threads=asked.threads, spinning=False)
    found = {}
    for kind, file in files.items():
        quantized, left = _counts(file, model)
        int8 = OnnxSession(file, device="cpu", threads=asked.threads, spinning=False)
        judgement = judge(fp32, int8, samples, judging, batch, asked.bounds)
        seven_bits = needs_7_bits(kind)
        found[variant_of(kind)] = Quantized(
            inputs=samples.inputs,
            sizes=dict(samples.sizes),
            calibrated=calibrated,
            activations=kind,
            weight_bits=7 if seven_bits else 8,
            quantized=quantized,
            left=left,
            size_bytes=file.stat().st_size,
            judgement=judgement,
            notes=(*([SEVEN_BITS] if seven_bits else []), *notes, *_doubts(judgement, samples)),
        )
    return {name: one.model_dump(mode="json") for name, one in _usable(found).items()}


def _usable(found: dict[str, Quantized]) -> dict[str, Quantized]:
    """Those that the gate passes, with a note on the others; the first where it passes none."""
    refused = [one for one in found.values() if one.judgement.refusal]
    if len(refused) == len(found):
        return dict(list(found.items())[:1])
    notes = [f"{one.activations} activations were refused: {one.judgement.refusal}" for one in refused]
    return {
        name: one.model_copy(update={"notes": (*one.notes, *notes)})
        for name, one in found.items()
        if one not in refused
    }


def _check(asked: QuantizeJob, model: onnx.ModelProto) -> None:
    """Raise ConfigInvalid for a model that is quantized already, or lacks a node to exclude."""
    if found := onnx_file.quantized_operators(model):
        raise ConfigInvalid(
            f"{asked.file} is quantized already", why=f"it has {', '.join(found)}", fix="give the fp32 model"
        )
    names = sorted({node.name for node in model.graph.node if node.name})
    if unknown := [name for name in asked.excluded_nodes if name not in names]:
        more = " ..." if len(names) > _NAMED else ""
        raise ConfigInvalid(
            f"{asked.file} has no node {unknown[0]!r} to exclude",
            why=f"it has {', '.join(names[:_NAMED])}{more}" if names else "its nodes have no names",
        )


def _prepare(model: onnx.ModelProto, file: Path) -> list[str]:
    """Write a copy of the model that ONNX Runtime's quantizer takes; returns what was changed.

    Raises StageFailed if its opset is too old to be converted.
    """
    from onnx import version_converter

    notes = []
    del model.graph.value_info[:]  # inferred again; stale, it breaks ONNX Runtime's quantizer
    opset = next(
        (entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), _LEAST_OPSET
    )
    converted = model
    if opset < _LEAST_OPSET:
        try:
            converted = version_converter.convert_version(model, _LEAST_OPSET)
        except Exception as error:  # the converter's own kinds
            raise StageFailed(
                f"the model's opset {opset} is too old",
                why=f"weights per channel need {_LEAST_OPSET}, and converting failed: {str(error)[:200]}",
                fix=f"export it again with opset {_LEAST_OPSET} or later",
            ) from None
        notes.append(f"the model was converted from opset {opset} to {_LEAST_OPSET}")
    onnx.save(converted, file)
    return notes


def _counts(int8: Path, fp32: onnx.ModelProto) -> tuple[dict[str, int], dict[str, int]]:
    """Operators that compute between Q/DQ nodes, and those of them that are left in fp32.

    Puts the metadata of the fp32 model into the int8 one. Raises StageFailed if nothing was quantized.
    """
    model = onnx.load(int8)
    from_int8 = {
        output for node in model.graph.node if node.op_type == "DequantizeLinear" for output in node.output
    }
    quantized: Counter[str] = Counter()
    left: Counter[str] = Counter()
    for node in model.graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear"):
            (quantized if node.input and node.input[0] in from_int8 else left)[node.op_type] += 1
    if not quantized:
        raise StageFailed(
            "nothing in the model can be quantized",
            why=f"it has {', '.join(f'{count} {op}' for op, count in left.most_common())}",
        )
    known = {entry.key for entry in model.metadata_props}
    model.metadata_props.extend(entry for entry in fp32.metadata_props if entry.key not in known)
    onnx.save(model, int8)
    return dict(quantized.most_common()), dict(left.most_common())


def _doubts(judgement: Judgement, samples: data.Samples) -> list[str]:
    """What makes the judgement worth less than it looks."""
    doubts = []
    accuracy, labels = judgement.accuracy_fp32, samples.labels
    if labels is not None and accuracy is None:
        doubts.append("the labels were not used: the model has no output (samples, classes)")
    if labels is not None and accuracy is not None and accuracy.value < _CHANCE / len(np.unique(labels)):
        doubts.append(
            f"the fp32 model itself gets {accuracy.value:.1%} of the labels right, which is about chance: "
            "check --mean, --std and --scale, and that the classes are in the model's order"
        )
    if judgement.samples < 100:
        doubts.append(f"judged on {judgement.samples} samples only")
    return doubts


if __name__ == "__main__":
    serve({"quantize": quantize})
