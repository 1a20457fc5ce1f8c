"""What Prometheus is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from hpml.tasks.drift.live import Drift

from hpml.core import hardware

_LATENCIES_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class _DriftMetrics(Collector):
    """Computed when they are asked for; none where the model has no reference."""

    of: Drift | None = None

    def collect(self) -> Iterator[Metric]:
        if self.of is None:
            return
        psi = GaugeMetricFamily(
            "hpml_drift_psi", "Population stability index against the validation split.", labels=["of"]
        )
        for name, value in self.of.indices().items():
            psi.add_metric([name], value)
        yield psi
        yield GaugeMetricFamily("hpml_drift_rows", "Rows that it is of, by their weights.", self.of.rows)
        yield CounterMetricFamily(
            "hpml_drift_failures", "Requests that could not be counted.", self.of.failures
        )


class Metrics:
    """Of one server; two in a process do not share them."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._drift = _DriftMetrics()
        self._registry.register(self._drift)
        self._requests = Counter(
            "hpml_requests",
            "Answered requests by path and HTTP status, of gRPC by method and code.",
            ("path", "status"),
            registry=self._registry,
        )
        self._latency_s = Histogram(
            "hpml_request_seconds",
            "From a request's headers to the end of its answer.",
            ("path",),
            buckets=_LATENCIES_S,
            registry=self._registry,
        )
        self._batch_rows = Histogram(
            "hpml_batch_rows", "Rows of a run of the engine.", buckets=_ROWS, registry=self._registry
        )
        self._run_s = Histogram(
            "hpml_engine_seconds", "A run of the engine.", buckets=_LATENCIES_S, registry=self._registry
        )
        self._waited_s = Histogram(
            "hpml_queue_seconds",
            "How long the oldest request of a run had waited.",
            buckets=_LATENCIES_S,
            registry=self._registry,
        )
        self.rows_waiting = Gauge(
            "hpml_queue_rows", "Rows that wait for the engine.", registry=self._registry
        )
        self.pending_bytes = Gauge(
            "hpml_pending_bytes",
            "Bodies and messages that are in memory.",
            registry=self._registry,
        )
        self._model = Gauge(
            "hpml_model",
            "1 for the model that answers.",
            ("name", "version", "digest"),
            registry=self._registry,
        )
        hardware_gauge = Gauge(
            "hpml_hardware", "1 for the CPU that this server runs on.", ("cpu",), registry=self._registry
        )
        hardware_gauge.labels(hardware.identity()["cpu"]).set(1)
        self.failed_swaps = Counter(
            "hpml_failed_swaps",
            "Models that did not take the place of the one before.",
            registry=self._registry,
        )

        self.failed_secrets = Counter(
            "hpml_failed_secrets",
            "Changed files of the token or of TLS that did not take the place of those before.",
            registry=self._registry,
        )

    def answered(self, path: str, status: int | str, seconds: float) -> None:
        """A request has its answer. path: a route or method of ours, not what a client made up."""
        self._requests.labels(path, str(status)).inc()
        self._latency_s.labels(path).observe(seconds)

    def ran(self, *, rows: int, waited_s: float, seconds: float) -> None:
        """The engine ran once."""
        self._batch_rows.observe(rows)
        self._waited_s.observe(waited_s)
        self._run_s.observe(seconds)

    def serves(self, name: str, version: str, digest: str, drift: Drift | None = None) -> None:
        """This model answers from now on."""
        self._drift.of = drift
        self._model.clear()
        self._model.labels(name, version, digest).set(1)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)
