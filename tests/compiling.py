"""Pipelines compiled for Kubeflow: each recipe once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from hpml.pipelines import recipe
from hpml.pipelines.kubeflow import compile as kubeflow
from hpml.pipelines.kubeflow.compile import Compiled


def compile_anew(file: Path, *overrides: str) -> Compiled:
    """In a thread, whose stack is short: kfp walks it for each setting of each step, and pytest's is deep."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(kubeflow.compile_pipeline, recipe.load(file, overrides)).result()


compiled = cache(compile_anew)
