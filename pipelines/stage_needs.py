"""What each stage needs of where it runs: components/<stage>/needs.py says it."""

from __future__ import annotations

import importlib

from hpml.core.needs import Needs


def needs_of(stage: str) -> Needs:
    """The needs of a stage; one of the user's own that says none is small and undemanding."""
    name = f"hpml.components.{stage}"
    try:
        needs: Needs = importlib.import_module(f"{name}.needs").NEEDS
    except ModuleNotFoundError as absent:
        if absent.name not in (name, f"{name}.needs"):
            raise
        return Needs()
    return needs
