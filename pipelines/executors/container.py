"""Runs each step in its image on this machine, by podman or docker.

A container sees what its step needs and no more: its inputs read-only, a place for its output, no network (a
bridge, where its step reads or writes elsewhere), a read-only root, no capabilities, the CPUs and the memory
that `needs.py` of its stage gives it. It runs as the user, so that what it writes is theirs.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from hpml.components.__main__ import Job, arguments_of
from hpml.core.contract import Events
from hpml.core.errors import ConfigInvalid, ExitCode, Unavailable
from hpml.data_files.model_folder import HUB
from hpml.pipelines.engine import cache_keys
from hpml.pipelines.engine.cache_keys import RuntimeEnvironment
from hpml.pipelines.engine.execution import Settings
from hpml.pipelines.executors.base import StepExit, Watcher
from hpml.pipelines.executors.forkserver import ForkServer, ProcessExit
from hpml.pipelines.executors.image_contents import require_architecture
from hpml.pipelines.executors.process import LocalSteps
from hpml.pipelines.plan import Node, Plan
from hpml.pipelines.recipe import LoadedRecipe
from hpml.pipelines.stage_needs import needs_of

_STOP_S = 12  # from SIGTERM to SIGKILL; a training step needs 10 to save
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_TMPFS = "/tmp:rw,exec,mode=1777"  # noqa: S108 - the container's own
_OF_THE_HUB = ("HF_ENDPOINT", "HF_TOKEN")
_CANNOT_START = {125: "the container engine refused it", 126: "its command cannot be run", 127: "no command"}


class Containers(LocalSteps):
    """Steps as containers. A small process beside the engine starts each, and ends it with the engine."""

    def __init__(self, loaded: LoadedRecipe, settings: Settings, watcher: Watcher) -> None:
        super().__init__(settings.home)
        self._recipe, self._cluster = loaded.recipe, loaded.recipe.cluster
        self._settings, self._watcher = settings, watcher
        self._engine = find_engine()
        self._names: dict[int, str] = {}
        self._runtime_environment: dict[str, RuntimeEnvironment] = {}

    # ------------------------------------------------------------------------------------------------ images

    def _image(self, stage: str) -> str:
        family = self._cluster.needs(stage).image
        assert family, "the defaults are filled in"
        return self._cluster.image(family)

    def runtime_environment(self, stage: str) -> RuntimeEnvironment:
        """What the stage's image holds, asked of the image itself, once.

        Raises ConfigInvalid if there is no such image, or if it holds other code than this installation.
        """
        image = self._image(stage)
        if image not in self._runtime_environment:
            digest = self._digest(image)
            self._runtime_environment[image] = cache_keys.of_image(image, self._about(image), digest)
        return self._runtime_environment[image]

    def _digest(self, image: str) -> str:
        answer = _ask(self._engine, "image", "inspect", "--format", "{{.Id}}", image)
        if answer.returncode:
            raise ConfigInvalid(
                f"there is no image {image} on this machine",
                why=" ".join(answer.stderr.split())[-200:],
                fix="build it: make images; or name yours in the recipe: cluster.images",
            )
        return answer.stdout.strip().removeprefix("sha256:")

    def _about(self, image: str) -> dict[str, Any]:
        answer = _ask(*self._isolated(self.cpus, "1Gi"), "--rm", image, "--about")
        try:
            return dict(json.loads(answer.stdout))
        except ValueError:
            raise Unavailable(
                f"the image {image} cannot be run by {Path(self._engine).name}",
                why=" ".join(answer.stderr.split())[-300:] or f"it ended with status {answer.returncode}",
                fix="hpml doctor says what the engine lacks; make images builds the images anew",
            ) from None

    # ------------------------------------------------------------------------------------------------- steps

    def check(self, plan: Plan) -> None:
        """Look at every image, and at what has to be reached, before anything is started.

        Raises ConfigInvalid if an image is absent, has other code or lacks what the network needs, or an
        address is that of this machine only.
        """
        for node in plan.nodes.values():
            holds = self.runtime_environment(node.stage)
            require_architecture(self._recipe, node, self._image(node.stage), holds)
            self._refuse_loopback(node)

    def prepare(self, waiting: tuple[Node, ...]) -> None:
        """Nothing: a container starts by itself."""

    def start(self, node: Node, job: dict[str, Any], log: Path) -> int:
        """Run the container of a step."""
        self._server = self._server or ForkServer()
        name = f"hpml-{node.name}-{secrets.token_hex(4)}"
        Path(job["scratch"]).mkdir(parents=True, exist_ok=True)
        Path(job["events"]).touch()
        argument = {
            "engine": self._engine,
            "name": name,
            "command": self._command(node, job, name),
            "events": job["events"],
            "memory": self._memory(node.stage),
        }
        number = self._server.start("hpml.pipelines.executors.container:run_container", argument, log)
        self._names[number] = name
        return number

    def _command(self, node: Node, job: dict[str, Any], name: str) -> list[str]:
        needs = self._cluster.needs(node.stage)
        command = self._isolated(job["threads"], self._memory(node.stage), network=self._network(node))
        command += ["--name", name, "--env", "HPML_IMPORT_PATHS=" + os.pathsep.join(job["import_paths"])]
        if needs.gpus:
            podman = Path(self._engine).name == "podman"
            command += ["--device", "nvidia.com/gpu=all"] if podman else ["--gpus", "all"]
        if needs_of(node.stage).registry:
            command += ["--env", f"MLFLOW_TRACKING_URI={self._settings.registry_uri}"]
        if self._url(node) == _hub():
            given = [name for name in _OF_THE_HUB if name in os.environ]  # by name: a token is for no log
            command += [part for name in given for part in ("--env", name)]
            command += ["--env", f"HF_HOME={job['scratch']}/hub"]  # /tmp there is memory
        for place, mode in self._mounts(node, job):
            command += ["--volume", f"{place}:{place}:{mode}"]
        fields = {key: value for key, value in job.items() if key != "import_paths"}
        return [*command, self._image(node.stage), *arguments_of(Job(**fields))]

    def _isolated(self, cpus: int, memory: str, *, network: str = "none") -> list[str]:
        user = f"{os.getuid()}:{os.getgid()}"
        rootless = ["--userns", "keep-id"] if os.getuid() and self._engine.endswith("podman") else []
        return [
            *(self._engine, "run", "--pull", "never", "--network", network, "--read-only", "--tmpfs", _TMPFS),
            *("--user", user, *rootless, "--cap-drop", "all", "--security-opt", "no-new-privileges"),
            *("--env", "HOME=/tmp", "--cpus", str(cpus), "--memory", str(quantity_bytes(memory))),
            *("--shm-size", "256m"),
        ]

    def _memory(self, stage: str) -> str:
        return self._cluster.needs(stage).memory or ""

    def _network(self, node: Node) -> str:
        """None, except for what is nowhere but on the network."""
        url = self._url(node)
        if not url:
            return "none"
        network = self._cluster.container_network
        self._watcher.say(f"{node.name} has a network ({network}), for {urlsplit(url).hostname}")
        return network

    def _url(self, node: Node) -> str:
        """What a step reads or writes elsewhere: a remote registry, data behind a URL; empty for most."""
        registry = self._settings.registry_uri
        if needs_of(node.stage).registry and "://" in registry and not registry.startswith("sqlite:"):
            return registry
        addresses = (getattr(node.config, name, None) for name in ("weights", "tokenizer"))
        if any(str(address).startswith(HUB) for address in addresses):
            return _hub()
        return getattr(node.config, "url", None) or ""

    def _refuse_loopback(self, node: Node) -> None:
        """In a container, localhost is the container, unless it shares the network of this machine."""
        host = urlsplit(self._url(node)).hostname or ""
        if _is_loopback(host) and self._cluster.container_network != "host":
            raise ConfigInvalid(
                f"{node.name} cannot reach {host} from its container",
                why=f"there, {host} is the container itself",
                fix="name a server by an address that it listens on beyond this machine's loopback,"
                " or give such steps this machine's network: --set cluster.container_network=host",
            )

    def _mounts(self, node: Node, job: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """What the container sees of this machine, at the same paths, read-only or not."""
        for given in job["inputs"].values():
            for path in [given] if isinstance(given, str) else given.values():
                yield path, "ro"
        yield str(Path(job["out"]).parent), "rw"
        yield job["scratch"], "rw"
        yield job["events"], "rw"
        for path in job["import_paths"]:
            yield path, "ro"
        for path in _paths_in(node.config):
            if path.exists():  # the step says it better when it does not
                yield str(path), "ro"
        if needs_of(node.stage).registry and self._settings.registry_uri.startswith("sqlite:"):
            yield str(self._settings.home), "rw"

    # --------------------------------------------------------------------------------------------------- end

    def signal(self, job: int, number: signal.Signals) -> None:
        """SIGTERM by the process that holds the container; SIGKILL by the engine, which needs no answer."""
        if number == signal.SIGKILL:
            _ask(self._engine, "kill", self._names[job])
        else:
            super().signal(job, number)

    def _understood(self, end: ProcessExit) -> StepExit:
        """Why it ended, the process that held the container has told in the step's events."""
        code = os.waitstatus_to_exitcode(end.status)
        return StepExit(end.job, code, cause="its container ended without saying why")


