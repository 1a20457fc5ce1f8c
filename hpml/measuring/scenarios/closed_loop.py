"""A closed loop: clients in threads of the engine's process, each asks again when it has its answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpml.artifacts.measurements import ConcurrencyFigures
from hpml.measuring.config import BenchmarkConfig
from hpml.measuring.scenarios.base import ROUNDS, Load, Session, WorkerRequest, in_rounds
from hpml.measuring.statistics import quantile, rate, samples_needed

_ROUND_S = 0.05  # about how long a round of one engine takes
_REQUESTS_PER_CLIENT = 10  # at least, so that the end, where not all clients are at work, weighs little
_P99 = 0.99


@dataclass(frozen=True)
class ClosedLoop(Load[ConcurrencyFigures]):
    """So many clients."""

    clients: int

    def measure(self, session: Session) -> dict[str, ConcurrencyFigures]:
        """Requests per second and latencies of every engine."""
        asked = {}
        for name in session.bench.names:
            requests = _requests(session, name, self.clients)
            arguments = {"clients": self.clients, "requests": requests}
            asked[name] = WorkerRequest("closed_loop", arguments, self.clients)
        figures = {}
        for name, replies in in_rounds(session.bench, asked, f"answering {self.clients} clients").items():
            latency_ms = np.asarray([reply["latency_ns"] for reply in replies]) / 1e6
            enough = latency_ms.size >= samples_needed(_P99)
            figures[name] = ConcurrencyFigures(
                clients=self.clients,
                requests_per_s=rate(
                    latency_ms.shape[1], np.asarray([[reply["seconds"]] for reply in replies])
                ),
                latency_ms_p50=quantile(latency_ms, 0.5),
                latency_ms_p99=quantile(latency_ms, _P99) if enough else None,
                unquoted="" if enough else f"{latency_ms.size} of {samples_needed(_P99)} samples",
            )
        return figures

    def unmeasured(self, config: BenchmarkConfig, reason: str) -> ConcurrencyFigures:
        """Figures without a value, and why."""
        return ConcurrencyFigures(clients=self.clients, reason=reason)


def _requests(session: Session, name: str, clients: int) -> int:
    """In a round: what fits into its time, no more than p99 needs, some of each client."""
    in_time = math.ceil(1e3 * _ROUND_S / session.latency_ms[name][1])
    return max(min(in_time, math.ceil(samples_needed(_P99) / ROUNDS)), _REQUESTS_PER_CLIENT * clients)
