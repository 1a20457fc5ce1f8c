"""`hpml deploy`: a bundle that has been checked is rolled out, or the files are written that bring it up."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpml.core.atomic_files import new_folder_beside
from hpml.core.contract import validate_options
from hpml.core.errors import ConfigInvalid, GateFailed, UsageError
from hpml.core.regular_files import sha256
from hpml.measuring.goals import COMPLETION
from hpml.pipelines.delivery.deploy_options import DeployOptions, is_name
from hpml.pipelines.delivery.deployable import Deployable
from hpml.pipelines.delivery.destinations import DESTINATIONS
from hpml.pipelines.delivery.destinations.base import COMMON, Destination, Rollouts, Writer
from hpml.pipelines.delivery.evidence import Keeper
from hpml.pipelines.delivery.rebuild import rebuilt
from hpml.pipelines.delivery.rollout import Rollout, Say
from hpml.pipelines.delivery.served_source import bundle_folder

MADE = ".hpml-deploy.json"  # what is in a folder of ours, so that it can be told from anybody else's


def deploy(
    source: str, to: str, given: Mapping[str, Any], output: Path | None, *, home: Path, say: Say
) -> list[str]:
    """Roll the bundle of `source` out; or, given `output`, write what deploys it into that folder.

    to: one of DESTINATIONS. given: the options that somebody gave, see DeployOptions.
    Returns the commands that bring it up, none after a rollout.
    Raises UsageError or ConfigInvalid for what is wrong, GateFailed for a bundle that is not verified, or
    that does not pass beside what is served; Unavailable.
    """
    destination = _destination(to)
    options = _options(given, to, destination)
    write, rollouts = destination.write, destination.rollouts
    if output is None and rollouts is None:
        raise UsageError(
            "--output is not given", why=f"{to} is brought up from files", fix="name the folder to write"
        )
    if output is not None and write is None:
        raise UsageError(f"--output means nothing to {to}", why="no files are needed", fix="leave it out")
    _check_replay(options, output)
    _check_rebuild(options)
    if output is not None:
        _check_replaceable(output.resolve())
    found = Deployable(bundle_folder(source, home), home)
    found.check()
    bundle = rebuilt(found, say) if options.rebuild else found
    _check_verified(bundle, options, is_rebuilt=bundle is not found)
    if destination.runs_here and not options.elsewhere:
        _check_hardware(bundle)
    options = options.model_copy(update={"name": options.name or _name(bundle)})
    if output is not None and write is not None:
        return _write(bundle, to, write, options, output.resolve())
    assert rollouts
    if options.replay:
        _check_requests(bundle, options.replay, options.max_batch, say)
    release = rollouts.release(bundle, options, say)
    evidence = _rollout(rollouts, options, home, say).deploy(release, options.limits, bundle.benchmark)
    if options.replay and evidence.figures is None:
        say("warning: no requests were replayed: this bundle was served already")
    return []


def rollback(name: str, to: str, given: Mapping[str, Any], *, home: Path, say: Say) -> None:
    """Serve what was served under `name` before. Raises UsageError if there is nothing, Unavailable."""
    rollouts, options = _of_name(name, to, given)
    _rollout(rollouts, options, home, say).rollback()


def undeploy(name: str, to: str, given: Mapping[str, Any], *, home: Path, say: Say) -> None:
    """Stop serving what is served under `name`. Raises UsageError if there is nothing, Unavailable."""
    rollouts, options = _of_name(name, to, given)
    _rollout(rollouts, options, home, say).undeploy()


def _of_name(name: str, to: str, given: Mapping[str, Any]) -> tuple[Rollouts, DeployOptions]:
    destination = _destination(to)
    if destination.rollouts is None:
        others = [other for other, one in DESTINATIONS.items() if one.rollouts]
        raise UsageError(f"hpml rolls nothing out to {to}", fix=f"give --to {' or '.join(others)}")
    return destination.rollouts, _options({**given, "name": name}, to, destination)


def _rollout(rollouts: Rollouts, options: DeployOptions, home: Path, say: Say) -> Rollout:
    keeper = Keeper(home, options.name, rollouts.address(options), say)
    return Rollout(rollouts.place(options, home, say), keeper.keep, say)


def _write(bundle: Deployable, to: str, write: Writer, options: DeployOptions, output: Path) -> list[str]:
    try:
        folder = new_folder_beside(output)
    except OSError as error:
        raise UsageError(
            f"{output} cannot be made", why=os.strerror(error.errno or 0), fix="give another folder"
        ) from None
    try:
        commands = write(bundle, options, folder)
        _sign(folder, {"to": to, "name": options.name, "bundle": bundle.digest})
        _replace(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [f"cd {shlex.quote(str(output))}", *commands]


def _options(given: Mapping[str, Any], to: str, destination: Destination) -> DeployOptions:
    _check_meaning(given, to, destination)
    options: DeployOptions = validate_options(
        DeployOptions, dict(given), where="what is given to hpml deploy"
    )
    return options


def _destination(to: str) -> Destination:
    if to not in DESTINATIONS:
        raise UsageError(f"there is no destination {to!r}", fix=f"give --to one of {', '.join(DESTINATIONS)}")
    return DESTINATIONS[to]


def _check_meaning(given: Mapping[str, Any], to: str, destination: Destination) -> None:
    for name in given:
        if name not in destination.options | COMMON:
            others = [other for other, one in DESTINATIONS.items() if name in one.options]
            raise UsageError(
                f"--{name.replace('_', '-')} means nothing to {to}",
                why=f"it is for {', '.join(others)}",
                fix="leave it out",
            )


def _check_rebuild(options: DeployOptions) -> None:
    if options.rebuild and options.elsewhere:
        raise UsageError(
            "--rebuild and --elsewhere are given",
            why="one builds for this machine, the other says that it will not serve",
            fix="leave one out, and give --rebuild on the machine that serves",
        )


def _check_replay(options: DeployOptions, output: Path | None) -> None:
    if options.replay and output:
        raise UsageError("--replay means nothing with --output", why="files are written, nothing is asked")
    if options.replay_agreement is not None and not options.replay:
        raise UsageError("--replay-agreement is given without --replay", fix="name the file of requests")


def _check_requests(bundle: Deployable, file: Path, max_rows: int, say: Say) -> None:
    """Raise UsageError naming the first of the recorded requests that the model does not take."""
    try:
        from hpml.serving.recording import read_requests
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--replay needs the package {error.name}", fix="pip install 'hpml-pipeline[serving]'"
        ) from None
    requests = sum(1 for _ in read_requests(file, bundle.facts.engine, max_rows=max_rows, tell=say))
    say(f"{requests:,} recorded requests are to be replayed")


def _check_verified(bundle: Deployable, options: DeployOptions, *, is_rebuilt: bool) -> None:
    measures_on = "this command again" if is_rebuilt else f"{COMPLETION}, RUN being the run that made it"
    if bundle.facts.unverified and not options.unverified:
        raise GateFailed(
            f"{bundle.title} is not verified",
            why="; ".join(bundle.facts.unverified),
            fix=f"complete it with {measures_on}, or give --unverified",
        )


def _check_hardware(bundle: Deployable) -> None:
    if why := bundle.target.foreign_reason(bundle.facts.engine):
        raise ConfigInvalid(
            f"the engine of {bundle.title} cannot run on this machine",
            why=why,
            fix="give --rebuild to build it again here, or --elsewhere if it is for one that can run it",
        )


def _name(bundle: Deployable) -> str:
    if is_name(bundle.name):
        return bundle.name
    raise UsageError(
        f"the model's name {bundle.facts.model_name!r} makes no name for a deployment",
        why="that has small letters, digits and - between them, a letter first",
        fix="give --name",
    )


# ------------------------------------------------------------------------------------------------- the folder


def _check_replaceable(folder: Path) -> None:
    """Raise UsageError unless `folder` is absent, empty, or as `_sign` left it."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        told = dict(json.loads((folder / MADE).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(
            f"{folder} is not empty",
            why="hpml deploy did not make it",
            fix="give another --output, or remove it",
        ) from None
    found = _digests(folder)
    if changed := sorted(name for name in {*told, *found} if told.get(name) != found.get(name)):
        raise UsageError(
            f"{folder} is not as hpml deploy left it",
            why=f"{changed[0]} was changed, added or removed since",
            fix="keep it elsewhere, or give another --output",
        )


def _sign(folder: Path, about: dict[str, str]) -> None:
    """Note what is in `folder`, and let whatever user a server runs as read it."""
    (folder / MADE).write_text(json.dumps({**about, "files": _digests(folder)}, indent=1) + "\n")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _digests(folder: Path) -> dict[str, str]:
    """Of all files but our own note; what is no file, such as a link or an empty folder, has none."""
    found = {}
    for path in sorted(folder.rglob("*")):
        is_plain = not path.is_symlink()
        if path == folder / MADE or (is_plain and path.is_dir() and any(path.iterdir())):
            continue
        digest = sha256(path) if is_plain and path.is_file() else ""
        found[path.relative_to(folder).as_posix()] = digest
    return found


def _replace(folder: Path, output: Path) -> None:
    """Put `folder` in the place of `output`, which is there with all of it or none."""
    before = output.with_name(f".{output.name}.{uuid.uuid4().hex}")
    if output.exists():
        output.rename(before)
    folder.rename(output)
    shutil.rmtree(before, ignore_errors=True)
