"""Asking a module in a process of its own: a user's network is a user's code, and building it needs torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from hpml.core.errors import StageFailed


def ask(module: str, question: dict[str, Any], import_paths: tuple[str, ...], *, timeout_s: float) -> Any:
    """What `python -m module` answers to `question` on stdin: the last line that it prints; both are JSON.

    Raises StageFailed that says how it ended, if it does not answer.
    """
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-m", module],
            input=json.dumps(question),
            env={**os.environ, "HPML_IMPORT_PATHS": os.pathsep.join(import_paths)},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise StageFailed(f"did not end in {timeout_s:g} s") from None
    try:
        return json.loads(answer.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = answer.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise StageFailed(f"ended its process ({answer.returncode}): {last[0]}") from None
