"""Write the deployable bundle and verify it in a clean process without torch."""

from __future__ import annotations

from hpml.artifacts.bundle import BundleSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.evaluation import EvaluationSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.registration import RegistrationSpec
from hpml.components.bundle.config import BundleConfig
from hpml.core.contract import Output, Result


def run(
    config: BundleConfig,
    *,
    engine: Artifact[EngineSpec],
    version: Artifact[RegistrationSpec],
    evaluation: Artifact[EvaluationSpec],
    out: Output,
) -> Result[BundleSpec]:
    """Write the bundle of `engine`, as select wrote it and register registered it as `version`.

    That of an engine that is not verified says so, and is placed on a server with --unverified only.
    Raises StageFailed if `version` is that of another engine, and GateFailed if the bundle does not answer
    its golden images as the engine did when it was exported.
    """
    from hpml.components.bundle.assemble import write_bundle

    return write_bundle(config, engine, version, evaluation, out)
