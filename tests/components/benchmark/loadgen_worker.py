"""The process of an engine to which MLPerf's loadgen (mlcommons-loadgen) can issue queries, too.

Latencies are read from loadgen's own trace, where they are counted from the scheduled moment.
python -m tests.components.benchmark.loadgen_worker FD PARENT_PID MEMORY_BYTES, as the product's own worker.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlperf_loadgen

from hpml.artifacts.measurements import ScenarioName
from hpml.core.errors import StageFailed
from hpml.measuring.process import worker
from hpml.measuring.scenarios.workload import Predict, settle

WORKER = "tests.components.benchmark.loadgen_worker"
_REQUESTS = 8  # distinct ones, which loadgen's queries take in turn
_SAMPLE_BEGINS = '{"name":"Sample","cat":"default","ph":"b"'


class Engine(worker.Engine):
    """An engine that can be asked for `loadgen` as well."""

    def loadgen(self, batch: int, **arguments: Any) -> dict[str, Any]:
        """Queries issued by loadgen; see `issue`."""
        requests = list(itertools.islice(self._inputs[batch], _REQUESTS))
        return issue(self._predict, requests, batch=batch, **arguments)


def issue(
    predict: Predict,
    requests: Sequence[Any],
    *,
    scenario: ScenarioName,
    queries: int,
    samples_per_query: int,
    batch: int,
    logs: Path | None = None,
) -> dict[str, Any]:
    """Let loadgen issue `queries` queries; a query is answered `batch` samples at a time, by one thread.

    requests: of `batch` samples each, used in turn whichever samples loadgen names. logs: where loadgen
    writes; a folder of its own that is removed if None.
    Answers `latency_ns`, one a query, and `seconds` from the first issue to the last answer. Raises what
    `predict` raises.
    """
    settle(predict, requests[0])
    with tempfile.TemporaryDirectory(prefix="loadgen-") as temporary:
        folder = logs or Path(temporary)
        settings = _settings(scenario, queries, samples_per_query)
        _run(_Answerer(predict, requests, batch), settings, samples_per_query * queries, folder)
        return _read_trace(folder / "mlperf_log_trace.json", queries)


def _settings(scenario: ScenarioName, queries: int, samples_per_query: int) -> Any:
    settings = mlperf_loadgen.TestSettings()
    settings.scenario = getattr(mlperf_loadgen.TestScenario, scenario)
    settings.mode = mlperf_loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms = 0
    # Of an offline query, loadgen counts the samples.
    settings.min_query_count = samples_per_query if scenario == "Offline" else queries
    settings.single_stream_expected_latency_ns = settings.multi_stream_expected_latency_ns = 1
    settings.multi_stream_samples_per_query = samples_per_query
    settings.offline_expected_qps = 1
    return settings


class _Answerer:
    """Answers loadgen's queries in the thread that issues them: in order, one after the other.

    An exception must not reach loadgen, which would end the process: it is kept, the rest left unanswered.
    """

    def __init__(self, predict: Predict, requests: Sequence[Any], batch: int) -> None:
        self.error: Exception | None = None
        self._predict, self._requests, self._batch = predict, itertools.cycle(requests), batch

    def __call__(self, query: list[Any]) -> None:
        """Predict as often as the samples of the query make batches, and tell loadgen."""
        for start in range(0, len(query), self._batch):
            if self.error is None:
                try:
                    self._predict(next(self._requests))
                except Exception as error:
                    self.error = error
            done = query[start : start + self._batch]
            mlperf_loadgen.QuerySamplesComplete(
                [mlperf_loadgen.QuerySampleResponse(sample.id, 0, 0) for sample in done]
            )


def _run(answerer: _Answerer, settings: Any, samples: int, folder: Path) -> None:
    """Raises what predicting raised."""
    output = mlperf_loadgen.LogOutputSettings()
    output.outdir = str(folder)
    logging = mlperf_loadgen.LogSettings()
    logging.log_output = output
    logging.enable_trace = True
    under_test = mlperf_loadgen.ConstructSUT(answerer, lambda: None)
    library = mlperf_loadgen.ConstructQSL(samples, samples, lambda _: None, lambda _: None)
    try:
        mlperf_loadgen.StartTestWithLogSettings(under_test, library, settings, logging, "")
    finally:
        mlperf_loadgen.DestroyQSL(library)
        mlperf_loadgen.DestroySUT(under_test)
    if answerer.error is not None:
        raise answerer.error


def _read_trace(file: Path, queries: int) -> dict[str, Any]:
    """A query is answered when its last sample is. The file as a whole is not valid JSON, its lines are.

    Raises StageFailed if loadgen's trace is not of so many queries.
    """
    latency_ns: dict[int, int] = {}
    first_us, last_us = math.inf, -math.inf
    for line in file.read_text().splitlines():
        if not line.startswith(_SAMPLE_BEGINS):
            continue
        sample = json.loads(line.rstrip(","))
        query, took_ns = sample["args"]["query_seq"], sample["args"]["complete_ns"]
        latency_ns[query] = max(took_ns, latency_ns.get(query, 0))
        first_us, last_us = min(first_us, sample["ts"]), max(last_us, sample["ts"] + took_ns / 1e3)
    if len(latency_ns) != queries:
        raise StageFailed(f"loadgen traced {len(latency_ns)} queries instead of {queries}")
    in_order = [latency_ns[query] for query in sorted(latency_ns)]
    return {"latency_ns": in_order, "seconds": (last_us - first_us) / 1e6}


if __name__ == "__main__":
    worker.main(Engine())