def find_engine() -> str:
    """The path of podman or docker, whichever answers.

    Raises Unavailable if neither does.
    """
    problems = []
    for engine in filter(None, map(shutil.which, ("podman", "docker"))):
        answer = _ask(engine, "info")
        if answer.returncode == 0:
            return engine
        problems.append(f"{engine}: {' '.join(answer.stderr.split())[-200:]}")
    raise Unavailable(
        "no container engine answers",
        why="; ".join(problems) or "neither podman nor docker is installed",
        fix="install podman, or run without --executor container",
    )


def run_container(engine: str, name: str, command: list[str], events: str, memory: str) -> int:
    """Run a container to its end; its exit status is returned. SIGTERM is passed on, then it has 12 s.

    Runs in a process of its own, which is told when the engine goes away: then the container ends, too.
    """

    def stop(_signal: int, _frame: object) -> None:
        subprocess.Popen([engine, "stop", "--time", str(_STOP_S), name], stdout=subprocess.DEVNULL)

    signal.signal(signal.SIGTERM, stop)
    try:
        status = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True).wait()
        cause = _cause(engine, name, status, memory)
        if cause:
            told = {"message": cause, "exit_code": int(ExitCode.STAGE_FAILED), "traceback": ""}
            Events(Path(events)).write("failed", **told)
        return status
    finally:
        _ask(engine, "rm", "--force", name)


