"""The pictures. Each is drawn for a given width in pixels, once for a desktop and once for a phone."""

from hpml.components.report.charts.accuracy_against_latency import accuracy_against_latency
from hpml.components.report.charts.accuracy_by_class import accuracy_by_class
from hpml.components.report.charts.latency_distributions import latency_distributions
from hpml.components.report.charts.throughput_against_latency import throughput_against_latency
from hpml.components.report.charts.throughput_by_batch import throughput_by_batch
from hpml.components.report.charts.time_by_step import time_by_step
from hpml.components.report.charts.training_curves import training_curves

__all__ = [
    "accuracy_against_latency",
    "accuracy_by_class",
    "latency_distributions",
    "throughput_against_latency",
    "throughput_by_batch",
    "time_by_step",
    "training_curves",
]
