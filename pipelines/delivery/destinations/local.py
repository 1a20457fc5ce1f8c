"""This machine: a server in the background, which another release takes over; see `delivery/local`."""

from __future__ import annotations

from pathlib import Path

from hpml.core.contract import validate_options
from hpml.pipelines.delivery import own_server
from hpml.pipelines.delivery.deploy_options import DeployOptions
from hpml.pipelines.delivery.deployable import Deployable
from hpml.pipelines.delivery.evidence import DEPLOYMENTS
from hpml.pipelines.delivery.local import LocalConfig, LocalPlace
from hpml.pipelines.delivery.release import Release
from hpml.pipelines.delivery.rollout import Say


def release(bundle: Deployable, options: DeployOptions, say: Say) -> Release:
    """`bundle` where it is; the place takes a copy. Without --port it is where the name is served by now."""
    own_server.check_can_serve(bundle, options)
    served = None if options.given("port") else place(options, bundle.home, say).stable()
    given = {
        "port": served.release.settings["port"] if served else options.port,
        "token_file": options.token_file.resolve() if options.token_file else None,
        "arguments": own_server.settings(bundle, options),
    }
    config: LocalConfig = validate_options(LocalConfig, given, where="what is given to hpml deploy")
    return bundle.released(str(bundle.folder.resolve()), config.model_dump(mode="json"))


def place(options: DeployOptions, home: Path, say: Say) -> LocalPlace:
    """The name in the workspace `home`."""
    folder = home / DEPLOYMENTS / options.name
    return LocalPlace(
        folder,
        say,
        wait_s=options.wait_s,
        ready_s=options.ready_s,
        smoke_s=options.smoke_s,
        replay=options.replay,
    )


def address(options: DeployOptions) -> str:
    """Which place that is, for the records."""
    return "local"
