"""Energy of a request, where the machine has a counter for it; never an estimate."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from hpml.measuring.bench import Bench, Unmeasured
from hpml.measuring.machine import gpu

RAPL = Path("/sys/class/powercap")
_SLICES = 5
_SLICE_S = 0.5  # the counters move in steps of a millisecond (RAPL) to some tens of them (NVML)

Counter = Callable[[], float]  # millijoules


def measure_energy(bench: Bench) -> None:
    """Take note of the energy of requests at batch 1 of each engine: what the whole package or GPU used."""
    counters = {name: _counter(launches.device) for name, launches in bench.launches.items()}
    with bench.launched() if any(counter for counter, _ in counters.values()) else nullcontext():
        for name, (counter, source) in counters.items():
            launches = bench.launches[name]
            launches.energy_source = source if counter else f"not measured: {source}"
            launches.energy_mj_per_request = _of_engine(bench, name, counter) if counter else []


def _counter(device: str) -> tuple[Counter | None, str]:
    """The counter that sees an engine on `device`, and its name; or None, and why there is none."""
    if device == "remote":
        return None, "the server is another process"
    return gpu_counter() if device == "cuda" else rapl_counter(RAPL)


def _of_engine(bench: Bench, name: str, counter: Counter) -> list[float]:
    """Millijoules a request, one value a slice."""
    values: list[float] = []
    for _ in range(_SLICES):
        dropped, begun_mj = bench.watch.dropped, counter()
        try:
            reply = bench.run_until_undisturbed(
                name, "run_for", "having its energy counted", batch=1, seconds=_SLICE_S
            )
        except Unmeasured:
            break
        used_mj = counter() - begun_mj
        # A slice that had to be repeated holds the energy of both, a counter that ran over tells nothing.
        if bench.watch.dropped == dropped and used_mj > 0:
            values.append(used_mj / reply["requests"])
    return values


def gpu_counter() -> tuple[Counter | None, str]:
    """NVML's counter, or why there is none."""
    if gpu.energy_mj() is None:
        return None, "NVML has no energy counter here (it needs Volta or newer)"
    return lambda: gpu.energy_mj() or 0.0, "NVML, all GPUs"


def rapl_counter(folder: Path) -> tuple[Counter | None, str]:
    """The counter of all CPU packages in `folder` (Linux powercap), or why there is none."""
    zones = [
        zone / "energy_uj"
        for zone in sorted(folder.glob("intel-rapl:*"))
        if (zone / "name").is_file() and (zone / "name").read_text().startswith("package")
    ]
    if not zones:
        return None, "this machine has no energy counter (RAPL) that can be seen"
    try:
        for zone in zones:
            zone.read_text()
    except PermissionError:
        return None, "only root may read this machine's energy counter (RAPL)"
    return lambda: sum(int(zone.read_text()) for zone in zones) / 1e3, "RAPL, all CPU packages"
