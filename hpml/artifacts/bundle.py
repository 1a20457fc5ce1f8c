"""A bundle, which can be deployed."""

from __future__ import annotations

from typing import Literal

from hpml.core.contract import Config


class BundleSpec(Config):
    """A deployable bundle: engine, preprocessing.json, bundle.json, golden samples, README.md."""

    kind: Literal["bundle"] = "bundle"
    model_name: str
    engine_name: str
    engine_digest: str
    file: str
    verified: tuple[str, ...]  # what was checked in a clean process
