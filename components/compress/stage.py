"""Make a trained network smaller by one method, and say what it cost."""

from __future__ import annotations

from components.artifacts import Artifact, DatasetSpec, ModelSpec
from components.compress import AnyMethod
from components.contract import Output, Result


def run(
    config: AnyMethod,
    *,
    model: Artifact[ModelSpec],
    teacher: Artifact[ModelSpec],
    data: Artifact[DatasetSpec],
    out: Output,
) -> Result[ModelSpec]:
    """Apply one method to `model`."""
    raise NotImplementedError
