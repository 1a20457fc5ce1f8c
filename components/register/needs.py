"""What the stage register needs."""

from hpml.core.needs import Needs

NEEDS = Needs(registry=True)
