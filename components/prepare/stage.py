"""Make the dataset that all stages read: loaded, checked, split and written as its task has it."""

from __future__ import annotations

from hpml.artifacts.dataset import DatasetSpec
from hpml.core.contract import Output, Result
from hpml.tasks import AnySource


def run(config: AnySource, *, out: Output) -> Result[DatasetSpec]:
    """Write the arrays of every split. Raises what the `prepare` of the source does."""
    return config.prepare(out)
