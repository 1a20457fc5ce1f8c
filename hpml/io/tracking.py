"""Tracking of a run in MLflow, which may be slow, late or down without the run noticing.

The executor appends events to an outbox, a file of JSON lines beside the run. `main`, in a process of its
own, sends them: one MLflow run for the pipeline's run, one nested run for each step. What was accepted is
noted in a second file, so an outage delays events and loses none. Sending is repeated until it is
acknowledged, and repeating changes nothing: MLflow runs are found again by their tags, parameters and tags
are keyed, and a metric is the same point when its name, value, step and time are. So each arrives once.

    python -m hpml.io.tracking OUTBOX [EARLIER_OUTBOX ...]

Where steps run in pods, each reports itself, from an outbox of its own; see `hpml.steps.step_tracking`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.util
import json
import logging
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal
from urllib.parse import quote, unquote

from hpml.core.atomic_files import write_text_atomic
from hpml.core.contract import canonical_json
from hpml.core.errors import HpmlError, StageFailed, Unavailable, causes, explained
from hpml.core.process import die_with_parent
from hpml.io.credentials import without_credentials as without_credentials

if TYPE_CHECKING:
    from mlflow import MlflowClient

Status = Literal["FINISHED", "FAILED", "KILLED"]

_RUN_TAG, _STEP_TAG = "hpml.run", "hpml.step"
_RUN_ID = re.compile(r"[\w.:-]{1,100}", re.ASCII)
_MAX_KEY, _MAX_PARAM, _MAX_TAG = 250, 6000, 8000  # characters that MLflow accepts
_EVENTS_AT_ONCE = 100  # acknowledged together
_SQLITE = "sqlite:///"
_SETTLE_S = 5.0  # within which a sender that lost withdraws the run it made


# --------------------------------------------------------------------------------------------------- secrets

_SECRET_KEY = re.compile(
    r"(password|passwd|passphrase|secrets?|token|credentials?|authorization|(api|access|private)[-_]?key)$",
    re.IGNORECASE,
)


def flatten(values: Mapping[str, Any]) -> dict[str, str]:
    """Nested config values as MLflow parameters: {"a": {"b": 1}} gives {"a.b": "1"}.

    What a credential-like name holds is replaced by ***, and so are credentials inside URIs.
    """
    flat: dict[str, str] = {}
    for key, value in values.items():
        if _SECRET_KEY.search(key) and value not in (None, ""):
            flat[key] = "***"
            continue
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            flat |= {f"{key}.{inner}": text for inner, text in flatten(value).items()}
        else:
            text = value if isinstance(value, str) else canonical_json(value)
            flat[key] = without_credentials(text)
    return flat


def _cut(text: str, limit: int) -> str:
    mark = f"... ({len(text)} characters)"
    return text if len(text) <= limit else text[: limit - len(mark)] + mark


def _key(name: str) -> str:
    """`name` as MLflow allows names: letters, digits, and "_-. :/"."""
    return re.sub(r"[^\w\-. :/]", "-", name, flags=re.ASCII)[:_MAX_KEY]


# ---------------------------------------------------------------------------------------------------- outbox


class StoreDamaged(Unavailable):
    """The file of a local store is no whole database: no waiting mends it."""


class Outbox:
    """The events of one run, appended to a file. One process writes it; writing never waits for a server.

    run_id, name: of the run, which others may report too, and of its recipe (the experiment in MLflow).
    Times are counted by the monotonic clock from the wall clock's time now: nothing ends before it began.
    """

    def __init__(self, path: Path, run_id: str, name: str) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        with path.open("r+b") as file:  # a line that a crash cut short is no event
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
        self._run = {"run": run_id, "name": name}
        self._unwritten = b""  # while the disk is full
        self._epoch_s = time.time() - time.monotonic()

    def run_started(self, params: Mapping[str, Any], tags: Mapping[str, str]) -> None:
        """The run began, or was resumed."""
        self._write("started", "", params=flatten(params), tags=flatten(tags))

    def step_started(self, step: str, params: Mapping[str, Any]) -> None:
        """The step `step` began; `params` is its config."""
        self._write("started", step, params=flatten(params))

    def metric(self, step: str, name: str, value: float, index: int, time_s: float) -> None:
        """One point of a curve: the value of `name` at `index`, measured at `time_s` since the epoch."""
        self._write("metrics", step, metrics={name: float(value)}, index=index, time_s=time_s)

    def step_ended(
        self, step: str, status: Status, metrics: Mapping[str, float], seconds: float, tags: Mapping[str, str]
    ) -> None:
        """The step `step` ended after `seconds` with its final `metrics`."""
        figures = {**metrics, "seconds": float(seconds)}
        self._write("ended", step, status=status, metrics=figures, tags=flatten(tags))

    def run_ended(self, status: Status | None) -> None:
        """The run ended; a sender stops once it has sent this.

        status: None for what its steps say when this is sent: FAILED if one of them failed, else FINISHED.
        """
        self._write("ended", "", status=status)

    def closed(self) -> None:
        """There will be no more events, although the run goes on; a sender stops once it has sent this."""
        self._write("closed", "")

    def _write(self, event: str, step: str, **fields: Any) -> None:
        now_s = self._epoch_s + time.monotonic()
        line = json.dumps({"event": event, **self._run, "step": step, "time_s": now_s, **fields})
        self._unwritten += line.encode() + b"\n"
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                written = file.write(self._unwritten)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                written = 0
            if written == len(self._unwritten):
                self._unwritten = b""
            else:
                file.truncate(end)  # no half line; the next event brings it


def _events_in(outbox: Path) -> bytes:
    """The events as the outbox has them, a line each. One that is still being written is left out."""
    content = outbox.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _say_that_run_ended(events: bytes) -> bool:
    """Whether the last of `events` is the run's end, or says that there will be no more of it."""
    last = json.loads(events.splitlines()[-1]) if events else {"event": ""}
    return last["event"] in ("ended", "closed") and not last["step"]


