"""The stages of the pipeline, and the hallway between them. What runs inside a container is here."""

import os

# Nothing phones home. These libraries report usage by default and read their switch when they are imported,
# so the switch is thrown here: no module of ours can be imported before its package.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["NNCF_DISABLE_TELEMETRY"] = "1"
os.environ["DO_NOT_TRACK"] = "1"
# Spinning OpenMP threads collapse a shared machine; it is read when the first OpenMP runtime loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
