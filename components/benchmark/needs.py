"""What the stage benchmark needs."""

from hpml.core.needs import Needs

NEEDS = Needs(
    cpus=None,
    exclusive=True,
    gates=frozenset({"require_quiet"}),
    hardware_bound=True,
    memory="2Gi",
    checkpoints=True,
)
