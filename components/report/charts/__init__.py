"""The pictures. Each is drawn for a given width in pixels, once for a desktop and once for a phone."""

from hpml.components.report.charts.latency_distributions import latency_distributions
from hpml.components.report.charts.quality import quality_against_latency, share_by_class
from hpml.components.report.charts.steps import time_by_step, training_curves
from hpml.components.report.charts.throughput import throughput_against_latency, throughput_by_batch

__all__ = [
    "latency_distributions",
    "quality_against_latency",
    "share_by_class",
    "throughput_against_latency",
    "throughput_by_batch",
    "time_by_step",
    "training_curves",
]
