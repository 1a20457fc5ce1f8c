"""What recipes and command lines may still name: what does nothing now, and what is called otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from hpml.core.errors import ConfigInvalid

_ONLY_UNDISTURBED = (
    "what was disturbed is never in the figures, and what has too few is not measured"
    " (to end with exit code 5 then: --strict, or benchmark.require_quiet: true)"
)
_WATCHED = "what counts as disturbed is benchmark.quiet.max_waited and max_stolen"
_PRECISION = "rounds go on until speed-ups are known to within benchmark.precision"
_BUILTIN = "the scenarios issue their queries themselves; the tests compare them with MLPerf's loadgen"
_SLICES = "a round is a slice of benchmark.slice_ms of each engine"

KEYS: Mapping[str, str] = {  # of a recipe -> what took its place
    "benchmark.quiet.enforce": _ONLY_UNDISTURBED,
    "benchmark.quiet.max_others": _WATCHED,
    "benchmark.quiet.max_slowdown": _WATCHED,
    "benchmark.quiet.max_round_slowdown": _WATCHED,
    "benchmark.quiet.max_drift": _PRECISION,
    "benchmark.quiet.max_disagreement": _PRECISION,
    "benchmark.scenario_backend": _BUILTIN,
    "benchmark.requests_per_round": _SLICES,
    "benchmark.images_per_round": _SLICES,
}
SECTIONS: Mapping[str, str] = {"ceilings": "peaks", "deploy": "bundle"}  # of a recipe -> as called now
RENAMED_KEYS: Mapping[str, str] = {  # of a recipe; in its file the configs take them
    "goals.max_accuracy_drop": "goals.max_quality_loss",
    "train.min_accuracy": "train.required.accuracy_top1",
}
OPTIONS: Mapping[str, str] = {  # of the command
    "--allow-noise": _ONLY_UNDISTURBED,
    "--requests": _SLICES,
}


def drop_retired(fields: dict[str, Any]) -> list[str]:
    """Take the retired keys out of the fields of a recipe; returns which it had."""
    found = []
    for key in KEYS:
        *sections, name = key.split(".")
        section: Any = fields
        for part in sections:
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict) and name in section:
            del section[name]
            found.append(key)
    return found


def rename_sections(fields: dict[str, Any], *, where: str) -> list[str]:
    """Give the sections of a recipe the names that they have now; returns which had another.

    Raises ConfigInvalid for a section that is there by both names.
    """
    found = [name for name in SECTIONS if name in fields]
    for name in found:
        if SECTIONS[name] in fields:
            raise ConfigInvalid(
                f"{where} has both {name} and {SECTIONS[name]}",
                why=f"{SECTIONS[name]} is what {name} is called now",
                fix=f"put what you want into {SECTIONS[name]}",
            )
        fields[SECTIONS[name]] = fields.pop(name)
    return found


def tell_renamed(names: Iterable[str]) -> None:
    """Say on stderr how sections of a recipe are called now: a line each."""
    for name in dict.fromkeys(names):
        print(f"{name} in a recipe is called {SECTIONS[name]} now", file=sys.stderr)


def tell(names: Iterable[str]) -> None:
    """Say on stderr of retired keys or options that they no longer do anything: a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        by_reason.setdefault({**KEYS, **OPTIONS}[name], []).append(name)
    for reason, named in by_reason.items():
        no_longer = "no longer does anything" if len(named) == 1 else "no longer do anything"
        print(f"{', '.join(named)} {no_longer}: {reason}", file=sys.stderr)
