"""What the stage export needs."""

from hpml.core.needs import Needs

NEEDS = Needs(preload=("torch",), hardware_bound=True, memory="2Gi")
