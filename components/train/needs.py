"""What the stage train needs."""

from hpml.core.needs import Needs

NEEDS = Needs(
    cpus=None,
    preload=("torch",),
    numerics_depend_on_threads=True,
    memory="2Gi",
    checkpoints=True,
    settable=("epochs",),
)
