"""`hpml bench`: what an argument is, real measurements of small things, and what is left of them."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml.artifacts.measurements import MeasurementsSpec
from hpml.components.export import stage as export
from hpml.core import memory
from hpml.core.errors import ConfigInvalid, GateFailed, HpmlError, StageFailed, UsageError
from hpml.measuring.rounds import Rounds
from hpml.measuring.samples import read_samples
from hpml.measuring.subjects import BundleSubject, EngineSubject, OnnxSubject, ServerSubject, TorchSubject
from hpml.pipelines.__main__ import main
from hpml.pipelines.bench import measurable
from hpml.pipelines.bench import session as bench
from hpml.pipelines.bench.measurable import Hints
from hpml.pipelines.bench.record import BenchRecord, analysed, figures_csv, read_again, read_record
from hpml.pipelines.bench.sample_file import SampleFile
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.run_record import RunRecord, StepRecord
from hpml.pipelines.engine.store import Store
from hpml.pipelines.terminal import bench_tables
from hpml.targets import Onnx
from tests.small_subjects import (
    MODEL_OF_THE_USER,
    inference_server,
    write_image_model,
    write_text_model,
)

QUICK = (
    *[
        "--rounds",
        "6",
        "--launches",
        "2",
        "--batch",
        "1,4",
        "--budget-s",
        "60",
        "--precision",
        "0.9",
        "--max-waited",
        "1e6",
        "--threads",  # else settings are tried, each in processes of its own
        "1",
    ],
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models of all sorts. Not to be changed."""
    place = tmp_path_factory.mktemp("models")
    write_image_model(place / "small.onnx")
    write_image_model(place / "renamed.onnx", name="input")
    write_image_model(place / "larger.onnx", size=64)
    write_image_model(place / "single.onnx", batch=1)
    write_image_model(place / "eight.onnx", batch=8)
    write_text_model(place / "text.onnx")
    (place / "their_model.py").write_text(MODEL_OF_THE_USER)
    (place / "notes.txt").write_text("")
    (place / "empty").mkdir()
    return place


@pytest.fixture
def hints(tmp_path: Path) -> Hints:
    return Hints(tmp_path / "runs")


