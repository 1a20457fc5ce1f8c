"""What the stage prepare needs."""

from hpml.core.needs import Needs

NEEDS = Needs(settable=("path", "url", "sha256"), settable_prefix="data_")
