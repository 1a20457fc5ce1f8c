"""What can be set about a registration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from hpml.core.contract import Config

# Without a dot: "hpml." and "mlflow." begin the names of others.
_TagName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_ -]{0,99}$")]


class RegisterConfig(Config):
    """How the chosen engine is registered."""

    # The recipe's name if empty. Also a folder name in the bundle.
    model_name: str = Field(default="", pattern=r"^([A-Za-z0-9_][A-Za-z0-9._-]{0,63})?$")
    tags: dict[_TagName, str] = Field(default_factory=dict)  # added to the version: {"team": "vision"}