@pytest.fixture(scope="module")
def measured(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a bench of a small and a much larger model, and of the user's own module."""
    place = tmp_path_factory.mktemp("bench")
    folder = place / "it"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(models)
        arguments = ["small.onnx", "larger.onnx", "their_model:small", "--input", "3x4x4"]
        main(["bench", *arguments, *QUICK, "--home", str(place / "runs"), "--out", str(folder)])
    return folder


FEW = "100 of 662 samples"


def short_of_samples(measured: Path) -> BenchRecord:
    """The record, as if its first engine had too few samples for p99."""
    record = read_record(measured)
    name, engine = next(iter(record.measurements.engines.items()))
    few = engine.model_copy(update={"latency_ms_p99": None, "unquoted": {"latency_ms_p99": FEW}})
    engines = {**record.measurements.engines, name: few}
    return record.model_copy(
        update={"measurements": record.measurements.model_copy(update={"engines": engines})}
    )


def tags_of(page: str) -> set[str]:
    """The elements that a browser would find in it."""
    found = set()
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, _: found.add(tag)  # type: ignore[method-assign]
    parser.feed(page)
    return found


# ------------------------------------------------------------------------------------ what an argument is


def test_what_an_argument_is(models: Path, hints: Hints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    file = measurable.measurable("small.onnx", hints)
    assert isinstance(file.subject, OnnxSubject) and file.subject.file == models / "small.onnx"
    given = Hints(hints.home, inputs=measurable.parse_inputs(["3x4x4"]))
    module = measurable.measurable("their_model:small", given)
    assert isinstance(module.subject, TorchSubject) and module.subject.import_paths == (models,)
    with inference_server() as server:
        by_url = measurable.measurable(f"{server.url}/v2/models/sum", hints)
        by_name = measurable.measurable(server.url, Hints(hints.home, model="sum"))
    assert isinstance(by_url.subject, ServerSubject) and by_url == by_name


def test_a_folder_with_a_bundle_is_a_bundle(models: Path, hints: Hints, tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "bundle.json").write_text("{}")
    with pytest.raises(HpmlError, match=r"bundle.json cannot be read"):
        measurable.measurable(str(tmp_path / "bundle"), hints)
    assert BundleSubject(folder=tmp_path).folder == tmp_path


@pytest.mark.parametrize(
    ("argument", "why"),
    [
        ("absent.onnx", "no such file or folder"),
        ("notes.txt", "not an .onnx file"),
        ("empty", "neither bundle.json nor manifest.json"),
        ("yesterday:int8/onnx", "there is no run 'yesterday'"),
        ("latest:int8/onnx", "there is no run 'latest'"),
        ("their_model:small", "nothing says what the module"),
        ("ftp://host/model", "http or https"),
        ("text.onnx", "size of 'seq' open"),
    ],
)
def test_what_cannot_be_measured_is_said(
    models: Path, hints: Hints, monkeypatch: pytest.MonkeyPatch, argument: str, why: str
) -> None:
    monkeypatch.chdir(models)
    with pytest.raises(HpmlError, match=re.escape(why)):
        measurable.measurable(argument, hints)


def test_an_artifact_that_is_no_engine_is_refused(digits_data: Any, hints: Hints) -> None:
    with pytest.raises(UsageError, match="it is a dataset"):
        measurable.measurable(str(digits_data.path), hints)


def test_the_same_again_has_a_name_of_its_own(models: Path, hints: Hints) -> None:
    file = str(models / "small.onnx")
    assert list(measurable.measurables([file, file, file], hints)) == [file, f"{file} (2)", f"{file} (3)"]


@pytest.fixture(scope="session")
def run_with_engines(
    digits_data: Any, small_model: Any, tmp_path_factory: pytest.TempPathFactory, run_stage_once: Any
) -> Path:
    """The workspace of a run that built fp32/onnx, did not get to int8/onnx, and measured nothing."""
    engine = run_stage_once(export.run, Onnx(), model=small_model, data=digits_data)
    home = tmp_path_factory.mktemp("workspace") / "runs"
    shutil.copytree(engine.path, Store(home).object_path(engine.digest))
    steps = {
        "export-onnx": StepRecord(stage="export", status="done", digest=engine.digest),
        "export-quantize-onnx": StepRecord(stage="export", status="failed"),
    }
    record = RunRecord(
        id="it", recipe="it", recipe_file="/there/it.yaml", status="failed", started_at_s=1.0, steps=steps
    )
    (home / "it").mkdir()
    run_record.save(home, record)
    (home / "it" / "recipe.yaml").write_text("data: digits\n")
    return home


def test_an_engine_of_a_run(run_with_engines: Path) -> None:
    found = measurable.measurable("it:fp32/onnx", Hints(run_with_engines))
    assert isinstance(found.subject, EngineSubject) and found.import_paths == ("/there",)
    assert found.signature.inputs[0].shape == (1, 8, 8) and found.known["precision"] == "fp32"
    same = measurable.measurable(str(found.subject.folder), Hints(run_with_engines))
    assert (same.subject, same.known) == (found.subject, found.known)


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ("it:int8/onnx", "export-quantize-onnx is failed"),
        ("it:fp32/eager", "export-eager is not part of the run"),
        ("it:fp64/onnx", "it has fp32/eager, fp32/onnx, int8/onnx"),
        ("it:", "did not choose an engine: its step select is not part of the run"),
    ],
)
def test_an_engine_that_a_run_does_not_have(run_with_engines: Path, engine: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        measurable.measurable(engine, Hints(run_with_engines))


def test_an_engine_of_a_run_in_kubeflow(run_with_engines: Path, tmp_path: Path) -> None:
    """Whose record knows that a step was done, and not what it made."""
    steps = {"export-onnx": StepRecord(stage="export", status="done")}
    record = run_record.load(run_with_engines, "it").model_copy(update={"steps": steps})
    (tmp_path / "it").mkdir()
    run_record.save(tmp_path, record)
    (tmp_path / "it" / "recipe.yaml").write_text("data: digits\n")
    with pytest.raises(UsageError, match="not here: it is in Kubeflow's store"):
        measurable.measurable("it:fp32/onnx", Hints(tmp_path))


def test_an_engine_of_a_run_takes_samples(run_with_engines: Path, tmp_path: Path) -> None:
    """It finds its images by the name that its subject has for them."""
    images = np.random.default_rng(0).standard_normal((9, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=images, y=np.zeros(9, np.int64))
    samples = SampleFile(tmp_path / "data.npz")
    found = measurable.measurables(["it:fp32/onnx"], Hints(run_with_engines, samples=samples))
    config = bench._config(found, bench.BenchOptions(batches=(1,)))
    bench._write_inputs(tmp_path / "inputs.npz", found, config, samples)
    with np.load(tmp_path / "inputs.npz") as arrays:
        [name] = found["it:fp32/onnx"].subject.arrays.values()
        assert (arrays[name] == images).all()


@pytest.mark.slow  # test_subjects finds them, too
def test_engines_of_runs_find_their_images_beside_an_onnx_file(
    run_with_engines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_image_model(tmp_path / "other.onnx")
    arguments = ["it:fp32/onnx", str(file), *QUICK, "--home", str(run_with_engines)]
    main(["bench", *arguments, "-o", "json", "--out", str(tmp_path / "out")])
    record = BenchRecord.model_validate_json(capsys.readouterr().out)
    assert list(record.measurements.engines) == ["it:fp32/onnx", str(file)]
    assert record.measurements.engines["it:fp32/onnx"].macs > 0


@pytest.mark.parametrize("given", ["seq", "seq=", "=3", "seq=0", "seq=-1", "seq=a"])
def test_sizes_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="is not valid"):
        measurable.parse_sizes([given])


def test_arguments_of_torch_modules(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(models / "their_model.py", tmp_path / "their_model_with_width.py")
    architecture = "their_model_with_width:wide"
    train = {"model": {"architecture": architecture, "arguments": {"width": 3}}}
    (tmp_path / "r.yaml").write_text(json.dumps({"data": "digits", "train": train}))
    hints = Hints(
        tmp_path,
        inputs=measurable.parse_inputs(["3x4x4"]),
        arguments=measurable.parse_arguments(["num_classes=7"]),
        recipe=Path("r.yaml"),
    )
    subject = measurable.measurable(architecture, hints).subject
    assert isinstance(subject, TorchSubject)
    assert subject.arguments == {"in_channels": 3, "width": 3, "num_classes": 7}
    monkeypatch.syspath_prepend(tmp_path)
    assert subject.open(threads=1).device == "cpu"
    with pytest.raises(StageFailed, match=r"'num_classes' -> .*--arg width=32"):
        subject.model_copy(update={"arguments": {"in_channels": 3}}).open(threads=1)
    with pytest.raises(UsageError, match=r"not the network of r.yaml: its network is their_model_with_width"):
        measurable.measurable("their_model:small", hints)


def test_a_recipe_alone_says_what_its_network_takes(tmp_path: Path, models: Path) -> None:
    """By its data; what the command line says goes before it."""
    shutil.copy(models / "their_model.py", tmp_path / "told_by_data.py")
    train = {"model": {"architecture": "told_by_data:wide", "arguments": {"width": 3}}}
    (tmp_path / "r.yaml").write_text(json.dumps({"data": "digits", "train": train}))
    hints = Hints(tmp_path, recipe=tmp_path / "r.yaml")

    def found(hints: Hints) -> tuple[Any, Any]:
        subject = measurable.measurable("told_by_data:wide", hints).subject
        assert isinstance(subject, TorchSubject)
        return subject.inputs[0].shape, subject.arguments

    assert found(hints) == ((1, 8, 8), {"in_channels": 1, "num_classes": 10, "width": 3})
    given = replace(hints, inputs=measurable.parse_inputs(["3x4x4"]), arguments={"num_classes": 7})
    assert found(given) == ((3, 4, 4), {"in_channels": 3, "num_classes": 7, "width": 3})
    absent = {"source": "npz", "path": "absent.npz"}
    (tmp_path / "r.yaml").write_text(json.dumps({"data": absent, "train": train}))
    with pytest.raises(ConfigInvalid, match=r"absent.npz.* -> .*--input 3x32x32 --arg num_classes=10$"):
        found(hints)
    assert found(given)[0] == (3, 4, 4)


@pytest.mark.parametrize("given", ["width", "=3", "a b=3", "width=[", "a=1e999", "a={1: 2}"])
def test_arguments_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="is not valid"):
        measurable.parse_arguments([given])


def test_inputs_that_do_not_fit_into_memory_are_refused(
    models: Path, hints: Hints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 10**6)
    found = measurable.measurables([str(models / "larger.onnx")], hints)
    with pytest.raises(ConfigInvalid, match=r"inputs take 0.00315 GB.*--batch 1"):
        bench._write_inputs(tmp_path / "inputs.npz", found, bench._config(found, bench.BenchOptions()))


@pytest.mark.parametrize("given", ["0", "1,", "a", "-1", "1;2"])
def test_batches_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="is not valid"):
        measurable.parse_batches(given)


# --------------------------------------------------------------------------------------- the config of it


def config(models: Path, hints: Hints, *names: str, **options: Any) -> Any:
    found = measurable.measurables([str(models / name) for name in names], hints)
    return bench._config(found, bench.BenchOptions(**options))


def test_a_fixed_batch_limits_what_is_measured(
    models: Path, hints: Hints, capsys: pytest.CaptureFixture[str]
) -> None:
    assert config(models, hints, "small.onnx").batch_sizes == (1, 8, 32)
    assert config(models, hints, "small.onnx", "single.onnx").batch_sizes == (1,)
    assert "takes one at a time" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ConfigInvalid, match=r"single.onnx takes batches of 1 only.*--batch 1"):
        config(models, hints, "single.onnx", batches=(1, 32))
    with pytest.raises(ConfigInvalid, match="takes batches of 1 only"):
        config(models, hints, "single.onnx", scenarios=("MultiStream",))
    with pytest.raises(ConfigInvalid, match="takes batches of 8 only"):
        config(models, hints, "eight.onnx")


