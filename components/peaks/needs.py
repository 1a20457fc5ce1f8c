"""What the stage peaks needs."""

from hpml.core.needs import Needs

NEEDS = Needs(
    cpus=None, exclusive=True, preload=("torch",), hardware_bound=True, memory="2Gi", only_shows=True
)
