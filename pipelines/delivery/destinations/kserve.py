"""KServe: an InferenceService on a ServingRuntime of our server, in either of KServe's modes.

The two split requests by different fields: https://kserve.github.io/website/docs (Knative), and
https://github.com/kserve/kserve/pull/5672 for Standard, which has it from 0.20 on.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from hpml.core import strict_yaml
from hpml.core.errors import UsageError
from hpml.pipelines.delivery import own_server
from hpml.pipelines.delivery.deploy_options import DeployOptions
from hpml.pipelines.delivery.deployable import Deployable
from hpml.targets.onnx import needs_vnni

_MODES = {"standard": "Standard", "knative": "Knative"}
_FORMAT = {"name": "hpml", "version": "2"}  # of bundle.json
_TOKEN = "/run/secrets/hpml/token"  # noqa: S105 - its path
_DRAIN_S = 10.0  # until every proxy knows that a pod is not ready
_LONGEST = 63  # characters of a host's label
_READY_MIN = 10  # for a node to fetch the image and the bundle, and the server to open it


def write(bundle: Deployable, options: DeployOptions, folder: Path) -> list[str]:
    """`kserve.yaml`; of a canary in Standard mode, its runtime and patches of the service that is there."""
    own_server.check_can_serve(bundle, options)
    _check(bundle, options)
    runtime, predictor = _runtime(bundle, options), _predictor(bundle, options)
    commands = _before(bundle, options)
    if options.canary_percent is None or options.mode == "knative":
        if options.canary_percent is not None:
            predictor["canaryTrafficPercent"] = options.canary_percent
        _dump(folder / "kserve.yaml", bundle, runtime, _service(options, predictor))
        commands += [f"kubectl apply --filename kserve.yaml{_in(options)}", _wait(options)]
        return commands if options.canary_percent is None else commands + _after_in_knative(options)
    canary = {"trafficPercent": options.canary_percent, "predictor": _canary(bundle, options)}
    promoted = {"name": bundle.revision, "model": predictor["model"]}
    _dump(folder / "runtime.yaml", bundle, runtime)
    _dump(folder / "canary.yaml", bundle, {"spec": {"canary": [canary]}})
    _dump(folder / "promote.yaml", bundle, {"spec": {"predictor": promoted, "canary": []}})
    _dump(folder / "roll-back.yaml", bundle, {"spec": {"canary": []}})
    return [
        *commands,
        f"kubectl apply --filename runtime.yaml{_in(options)}",
        _patch_by_file(options, "canary.yaml"),
        _wait(options, "CanaryPredictorReady"),
        f"# all requests, without a restart: {_patch_by_file(options, 'promote.yaml')}",
        f"# none: {_patch_by_file(options, 'roll-back.yaml')}",
    ]


def _check(bundle: Deployable, options: DeployOptions) -> None:
    """Raise UsageError for what KServe would refuse, or would not do."""
    if not options.bundle_uri:
        raise UsageError(
            "--bundle-uri is not given",
            why="the pods get the bundle from there",
            fix="give s3://BUCKET/FOLDER or pvc://CLAIM/FOLDER",
        )
    if options.port < 1024:
        raise UsageError(
            f"port {options.port} is refused",
            why="the server is no root in its pod, and may not listen there",
            fix="leave --port out: KServe serves it at port 80",
        )
    longest = max(f"{options.name}-predictor-{options.namespace}", _canary_name(bundle, options), key=len)
    if len(longest) > _LONGEST:
        raise UsageError(
            f"the name {options.name!r} is too long",
            why=f"KServe makes {longest} of it, of {len(longest)} characters, and {_LONGEST} are allowed",
            fix="give a shorter --name",
        )


def _canary_name(bundle: Deployable, options: DeployOptions) -> str:
    return f"{options.name}-{bundle.revision}-predictor"


def _runtime(bundle: Deployable, options: DeployOptions) -> dict[str, Any]:
    """How a pod serves a bundle. It is named after the version: the one that is there keeps its own."""
    return {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": {"name": _runtime_name(bundle, options), "namespace": options.namespace},
        "spec": {
            "supportedModelFormats": [{**_FORMAT, "autoSelect": False}],
            "protocolVersions": ["v2"],
            "multiModel": False,
            "containers": [_container(bundle, options)],
            "volumes": _volumes(options),
        },
    }


def _runtime_name(bundle: Deployable, options: DeployOptions) -> str:
    return f"{options.name}-{bundle.revision}"


def _container(bundle: Deployable, options: DeployOptions) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [{"name": "tmp", "mountPath": "/tmp"}]  # noqa: S108 - of the container
    if options.token_file:
        mounts.append({"name": "token", "mountPath": _TOKEN.rpartition("/")[0], "readOnly": True})
    return {
        "name": "kserve-container",
        "image": own_server.image(options),
        "args": own_server.arguments(bundle, options, "/mnt/models", token=_TOKEN, drain_s=_drain_s(options)),
        "ports": [{"containerPort": options.port, "protocol": "TCP"}],
        "resources": _resources(bundle, options),
        "readinessProbe": _probe(own_server.READY, options),
        "livenessProbe": _probe(own_server.LIVE, options),  # it is answered while the bundle is opened, too
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": mounts,
    }


def _resources(bundle: Deployable, options: DeployOptions) -> dict[str, Any]:
    """Requests are the limits, so that a pod has what the engine was measured with to itself."""
    needed = {
        "cpu": f"{own_server.cpus(bundle, options):g}",
        "memory": f"{own_server.memory_mib(bundle, options)}Mi",
    }
    if bundle.runs_on_gpu:
        needed["nvidia.com/gpu"] = "1"
    return {"requests": needed, "limits": dict(needed)}


def _probe(path: str, options: DeployOptions) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": options.port}, "periodSeconds": 5, "timeoutSeconds": 5}


def _volumes(options: DeployOptions) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}]
    if options.token_file:
        volumes.append({"name": "token", "secret": {"secretName": _secret(options)}})
    return volumes


def _secret(options: DeployOptions) -> str:
    return f"{options.name}-token"


def _model(bundle: Deployable, options: DeployOptions) -> dict[str, Any]:
    return {
        "modelFormat": _FORMAT,
        "protocolVersion": "v2",
        "runtime": _runtime_name(bundle, options),
        "storageUri": options.bundle_uri,
    }


def _predictor(bundle: Deployable, options: DeployOptions) -> dict[str, Any]:
    predictor: dict[str, Any] = {"minReplicas": options.replicas, "automountServiceAccountToken": False}
    if options.service_account:
        predictor["serviceAccountName"] = options.service_account
    if options.mode == "knative":
        predictor["maxReplicas"] = options.replicas  # without it, as many as the load asks for
    else:  # Knative refuses the field: https://github.com/kserve/kserve/issues/1723
        predictor["terminationGracePeriodSeconds"] = own_server.stop_s(_drain_s(options))
    return {**predictor, "model": _model(bundle, options)}


def _canary(bundle: Deployable, options: DeployOptions) -> dict[str, Any]:
    """What is not said is as in the service that is there; replicas: its share of those."""
    canary: dict[str, Any] = {"name": bundle.revision, "model": _model(bundle, options)}
    return canary | {"minReplicas": options.replicas} if options.given("replicas") else canary


def _service(options: DeployOptions, predictor: dict[str, Any]) -> dict[str, Any]:
    annotations = {"serving.kserve.io/deploymentMode": _MODES[options.mode]}
    if options.mode == "standard":
        annotations["serving.kserve.io/autoscalerClass"] = "none"  # a canary has a fixed number of replicas
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": options.name, "namespace": options.namespace, "annotations": annotations},
        "spec": {"predictor": predictor},
    }


def _drain_s(options: DeployOptions) -> float:
    return _DRAIN_S if options.drain_s is None else options.drain_s


def _dump(file: Path, bundle: Deployable, *documents: dict[str, Any]) -> None:
    head = f"# {bundle.title}, by hpml deploy --to kserve\n"
    file.write_text(head + "---\n".join(map(strict_yaml.dump, documents)), encoding="utf-8")


# --------------------------------------------------------------------------------------------------- commands


def _in(options: DeployOptions) -> str:
    return f" --namespace {options.namespace}"


def _before(bundle: Deployable, options: DeployOptions) -> list[str]:
    """What the pods need before they start."""
    folder = shlex.quote(str(bundle.folder.resolve()))
    if options.bundle_uri.startswith("s3://"):
        commands = [f"aws s3 sync {folder} {options.bundle_uri}"]
    else:
        claim, _, path = options.bundle_uri.removeprefix("pvc://").partition("/")
        commands = [f"# copy the files of {folder}, and no others, to {path} of the claim {claim}"]
    if options.token_file:
        file = shlex.quote(f"token={options.token_file.resolve()}")
        create = f"kubectl create secret generic {_secret(options)} --from-file {file}{_in(options)}"
        commands.append(f"{create} --dry-run=client --output yaml | kubectl apply --filename -")
    if options.canary_percent is not None:
        commands.append("# leave the folder of the version that is there: its pods read it when they start")
    if needs_vnni(bundle.facts.engine):
        commands.append("# its nodes need CPUs with VNNI (or without AVX2): on others the server refuses it")
    return commands


def _wait(options: DeployOptions, condition: str = "Ready") -> str:
    until = f"--for=condition={condition} --timeout={_READY_MIN}m"
    return f"kubectl wait inferenceservice/{options.name} {until}{_in(options)}"


def _patch_by_file(options: DeployOptions, file: str) -> str:
    return f"kubectl patch inferenceservice {options.name} --type merge --patch-file {file}{_in(options)}"


def _after_in_knative(options: DeployOptions) -> list[str]:
    """Without the field the revision gets all requests, with 0 none."""
    promoted, rolled_back = (
        shlex.quote(json.dumps({"spec": {"predictor": {"canaryTrafficPercent": percent}}}))
        for percent in (None, 0)
    )
    patch = f"kubectl patch inferenceservice {options.name} --type merge{_in(options)} --patch"
    return [f"# all requests: {patch} {promoted}", f"# none: {patch} {rolled_back}"]
