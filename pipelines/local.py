"""Runs a plan on this machine: steps are isolated processes, cached by content, parallel where they may."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from components import hardware, tracking
from components.artifacts import read_manifest
from components.errors import ConfigInvalid, ExitCode
from components.tracking import Outbox, store_identity
from pipelines import run_record
from pipelines.forkserver import Ended, ForkServer
from pipelines.plan import Node, Plan
from pipelines.provenance import Code, Material, code_of, explain, material_of
from pipelines.resources import resources_of
from pipelines.run_record import FINISHED, RunRecord, Status, StepRecord
from pipelines.store import Lock, Store, copy_out

_POLL_S = 0.1
_GRACE_S = 15.0
_LAST_TRACKING_S = 30.0
_TELL_AFTER_S = 2.0
_MLFLOW_STATUS: Mapping[Status, tracking.Status] = {
    "done": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
}


class Watcher(Protocol):
    """Who is told what happens, such as the terminal."""

    def step_changed(self, name: str, record: StepRecord) -> None:
        """A step has another status."""

    def progressed(self, name: str, event: Mapping[str, Any]) -> None:
        """A running step reported progress; see contract.Output.progress."""

    def say(self, text: str) -> None:
        """Something the user should know."""


@dataclass(frozen=True)
class Settings:
    """How a plan is to be run.

    home: the workspace. import_paths: folders of the user's own modules. max_parallel: steps at once, None
    for as many as there are CPUs. force: steps to run although they are cached. tracking_uri: where MLflow
    is; empty: the run is not tracked. registry_uri: where the model registry is, tracked or not.
    becomes_latest: whether "latest" is this run from now on.
    """

    home: Path
    import_paths: tuple[str, ...] = ()
    max_parallel: int | None = None
    force: frozenset[str] = frozenset()
    tracking_uri: str = ""
    registry_uri: str = ""
    becomes_latest: bool = True


@dataclass
class _Running:
    """A step that has a process."""

    node: Node
    material: Material
    locks: tuple[Lock, ...]
    delivered: Path
    events: EventTail
    threads: int
    oom_kills_before: int


def check_machine(plan: Plan) -> None:
    """Ask every step whether this machine can run it, before anything is started.

    Raises ConfigInvalid with the first reason.
    """
    for node in plan.nodes.values():
        reason = node.config.unmet()
        if reason:
            raise ConfigInvalid(f"step {node.name} cannot run on this machine", why=reason)


@dataclass(frozen=True)
class Forecast:
    """What a run would do with one step: "cached", "would run", or "depends" on what comes before it."""

    step: str
    outcome: str
    reasons: tuple[str, ...]


def forecast(plan: Plan, settings: Settings) -> list[Forecast]:
    """What a run of `plan` would find in the store, without running anything."""
    store = Store(settings.home)
    digests: dict[str, str] = {}
    answers = []
    for node in plan.nodes.values():
        unknown = [parent for parent in node.parents() if parent not in digests]
        if unknown:
            answers.append(Forecast(node.name, "depends", (f"on what {', '.join(unknown)} will write",)))
            continue
        material = _material(node, digests, settings)
        digest = None if node.name in settings.force else store.lookup(material.key)
        if digest:
            digests[node.name] = digest
            answers.append(Forecast(node.name, "cached", ()))
        else:
            reasons = _why_miss(node, material, store, settings)
            answers.append(Forecast(node.name, "would run", reasons))
    return answers


def _material(node: Node, digests: Mapping[str, str], settings: Settings) -> Material:
    inputs = {
        name: digests[source]
        if isinstance(source, str)
        else {key: digests[step] for key, step in source.items()}
        for name, source in node.inputs.items()
    }
    registry = store_identity(settings.registry_uri) if resources_of(node.stage).registry else ""
    return material_of(node, inputs, import_paths=settings.import_paths, registry=registry)


def _why_miss(node: Node, material: Material, store: Store, settings: Settings) -> tuple[str, ...]:
    if node.name in settings.force:
        return ("it was forced",)
    reasons = explain(material, store.last_material(node.name))
    return tuple(reasons) or ("its stored result is gone or damaged",)


class LocalRun:
    """One run of a plan. Use once."""

    def __init__(self, plan: Plan, record: RunRecord, settings: Settings, watcher: Watcher) -> None:
        self._plan, self._settings, self._watcher = plan, settings, watcher
        self._record = record
        self._folder = settings.home / record.id
        self._store = Store(settings.home)
        self._cpus = hardware.usable_cpus()
        self._digests: dict[str, str] = {}
        self._running: dict[int, _Running] = {}
        self._server: ForkServer | None = None
        self._preloaded: set[str] = set()
        self._told_waiting: set[str] = set()
        self._outbox_file = self._folder / "tracking.jsonl"
        self._outbox: Outbox | None = None  # opened when the first step is really run
        self._sender: int | None = None
        self._stop: signal.Signals | None = None

    # --------------------------------------------------------------------------------------- the whole run

    def execute(self) -> RunRecord:
        """Run what is not in the store. A failed step blocks those that need it; the others go on."""
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        if self._settings.becomes_latest:
            _point_latest(self._settings.home, self._record.id)
        self._save()
        with self._store.in_use(), self._signals():
            try:
                while self._unfinished() and not self._stop:
                    self._settle()
                    self._launch()
                    self._collect(_POLL_S)
                if self._stop:
                    self._interrupt()
                self._end()
            finally:
                if self._server:
                    self._server.close()
        return self._record

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run in order; a second one does not wait for checkpoints."""

        def handle(number: int, _frame: object) -> None:
            if self._stop:
                for job in self._running:
                    self._forks.signal(job, signal.SIGKILL)
            self._stop = signal.Signals(number)

        old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    @property
    def _forks(self) -> ForkServer:
        """The fork server, started when the first step needs it."""
        if self._server is None:
            os.environ["MLFLOW_TRACKING_URI"] = self._settings.registry_uri
            self._server = ForkServer()
            self._start_tracking(self._server)
        return self._server

    def _unfinished(self) -> bool:
        return any(step.status in ("waiting", "running") for step in self._record.steps.values())

    # --------------------------------------------------------------------------------- from waiting to done

    def _settle(self) -> None:
        """Block what can no longer run, and take from the store what is there, until nothing changes."""
        for node in self._waiting():
            statuses = [self._record.steps[parent].status for parent in node.parents()]
            if any(status in ("failed", "blocked") for status in statuses):
                self._change(node.name, status="blocked")
            elif all(status in FINISHED for status in statuses) and not self._record.steps[node.name].key:
                self._look_up(node)

    def _look_up(self, node: Node) -> None:
        material = _material(node, self._digests, self._settings)
        digest = None if node.name in self._settings.force else self._store.lookup(material.key)
        if digest:
            self._succeed(node, "cached", digest, key=material.key)
        else:
            reasons = _why_miss(node, material, self._store, self._settings)
            self._change(node.name, key=material.key, reasons=reasons)

    def _waiting(self) -> list[Node]:
        return [
            self._plan.nodes[name] for name, step in self._record.steps.items() if step.status == "waiting"
        ]

    def _launch(self) -> None:
        """Start every step that is ready, as far as CPUs, `max_parallel` and exclusiveness allow."""
        ready = [node for node in self._waiting() if self._record.steps[node.name].key]
        for node in ready:
            if self._fits(node):
                self._start(node)
        if self._server:
            self._preload(self._server)

    def _preload(self, server: ForkServer) -> None:
        """Have the server import what the steps that are still to come will need, while others run."""
        modules = {name for node in self._waiting() for name in resources_of(node.stage).preload}
        if modules - self._preloaded:
            server.preload(tuple(sorted(modules - self._preloaded)))
            self._preloaded |= modules

    def _threads(self, node: Node) -> int:
        return min(resources_of(node.stage).cpus or self._cpus, self._cpus)

    def _fits(self, node: Node) -> bool:
        running = self._running.values()
        if any(resources_of(other.node.stage).exclusive for other in running):
            return False
        if resources_of(node.stage).exclusive:
            return not running
        used = sum(other.threads for other in running)
        limit = self._settings.max_parallel or self._cpus
        return len(running) < limit and used + self._threads(node) <= self._cpus

    def _start(self, node: Node) -> None:
        material = _material(node, self._digests, self._settings)
        locks = self._locks(node, material)
        if not locks:  # look again at the next turn
            if node.name not in self._told_waiting:
                self._watcher.say(f"{node.name} waits for another run in this workspace")
                self._told_waiting.add(node.name)
            return
        digest = None if node.name in self._settings.force else self._store.lookup(material.key)
        if digest:
            _release(locks)
            self._succeed(node, "cached", digest, key=material.key)
            return
        self._change(node.name, status="running", key=material.key, started_at_s=time.time())
        delivered = self._store.incoming(node.name)
        events = self._folder / "logs" / f"{node.name}.events.jsonl"
        argument = self._job(node, material, delivered, events)
        job = self._forks.start(
            "components.__main__:run_job", argument, self._folder / "logs" / f"{node.name}.log"
        )
        self._running[job] = _Running(
            node, material, locks, delivered, EventTail(events), self._threads(node), _oom_kills()
        )
        if self._outbox:
            self._outbox.step_started(node.name, argument["config"])

    def _locks(self, node: Node, material: Material) -> tuple[Lock, ...]:
        """The right to compute this key, and to use the machine beside other runs; empty if not now."""
        computing = self._store.try_lock(material.key)
        if computing is None:
            return ()
        machine = self._store.try_machine(alone=resources_of(node.stage).exclusive)
        if machine is None:
            computing.release()
            return ()
        return computing, machine

    def _job(self, node: Node, material: Material, delivered: Path, events: Path) -> dict[str, Any]:
        """The fields of components.__main__.Job."""
        code: Code = code_of(node.run.__module__, self._settings.import_paths)
        return {
            "run": node.run_path,
            "config": node.config.model_dump(mode="json"),
            "inputs": {
                name: self._path_of(source)
                if isinstance(source, str)
                else {key: self._path_of(step) for key, step in source.items()}
                for name, source in node.inputs.items()
            },
            "out": str(delivered),
            "scratch": str(self._store.scratch(material.key)),
            "events": str(events),
            "threads": self._threads(node),
            "import_paths": self._settings.import_paths,
            "code_digest": code.digest,
            "libraries": dict(code.libraries),
        }

    def _path_of(self, step: str) -> str:
        return str(self._store.object_path(self._digests[step]))

    def _collect(self, timeout_s: float) -> None:
        """Hear from running steps: progress and metrics, then the ends of those that ended."""
        if not self._running:
            if self._waiting():  # only for other runs
                time.sleep(timeout_s)
            return
        ended = self._forks.ended(timeout_s)
        for running in self._running.values():
            self._hear(running)
        for end in ended:
            if end.job in self._running:
                self._finish(end)
        self._collect_sender(ended)

    def _hear(self, running: _Running) -> None:
        for event in running.events.read():
            if event["event"] == "progress":
                self._watcher.progressed(running.node.name, event)
            elif event["event"] == "metric" and self._outbox:
                self._outbox.metric(
                    running.node.name, event["name"], event["value"], event["index"], event["time_s"]
                )

    # ------------------------------------------------------------------------------------- how a step ended

    def _finish(self, end: Ended) -> None:
        running = self._running.pop(end.job)
        self._hear(running)
        name = running.node.name
        seconds = time.time() - self._record.steps[name].started_at_s
        self._change(name, quiet=True, seconds=seconds, peak_rss_bytes=end.peak_rss_bytes)
        try:
            if end.status == 0:
                digest = self._store.accept(running.delivered, running.material.key, running.material, name)
                self._succeed(running.node, "done", digest, key=running.material.key)
            else:
                self._fail(running, end)
        finally:
            _release(running.locks)
        if self._outbox:
            step = self._record.steps[name]
            metrics = read_manifest(self._store.object_path(step.digest)).metrics if step.digest else {}
            tags = {"artifact": step.digest} if step.digest else {"error": step.error}
            self._outbox.step_ended(name, _MLFLOW_STATUS[step.status], metrics, seconds, tags)

    def _succeed(self, node: Node, status: Status, digest: str, *, key: str) -> None:
        self._digests[node.name] = digest
        deliver = resources_of(node.stage).deliver
        if deliver:
            copy_out(self._store.open(digest), self._folder / deliver)
        self._change(node.name, status=status, digest=digest, key=key)

    def _fail(self, running: _Running, end: Ended) -> None:
        name = running.node.name
        code, message = _cause(running, end)
        interrupted = code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED) and self._stop is not None
        self._change(
            name, status="interrupted" if interrupted else "failed", error=message, exit_code=int(code)
        )
        if running.delivered.exists():  # refused by its gate, kept for a look
            place = self._folder / "rejected" / name
            place.parent.mkdir(exist_ok=True)
            shutil.move(running.delivered, place)
            self._watcher.say(f"what {name} refused is kept in {place}")

    def _interrupt(self) -> None:
        """Ask the running steps to save and stop; give them time; whatever remains is killed."""
        self._watcher.say("stopping: running steps save what they have (Ctrl-C again to kill them)")
        for job in self._running:
            self._forks.signal(job, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while self._running and time.monotonic() < deadline:
            self._collect(_POLL_S)
        for job in self._running:
            self._forks.signal(job, signal.SIGKILL)
        while self._running:
            self._collect(_POLL_S)
        for node in self._waiting():
            self._change(node.name, quiet=True, status="interrupted")

    # ---------------------------------------------------------------------------------------- book-keeping

    def _end(self) -> None:
        statuses = {step.status for step in self._record.steps.values()}
        status: Status = "done"
        if "failed" in statuses:
            status = "failed"
        elif self._stop:
            status = "interrupted"
        seconds = time.time() - self._record.started_at_s
        failure = first_failure(self._record)
        exit_code = failure[1].exit_code if failure else 128 + self._stop if self._stop else 0
        self._record = self._record.model_copy(
            update={"status": status, "seconds": seconds, "exit_code": exit_code}
        )
        self._save()
        self._end_tracking()

    def _change(self, name: str, *, quiet: bool = False, **fields: Any) -> None:
        step = self._record.steps[name].model_copy(update=fields)
        self._record = self._record.model_copy(update={"steps": {**self._record.steps, name: step}})
        if not quiet and "status" in fields:
            self._save()
            self._watcher.step_changed(name, step)

    def _save(self) -> None:
        run_record.save(self._settings.home, self._record)

    def _start_tracking(self, server: ForkServer) -> None:
        """A run in which every step is cached is not tracked: nothing was done."""
        if self._settings.tracking_uri:
            self._outbox = Outbox(self._outbox_file)
            self._outbox.run_started(self._record.id, self._record.recipe, {})
            self._sender = server.start(
                "components.tracking:main",
                {"arguments": [str(self._outbox_file), self._settings.tracking_uri, *self._unsent()]},
                self._folder / "logs" / "tracking.log",
            )

    def _unsent(self) -> list[str]:
        """The outboxes of earlier runs that MLflow has not taken whole."""
        outboxes = sorted(self._settings.home.glob(f"*/{self._outbox_file.name}"))
        return [
            str(file)
            for file in outboxes
            if file != self._outbox_file
            and not file.parent.is_symlink()
            and tracking.unsent(file, self._settings.tracking_uri)
        ]

    def _end_tracking(self) -> None:
        """Let the sender send the rest, for a bounded time. What remains is sent by a later run."""
        if not self._outbox or not self._server:
            return
        self._outbox.run_ended(_MLFLOW_STATUS[self._record.status])
        begun, told = time.monotonic(), False
        while self._sender is not None and time.monotonic() - begun < _LAST_TRACKING_S:
            self._collect_sender(self._server.ended(_POLL_S))
            if self._sender is not None and not told and time.monotonic() - begun > _TELL_AFTER_S:
                self._watcher.say("waiting for MLflow to take the last events")
                told = True
        if self._sender is not None:
            self._watcher.say(
                f"tracking: MLflow has not answered or not taken all in {_LAST_TRACKING_S:.0f} s;"
                " the next run sends the rest"
            )

    def _collect_sender(self, ended: list[Ended]) -> None:
        for end in ended:
            if end.job == self._sender:
                self._sender = None
                if end.status:
                    said = (self._folder / "logs" / "tracking.log").read_text().splitlines()[-1:]
                    self._watcher.say(f"tracking: {' '.join(said)}; they are kept for the next run")


def _release(locks: tuple[Lock, ...]) -> None:
    for lock in locks:
        lock.release()


class EventTail:
    """Reads what a running step appends to its events file."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0
        self.failure: Mapping[str, Any] | None = None

    def read(self) -> list[dict[str, Any]]:
        """The whole lines that came since the last call. The step's failure, if told, is kept aside."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        events = [json.loads(line) for line in whole.splitlines()]
        self.failure = next((event for event in events if event["event"] == "failed"), self.failure)
        return events


def _cause(running: _Running, end: Ended) -> tuple[int, str]:
    """The exit code and the sentence of a step that failed: what it said itself, or what became of it."""
    failure = running.events.failure
    if failure:
        return failure["exit_code"], failure["message"]
    if os.WIFSIGNALED(end.status):
        number = os.WTERMSIG(end.status)
        if number == signal.SIGKILL and _oom_kills() > running.oom_kills_before:
            rss_gb = end.peak_rss_bytes / 1e9
            return ExitCode.STAGE_FAILED, (
                f"the kernel killed it for lack of memory at {rss_gb:.1f} GB"
                " -> use a smaller batch or model, or a machine with more memory"
            )
        name = signal.Signals(number).name
        return ExitCode.STAGE_FAILED, f"its process was killed by {name} ({signal.strsignal(number)})"
    status = os.waitstatus_to_exitcode(end.status)
    return ExitCode.STAGE_FAILED, f"its process ended with status {status} without saying why"


def _oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory, on this machine or in this container."""
    for file in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        with contextlib.suppress(OSError):
            for line in Path(file).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return 0


def _point_latest(home: Path, run: str) -> None:
    """Make `<home>/latest` a link to the newest run."""
    part = home / f".latest.{run}"
    part.symlink_to(run)
    part.replace(home / "latest")


def first_failure(record: RunRecord) -> tuple[str, StepRecord] | None:
    """The step that failed first, and its record."""
    failed = [(name, step) for name, step in record.steps.items() if step.status == "failed"]
    return min(failed, key=lambda item: item[1].started_at_s + item[1].seconds, default=None)
