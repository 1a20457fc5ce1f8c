"""One machine with Docker or Podman."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpml.pipelines.delivery import own_server
from hpml.pipelines.delivery.deploy_options import DeployOptions
from hpml.pipelines.delivery.deployable import Deployable
from hpml.pipelines.delivery.destinations import compose_file

_UID = 10001  # as in our image; said here because another image may have another


def write(bundle: Deployable, options: DeployOptions, folder: Path) -> list[str]:
    """`compose.yaml`, and the bundle in a folder of its digest, so that another makes another container."""
    own_server.check_can_serve(bundle, options)
    place = f"bundle-{bundle.digest[:12]}"
    bundle.copy_to(folder / place)
    head = f"{bundle.title}, by hpml deploy --to compose"
    compose_file.write(folder, head, options, _service(bundle, options, place))
    return compose_file.commands(options, own_server.READY, uid=_UID)


def _service(bundle: Deployable, options: DeployOptions, place: str) -> dict[str, Any]:
    drain_s = options.drain_s or 0  # nothing watches here whether it is ready and sends requests elsewhere
    token = compose_file.TOKEN
    return {
        "image": own_server.image(options),
        "command": own_server.arguments(bundle, options, "/bundle", token=token, drain_s=drain_s),
        "restart": "unless-stopped",
        "user": f"{_UID}:{_UID}",
        "read_only": True,
        "tmpfs": ["/tmp:size=64m,mode=1777,noexec,nosuid,nodev"],  # noqa: S108 - of the container
        **compose_file.CONFINED,
        "ports": compose_file.ports(options),
        "volumes": compose_file.read_only(place, "/bundle"),
        "healthcheck": compose_file.healthcheck("python", own_server.READY, options, start_s=300),
        "stop_grace_period": f"{own_server.stop_s(drain_s)}s",
        "deploy": {"resources": _resources(bundle, options)},
    }


def _resources(bundle: Deployable, options: DeployOptions) -> dict[str, Any]:
    limits = {
        "cpus": f"{own_server.cpus(bundle, options):g}",
        "memory": f"{own_server.memory_mib(bundle, options)}m",
        "pids": 512,
    }
    return (
        {"limits": limits, "reservations": compose_file.ONE_GPU} if bundle.runs_on_gpu else {"limits": limits}
    )
