"""What the stage bundle needs."""

from hpml.core.needs import Needs

NEEDS = Needs(deliver="bundle")
