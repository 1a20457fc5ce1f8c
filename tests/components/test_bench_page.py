"""The page of a bench: states, settings, latency over time, and what is not measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpml.artifacts.measurements import MeasurementsSpec
from hpml.pipelines.command_pages.bench import bench_page
from hpml.reporting.format import sentence
from hpml.reporting.over_time import latency_over_time, over_time_picture, read_over_time
from tests import measured_specs
from tests.html_elements import compact

FACTS = {"command": "hpml bench a.onnx b.onnx"}


def body(measured: MeasurementsSpec, samples: dict[str, Any]) -> str:
    over_time = latency_over_time(samples, measured.engines)
    page = bench_page(measured, facts=FACTS, notes=(), outputs={}, over_time=over_time)
    return compact(page.partition("<body>")[2])


def text(html: str) -> str:
    return re.sub(r"<[^>]*>", "", html)


def test_states_settings_and_undisturbed_slices() -> None:
    shown = text(body(measured_specs.two_states(), measured_specs.samples()))
    assert "2,000 of 2,300 slices were undisturbed" in shown
    assert "int8/onnx2 threads, spinning" in shown and "near 0.124far 0.219" in shown
    assert "p50 and speed are over the mixture seen: 35 % near, 65 % far" in shown
    assert "int8/onnx: cores near, 35 %: 9.44×; cores far, 65 %: 9.22×" in shown  # noqa: RUF001
    assert "mixture" not in text(body(measured_specs.one_state(), measured_specs.samples()))


def test_what_is_not_measured_comes_with_the_reason_and_the_command() -> None:
    shown = text(body(measured_specs.too_busy(), {}))
    assert f"Not all is measured. Latency: {measured_specs.BUSY}." in shown
    assert "hpml bench a.onnx b.onnx measures again" in shown
    assert f"not measured: {measured_specs.BUSY}" in shown
    assert "over the time of the run" not in shown


def test_a_bench_that_a_version_before_refused_has_its_page() -> None:
    refused = MeasurementsSpec.model_validate(
        measured_specs.spec({}, best_fp32="").model_dump(exclude={"incomplete"}) | {"invalid": "a hog"}
    )
    shown = text(body(refused, {}))
    assert "There are no figures" in shown and "A hog." in shown


@pytest.mark.parametrize("width", [952.0, 350.0])
def test_every_dot_of_the_picture_is_inside_it(width: float) -> None:
    measured = measured_specs.two_states()
    samples = measured_specs.samples(rounds=60)
    samples["fp32/onnx@1"][7] = 50.0  # a round that something slowed
    over_time = latency_over_time(samples, measured.engines)
    assert over_time
    classes = dict.fromkeys(measured.engines, "k3")
    picture = over_time_picture(over_time, measured.states, classes, width)
    assert picture is not None
    dots = [path.get("d", "") for path in picture.iter("path")]
    spots = [(float(x), float(y)) for d in dots for x, y in re.findall(r"M([\d.]+) ([\d.]+)h0", d)]
    known = sum(int(np.isfinite(p50_ms).sum()) for p50_ms in over_time.p50_ms.values())
    assert len(spots) == known  # a round without a figure of an engine has no dot
    height = float(picture.get("height", "0"))
    assert all(0 < x < width and 0 < y < height for x, y in spots)


def test_one_state_is_drawn_in_the_colours_of_the_engines() -> None:
    measured = measured_specs.one_state()
    over_time = latency_over_time(measured_specs.samples(), measured.engines)
    assert over_time
    picture = over_time_picture(
        over_time, (), {name: f"k{at}" for at, name in enumerate(measured.engines)}, 952
    )
    assert picture is not None
    assert {path.get("class") for path in picture.iter("path")} == {f"dots k{at}" for at in range(4)}


def test_the_samples_of_a_folder_say_when(tmp_path: Path) -> None:
    samples = measured_specs.samples(rounds=10)
    np.savez(tmp_path / "samples.npz", **samples)
    found = read_over_time(tmp_path / "samples.npz", ["int8/onnx", "not measured/onnx"])
    assert found and list(found.p50_ms) == ["int8/onnx"] and found.at_s.tolist() == samples["at_s@1"].tolist()
    np.savez(tmp_path / "before.npz", **{"int8/onnx@1": samples["int8/onnx@1"]})
    assert read_over_time(tmp_path / "before.npz", ["int8/onnx"]) is None


def test_pauses_are_cut_out_of_the_time() -> None:
    shown = body(measured_specs.two_states(), measured_specs.samples(pause_s=86_400))
    assert "Dashed: measuring had stopped" in shown and "time of measuring, s" in shown
    assert "Dashed: measuring" not in body(measured_specs.two_states(), measured_specs.samples())


def test_names_of_engines_do_not_get_a_capital() -> None:
    assert sentence("fp32/onnx is slow") == "fp32/onnx is slow."
    assert sentence("latency p50 0.2 ms.") == "Latency p50 0.2 ms."
    assert sentence("p50 of it") == "p50 of it."