def _cause(engine: str, name: str, status: int, memory: str) -> str:
    """What only the engine knows of a container that ended so; empty if the step speaks for itself."""
    if status in _CANNOT_START:
        return f"its container was not started: {_CANNOT_START[status]} -> its log has the engine's words"
    if status != 128 + signal.SIGKILL:
        return ""
    if _ask(engine, "inspect", "--format", "{{.State.OOMKilled}}", name).stdout.strip() == "true":
        return (
            f"the kernel killed it at its limit of {memory} of memory"
            " -> raise cluster.stages.<stage>.memory in the recipe, or use a smaller batch"
        )
    return "its container was killed by SIGKILL"


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def _hub() -> str:
    """The address of the Hugging Face hub, as its library takes it."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


def _is_loopback(host: str) -> bool:
    """Whether a name or address is that of the machine that asks."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def quantity_bytes(quantity: str) -> int:
    """The bytes of a Kubernetes quantity, such as 2Gi."""
    number, unit = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", quantity).groups()  # type: ignore[union-attr]
    return int(float(number) * _UNITS[unit])


def _paths_in(value: Any) -> Iterator[Path]:
    """Every absolute path that a config names."""
    if isinstance(value, Path) and value.is_absolute():
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _paths_in(getattr(value, name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _paths_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _paths_in(item)
