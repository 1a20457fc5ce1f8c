"""Releases, and bundles that are sealed as the stage `bundle` seals them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpml.artifacts.bundle import BundleSpec
from hpml.artifacts.folder import Lineage, seal_artifact
from hpml.artifacts.interval import Interval
from hpml.pipelines.delivery.release import Release
from hpml.serving.rollout.figures import Latencies, SmokeFigures
from tests.serving.small_bundles import write_bundle


def release(name: str) -> Release:
    """A release whose digest begins with `name`."""
    return Release(
        digest=name.ljust(64, "0"),
        uri=f"s3://hpml/{name}",
        model_name="small",
        model_version=name,
        engine_digest=name,
    )


def sealed_bundle(folder: Path, **facts: Any) -> Path:
    """A bundle of a small model with its manifest; see `write_bundle`."""
    return with_manifest(write_bundle(folder, **facts))


def with_manifest(folder: Path) -> Path:
    """The bundle in `folder`, as an artifact."""
    spec = BundleSpec(
        model_name="small",
        engine_name="fp32/onnx",
        engine_digest="digest",
        file="engine/model.onnx",
        verified=(),
    )
    lineage = Lineage(
        stage="bundle",
        code_digest="",
        config={},
        parents={},
        libraries={},
        started_at_s=0,
        seconds=0,
        peak_rss_bytes=0,
    )
    seal_artifact(folder, spec=spec, metrics={}, lineage=lineage)
    return folder


def latencies(p50: float, p99: float) -> Latencies:
    """Of a hundred requests."""
    return Latencies(requests=100, latency_ms_p50=p50, latency_ms_p99=p99)


def about(value: float) -> Interval:
    """An interval of a tenth to both sides."""
    return Interval(value=value, low=0.9 * value, high=1.1 * value)


def seen(of: Release, **others: Any) -> SmokeFigures:
    """A canary as fast as the stable server, unless `others` say otherwise."""
    told: dict[str, Any] = {
        "answers_through": 3,
        "canary": latencies(1, 2),
        "stable": latencies(1, 2),
        "p50_ratio": about(1.0),
        "engine_ms_mean": 0.1,
        "hardware": "a CPU",
    }
    return SmokeFigures(release=of.digest, **{**told, **others})