def test_wishes_that_cannot_be_met_are_refused(models: Path, hints: Hints) -> None:
    for wish, why in (
        ({"scenarios": ("Offlien",)}, "scenarios"),
        ({"rounds": 1}, "rounds"),
        ({"threads": 1000}, "CPUs"),
        ({"reference": "other"}, "no engine 'other'"),
    ):
        with pytest.raises(HpmlError, match=why):
            config(models, hints, "small.onnx", **wish)


def test_a_server_is_no_disturbance(models: Path, hints: Hints) -> None:
    with inference_server() as server:
        found = measurable.measurables([f"{server.url}/v2/models/sum", str(models / "small.onnx")], hints)
    quiet = bench._config(found, bench.BenchOptions()).quiet
    alone = config(models, hints, "small.onnx").quiet
    assert quiet.max_waited == 1 > alone.max_waited and quiet.max_stolen == alone.max_stolen


def test_the_same_inputs_for_those_that_take_the_same(models: Path, hints: Hints, tmp_path: Path) -> None:
    names = ("small.onnx", "renamed.onnx", "larger.onnx")
    found = measurable.measurables([str(models / name) for name in names], hints)
    bench._write_inputs(tmp_path / "inputs.npz", found, bench._config(found, bench.BenchOptions()))
    with np.load(tmp_path / "inputs.npz") as arrays:
        assert sorted(arrays[name].shape for name in arrays.files) == [(64, 3, 4, 4), (64, 3, 64, 64)]


