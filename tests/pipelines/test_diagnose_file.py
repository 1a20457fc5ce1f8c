"""`hpml diagnose FILE.onnx`: a verdict and layers of a bare file, in every form of output."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpml.artifacts.diagnosis import DiagnosisSpec, EngineDiagnosis
from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures, MeasurementsSpec, Throughput
from hpml.artifacts.peaks import BandwidthPoint, GemmPoint, PeaksSpec
from hpml.components.diagnose.onnx_file import diagnose
from hpml.core.errors import StageFailed
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.subjects import OnnxSubject, TorchSubject
from hpml.pipelines.__main__ import main
from hpml.pipelines.bench import diagnose_file, diagnosis, session
from hpml.pipelines.bench.measurable import Hints, measurable, measurables
from hpml.pipelines.bench.record import BenchRecord, read_record
from hpml.pipelines.bench.sample_file import SampleFile
from hpml.pipelines.bench.session import BenchOptions
from hpml.pipelines.terminal import bench_tables
from hpml.pipelines.terminal.console import PlainWatcher
from tests.small_subjects import (
    transformer_samples,
    write_endless,
    write_image_model,
    write_text_model,
    write_transformer,
)


def sure(value: float) -> Interval:
    return Interval(value=value, low=value, high=value)


PEAKS = PeaksSpec(
    hardware={},
    bandwidths=tuple(
        BandwidthPoint(
            device="cpu", kernel="triad", threads=1, working_set_bytes=size, level=level, gb_per_s=sure(10.0)
        )
        for level, size in (("L1", 32_000), ("DRAM", 256_000_000))
    ),
    gemms=(
        GemmPoint(
            device="cpu",
            precision="fp32",
            library="onnxruntime (MLAS)",
            threads=1,
            size=512,
            gflop_per_s=sure(50.0),
        ),
    ),
)


def figures(**fields: Any) -> EngineFigures:
    """Of a request that takes a millisecond, and is better used at batch 32."""
    rates = ((1, 1000.0), (32, 9000.0))
    return EngineFigures(
        status="measured",
        target="onnx",
        precision="fp32",
        methods=(),
        size_bytes=1,
        parameters=1,
        macs=0,
        latency_ms_p50=sure(1.0),
        throughput=tuple(Throughput(batch=batch, images_per_s=sure(rate)) for batch, rate in rates),
        **fields,
    )


def measured(of_file: EngineFigures, name: str = "m.onnx") -> MeasurementsSpec:
    return MeasurementsSpec(
        reference=name, best_fp32="", engines={name: of_file}, rounds=1, threads=1, seed=0, environment={}
    )


def told_of(file: Path, tmp_path: Path, **sizes: int) -> tuple[EngineDiagnosis, list[str]]:
    found = measurable(str(file), Hints(tmp_path, sizes=sizes))
    assert isinstance(found.subject, OnnxSubject)
    return diagnose_file._in_a_process(found, measured(figures()), PEAKS, 120)


@pytest.fixture(scope="module")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> DiagnosisSpec:
    place = tmp_path_factory.mktemp("diagnosed")
    one, notes = told_of(write_image_model(place / "m.onnx", size=64), place)
    return DiagnosisSpec(threads=1, engines={"m.onnx": one}, notes=tuple(notes))


def test_the_layers_of_a_bare_file_under_the_peaks(diagnosed: DiagnosisSpec) -> None:
    one = diagnosed.engines["m.onnx"]
    assert one.status == "diagnosed" and one.time_us == 1000 and one.roof_us
    product = next(layer for layer in one.layers if layer.flops)
    assert product.flops == 2 * 3 * 64 * 64 * 5 and product.bytes > 4 * 3 * 64 * 64 * 5
    assert one.bound == "overhead" and "in 1 ms" in one.verdict
    assert any(finding.rule == "small-batch" for finding in one.findings)
    assert any("int8" in note for note in diagnosed.notes)  # has no peak here, which is said


def test_a_file_with_several_inputs_of_other_types(tmp_path: Path) -> None:
    file = write_text_model(tmp_path / "t.onnx")
    arrays = {"ids": np.ones((4, 7), np.int64), "mask": np.ones((4, 7), np.float32)}
    np.savez(tmp_path / "inputs.npz", **arrays)  # type: ignore[arg-type]
    told = diagnose(
        "t.onnx",
        str(file),
        str(tmp_path / "inputs.npz"),
        figures().model_dump(mode="json"),
        [],
        PEAKS.model_dump(mode="json"),
        1,
    )
    ops = {layer["op"] for layer in told["diagnosis"]["layers"]}
    assert "Gather" in ops or "ReduceMean" in ops


def test_a_file_that_never_answers_is_ended(tmp_path: Path) -> None:
    found = measurable(str(write_endless(tmp_path / "endless.onnx")), Hints(tmp_path))
    assert isinstance(found.subject, OnnxSubject)
    with pytest.raises(
        StageFailed,
        match=r"endless.onnx' failed while being profiled: it did not answer within its limit of 4 s",
    ):
        diagnose_file._in_a_process(found, measured(figures()), PEAKS, 4)


def test_what_was_not_measured_is_not_diagnosed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_image_model(tmp_path / "m.onnx", size=8)
    busy = "machine busy (26 of 645 slices were quiet)"
    update = {"status": "not measured", "reason": busy, "latency_ms_p50": None, "throughput": ()}
    incomplete = {"incomplete": f"not measured: latency at batch 1: {busy}"}
    spec = measured(figures().model_copy(update=update), str(file)).model_copy(update=incomplete)
    monkeypatch.setattr(
        diagnose_file.bench, "measure", lambda *_, **__: (SimpleNamespace(measurements=spec), None)
    )
    found, _ = diagnose_file.diagnose(tmp_path, file, {}, BenchOptions(), PlainWatcher(), limit_s=1)
    one = found.engines[str(file)]
    assert (one.status, one.reason) == ("not diagnosed", f"not measured: {busy}")


def test_remedies_are_those_of_a_file() -> None:
    from hpml.components.diagnose import onnx_file
    from hpml.components.diagnose.rules import RULES

    assert set(onnx_file._REMEDIES) <= {rule.name for rule in RULES}
    assert not any("benchmark.threads" in remedy for remedy in onnx_file._REMEDIES.values())


@pytest.mark.parametrize("output", ["table", "json", "markdown", "html"])
def test_every_form_of_output(
    diagnosed: DiagnosisSpec, output: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(diagnose_file, "diagnose", lambda *_, **__: (diagnosed, PEAKS))
    main(["diagnose", "m.onnx", "-o", output])
    printed = capsys.readouterr().out
    one = diagnosed.engines["m.onnx"]
    if output == "json":
        assert EngineDiagnosis.model_validate(json.loads(printed)) == one
    elif output == "html":
        assert printed.startswith("<!DOCTYPE html>") and "<script" not in printed and "MatMul" in printed
    else:
        assert "MatMul" in printed and "larger batches" in " ".join(printed.split())
        assert ("| slowest layers |" in printed) == (output == "markdown")


def test_names_steer_no_markdown(diagnosed: DiagnosisSpec, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = {"[x](http://evil)|<img>\n# y": diagnosed.engines["m.onnx"]}
    spec = diagnosed.model_copy(update={"engines": hostile})
    diagnosis.show_document("it", spec, PEAKS, "", "markdown")
    head = capsys.readouterr().out.splitlines()[0]
    assert head == r"## \[x\](http://evil)\|\<img\> \# y"


def test_a_bench_tells_the_share_of_the_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the ONNX files among what it measured, on real samples; of a torch module why not."""
    file = write_transformer(tmp_path / "t.onnx")
    np.savez(tmp_path / "data.npz", **transformer_samples())
    samples = SampleFile(tmp_path / "data.npz")
    found = measurables([str(file)], Hints(tmp_path, samples=samples))
    [item] = found.values()
    found["net:other"] = replace(item, subject=TorchSubject(path="net:other"))
    both = {name: figures() for name in found}
    record = record_of(measured(figures(), str(file)).model_copy(update={"engines": both}))
    peaks = SimpleNamespace(spec=PEAKS)
    monkeypatch.setattr(diagnose_file.bench_machine, "measure_peaks", lambda *_, **__: None)
    monkeypatch.setattr(diagnose_file.bench_machine, "peaks_of", lambda *_: peaks)
    spec, under = diagnose_file.diagnose_measured(
        tmp_path, found, record, PlainWatcher(), limit_s=60, samples=samples
    )
    one, other = spec.engines.values()
    assert one.status == "diagnosed" and one.share_of_roof and under == PEAKS
    assert other.status == "not diagnosed" and "only ONNX files" in other.reason
    (tmp_path / "it").mkdir()
    np.savez(tmp_path / "it" / "samples.npz", allow_pickle=False)
    bench_tables.show(session.with_diagnosis(tmp_path / "it", record, spec, under), tmp_path / "it", "table")
    printed = capsys.readouterr().out
    share = f"{100 * one.share_of_roof:.1f} %"
    assert "of peak" in printed and share in printed and "net:other: not diagnosed: only" in printed
    assert read_record(tmp_path / "it").diagnosis == spec
    assert "Why it is not faster" in (tmp_path / "it" / "bench.html").read_text()


def record_of(spec: MeasurementsSpec) -> BenchRecord:
    config = BenchmarkConfig(reference=spec.reference)
    return BenchRecord(
        id="it", created_at="", command=(), config=config, libraries={}, subjects={}, measurements=spec
    )


def test_samples_are_for_files(tmp_path: Path) -> None:
    for command in (["diagnose", "latest"], ["bench", "--from", str(tmp_path)]):
        with pytest.raises(SystemExit) as caught:
            main([*command, "--data", "data.npz", "--home", str(tmp_path)])
        assert caught.value.code == 2


def test_a_file_has_no_variants(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["diagnose", str(tmp_path / "m.onnx"), "int8/onnx"])
    assert caught.value.code == 2
