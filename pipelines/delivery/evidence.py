"""What became of rollouts is kept: as a file of the workspace, and in the model registry."""

from __future__ import annotations

import getpass
import json
import os
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpml.core.atomic_files import write_text_atomic
from hpml.core.errors import HpmlError
from hpml.io.tracking import store_of
from hpml.pipelines.delivery.rollout import Evidence, Say

DEPLOYMENTS = "deployments"  # folder of a workspace


@dataclass(frozen=True)
class Keeper:
    """Keeps evidence of the rollouts of `name` to `place`, such as "kubernetes/hpml".

    What cannot be written, and a registry that does not answer or does not have the version, are told aloud:
    what is served does not depend on them.
    """

    home: Path
    name: str
    place: str
    say: Say

    def keep(self, evidence: Evidence) -> None:
        """Write it down. Raises nothing."""
        now = datetime.now(UTC)
        told = {
            "when": now.isoformat(timespec="seconds"),
            "who": _user(),
            "name": self.name,
            "place": self.place,
            **evidence.told(),
        }
        outcome = evidence.outcome.replace(" ", "-")
        file = self.home / DEPLOYMENTS / self.name / f"{now:%Y%m%dT%H%M%S.%f}-{outcome}.json"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(file, json.dumps(told, indent=1) + "\n")
            self.say(f"what was seen: {file}")
        except OSError as error:
            self.say(f"warning: what was seen cannot be written: {error}")
        self._record(evidence, told, file)

    def _record(self, evidence: Evidence, told: dict[str, Any], file: Path) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or store_of(self.home)
        release = evidence.release
        try:
            from hpml.components.register.deployments import record_deployment

            record_deployment(
                uri,
                release.model_name,
                release.model_version,
                place=f"{self.place}/{self.name}",
                told=told,
                file=str(file.relative_to(self.home)),
                becomes_champion=release.verified and evidence.outcome in ("promoted", "rolled back"),
            )
        except ModuleNotFoundError as error:
            self.say(f"warning: not recorded in the registry: the package {error.name} is not installed")
        except HpmlError as error:
            self.say(f"warning: not recorded in the registry: {error}")


def deployer() -> str:
    """Who rolls out, for those that find a name taken."""
    return f"{_user()} (process {os.getpid()})"


def _user() -> str:
    """Who this is, in a container too, whose user has no name."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = f"user {os.getuid()}"
    return f"{name}@{socket.gethostname()}"
