"""What `register` notes of a version in the model registry."""

from __future__ import annotations

from typing import Literal

from hpml.core.contract import Config


class RegistrationSpec(Config):
    """A version in the model registry."""

    kind: Literal["registration"] = "registration"
    registry: str  # the tracking URI, without credentials
    model_name: str
    version: int
    aliases: tuple[str, ...]
    engine_digest: str
    champion_reason: str