def unsent(outbox: Path, tracking_uri: str) -> str:
    """The events, a line each, that the store at `tracking_uri` has not acknowledged. Imports no mlflow."""
    return _events_in(outbox)[_read_position(outbox, store_identity(tracking_uri)) :].decode()


def are_events(text: str) -> bool:
    """Whether `text`, which comes from outside, is an outbox that can be sent."""
    return bool(text) and text.endswith("\n") and all(_is_event(line) for line in text.splitlines())


def _is_event(line: str) -> bool:
    try:
        event = json.loads(line)
        return (
            event["event"] in ("started", "metrics", "ended", "closed")
            and _RUN_ID.fullmatch(event["run"]) is not None
            and all(isinstance(event[key], str) for key in ("name", "step"))
            and isinstance(event["time_s"], int | float)
            and all(isinstance(event.get(key, {}), dict) for key in ("params", "tags", "metrics"))
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _read_position(outbox: Path, store: str) -> int:
    """How many bytes of the outbox `store` has acknowledged; none if it is another store, or not known."""
    try:
        fields = json.loads(outbox.with_name(f"{outbox.name}.sent").read_text())
        return int(fields["offset"]) if fields["store"] == store else 0
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # sent again, it counts once
        return 0


def _write_position(outbox: Path, store: str, offset: int) -> None:
    position = {"store": store, "offset": offset}
    write_text_atomic(outbox.with_name(f"{outbox.name}.sent"), json.dumps(position))


# ----------------------------------------------------------------------------------------------------- store


def store_of(home: Path) -> str:
    """The URI of the local store of the workspace `home`."""
    return _sqlite_uri(home.resolve() / "mlflow.db")


def _sqlite_uri(path: Path) -> str:
    """SQLAlchemy takes what follows a ? for options, and decodes %20 and the like.

    MLflow does not decode, and makes an empty folder of the name that is written here beside the real one.
    """
    return _SQLITE + re.sub(r"%(?=[0-9A-Fa-f]{2})|\?", lambda found: quote(found[0]), str(path))


def _sqlite_path(uri: str) -> Path | None:
    return Path(unquote(uri.removeprefix(_SQLITE).partition("?")[0])) if uri.startswith(_SQLITE) else None


def store_identity(uri: str) -> str:
    """Which store `uri` leads to, without importing mlflow; "" for a SQLite file that is not there.

    A SQLite store carries a random identity, so a file that was deleted and made anew is another store.
    """
    path = _sqlite_path(uri)
    if path is None:
        return without_credentials(uri)
    if not path.is_file():
        return ""
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            row = database.execute("SELECT id FROM hpml_store").fetchone()
    except sqlite3.Error:
        return ""
    return str(row[0])


@contextlib.contextmanager
def store_lock(uri: str) -> Iterator[None]:
    """Keep other processes of this machine from a local store meanwhile; a server guards itself."""
    path = _sqlite_path(uri)
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_name(f".{path.name}.lock").open("w")
    except OSError as error:
        raise Unavailable("the MLflow store cannot be opened", why=str(error)) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ensure_store(uri: str) -> None:
    """Make the MLflow store at `uri` ready for use, its schema included.

    A new SQLite file appears whole or not at all: MLflow's own first use of one crashes when it happens in
    two processes at once, and takes a second in which others would see half a schema.
    Raises Unavailable if the store cannot be reached or written.
    """
    path = _sqlite_path(uri)
    if path is None:
        with reaching(uri):
            client(uri).search_experiments(max_results=1)
        return
    if store_identity(uri):
        return
    with store_lock(uri), reaching(uri):
        if path.exists():
            _give_identity(path)
            return
        new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            _give_identity(new)
            new.rename(path)
        finally:
            new.unlink(missing_ok=True)


def _give_identity(path: Path) -> None:
    """Have MLflow make its tables in the SQLite file, where they lack, and note an identity beside them."""
    with contextlib.closing(sqlite3.connect(path, timeout=20)) as database, database:
        # Raises sqlite3.Error at once for what MLflow would retry to open for minutes.
        database.execute("SELECT count(*) FROM sqlite_master")
        client(_sqlite_uri(path.absolute())).search_experiments(max_results=1)
        database.execute("CREATE TABLE IF NOT EXISTS hpml_store (only INTEGER PRIMARY KEY, id TEXT NOT NULL)")
        database.execute("INSERT OR IGNORE INTO hpml_store VALUES (1, ?)", (str(uuid.uuid4()),))


@contextlib.contextmanager
def reaching(uri: str) -> Iterator[None]:
    """Turn whatever a store or its client raises into one line without credentials.

    Raises StageFailed for what MLflow refuses, StoreDamaged for a local database that is, Unavailable for all
    else.
    """
    try:
        yield
    except HpmlError:
        raise
    except Exception as error:
        place = f"the MLflow store at {without_credentials(uri)}"
        cause = _root_cause(error)
        why = _cut(" ".join(without_credentials(str(cause)).split()), 300)
        if getattr(error, "error_code", "") == "INVALID_PARAMETER_VALUE":
            raise StageFailed(f"{place} refused what it got", why=why) from None
        file = _sqlite_path(uri)
        if file and type(cause) is sqlite3.DatabaseError:  # locked, full or read-only are kinds of their own
            raise StoreDamaged(
                f"{place} is damaged",
                why=why,
                fix=f"move {file} away: the next run makes a new one and sends it what all runs tracked;"
                " to save its registered versions: sqlite3 FILE .recover",
            ) from None
        fix = "check MLFLOW_TRACKING_URI and its credentials, and that the server is up; then run again"
        if file:
            fix = f"see that {file} can be read and written, and that its disk has room; then run again"
        raise Unavailable(f"{place} cannot be used", why=why or type(error).__name__, fix=fix) from None


def _root_cause(error: BaseException) -> BaseException:
    """The failure of the socket or the database behind `error`; `error` itself if there is none."""
    behind = [cause for cause in causes(error) if isinstance(cause, OSError | sqlite3.Error)]
    return behind[-1] if behind else error


def client(uri: str, *, timeout_s: int = 5, retries: int = 0) -> MlflowClient:
    """An MLflow client for `uri`. Takes seconds the first time in a process: importing mlflow does.

    timeout_s, retries: of each HTTP request, where the environment does not say it.
    """
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(timeout_s))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(retries))
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    os.environ["MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR"] = "false"
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic", "urllib3"):  # what they log, we say in one line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return MlflowClient(uri)


