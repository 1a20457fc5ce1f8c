"""The page of `hpml bench machine`."""

from __future__ import annotations

from hpml.artifacts.core_state import CoreDistances
from hpml.artifacts.peaks import PeaksSpec
from hpml.reporting import rendering


def machine_page(spec: PeaksSpec, cores: CoreDistances) -> str:
    """The whole HTML document: the peaks, the distance between the CPUs, and the machine they are of."""
    template, title = "pipelines/command_pages/templates/machine.html", "The peaks of this machine"
    return rendering.render(template, title=title, spec=spec, cores=cores)
