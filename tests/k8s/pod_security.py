"""What Pod Security *restricted* asks of a pod, and our own rule on top: a read-only root file system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Pod = dict[str, Any]

SAFE_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"
}  # fmt: skip


def containers_of(pod: Pod) -> list[dict[str, Any]]:
    """Every container of a pod's spec, those that run before it too."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def violations(pod: Pod) -> list[str]:
    """What is wrong with a pod's spec, one entry a problem."""
    return [*_of_the_pod(pod), *(problem for each in containers_of(pod) for problem in _of(each, pod))]


def _of_the_pod(pod: Pod) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield name
    for volume in pod.get("volumes", []):
        for kind in volume.keys() - {"name"} - SAFE_VOLUMES:
            yield f"volume {volume['name']} is a {kind}"
    if pod.get("securityContext", {}).get("sysctls"):
        yield "sysctls"


def _of(container: dict[str, Any], pod: Pod) -> Iterator[str]:
    own = container.get("securityContext", {})
    context = {**pod.get("securityContext", {}), **own}
    capabilities = own.get("capabilities", {})
    wrong = {
        "privileged": own.get("privileged"),
        "may escalate": own.get("allowPrivilegeEscalation") is not False,
        "may be root": context.get("runAsNonRoot") is not True,
        "is root": context.get("runAsUser", 0) == 0,
        "seccomp": context.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"),
        "keeps capabilities": "ALL" not in capabilities.get("drop", []),
        "adds capabilities": capabilities.get("add"),
        "unmasked /proc": own.get("procMount", "Default") != "Default",
        "a port of the host": any(port.get("hostPort") for port in container.get("ports", [])),
        "writable root": own.get("readOnlyRootFilesystem") is not True,
    }
    for problem, found in wrong.items():
        if found:
            yield f"{container['name']}: {problem}"


def _context(**settings: Any) -> Callable[[Pod], None]:
    return lambda pod: pod["containers"][0]["securityContext"].update(settings)


def _host_volume(pod: Pod) -> None:
    pod["volumes"].append({"name": "host", "hostPath": {"path": "/"}})


def _host_port(pod: Pod) -> None:
    pod["containers"][0]["ports"] = [{"containerPort": 8080, "hostPort": 8080}]


# One more privilege each; admission refuses all of these.
PRIVILEGES: dict[str, Callable[[Pod], None]] = {
    "privileged": _context(privileged=True, allowPrivilegeEscalation=True),
    "escalation": _context(allowPrivilegeEscalation=True),
    "root": lambda pod: pod["securityContext"].update(runAsUser=0),
    "perhaps root": lambda pod: pod["securityContext"].update(runAsNonRoot=False),
    "no seccomp": lambda pod: pod["securityContext"].update(seccompProfile={"type": "Unconfined"}),
    "one more capability": _context(capabilities={"drop": ["ALL"], "add": ["SYS_PTRACE"]}),
    "all capabilities": _context(capabilities={}),
    "the host's files": _host_volume,
    "the host's network": lambda pod: pod.update(hostNetwork=True),
    "the host's processes": lambda pod: pod.update(hostPID=True),
    "a port of the host": _host_port,
}