def experiment_id(client: MlflowClient, uri: str, name: str) -> str:
    """The id of the experiment `name`, made if it is not there. A local store keeps artifacts beside itself.

    Raises Unavailable if it was deleted.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        path = _sqlite_path(uri)
        place = (path.parent.absolute() / "mlartifacts" / name).as_uri() if path else None
        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException:  # another process was faster
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    if found.lifecycle_stage != "active":
        raise Unavailable(
            f"the MLflow experiment {name!r} is deleted",
            fix=f"restore it (mlflow experiments restore -x {found.experiment_id}) or rename the recipe",
        )
    return str(found.experiment_id)


# --------------------------------------------------------------------------------------------------- sending


@dataclass(frozen=True)
class Drained:
    """What a drain achieved.

    remaining: events not yet acknowledged. ended: whether the run's end has been sent. refused: what MLflow
    will never accept, in words (its event counts as sent). problem: why events remain. lasts: whether trying
    again is of no use.
    """

    remaining: int
    ended: bool = False
    refused: tuple[str, ...] = ()
    problem: str = ""
    lasts: bool = False


def drain(outbox: Path, tracking_uri: str, *, seconds: float = 30.0) -> Drained:
    """Send what is in `outbox` and was not sent yet; stop at the first problem, or after about `seconds`.

    Raises nothing because of the store: a problem is reported, and the events stay for the next drain.
    """
    deadline_s = time.monotonic() + seconds
    with outbox.with_name(f"{outbox.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Drained(_events_in(outbox).count(b"\n"), problem="another process is sending them")
        return _drain(outbox, tracking_uri, deadline_s)


def _drain(outbox: Path, uri: str, deadline_s: float) -> Drained:
    events = _events_in(outbox)  # more may come meanwhile
    position = _read_position(outbox, store_identity(uri))
    remaining = events[position:].splitlines(keepends=True)
    refused: list[str] = []
    try:
        if remaining:
            ensure_store(uri)
            with reaching(uri):
                sink, store = _Sink(uri), store_identity(uri)
                while remaining:
                    batch = remaining[:_EVENTS_AT_ONCE]
                    refused += sink.send([json.loads(line) for line in batch])
                    del remaining[: len(batch)]
                    position += sum(map(len, batch))
                    _write_position(outbox, store, position)
                    if remaining and time.monotonic() > deadline_s:
                        raise Unavailable("there was not enough time")
    except HpmlError as error:
        return Drained(len(remaining), False, tuple(refused), str(error), isinstance(error, StoreDamaged))
    return Drained(0, _say_that_run_ended(events), tuple(refused))


@dataclass
class _Update:
    """What some events say about one MLflow run: the pipeline's run (`step` is empty) or a step's."""

    run: str
    experiment: str
    step: str
    since_ms: int
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    points: list[tuple[str, float, int, int]] = field(default_factory=list)  # name, value, time in ms, index
    status: Status | Literal["RUNNING", "AS ITS STEPS", ""] = ""  # empty where the events say nothing of it
    until_ms: int | None = None


def _fold(events: list[dict[str, Any]]) -> list[_Update]:
    """The events as one update per MLflow run, the pipeline's run first."""
    updates: dict[tuple[str, str], _Update] = {}
    for event in events:
        run, step, time_ms = event["run"], event["step"], int(event["time_s"] * 1000)
        for part in ("", step):
            updates.setdefault((run, part), _Update(run, event["name"], part, time_ms))
        update = updates[run, step]
        update.params |= event.get("params", {})
        update.tags |= event.get("tags", {})
        for name, value in event.get("metrics", {}).items():
            update.points.append((name, value, time_ms, event.get("index", 0)))
        if event["event"] == "started":
            update.status, update.until_ms = "RUNNING", None
        elif event["event"] == "ended":
            update.status, update.until_ms = event["status"] or "AS ITS STEPS", time_ms
    return sorted(updates.values(), key=lambda update: bool(update.step))


