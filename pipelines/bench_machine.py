"""`hpml bench machine`: the ceilings of this machine, by the very step that a recipe's run has for them.

It goes through the same executor and store, so whichever comes second finds the ceilings there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from components.artifacts import Artifact, write_text_atomic
from components.ceilings import stage as ceilings
from components.ceilings.stage import CeilingsConfig
from components.measurements import CeilingsSpec
from components.page.ceilings import Ceiling, bandwidth_ceilings, ceilings_page, gemm_ceilings
from components.page.format import bounds, plain
from pipelines import console, run_record
from pipelines.execution import Execution, Settings
from pipelines.local import Processes
from pipelines.place import Watcher
from pipelines.plan import Plan, Step, trace
from pipelines.run_record import RunRecord
from pipelines.store import Store

_NAME = "machine"
_NOT_STABLE = "not stable"  # how the reason of such a point begins
_MEANING = (
    "A layer that moves B bytes in F operations takes at least about the longer of",
    "B / (GB/s of the level that holds them) and F / (Gflop/s of its precision).",
)


def measure(home: Path, watcher: Watcher, *, force: bool) -> RunRecord:
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

    def graph(step: Step[str], config: CeilingsConfig) -> None:
        step(ceilings.run, config)

    return trace(graph, CeilingsConfig())


def found(home: Path, record: RunRecord) -> Artifact[CeilingsSpec]:
    """The ceilings that a run of `measure` ended with."""
    (step,) = record.steps.values()
    return Store(home).open(step.digest)


def show(artifact: Artifact[CeilingsSpec], output: str) -> None:
    """Print the ceilings on stdout, as tables of at most 80 columns or as JSON with all points."""
    if output == "json":
        samples = str(artifact.file("samples.json"))
        print(json.dumps({**artifact.spec.model_dump(mode="json"), "samples": samples}, indent=2))
        return
    spec = artifact.spec
    for name, fact in spec.hardware.items():
        console.out.print(Text(f"{name}: {fact or '-'}", style="dim"), soft_wrap=True)
    console.out.print()
    _print_ceilings("memory", "GB/s", bandwidth_ceilings(spec))
    console.out.print()
    _print_ceilings("product", "Gflop/s", gemm_ceilings(spec))
    console.out.print()
    for sentence in (*_not_quoted(spec), *_MEANING):
        console.out.print(Text(sentence))


def write_page(artifact: Artifact[CeilingsSpec], file: Path) -> None:
    """Write the page with the pictures, whole or not at all."""
    write_text_atomic(file, ceilings_page(artifact.spec))


def _print_ceilings(of: str, unit: str, ceilings: Sequence[Ceiling]) -> None:
    rows = [
        (
            ceiling.place,
            ceiling.of,
            plain(ceiling.rate.value) if ceiling.rate else "-",
            bounds(ceiling.rate) if ceiling.rate else ceiling.reason,
            ceiling.where,
        )
        for ceiling in ceilings
    ]
    console.print_table(("where", of, unit, "95 %", "at"), rows, right=(2,))


def _not_quoted(spec: CeilingsSpec) -> list[str]:
    """How many points have no figure, by the reason, and what helps; `-o json` has each with its own."""
    given = [point.reason for point in spec.bandwidths] + [point.reason for point in spec.gemms]
    reasons = Counter(reason.partition(":")[0] for reason in given if reason)
    if not reasons:
        return []
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    said = [f"Not quoted: {sum(reasons.values())} of {len(given)} points ({counts})."]
    if reasons[_NOT_STABLE]:
        said.append("If something else was running, measure again: hpml bench machine --force")
    return said
