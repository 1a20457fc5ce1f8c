"""What is rolled out: a bundle, by the digest of all that is in it."""

from __future__ import annotations

from pydantic import Field, JsonValue

from hpml.core.contract import Config


class Release(Config):
    """One bundle, where servers find it (`uri`), and which version of the registry it is of.

    verified: whether every goal of its engine was checked. settings: what the place where it is served needs
    to serve it again, such as its CPUs.
    """

    digest: str
    uri: str
    model_name: str
    model_version: str
    engine_digest: str
    verified: bool = True
    settings: dict[str, JsonValue] = Field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model_name}/{self.model_version} ({self.digest[:12]})"
