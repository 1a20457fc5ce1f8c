"""The section of the scenarios: every figure, every reason, and what it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import ConcurrencyFigures, EngineFigures, ScenarioFigures
from hpml.components.report.content import Content, gather
from hpml.components.report.page import parts_of
from hpml.measuring.goals import Goals


def about(value: float) -> Interval:
    return Interval(value=value, low=0.97 * value, high=1.04 * value)


def _with_scenarios(engine: EngineFigures) -> EngineFigures:
    ms = engine.latency_ms_p50.value
    slow = ms > 1
    figures = (
        ScenarioFigures(
            scenario="SingleStream",
            metric="latency_ms_p90",
            value=about(1.1 * ms),
            queries=210,
            early_stopping_ms=1.23 * ms,
        ),
        ScenarioFigures(
            scenario="MultiStream",
            metric="latency_ms_p99",
            samples_per_query=8,
            value=None if slow else about(6 * ms),
            reason="not enough samples: 529 of 662 in 10 s" if slow else "",
            early_stopping_ms=None if slow else 6.6 * ms,
        ),
        ScenarioFigures(
            scenario="Offline", metric="samples_per_s", value=about(1900 / ms), queries=7, batch=32
        ),
        ScenarioFigures(
            scenario="Server",
            metric="queries_per_s",
            latency_bound_ms=15.0,
            value=None if slow else Interval(value=830 / ms, low=830 / ms, high=910 / ms),
            reason="one query alone takes 61.4 ms, p99 has to be within 15 ms" if slow else "",
        ),
    )
    loops = tuple(
        ConcurrencyFigures(
            clients=clients,
            requests_per_s=about(1000 / ms * clients**0.3),
            latency_ms_p50=about(ms * clients**0.7),
            latency_ms_p99=None if slow else about(1.4 * ms * clients**0.7),
            unquoted="350 of 662 samples" if slow else "",
        )
        for clients in (1, 2, 4)
    )
    return engine.model_copy(update={"scenarios": figures, "concurrency": loops})


@pytest.fixture
def content(make_run: Callable[..., Any]) -> Content:
    bare = gather(Goals(), **make_run().inputs)
    engines = {
        name: _with_scenarios(engine) if engine.status == "measured" else engine
        for name, engine in bare.measurements.engines.items()
    }
    return _of(bare, engines)


def _of(content: Content, engines: dict[str, EngineFigures]) -> Content:
    measurements = content.measurements.model_copy(update={"engines": engines})
    return Content(**{**vars(content), "measurements": measurements})


def _text(content: Content) -> str:
    section = str(parts_of(content).scenarios())
    assert "<section>" in section
    return section


def test_every_figure_and_every_reason_is_shown(content: Content) -> None:
    text = _text(content)
    for engine in content.measurements.engines.values():
        for figure in engine.scenarios:
            shown = figure.reason if figure.value is None else f"{figure.value.value:,.4g}"[:3]
            assert shown in text
    for expected in ("batches of 32", "at 99 %", "p99 350 of 662 samples", "within 15 ms", "4 clients"):
        assert expected in text
    assert "not an MLPerf result" in text
    assert "loadgen" not in text
    assert text.count("<svg") == 4  # two pictures, each for a desktop and for a phone


def test_who_issued_the_queries_is_said(content: Content) -> None:
    engines = {
        name: engine.model_copy(
            update={
                "scenarios": tuple(
                    figure.model_copy(update={"backend": "loadgen"}) for figure in engine.scenarios
                )
            }
        )
        for name, engine in content.measurements.engines.items()
    }
    assert "issued by MLPerf's loadgen" in _text(_of(content, engines))


def test_without_measurements_there_is_no_section(content: Content) -> None:
    engines = {
        name: engine.model_copy(update={"scenarios": (), "concurrency": (), "throughput": ()})
        for name, engine in content.measurements.engines.items()
    }
    assert not parts_of(_of(content, engines)).scenarios().strip()


def test_a_loop_that_was_disturbed_is_a_reason_and_no_point(content: Content) -> None:
    loops = (ConcurrencyFigures(clients=2, reason="disturbed: a hog"),)
    engines = {
        name: engine.model_copy(update={"scenarios": (), "concurrency": loops, "throughput": ()})
        for name, engine in content.measurements.engines.items()
    }
    text = _text(_of(content, engines))
    assert "disturbed: a hog" in text
    assert "<svg" not in text