class _Sink:
    """The MLflow runs of a pipeline's run: found by their tags, made where they are missing.

    Several senders may look for a run at the same moment, one in each pod, and each make it: all but the
    oldest are then deleted by those who made them. A run named by MLFLOW_RUN_ID is taken as the pipeline's
    own; whoever made that one also ends it.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._client = client(uri)
        self._adopted = os.environ.get("MLFLOW_RUN_ID", "")
        self._experiments: dict[str, str] = {}  # run -> experiment id
        self._runs: dict[tuple[str, str], str] = {}  # run, step -> MLflow run id

    def send(self, events: list[dict[str, Any]]) -> list[str]:
        """Send `events`; may be repeated. Returns what MLflow refuses for good, in words."""
        return [refusal for update in _fold(events) for refusal in self._apply(update)]

    def _apply(self, update: _Update) -> list[str]:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException

        mlflow_run = self._mlflow_run(update)
        parts: dict[str, Any] = {
            "params": [Param(_key(k), _cut(v, _MAX_PARAM)) for k, v in update.params.items()],
            "tags": [RunTag(_key(k), _cut(v, _MAX_TAG)) for k, v in update.tags.items()],
            "metrics": [Metric(_key(name), value, ms, index) for name, value, ms, index in update.points],
        }
        refusals = []
        for part, entries in parts.items():
            if not entries:
                continue
            try:
                self._client.log_batch(mlflow_run, **{part: entries})
            except MlflowException as error:
                if error.error_code != "INVALID_PARAMETER_VALUE":
                    raise
                self._check_still_there(mlflow_run)
                refusals.append(f"{update.step or 'the run'}: {' '.join(str(error).split())}")
        self._set_status(update, mlflow_run)
        return refusals

    def _check_still_there(self, mlflow_run: str) -> None:
        """Raise Unavailable if the run was deleted since we found it: the next drain finds the one to use."""
        if self._client.get_run(mlflow_run).info.lifecycle_stage != "active":
            raise Unavailable(f"the MLflow run {mlflow_run} was deleted meanwhile")

    def _set_status(self, update: _Update, mlflow_run: str) -> None:
        if not update.status or mlflow_run == self._adopted:
            return
        if update.status == "RUNNING":
            self._client.update_run(mlflow_run, "RUNNING")
            return
        status = self._status_of_steps(update) if update.status == "AS ITS STEPS" else update.status
        self._client.set_terminated(mlflow_run, status, update.until_ms)

    def _status_of_steps(self, update: _Update) -> Status:
        steps = (found for found in self._search(update.run) if found.data.tags.get(_STEP_TAG))
        return "FAILED" if any(step.info.status == "FAILED" for step in steps) else "FINISHED"

    def _mlflow_run(self, update: _Update) -> str:
        """The id of the MLflow run that `update` is about."""
        if update.run not in self._experiments:
            self._find(update)
        key = (update.run, update.step)
        if key not in self._runs:
            tags = {_RUN_TAG: update.run, "mlflow.runName": update.step or update.run}
            if update.step:
                tags |= {_STEP_TAG: update.step, "mlflow.parentRunId": self._runs[update.run, ""]}
            experiment = self._experiments[update.run]
            made = self._client.create_run(experiment, start_time=update.since_ms, tags=tags)
            self._runs[key] = self._agreed(update, made.info.run_id)
        return self._runs[key]

    def _agreed(self, update: _Update, ours: str) -> str:
        """The run to use, `ours` or that of another sender that made it at the same moment.

        A sender that saw ours and is younger deletes its own. One that is still there after a while had
        looked before ours was made, and goes on with its own: then ours is deleted, however old it is.
        """
        until_s = time.monotonic() + _SETTLE_S
        while True:
            found = self._search(update.run)
            ids = [str(run.info.run_id) for run in found if run.data.tags.get(_STEP_TAG, "") == update.step]
            others = [run_id for run_id in ids if run_id != ours]
            if not others:
                return ours
            if ids[0] != ours or time.monotonic() > until_s:
                self._client.delete_run(ours)
                return others[0]
            time.sleep(0.2)

    def _search(self, run: str) -> list[Any]:
        """The MLflow runs of a pipeline's run, oldest first."""
        query = f"tags.`{_RUN_TAG}` = '{run}'"
        found = self._client.search_runs([self._experiments[run]], query, max_results=10_000)
        return sorted(found, key=lambda item: (item.info.start_time, item.info.run_id))

    def _find(self, update: _Update) -> None:
        """Learn which runs of this pipeline's run the store has already."""
        if self._adopted:
            experiment = self._client.get_run(self._adopted).info.experiment_id
        else:
            experiment = experiment_id(self._client, self._uri, update.experiment)
        self._experiments[update.run] = experiment
        for found in self._search(update.run):
            self._runs.setdefault((update.run, found.data.tags.get(_STEP_TAG, "")), found.info.run_id)
        if self._adopted:
            self._runs[update.run, ""] = self._adopted


