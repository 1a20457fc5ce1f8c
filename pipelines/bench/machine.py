"""`hpml bench machine`: the peaks of this machine, and how far its CPUs are from each other.

The peaks come from the very step that a recipe's run has for them, through the same executor and store, so
whichever comes second finds them there. The distance between the CPUs changes with where the host puts them:
it is watched each time, and kept in the folder of the run.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from hpml.artifacts.core_state import CoreDistances
from hpml.artifacts.folder import Artifact
from hpml.artifacts.peaks import PeaksSpec
from hpml.components.peaks import stage as peaks
from hpml.components.peaks.config import PeaksConfig
from hpml.core.atomic_files import write_text_atomic
from hpml.pipelines.bench import core_distances
from hpml.pipelines.command_pages.machine import machine_page
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.execution import Execution, Settings
from hpml.pipelines.engine.run_record import RunRecord, StepRecord
from hpml.pipelines.engine.store import Store
from hpml.pipelines.executors.base import Watcher
from hpml.pipelines.executors.process import Processes
from hpml.pipelines.plan import Plan, Step, trace
from hpml.pipelines.terminal import console
from hpml.reporting.core_distances import in_words, state_rows
from hpml.reporting.format import bounds, plain
from hpml.reporting.peaks import Peak, bandwidth_peaks, gemm_peaks

_NAME = "machine"
_CORES = "cores.json"  # in the folder of the run
WATCHED_S = 30.0
_NOT_STABLE = "not stable"  # how the reason of such a point begins
_MEANING = (
    "A layer that moves B bytes in F operations takes at least about the longer of",
    "B / (GB/s of the level that holds them) and F / (Gflop/s of its precision).",
)


@dataclass(frozen=True)
class Machine:
    """What was measured of it."""

    peaks: Artifact[PeaksSpec]
    cores: CoreDistances


def measure(home: Path, watcher: Watcher, *, force: bool, seconds: float = WATCHED_S) -> RunRecord:
    """The peaks, see `measure_peaks`, and then the distance between the CPUs for so many seconds."""
    record = measure_peaks(home, watcher, force=force)
    if record.status == "done":
        watcher.step_changed("cores", StepRecord(stage="cores", status="running"))
        shown = {"total": round(seconds), "unit": "s", "note": ""}
        cores = core_distances.watch(
            seconds, lambda passed_s: watcher.progressed("cores", {**shown, "done": round(passed_s)})
        )
        write_text_atomic(home / record.id / _CORES, cores.model_dump_json(indent=1))
        watcher.step_changed("cores", StepRecord(stage="cores", status="done", seconds=cores.seconds))
    return record


def measure_peaks(home: Path, watcher: Watcher, *, force: bool) -> RunRecord:
    """Run the one step, or find its result in the store; `force` measures again."""
    plan = plan_of_machine()
    place = Processes(home)
    place.check(plan)
    forced = frozenset(plan.nodes) if force else frozenset()
    record = run_record.start(home, run_record.new_run_id(_NAME), _NAME, "", plan)
    settings = Settings(home=home, force=forced, becomes_latest=False)
    return Execution(plan, record, settings, watcher, place).execute()


def plan_of_machine() -> Plan:
    """The one step, with the config that a recipe has where it says nothing."""

    def graph(step: Step[str], config: PeaksConfig) -> None:
        step(peaks.run, config)

    return trace(graph, PeaksConfig())


def found(home: Path, record: RunRecord) -> Machine:
    """What a run of `measure` ended with."""
    cores = CoreDistances.model_validate_json((home / record.id / _CORES).read_text())
    return Machine(peaks_of(home, record), cores)


def peaks_of(home: Path, record: RunRecord) -> Artifact[PeaksSpec]:
    """The peaks that a run of `measure_peaks` ended with."""
    (step,) = record.steps.values()
    return Store(home).open(step.digest)


def show(machine: Machine, output: str) -> None:
    """Print all on stdout, as tables of at most 80 columns or as JSON with all points."""
    spec = machine.peaks.spec
    if output == "json":
        samples = str(machine.peaks.file("samples.json"))
        cores = machine.cores.model_dump(mode="json")
        print(json.dumps({**spec.model_dump(mode="json"), "samples": samples, "cores": cores}, indent=2))
        return
    for name, fact in spec.hardware.items():
        console.out.print(Text(f"{name}: {fact or '-'}", style="dim"), soft_wrap=True)
    console.out.print()
    _print_peaks("memory", "GB/s", bandwidth_peaks(spec))
    console.out.print()
    _print_peaks("product", "Gflop/s", gemm_peaks(spec))
    console.out.print()
    for sentence in (*_not_quoted(spec), *_MEANING):
        console.out.print(Text(sentence))
    console.out.print()
    _print_cores(machine.cores)


def write_page(machine: Machine, file: Path) -> None:
    """Write the page with the pictures, whole or not at all."""
    write_text_atomic(file, machine_page(machine.peaks.spec, machine.cores))


def _print_cores(cores: CoreDistances) -> None:
    """The matrix, the states, and what they mean."""
    for line in _matrix(cores):
        console.out.print(Text(line), soft_wrap=True)
    if cores.states:
        console.print_table(("cores", "ns", "of 95 %", "of the time"), state_rows(cores), right=(1, 3))
    for line in textwrap.wrap(in_words(cores), 80):
        console.out.print(Text(line))


def _matrix(cores: CoreDistances) -> Iterator[str]:
    """A line for each CPU with its distance from those before it, in ns; at most 80 columns for 16 CPUs."""
    if not cores.round_trips_ns:
        return
    yield "cache line from CPU to CPU and back, ns:"
    for cpu, row in zip(cores.cpus[1:], cores.round_trips_ns[1:], strict=True):
        yield f"{cpu:>5}" + "".join(f"{round_trip:5.0f}" for round_trip in row)
    yield " " * 5 + "".join(f"{cpu:>5}" for cpu in cores.cpus[:-1])


def _print_peaks(of: str, unit: str, peaks: Sequence[Peak]) -> None:
    rows = []
    for peak in peaks:
        figure = (plain(peak.rate.value), bounds(peak.rate)) if peak.rate else ("-", peak.reason)
        rows.append((peak.place, peak.of, *figure, peak.where))
    console.print_table(("where", of, unit, "95 %", "at"), rows, right=(2,))


def _not_quoted(spec: PeaksSpec) -> list[str]:
    """How many points have no figure, by the reason, and what helps; `-o json` has each with its own."""
    given = [point.reason for point in spec.bandwidths] + [point.reason for point in spec.gemms]
    reasons = Counter(reason.partition(":")[0] for reason in given if reason)
    if not reasons:
        return []
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    said = [f"Not quoted: {sum(reasons.values())} of {len(given)} points ({counts})."]
    if spec.not_stable:
        said += [
            f"Peaks not known yet, as rounds disagree: {spec.not_stable}.",
            "So this is not kept as the machine's: hpml bench machine measures again.",
        ]
    elif reasons[_NOT_STABLE]:
        said.append("If something else was running, measure again: hpml bench machine --force")
    return said
