"""What the stage report needs."""

from hpml.core.needs import Needs
from hpml.measuring.goals import Goals

NEEDS = Needs(deliver="report", only_shows=True, settable=tuple(Goals.model_fields))
