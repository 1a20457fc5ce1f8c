"""This machine as a place where releases are served, by `hpml serve` in the background.

A name is a folder: `releases/` holds bundles by their digests, `current` points at the one that is served,
and `state.json` says what is served beside it. The server opens `current`, and opens it anew when it is told
to, so that a new release takes over without a connection that is lost. Its process is found by what it
serves, so that one that was started by a rollout that was cut off is known, too. Servers do not survive a
restart of the machine: the next `hpml deploy` starts them again.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from hpml.core.atomic_files import write_text_atomic
from hpml.core.contract import Config, validate
from hpml.core.errors import StageFailed, Unavailable, UsageError
from hpml.measuring.subjects.bundle import BundleSubject
from hpml.pipelines.delivery import local_lock
from hpml.pipelines.delivery.release import Release
from hpml.pipelines.delivery.rollout import Say, Stable
from hpml.serving.rollout.figures import RELEASE_HEADER, SmokeFigures

Track = Literal["stable", "canary"]
_HOST = "127.0.0.1"
_LOOK_EVERY_S = 0.1
_GONE_S = 1.0  # a process that has just begun has no command line yet
_STOP_S = 45.0  # a server has 30 s for requests in flight
_SETTLED = {"promoting": None, "previous_then": None}  # of the state


class LocalConfig(Config):
    """How a model is served on this machine. arguments: further ones of `hpml serve`."""

    port: int = Field(default=8000, ge=1, le=65535)
    token_file: Path | None = None
    arguments: tuple[str, ...] = ()


class _State(Config):
    """What there is. Ports are those of the servers by track.

    promoting: what is taking over, until it has; with `previous_then`, what is the one before from then on.
    """

    releases: dict[Track, Release] = Field(default_factory=dict)
    tried: bool = False
    previous: Release | None = None
    promoting: Release | None = None
    previous_then: Release | None = None
    ports: dict[Track, int] = Field(default_factory=dict)


class LocalPlace:
    """Serves releases from `folder`, each as its settings say, which are those of a LocalConfig.

    ready_s: how long a server may take to get ready. smoke_s: how long a canary is asked. replay: a file of
    recorded requests, which it is sent afterwards.
    """

    def __init__(
        self,
        folder: Path,
        say: Say,
        *,
        wait_s: float,
        ready_s: float,
        smoke_s: float,
        replay: Path | None = None,
    ) -> None:
        self._folder, self._say = folder.resolve(), say
        self._wait_s, self._ready_s, self._smoke_s, self._replay = wait_s, ready_s, smoke_s, replay
        self._read: dict[Track, int] = {}  # bytes of the logs that are of before

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One rollout at a time. Raises Unavailable naming who rolls out after `wait_s`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with local_lock.held(self._folder / "lock", self._wait_s, self._say):
            self._finish()
            yield

    def _finish(self) -> None:
        """Let take over what was taking over when a rollout was cut off: it had passed."""
        state = self._state()
        if state.promoting:
            self._say(f"a rollout was cut off while {state.promoting} took over: it is finished")
            self.promote(state.promoting, state.previous_then)

    # ----------------------------------------------------------------------------------- what is there

    def stable(self) -> Stable | None:
        """What is served; by a server that is started again if it is gone."""
        state = self._state()
        release = state.releases.get("stable")
        return Stable(release, state.tried, state.previous) if release else None

    def canary(self) -> Release | None:
        """What is beside it."""
        return self._state().releases.get("canary")

    def _state(self) -> _State:
        file = self._folder / "state.json"
        try:
            return _State.model_validate_json(file.read_text())
        except FileNotFoundError:
            return _State()
        except (ValidationError, UnicodeDecodeError):
            raise StageFailed(
                f"{file} is damaged", fix=f"stop what it serves, and delete {self._folder}"
            ) from None

    def _change(self, state: _State) -> None:
        write_text_atomic(self._folder / "state.json", state.model_dump_json(indent=1) + "\n")

    # --------------------------------------------------------------------------------- what is changed

    def begin(self, release: Release) -> None:
        """Serve `release` where nothing was served before; it is not tried yet."""
        self._bring(release)
        self._stop_processes("stable")
        self._change(_State(releases={"stable": release}))
        self._point_at(release)
        self._start("stable", release)
        self._wait_until_serving(release, "stable")

    def start_canary(self, release: Release) -> None:
        """Serve `release` at a port of its own: it gets none of the traffic.

        Raises UsageError if it is to be asked with another token than the stable one, Unavailable if that
        cannot be started.
        """
        stable = self._state().releases["stable"]
        if _config(stable).token_file != _config(release).token_file:
            raise UsageError(
                "the token and the bundle cannot change together",
                why="both versions are asked in turns, with one token",
                fix=f"deploy {stable} with the new token first",
            )
        try:
            self._ensure_running(stable)
        except StageFailed as error:
            raise Unavailable(
                f"what is served cannot be started: {error.what}",
                why=error.why,
                fix="hpml undeploy, then deploy",
            ) from None
        self._bring(release)
        state = self._state()
        self._change(state.model_copy(update={"releases": {**state.releases, "canary": release}}))
        self._start("canary", release)
        self._wait_until_serving(release, "canary")

    def promote(self, release: Release, previous: Release | None) -> None:
        """Let the server open `release`; what the one before has accepted, that still answers.

        One that is to listen elsewhere, or to be asked otherwise, is started again, which takes a moment.
        """
        self._bring(release)
        state = self._state()
        former = state.releases.get("stable")
        self._change(state.model_copy(update={"promoting": release, "previous_then": previous}))
        try:
            self._take_over(release, former)
        except StageFailed:
            if former and former != release:
                self._take_over(former, release)
            self._change(self._state().model_copy(update=_SETTLED))
            raise
        update = {
            "releases": {**self._state().releases, "stable": release},
            "tried": True,
            "previous": previous,
            **_SETTLED,
        }
        self._change(self._state().model_copy(update=update))
        self._say(f"{release} answers at http://127.0.0.1:{_config(release).port}")

    def _take_over(self, release: Release, former: Release | None) -> None:
        self._point_at(release)
        if former and former.settings != release.settings:
            self._say("the server is started again: its settings are others")
            self._stop_processes("stable")
        self._ensure_running(release)
        if self._answering("stable") != release.digest:
            self._read["stable"] = (self._folder / "stable.log").stat().st_size
            self._signal("stable", signal.SIGHUP)
        self._wait_until_serving(release, "stable")

    def remove_canary(self) -> None:
        """Stop the canary, and remove the copies of all releases but what is served and the one before."""
        self._stop("canary")
        state = self._state()
        kept = {release.digest for release in (*state.releases.values(), state.previous) if release}
        for path in (self._folder / "releases").glob("*"):
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)
                self._say(f"the copy of the bundle {path.name[:12]} is removed: no rollback needs it")

    def remove(self) -> None:
        """Stop both servers, and remove the copies of bundles; the state last, which says what there is."""
        self._stop_processes("canary")
        self._stop_processes("stable")
        (self._folder / "current").unlink(missing_ok=True)
        shutil.rmtree(self._folder / "releases", ignore_errors=True)
        (self._folder / "state.json").unlink(missing_ok=True)
        self._say(f"what stays: logs, and what was seen of rollouts, in {self._folder}")

    def _bring(self, release: Release) -> None:
        """Have the bundle where nobody changes it; a copy that was changed is made anew."""
        path = self._path(release)
        if path.is_dir() and (Path(release.uri) == path or BundleSubject(folder=path).is_whole):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch, old = (path.with_name(f".{part}.{os.getpid()}") for part in ("new", "old"))
        for folder in (scratch, old):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            shutil.copytree(release.uri, scratch)
        except OSError as error:
            raise StageFailed(f"the bundle of {release} cannot be copied", why=str(error)) from None
        if path.exists():
            path.rename(old)
        scratch.rename(path)
        shutil.rmtree(old, ignore_errors=True)

    def _path(self, release: Release) -> Path:
        return self._folder / "releases" / release.digest

    def _point_at(self, release: Release) -> None:
        link = self._folder / f".current.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(self._path(release).relative_to(self._folder))
        link.replace(self._folder / "current")

    # -------------------------------------------------------------------------------------- processes

    def _ensure_running(self, release: Release) -> None:
        """Have the server run as the settings of `release` say. Raises StageFailed if it does not start."""
        if self._process("stable") and self._state().ports["stable"] == _config(release).port:
            return
        self._say("the server is not running: it is started")
        self._stop_processes("stable")
        self._start("stable", release)
        self._wait(lambda: self._answering("stable") is not None, "the server")

    def _start(self, track: Track, release: Release) -> None:
        config = _config(release)
        source = self._folder / "current" if track == "stable" else self._path(release)
        port = config.port if track == "stable" else _free_port()
        if not _is_free(port):
            raise StageFailed(
                f"port {port} is taken", why="something else listens there", fix="give another --port"
            )
        state = self._state()
        self._change(state.model_copy(update={"ports": {**state.ports, track: port}}))
        command = [sys.executable, "-m", "hpml.pipelines", "serve", str(source), "--port", str(port)]
        command += ["--token-file", str(config.token_file)] if config.token_file else []
        file = self._folder / f"{track}.log"
        command += [*config.arguments, "--log-file", str(file)]
        self._read[track] = 0
        with file.open("wb") as log:  # for what is said before it is opened
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                start_new_session=True,
            )

    def _processes(self, track: Track) -> dict[int, list[str]]:
        """The servers of a track by the numbers of their processes, with their commands."""
        release = self._state().releases.get("canary")
        served = self._folder / "current" if track == "stable" else release and self._path(release)
        found = {}
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                if folder.name.isdigit() and folder.stat().st_uid == os.getuid():
                    command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    if command[1:5] == ["-m", "hpml.pipelines", "serve", str(served)]:
                        found[int(folder.name)] = command
        return found

    def _process(self, track: Track) -> int | None:
        """That which listens where the state says; None if it is not running."""
        port = str(self._state().ports.get(track, ""))
        running = self._processes(track).items()
        return next((number for number, command in running if command[5:7] == ["--port", port]), None)

    def _signal(self, track: Track, number: signal.Signals) -> None:
        for process in self._processes(track):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def _stop_processes(self, track: Track) -> None:
        self._signal(track, signal.SIGTERM)
        if not _within(_STOP_S, lambda: not self._processes(track)):
            self._signal(track, signal.SIGKILL)

    def _stop(self, track: Track) -> None:
        self._stop_processes(track)
        state = self._state()
        kept = {
            name: {key: value for key, value in getattr(state, name).items() if key != track}
            for name in ("releases", "ports")
        }
        self._change(state.model_copy(update=kept))

    def _wait_until_serving(self, release: Release, track: Track) -> None:
        """Raises StageFailed in the server's own words if it ends, or keeps the one before."""
        self._wait(
            lambda: bool(self._process(track)) and self._answering(track) == release.digest,
            f"{release}",
            track,
        )

    def _wait(self, condition: Callable[[], bool], what: str, track: Track = "stable") -> None:
        until = time.monotonic() + self._ready_s
        seen_s = time.monotonic()
        while not condition():
            said = self._last_words(track)
            if self._process(track):
                seen_s = time.monotonic()
            if time.monotonic() - seen_s > _GONE_S or "is still served" in said:
                raise StageFailed(f"{what} does not get ready", why=said or "its server ended")
            if time.monotonic() > until:
                raise StageFailed(f"{what} does not get ready", why=f"waited {self._ready_s:.0f} s")
            time.sleep(_LOOK_EVERY_S)

    def _last_words(self, track: Track) -> str:
        log = (self._folder / f"{track}.log").read_bytes()
        begin = self._read.get(track, 0)
        said = log[begin:] if begin <= len(log) else log  # it was begun anew meanwhile
        lines = said.decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else ""

    def _answering(self, track: Track) -> str | None:
        """The digest of the release that the server answers with; None if it is not ready."""
        connection = HTTPConnection(_HOST, self._state().ports[track], timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            response = connection.getresponse()
            return response.getheader(RELEASE_HEADER) if response.status == 200 else None
        except (OSError, HTTPException):
            return None
        finally:
            connection.close()

    # ------------------------------------------------------------------------------------------ smoke

    def smoke(self, release: Release, *, beside_stable: bool) -> SmokeFigures:
        """Ask it from this process."""
        from hpml.serving.rollout.smoke import smoke

        ports = self._state().ports
        urls = {track: f"http://{_HOST}:{port}" for track, port in ports.items()}
        token_file = _config(release).token_file
        token = token_file.read_text().strip() if token_file else ""
        self._say(f"{release} is asked for {self._smoke_s:g} s, in turns with what is served")
        return smoke(
            self._path(release),
            release.digest,
            urls["canary" if beside_stable else "stable"],
            stable=urls["stable"] if beside_stable else "",
            through="" if beside_stable else urls["stable"],
            token=token,
            seconds=self._smoke_s,
            requests=self._replay,
        )


def _config(release: Release) -> LocalConfig:
    config: LocalConfig = validate(LocalConfig, release.settings, where="the settings of a release")
    return config


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True


def _is_free(port: int) -> bool:
    try:
        socket.create_server((_HOST, port)).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.create_server((_HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
