"""Runs a plan by an executor: what is stored is not run again, the rest side by side, and MLflow is told."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpml.core.errors import ExitCode, HpmlError, shortened
from hpml.io import tracking
from hpml.io.relay import EventTail
from hpml.io.tracking import Outbox, store_identity
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.cache_keys import CacheKeyInputs, cache_key_inputs, code_of, explain
from hpml.pipelines.engine.run_record import FINISHED, RunRecord, Status, StepRecord
from hpml.pipelines.engine.store import copy_out
from hpml.pipelines.executors.base import Executor, StepExit, Watcher
from hpml.pipelines.plan import Node, Plan
from hpml.pipelines.stage_needs import needs_of

MOST_TOLD = 300  # characters of what is missing; the report has all
_POLL_S = 0.1
_QUIET_POLL_S = 1.0  # while a step wants the machine for itself: looking for its progress takes a CPU from it
_GRACE_S = 15.0
_LAST_TRACKING_S = 30.0
_TELL_AFTER_S = 2.0
_WITHOUT_RESULT: tuple[Status, ...] = ("failed", "blocked")
_MLFLOW_STATUS: Mapping[Status, tracking.Status] = {
    "done": "FINISHED",
    "failed": "FAILED",
    "interrupted": "KILLED",
}


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
    key_inputs: CacheKeyInputs
    held: contextlib.ExitStack  # the right to compute its key, and to use the machine
    delivered: str
    events: EventTail
    threads: int


@dataclass(frozen=True)
class Forecast:
    """What a run would do with one step: "cached", "would run", or "depends" on what comes before it.

    digest: of what is cached.
    """

    step: str
    outcome: str
    reasons: tuple[str, ...]
    digest: str = ""


def forecast(plan: Plan, settings: Settings, executor: Executor) -> list[Forecast]:
    """What a run of `plan` would find in the store of `executor`, without running anything."""
    digests: dict[str, str] = {}
    answers = []
    for node in plan.nodes.values():
        unknown = [parent for parent in node.parents() if parent not in digests]
        if unknown:
            answers.append(Forecast(node.name, "depends", (f"on what {', '.join(unknown)} will write",)))
            continue
        key_inputs = _key_inputs(plan, node, digests, settings, executor)
        digest = None if node.name in settings.force else executor.store.lookup(key_inputs.key)
        if digest:
            digests[node.name] = digest
            answers.append(Forecast(node.name, "cached", (), digest))
        else:
            reasons = _why_miss(node, key_inputs, settings, executor)
            answers.append(Forecast(node.name, "would run", reasons))
    return answers


def _key_inputs(
    plan: Plan, node: Node, digests: Mapping[str, str], settings: Settings, executor: Executor
) -> CacheKeyInputs:
    registry = store_identity(settings.registry_uri) if needs_of(node.stage).registry else ""
    return cache_key_inputs(
        node,
        node.present(digests),
        ancestors=plan.needed_for(node.name).nodes.values(),
        import_paths=settings.import_paths,
        registry=registry,
        runtime_environment=executor.runtime_environment(node.stage),
        threads=executor.threads(node.stage),
    )


def _why_miss(
    node: Node, key_inputs: CacheKeyInputs, settings: Settings, executor: Executor
) -> tuple[str, ...]:
    if node.name in settings.force:
        return ("it was forced",)
    if missing := executor.store.incomplete(key_inputs.key):
        return (f"it was incomplete: {missing}",)
    reasons = explain(key_inputs, executor.store.last_key_inputs(node.name))
    return tuple(reasons) or ("its stored result is gone or damaged",)


class Execution:
    """One run of a plan by an executor, which it closes. Use once.

    What is finished in the record that it is given is taken as it is there.
    """

    def __init__(
        self, plan: Plan, record: RunRecord, settings: Settings, watcher: Watcher, executor: Executor
    ) -> None:
        self._plan, self._settings, self._watcher = plan, settings, watcher
        self._executor, self._store = executor, executor.store
        self._record, self._begun_s = record, time.monotonic()
        self._folder = settings.home / record.id
        self._digests = {name: step.digest for name, step in record.steps.items() if step.status in FINISHED}
        self._verified: set[str] = set()  # digests of artifacts whose files were written or read in this run
        self._running: dict[int, _Running] = {}
        self._told_waiting: set[str] = set()
        self._outbox_file = self._folder / "tracking.jsonl"
        self._outbox: Outbox | None = None  # opened when the first step is really run
        self._sender: subprocess.Popen[bytes] | None = None
        self._stop: signal.Signals | None = None

    # --------------------------------------------------------------------------------------- the whole run

    def execute(self) -> RunRecord:
        """Run what is not in the store. A failed step blocks those that need it; the others go on."""
        (self._folder / "logs").mkdir(parents=True, exist_ok=True)
        if self._settings.becomes_latest:
            run_record.point_latest(self._settings.home, self._record.id)
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
                self._executor.close(self._record.status)
                if self._sender:
                    self._sender.kill()  # what it has not sent, the next run sends
        return self._record

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run in order; a second one does not wait for checkpoints."""

        def handle(number: int, _frame: object) -> None:
            if self._stop:
                for job in self._running:
                    self._executor.signal(job, signal.SIGKILL)
            self._stop = signal.Signals(number)

        old = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _unfinished(self) -> bool:
        return any(step.status in ("waiting", "running") for step in self._record.steps.values())

    # --------------------------------------------------------------------------------- from waiting to done

    def _settle(self) -> None:
        """Block what can no longer run, and take from the store what is there, until nothing changes."""
        for node in self._waiting():
            status_of = {parent: self._record.steps[parent].status for parent in node.parents()}
            if any(status_of[parent] in _WITHOUT_RESULT for parent in node.required()):
                self._change(node.name, status="blocked")
                continue
            settled = all(status in (*FINISHED, *_WITHOUT_RESULT) for status in status_of.values())
            if settled and not self._record.steps[node.name].key:
                self._look_up(node)

    def _look_up(self, node: Node) -> None:
        key_inputs = self._key_inputs(node)
        if not self._is_stored(node, key_inputs):
            reasons = _why_miss(node, key_inputs, self._settings, self._executor)
            self._change(node.name, key=key_inputs.key, reasons=reasons)

    def _is_stored(self, node: Node, key_inputs: CacheKeyInputs) -> bool:
        """Whether the result of a step is in the store; it is done then."""
        digest = None if node.name in self._settings.force else self._store.lookup(key_inputs.key)
        if digest:
            self._succeed(node, "cached", digest, key=key_inputs.key)
        return bool(digest)

    def _key_inputs(self, node: Node) -> CacheKeyInputs:
        key_inputs = _key_inputs(self._plan, node, self._digests, self._settings, self._executor)
        left_out = self._left_out(node)
        return CacheKeyInputs({**key_inputs.fields, "left out": left_out}) if left_out else key_inputs

    def _waiting(self) -> list[Node]:
        return [
            self._plan.nodes[name] for name, step in self._record.steps.items() if step.status == "waiting"
        ]

    def _launch(self) -> None:
        """Start every step that is ready, as far as CPUs, `max_parallel` and exclusiveness allow."""
        for node in self._waiting():
            if self._record.steps[node.name].key and self._fits(node):
                self._start(node)
        self._executor.prepare(tuple(self._waiting()))

    def _fits(self, node: Node) -> bool:
        running = self._running.values()
        if any(other.node.is_exclusive for other in running):
            return False
        if node.is_exclusive:
            return not running
        cpus = self._executor.cpus
        limit = self._settings.max_parallel or cpus
        if limit is not None and len(running) >= limit:
            return False
        threads = self._executor.threads(node.stage) + sum(other.threads for other in running)
        return cpus is None or threads <= cpus

    def _start(self, node: Node) -> None:
        key_inputs = self._key_inputs(node)
        held = self._store.try_begin(key_inputs.key, alone=node.is_exclusive)
        if not held:  # look again at the next turn
            if node.name not in self._told_waiting:
                self._watcher.say(f"{node.name} waits for another run in this workspace")
                self._told_waiting.add(node.name)
            return
        if self._is_stored(node, key_inputs):  # by another run, meanwhile
            held.close()
            return
        self._change(node.name, status="running", key=key_inputs.key, started_at_s=self._now_s())
        delivered = self._store.incoming(node.name)
        events = self._folder / "logs" / f"{node.name}.events.jsonl"
        argument = self._job(node, key_inputs, delivered, events)
        self._start_tracking()
        job = self._executor.start(node, argument, self._folder / "logs" / f"{node.name}.log")
        self._running[job] = _Running(
            node, key_inputs, held, delivered, EventTail(events), argument["threads"]
        )
        if self._outbox:
            self._outbox.step_started(node.name, argument["config"])

    def _job(self, node: Node, key_inputs: CacheKeyInputs, delivered: str, events: Path) -> dict[str, Any]:
        """The fields of hpml.components.__main__.Job."""
        code = code_of(node.run.__module__, self._settings.import_paths)
        return {
            "run": node.run_path,
            "config": node.config.model_dump(mode="json"),
            "inputs": node.present(
                {step: self._store.location(digest) for step, digest in self._digests.items()}
            ),
            "out": delivered,
            "scratch": self._store.scratch(key_inputs.key),
            "events": str(events),
            "threads": self._executor.threads(node.stage),
            "import_paths": self._settings.import_paths,
            "code_digest": code.digest,
            "libraries": self._executor.runtime_environment(node.stage).versions(code),
            "left_out": self._left_out(node),
            "parents": self._parents(node),
            "verified": sorted(self._verified & set(self._parents(node).values())),
        }

    def _parents(self, node: Node) -> dict[str, str]:
        """The content digest of each input that there is, by its name or name/key."""
        steps = node.sources()
        return {name: self._digests[step] for name, step in steps.items() if step in self._digests}

    def _left_out(self, node: Node) -> dict[str, str]:
        """For a step that only shows, the inputs that it has to do without, and why."""
        if not needs_of(node.stage).only_shows:
            return {}
        steps = node.sources()
        return {name: self._why_none(step) for name, step in steps.items() if step not in self._digests}

    def _why_none(self, step: str) -> str:
        """Why a step made nothing: it failed, or one that it needs did."""
        record = self._record.steps[step]
        if record.status == "failed":
            return f"step {step} failed: {record.error}"
        parents = self._plan.nodes[step].required()
        return next(self._why_none(name) for name in sorted(parents) if name not in self._digests)

    def _collect(self, timeout_s: float) -> None:
        """Hear from running steps: progress and metrics, then the ends of those that ended."""
        if not self._running:
            if self._waiting():  # only for other runs
                time.sleep(timeout_s)
            return
        alone = any(running.node.is_exclusive for running in self._running.values())
        ended = self._executor.ended(_QUIET_POLL_S if alone else timeout_s)
        for running in self._running.values():
            self._hear(running)
        for end in ended:
            if end.job in self._running:
                self._finish(end)
        self._look_after_sender()

    def _hear(self, running: _Running) -> None:
        for event in running.events.read():
            if event["event"] == "progress":
                self._watcher.progressed(running.node.name, event)
            elif event["event"] == "metric" and self._outbox:
                self._outbox.metric(
                    running.node.name, event["name"], event["value"], event["index"], event["time_s"]
                )
            elif event["event"] == "note":
                self._watcher.say(f"{running.node.name}: {event['text']}")

    # ------------------------------------------------------------------------------------- how a step ended

    def _finish(self, end: StepExit) -> None:
        running = self._running.pop(end.job)
        self._hear(running)
        name = running.node.name
        seconds = self._now_s() - self._record.steps[name].started_at_s
        self._change(name, seconds=seconds, peak_rss_bytes=end.peak_rss_bytes)
        with running.held:
            try:
                if end.exit_code == 0:
                    self._accept(running)
                else:
                    self._fail(running, end)
            except HpmlError as error:  # the step did its work, and the store did not take it
                self._change(name, status="failed", error=str(error), exit_code=int(error.exit_code))
        if self._outbox:
            step = self._record.steps[name]
            metrics = self._store.manifest(step.digest).metrics if step.digest else {}
            tags = {"artifact": step.digest} if step.digest else {"error": step.error}
            tags |= {"incomplete": step.incomplete} if step.incomplete else {}
            self._outbox.step_ended(name, _MLFLOW_STATUS[step.status], metrics, seconds, tags)

    def _accept(self, running: _Running) -> None:
        node, key = running.node, running.key_inputs.key
        digest = self._store.accept(running.delivered, key, running.key_inputs, node.name)
        manifest = self._store.manifest(digest)
        # Where the executor cannot tell the memory, the step could.
        peak_bytes = self._record.steps[node.name].peak_rss_bytes or manifest.lineage.peak_rss_bytes
        self._change(node.name, incomplete=manifest.incomplete, peak_rss_bytes=peak_bytes)
        self._verified.update(self._parents(node).values(), [digest])
        self._succeed(node, "done", digest, key=key)
        if manifest.incomplete:
            self._watcher.say(f"{node.name} is incomplete; what is missing is told when the run ends")

    def _succeed(self, node: Node, status: Status, digest: str, *, key: str) -> None:
        self._digests[node.name] = digest
        deliver = needs_of(node.stage).deliver
        if deliver:
            copy_out(self._store.open(digest), self._folder / deliver)
        self._change(node.name, status=status, digest=digest, key=key)

    def _fail(self, running: _Running, end: StepExit) -> None:
        name = running.node.name
        told = running.events.failure or {"exit_code": ExitCode.STAGE_FAILED, "message": end.cause}
        code = int(told["exit_code"])
        interrupted = code in (ExitCode.INTERRUPTED, ExitCode.TERMINATED) and self._stop is not None
        status: Status = "interrupted" if interrupted else "failed"
        self._change(name, status=status, error=told["message"], exit_code=code)
        folder = self._folder / "rejected" / name
        if self._store.keep_rejected(running.delivered, folder):
            self._watcher.say(f"what {name} refused is kept in {folder}")

    def _interrupt(self) -> None:
        """Ask the running steps to save and stop; give them time; whatever remains is killed."""
        self._watcher.say("stopping: running steps save what they have (Ctrl-C again to kill them)")
        for job in self._running:
            self._executor.signal(job, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while self._running and time.monotonic() < deadline:
            self._collect(_POLL_S)
        for job in self._running:
            self._executor.signal(job, signal.SIGKILL)
        while self._running:
            self._collect(_POLL_S)
        for node in self._waiting():
            self._change(node.name, quiet=True, status="interrupted")

    # ---------------------------------------------------------------------------------------- book-keeping

    def _now_s(self) -> float:
        """Unix time, counted from the start of the run by the monotonic clock: the wall clock may jump."""
        return self._record.started_at_s + time.monotonic() - self._begun_s

    def _end(self) -> None:
        failure = first_failure(self._record)
        status: Status = "failed" if failure else "interrupted" if self._stop else "done"
        exit_code = failure[1].exit_code if failure else 128 + self._stop if self._stop else 0
        seconds = time.monotonic() - self._begun_s
        ended = {"status": status, "seconds": seconds, "exit_code": exit_code}
        self._record = self._record.model_copy(update=ended)
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

    def _start_tracking(self) -> None:
        """When the first step is really run: if all are cached, nothing was done and nothing is tracked."""
        if self._outbox or not self._settings.tracking_uri or self._executor.tracks:
            return
        self._outbox = Outbox(self._outbox_file, self._record.id, self._record.recipe)
        self._outbox.run_started({}, {})
        with self._tracking_log.open("ab") as log:
            self._sender = tracking.start_sender(
                self._outbox_file, self._settings.tracking_uri, self._unsent(), log=log
            )

    @property
    def _tracking_log(self) -> Path:
        return self._folder / "logs" / "tracking.log"

    def _unsent(self) -> list[Path]:
        """The outboxes of earlier runs that MLflow has not taken whole."""
        outboxes = sorted(self._settings.home.glob(f"*/{self._outbox_file.name}"))
        others = [file for file in outboxes if file != self._outbox_file and not file.parent.is_symlink()]
        return [file for file in others if tracking.unsent(file, self._settings.tracking_uri)]

    def _end_tracking(self) -> None:
        """Let the sender send the rest, for a bounded time. What remains is sent by a later run."""
        if not self._outbox:
            return
        self._outbox.run_ended(_MLFLOW_STATUS[self._record.status])
        begun, told = time.monotonic(), False
        while self._sender and time.monotonic() - begun < _LAST_TRACKING_S:
            time.sleep(_POLL_S)
            self._look_after_sender()
            if self._sender and not told and time.monotonic() - begun > _TELL_AFTER_S:
                self._watcher.say("waiting for MLflow to take the last events")
                told = True
        if self._sender:
            self._watcher.say(
                f"tracking: MLflow has not answered or not taken all in {_LAST_TRACKING_S:.0f} s;"
                " the next run sends the rest"
            )

    def _look_after_sender(self) -> None:
        if self._sender and self._sender.poll() is not None:
            if self._sender.returncode:
                said = self._tracking_log.read_text().splitlines()[-1:]
                self._watcher.say(f"tracking: {' '.join(said)}; they are kept for the next run")
            self._sender = None


def first_failure(record: RunRecord) -> tuple[str, StepRecord] | None:
    """The step that failed first, and its record; of those whose failure is the run's."""
    failed = [
        (name, step) for name, step in record.steps.items() if step.status == "failed" and not step.only_shows
    ]
    return min(failed, key=lambda item: item[1].started_at_s + item[1].seconds, default=None)


def incomplete_steps(record: RunRecord) -> list[str]:
    """A sentence for each step whose result lacks something: what, and why."""
    return [
        f"{name} is incomplete: {shortened(step.incomplete, MOST_TOLD)}"
        for name, step in record.steps.items()
        if step.incomplete
    ]


def not_shown(record: RunRecord) -> list[str]:
    """A sentence for each step that failed without failing the run."""
    return [
        f"step {name} failed, which only shows; the run does not depend on it: {step.error}"
        for name, step in record.steps.items()
        if step.status == "failed" and step.only_shows
    ]
