"""What the stage select needs."""

from hpml.core.needs import Needs
from hpml.measuring.goals import Goals

NEEDS = Needs(settable=tuple(Goals.model_fields))