# -------------------------------------------------------------------------------------- a real measurement


def test_what_is_in_the_folder(measured: Path) -> None:
    assert {file.name for file in measured.iterdir()} == {
        "bench.json",
        "samples.npz",
        "bench.csv",
        "bench.html",
    }
    record = read_record(measured)
    engines = record.measurements.engines
    assert list(engines) == ["small.onnx", "larger.onnx", "their_model:small"]
    larger, small = engines["larger.onnx"], engines["small.onnx"]
    speedup = larger.speedup_vs_reference
    assert larger.latency_ms_p50 and small.latency_ms_p50 and speedup
    assert 0 < speedup.low <= speedup.value <= speedup.high < 1
    assert small.speedup_vs_reference and small.speedup_vs_reference.low == 1
    assert [item.batch for item in small.throughput] == [1, 4]
    assert larger.size_bytes > 12_288 * 5 * 4 and larger.parameters == 12_288 * 5
    assert small.resources and small.resources.peak_rss_bytes
    assert {"cpu", "cpu_flags", "cpu_governor", "memory_limit"} <= record.measurements.environment.keys()
    assert {"onnxruntime", "torch", "numpy"} <= record.libraries.keys()
    assert record.config.reference == "small.onnx"


def test_the_table_of_figures(measured: Path) -> None:
    with (measured / "bench.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    p50 = next(row for row in rows if row["engine"] == "small.onnx" and row["figure"] == "latency_ms_p50")
    quoted = read_record(measured).measurements.engines["small.onnx"].latency_ms_p50
    assert quoted and float(p50["value"]) == quoted.value and p50["unit"] == "ms"
    without_p99 = csv.DictReader(io.StringIO(figures_csv(short_of_samples(measured).measurements)))
    p99 = next(row for row in without_p99 if row["figure"] == "latency_ms_p99")
    assert (p99["value"], p99["reason"]) == ("", FEW)


def test_the_samples_give_the_same_figures_again(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = read_record(measured)
    shutil.copytree(measured, tmp_path / "copy")
    told = json.loads((tmp_path / "copy" / "bench.json").read_text())
    told["measurements"]["engines"] = {}
    (tmp_path / "copy" / "bench.json").write_text(json.dumps(told))
    assert read_again(tmp_path / "copy") == stored
    main(["bench", "--from", str(tmp_path / "copy"), "-o", "json"])
    assert BenchRecord.model_validate_json(capsys.readouterr().out) == stored


def test_the_tables_fit_80_columns(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "--from", str(measured)])
    of_command = capsys.readouterr().out
    bench_tables.show(short_of_samples(measured), measured, "table")
    for printed in (of_command, capsys.readouterr().out):
        tables, _, sentences = printed.rpartition("Second lines")
        assert max(len(line) for line in tables.splitlines()) <= 80
        assert " rounds" in sentences and "bench.html" in sentences
    assert "100 of 662" in " ".join(tables.split())


def test_the_page_is_self_contained(measured: Path) -> None:
    page = (measured / "bench.html").read_text()
    assert "script" not in tags_of(page) and not re.search(r"(src|href)=", page)
    assert FEW in bench.page(short_of_samples(measured)) and "their_model" in page.replace(
        "<wbr>", ""
    ).replace("<wbr />", "")


def test_names_from_outside_are_escaped_and_steer_nothing(
    measured: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = read_record(measured)
    name = "<script>alert(1)</script>\x1b[2J[bold]"
    hostile = record.model_copy(
        update={
            "subjects": {name: record.subjects["small.onnx"]},
            "config": record.config.model_copy(update={"reference": name}),
            "measurements": record.measurements.model_copy(update={"reference": name, "engines": {}}),
        }
    )
    rounds = read_samples(measured / "samples.npz", ["small.onnx"], (1, 4), ())
    renamed = [replace(one, latency_ms={name: one.latency_ms["small.onnx"]}) for one in rounds.all]
    hostile = analysed(hostile, Rounds(renamed))
    assert "script" not in tags_of(bench.page(hostile))
    bench_tables.show(hostile, measured, "table")
    printed = capsys.readouterr().out
    assert "\x1b[2J" not in printed and "[bold]" in printed.replace("\n", "")


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("no json", "is not the record of a bench"),
        ("other", "is not the record of a bench"),
        ("no samples", "cannot be read"),
        ("short", "lacks samples"),
        ("objects", "cannot be read"),
        ("not a number", "are not latencies"),
    ],
)
def test_a_folder_that_is_damaged_is_refused(measured: Path, tmp_path: Path, damage: str, why: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(measured, folder)
    with np.load(folder / "samples.npz") as file:
        arrays = dict(file)
    if damage == "no json":
        (folder / "bench.json").write_text("{")
    elif damage == "other":
        (folder / "bench.json").write_text('{"kind": "report"}')
    elif damage == "no samples":
        (folder / "samples.npz").unlink()
    elif damage == "short":
        del arrays["small.onnx@4"]
    elif damage == "objects":
        arrays["small.onnx@4"] = np.array([[print]], dtype=object)
    else:
        arrays["small.onnx@4"] = np.full_like(arrays["small.onnx@4"], np.nan)
    if damage in ("short", "objects", "not a number"):
        np.savez(folder / "samples.npz", **arrays)
    with pytest.raises(ConfigInvalid, match=why):
        read_again(folder)


@pytest.mark.slow  # test_subjects asks the same server
def test_a_server_beside_an_onnx_file(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with inference_server(extensions=("binary_tensor_data",)) as server:
        address = f"{server.url}/v2/models/sum"
        arguments = [address, str(models / "small.onnx"), *QUICK, "--home", str(tmp_path / "runs")]
        main(["bench", *arguments, "-o", "json", "--scenario", "SingleStream", "--price-per-hour", "0.4"])
    record = BenchRecord.model_validate_json(capsys.readouterr().out)
    remote, local = record.measurements.engines.values()
    assert remote.latency_ms_p50 and remote.scenarios[0].scenario == "SingleStream"
    assert remote.resources and local.resources and local.resources.peak_rss_bytes
    assert remote.resources.peak_rss_bytes is remote.resources.cold_start_ms is None
    assert "server" in remote.resources.energy_source and remote.resources.price_per_million
    assert any("includes the network" in note for note in record.notes)
    [folder] = (tmp_path / "runs" / "bench").iterdir()
    assert read_record(folder) == record


def test_an_incomplete_measurement_is_a_warning_and_with_strict_exit_code_5(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench.warn_incomplete("", strict=True)
    assert capsys.readouterr().err == ""
    bench.warn_incomplete("small.onnx: machine busy", strict=False)
    warning, fix = capsys.readouterr().err.splitlines()
    assert warning == "warning: the measurement is incomplete: small.onnx: machine busy"
    assert "--budget-s" in fix
    with pytest.raises(GateFailed, match=r"small\.onnx: machine busy"):
        bench.warn_incomplete("small.onnx: machine busy", strict=True)


@pytest.mark.parametrize(("option", "instead"), [("--allow-noise", "--strict"), ("--requests=9", "slice_ms")])
def test_an_option_that_does_nothing_any_more_is_taken_and_said(
    capsys: pytest.CaptureFixture[str], option: str, instead: str
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", option, "absent.onnx"])
    told, error = capsys.readouterr().err.splitlines()
    assert told.startswith(f"{option.partition('=')[0]} no longer does anything: ") and instead in told
    assert "absent.onnx" in error
    main(["bench", "engines", "--help"])
    assert option.partition("=")[0] not in capsys.readouterr().out


def test_what_a_busy_machine_leaves_is_written_and_told(models: Path, tmp_path: Path) -> None:
    """No slice can pass limits that nothing meets, so the budget ends first."""
    found = measurable.measurables([str(models / "small.onnx")], Hints(tmp_path / "runs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpml.measuring.machine.watch.Watch.disturbances_outside", lambda *_: ["a hog"])
        record, folder = bench.measure(
            tmp_path / "runs", found, bench.BenchOptions(batches=(1,), budget_s=1.0), command=(), folder=None
        )
    assert "not measured: latency at batch 1" in record.measurements.incomplete
    assert isinstance(read_record(folder).measurements, MeasurementsSpec)


def test_a_folder_that_is_there_already_is_not_written_over(models: Path, measured: Path) -> None:
    before = sorted(measured.iterdir())
    with pytest.raises(SystemExit) as ended:
        main(["bench", str(models / "small.onnx"), "--out", str(measured)])
    assert ended.value.code == 2 and sorted(measured.iterdir()) == before


def test_the_machine_is_a_subcommand_and_engines_are_the_default(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(["bench", "--help"])
    shown = capsys.readouterr().out
    assert "machine" in shown and "engines" in shown and "ENGINE..." in shown
    for arguments in (["absent.onnx"], ["--batch", "1", "absent.onnx"], ["engines", "absent.onnx"]):
        with pytest.raises(SystemExit) as ended:
            main(["bench", *arguments])
        assert ended.value.code == 2 and "absent.onnx" in capsys.readouterr().err
    main(["bench", "machine", "--help"])
    assert "--force" in capsys.readouterr().out


def test_exit_codes_of_servers(capsys: pytest.CaptureFixture[str]) -> None:
    with inference_server() as server:
        gone = f"{server.url}/v2/models/sum"
        with pytest.raises(SystemExit) as unknown:
            main(["bench", f"{server.url}/v2/models/other"])
    with pytest.raises(SystemExit) as refused:
        main(["bench", gone])
    assert unknown.value.code == refused.value.code == 6
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2 and "404" in lines[0] and "ConnectionRefusedError" in lines[1]
