"""How far the CPUs of this machine are from each other, now and over some time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from hpml.artifacts.core_state import CoreDistances, CoreState
from hpml.measuring.machine.core_latency_probe import CoreLatencyProbe

MOST_CPUS = 16  # in the matrix, a line of which fits into 80 columns
_PAUSE_S = 0.05  # between two probes, for whoever else is here


def watch(seconds: float, progress: Callable[[float], None] = lambda _: None) -> CoreDistances:
    """Probe the CPUs that this process may use: each pair of them once, then a sample for `seconds`.

    progress: told the seconds that have passed.
    """
    usable = sorted(os.sched_getaffinity(0))
    cpus = usable[:: -(-len(usable) // MOST_CPUS)]
    if len(cpus) == 1:
        return CoreDistances(cpus=tuple(cpus), usable_cpus=1)
    with CoreLatencyProbe(cpus) as distance:
        matrix = tuple(
            tuple(distance.between(one, other) for other in cpus[:at]) for at, one in enumerate(cpus)
        )
        begun_s = time.monotonic()
        seen_ns: list[float] = []
        while not seen_ns or time.monotonic() - begun_s < seconds:
            seen_ns.append(distance.round_trip_ns() or 0.0)
            progress(time.monotonic() - begun_s)
            time.sleep(_PAUSE_S)
    states, changes = _states(seen_ns, seconds)
    return CoreDistances(
        cpus=tuple(cpus),
        usable_cpus=len(usable),
        round_trips_ns=matrix,
        states=states,
        changes=changes,
        seconds=seconds,
    )


def _states(probes_ns: Sequence[float], seconds: float) -> tuple[tuple[CoreState, ...], int]:
    """The states of probes at even distances over `seconds`, and how often one followed upon another."""
    import numpy as np  # not in the client's image

    from hpml.measuring.machine.state_clusters import find_states

    seen_ns = np.array(probes_ns)
    found = find_states(seen_ns)
    at = found.of(seen_ns)
    states = found.described([float((at == index).mean()) * seconds for index in range(len(found.names))])
    return states, int(np.count_nonzero(np.diff(at)))
