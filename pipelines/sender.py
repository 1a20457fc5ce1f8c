"""Sends a run's tracking events beside its executor, and ends when that ends, however it does.

python -m pipelines.sender EXECUTOR_PID OUTBOX TRACKING_URI [EARLIER_OUTBOX ...]
"""

from __future__ import annotations

import signal
import sys

from components import tracking
from components.errors import explained
from components.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    with explained():
        tracking.main(sys.argv[2:])
