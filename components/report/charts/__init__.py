"""The pictures. Each is drawn for a given width in pixels, once for a desktop and once for a phone."""

from hpml.components.report.charts.accuracy import accuracy_against_latency, accuracy_by_class
from hpml.components.report.charts.latency_distributions import latency_distributions
from hpml.components.report.charts.steps import time_by_step, training_curves
from hpml.components.report.charts.throughput import throughput_against_latency, throughput_by_batch

__all__ = [
    "accuracy_against_latency",
    "accuracy_by_class",
    "latency_distributions",
    "throughput_against_latency",
    "throughput_by_batch",
    "time_by_step",
    "training_curves",
]
