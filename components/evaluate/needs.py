"""What the stage evaluate needs."""

from hpml.core.needs import Needs
from hpml.measuring.goals import Goals

NEEDS = Needs(preload=("torch",), hardware_bound=True, memory="2Gi", settable=tuple(Goals.model_fields))
