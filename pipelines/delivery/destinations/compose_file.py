"""What the files for Docker Compose have in common: https://github.com/compose-spec/compose-spec."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path
from typing import Any

from hpml.core import strict_yaml
from hpml.pipelines.delivery.deploy_options import DeployOptions

TOKEN = "/run/secrets/token"  # noqa: S105 - its path
CONFINED: dict[str, Any] = {"cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
ONE_GPU: dict[str, Any] = {"devices": [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]}


def write(folder: Path, head: str, options: DeployOptions, service: dict[str, Any]) -> None:
    """`compose.yaml` with one service, which gets the token if there is one; `head` is its first line."""
    project: dict[str, Any] = {"name": options.name, "services": {"server": service}}
    if options.token_file:
        service["secrets"] = ["token"]
        project["secrets"] = {"token": {"file": escaped(str(options.token_file.resolve()))}}
    (folder / "compose.yaml").write_text(f"# {head}\n" + strict_yaml.dump(project), encoding="utf-8")


def escaped(text: str) -> str:
    """`text` as Compose takes it: a $ would begin the name of a variable."""
    return text.replace("$", "$$")


def ports(options: DeployOptions) -> list[dict[str, Any]]:
    """The server's port, as this machine offers it."""
    return [{"host_ip": options.host, "published": str(options.port), "target": options.port}]


def read_only(place: str, target: str) -> list[dict[str, Any]]:
    """The folder `place` beside the file, as `target` in the container."""
    bind = {"create_host_path": False}
    return [{"type": "bind", "source": f"./{place}", "target": target, "read_only": True, "bind": bind}]


def healthcheck(python: str, path: str, options: DeployOptions, *, start_s: int) -> dict[str, Any]:
    """Asks the server for `path` in the container, by its `python`: images have no curl."""
    url = f"http://127.0.0.1:{options.port}{path}"
    code = f"import urllib.request; urllib.request.urlopen('{url}', timeout=5)"
    return {
        "test": ["CMD", python, "-c", code],
        "interval": "10s",
        "timeout": "10s",
        "retries": 3,
        "start_period": f"{start_s}s",
    }


def commands(options: DeployOptions, path: str, *, uid: int) -> list[str]:
    """What brings it up and asks it for `path`. uid: the server's user, who has to read the token."""
    before = []
    if options.token_file and not _is_readable(options.token_file, uid):
        file = shlex.quote(str(options.token_file.resolve()))
        before = [f"sudo chown {uid} {file}  # the server's user, who has to read it"]
    host = f"[{options.host}]" if ":" in options.host else options.host
    return [
        *before,
        "docker compose up --detach --wait  # podman compose does, too",
        f"curl --fail http://{host}:{options.port}{path}",
    ]


def _is_readable(file: Path, uid: int) -> bool:
    status = file.stat()
    return bool(status.st_mode & stat.S_IROTH) or status.st_uid == uid
