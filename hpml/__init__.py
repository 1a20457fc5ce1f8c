"""What stages share; `components` and `pipelines` are links, so that all is imported by one name."""

import os
import sys

# Nothing phones home. These libraries report usage by default and read their switch when they are imported,
# so the switch is thrown here: no module of ours can be imported before its package.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["NNCF_DISABLE_TELEMETRY"] = "1"
os.environ["DO_NOT_TRACK"] = "1"

# Folders of the user's own modules, for every process of a run. Last: a user's `select.py` hides nothing.
sys.path += [path for path in os.environ.get("HPML_IMPORT_PATHS", "").split(os.pathsep) if path]