# ---------------------------------------------------------------------------------------------------- sender

_PARENT = "HPML_TRACKED_PROCESS"


def can_send() -> bool:
    """Whether mlflow is installed; the image that submits and launches is without it."""
    return importlib.util.find_spec("mlflow") is not None


def start_sender(
    outbox: Path, tracking_uri: str, earlier: Sequence[Path], *, log: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """`main` in a process of its own, which ends with this one; what it says goes to `log`, or to stderr."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "hpml.io.tracking", *map(str, (outbox, *earlier))],
        env=os.environ | {"MLFLOW_TRACKING_URI": tracking_uri, _PARENT: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=log or 2,
        stderr=log or 2,
        start_new_session=True,  # a Ctrl-C is for who started it, whose last events it still sends
    )


def main(arguments: Sequence[str]) -> None:
    """Send what is appended to the outbox named first, to MLFLOW_TRACKING_URI, until its run ended.

    The outboxes of earlier runs, named after it, are sent first, as far as something in them is unsent.
    SIGTERM ends it after a last attempt of about ten seconds. While the store does not answer, attempts get
    rarer: every second at first, every 30 s at last. What MLflow refuses, and what was not sent, goes to
    stderr. Raises SystemExit with status 6 if events remain for a later drain.
    """
    outbox, *earlier = map(Path, arguments)
    uri = os.environ["MLFLOW_TRACKING_URI"]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    for path in earlier:
        if unsent(path, uri) and not stop.is_set():
            _report(drain(path, uri))
    drained = _keep_sending(outbox, uri, stop)
    if drained.remaining:
        print(f"{drained.remaining} tracking events not sent: {drained.problem}", file=sys.stderr)
        raise SystemExit(int(Unavailable.exit_code))


def _keep_sending(outbox: Path, uri: str, stop: threading.Event) -> Drained:
    pause_s = 1.0
    while True:
        stopping = stop.is_set()
        drained = drain(outbox, uri, seconds=10.0 if stopping else 30.0)
        _report(drained)
        if drained.ended or drained.lasts or stopping:
            return drained
        pause_s = min(2 * pause_s, 30.0) if drained.problem else 1.0
        stop.wait(pause_s)


def _report(drained: Drained) -> None:
    for refusal in drained.refused:
        print(f"MLflow refused {refusal}", file=sys.stderr)


if __name__ == "__main__":
    if _PARENT in os.environ:
        die_with_parent(int(os.environ[_PARENT]), signal.SIGTERM)
    with explained():
        main(sys.argv[1:])
