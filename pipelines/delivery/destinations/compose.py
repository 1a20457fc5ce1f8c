"""One machine with Docker or Podman: https://github.com/compose-spec/compose-spec."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path
from typing import Any

from hpml.core import strict_yaml
from hpml.pipelines.delivery import own_server
from hpml.pipelines.delivery.deploy_options import DeployOptions
from hpml.pipelines.delivery.deployable import Deployable

_UID = 10001  # as in our image; said here because another image may have another
_TOKEN = "/run/secrets/token"  # noqa: S105 - its path
_IS_READY = (  # the image has no curl
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}{path}', timeout=5)"
)


def write(bundle: Deployable, options: DeployOptions, folder: Path) -> list[str]:
    """`compose.yaml`, and the bundle in a folder of its digest, so that another makes another container."""
    own_server.check_can_serve(bundle, options)
    place = f"bundle-{bundle.digest[:12]}"
    bundle.copy_to(folder / place)
    project = {"name": options.name, "services": {"server": _service(bundle, options, place)}}
    if options.token_file:
        # A $ would begin the name of a variable.
        project["secrets"] = {"token": {"file": str(options.token_file.resolve()).replace("$", "$$")}}
    head = f"# {bundle.title}, by hpml deploy --to compose\n"
    (folder / "compose.yaml").write_text(head + strict_yaml.dump(project), encoding="utf-8")
    return _commands(options)


def _service(bundle: Deployable, options: DeployOptions, place: str) -> dict[str, Any]:
    drain_s = options.drain_s or 0  # nothing watches here whether it is ready and sends requests elsewhere
    is_ready = _IS_READY.format(port=options.port, path=own_server.READY)
    service: dict[str, Any] = {
        "image": own_server.image(options),
        "command": own_server.arguments(bundle, options, "/bundle", token=_TOKEN, drain_s=drain_s),
        "restart": "unless-stopped",
        "user": f"{_UID}:{_UID}",
        "read_only": True,
        "tmpfs": ["/tmp:size=64m,mode=1777,noexec,nosuid,nodev"],  # noqa: S108 - of the container
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "ports": [{"host_ip": options.host, "published": str(options.port), "target": options.port}],
        "volumes": [
            {
                "type": "bind",
                "source": f"./{place}",
                "target": "/bundle",
                "read_only": True,
                "bind": {"create_host_path": False},
            }
        ],
        "healthcheck": {
            "test": ["CMD", "python", "-c", is_ready],
            "interval": "10s",
            "timeout": "10s",
            "retries": 3,
            "start_period": "300s",
        },
        "stop_grace_period": f"{own_server.stop_s(drain_s)}s",
        "deploy": {"resources": _resources(bundle, options)},
    }
    if options.token_file:
        service["secrets"] = ["token"]
    return service


def _resources(bundle: Deployable, options: DeployOptions) -> dict[str, Any]:
    limits = {
        "cpus": f"{own_server.cpus(bundle, options):g}",
        "memory": f"{own_server.memory_mib(bundle, options)}m",
        "pids": 512,
    }
    if not bundle.runs_on_gpu:
        return {"limits": limits}
    devices = [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    return {"limits": limits, "reservations": {"devices": devices}}


def _commands(options: DeployOptions) -> list[str]:
    commands = []
    if options.token_file and not _is_readable_inside(options.token_file):
        file = shlex.quote(str(options.token_file.resolve()))
        commands.append(f"sudo chown {_UID} {file}  # the server's user, who has to read it")
    host = f"[{options.host}]" if ":" in options.host else options.host
    return [
        *commands,
        "docker compose up --detach --wait  # podman compose does, too",
        f"curl --fail http://{host}:{options.port}{own_server.READY}",
    ]


def _is_readable_inside(file: Path) -> bool:
    status = file.stat()
    return bool(status.st_mode & stat.S_IROTH) or status.st_uid == _UID
