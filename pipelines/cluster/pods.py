"""The pod that a step runs in, the same for a Job, a PyTorchJob and its launcher.

It is what Pod Security *restricted* allows: no root, no privileges, no token of the service account unless
asked for; the root file system is read-only, /tmp is where a step may write.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hpml.pipelines.cluster.config import ClusterConfig, StageNeeds

PART_OF = {"app.kubernetes.io/part-of": "hpml"}
RUN_LABEL, STEP_LABEL = "hpml.dev/run", "hpml.dev/step"
UID = 10001


def labels(run: str, step: str, *, queue: str = "") -> dict[str, str]:
    """The labels of everything that belongs to step `step` of run `run`."""
    return {**PART_OF, RUN_LABEL: label_value(run), STEP_LABEL: label_value(step), **queue_label(queue)}


def queue_label(queue: str) -> dict[str, str]:
    """The label of a job that Kueue is to admit to `queue`, if there is one."""
    return {"kueue.x-k8s.io/queue-name": queue} if queue else {}


def label_value(text: str) -> str:
    """`text` as Kubernetes allows the value of a label; what had to be changed is told apart by a digest."""
    return _told_apart(re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-_."), text, 63)


def object_name(*parts: str) -> str:
    """A DNS label of at most 52 characters that stands for `parts` and no others.

    52, because controllers append to a job's name what tells its pods apart.
    """
    text = "-".join(parts)
    return _told_apart(re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-"), text, 52)


def _told_apart(plain: str, text: str, most: int) -> str:
    """`plain`, with a digest of `text` where that is another text or longer than `most` characters."""
    if plain == text and len(text) <= most:
        return text
    return f"{plain[: most - 9].rstrip('-')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def owner_reference(item: Mapping[str, Any]) -> dict[str, str]:
    """How something says that the object `item` is its owner."""
    name, uid = item["metadata"]["name"], item["metadata"]["uid"]
    return {"apiVersion": item["apiVersion"], "kind": item["kind"], "name": name, "uid": uid}


def environment(cluster: ClusterConfig, run: str, recipe: str, step: str) -> dict[str, str]:
    """What a step is told by its environment: whose events it reports and where to, where the store is."""
    told = {"HPML_RUN": run, "HPML_RECIPE": recipe, "HPML_STEP": step, "HPML_STORE": cluster.store}
    return {**told, "MLFLOW_TRACKING_URI": cluster.tracking_uri} if cluster.tracking_uri else told


def pod_template(
    cluster: ClusterConfig,
    needs: StageNeeds,
    command: Sequence[str],
    *,
    labels: Mapping[str, str],
    env: Mapping[str, str],
    name: str = "step",
    account: str = "",
) -> dict[str, Any]:
    """A PodTemplateSpec that runs `command` in the image of `needs.image`.

    needs: with every default filled in, see `ClusterConfig.needs`. account: the service account whose token
    the pod gets; without one it runs as the stages' account and has no token.
    """
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "serviceAccountName": account or cluster.stage_account,
        "automountServiceAccountToken": bool(account),
        "enableServiceLinks": False,  # its variables would be configuration that nobody wrote
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": UID,
            "runAsGroup": UID,
            "fsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(cluster, needs, command, env, name)],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    if needs.gpus or name == "pytorch":  # NCCL and data loaders outgrow the 64 MB that a pod has
        memory = {"medium": "Memory", "sizeLimit": cluster.shared_memory}
        spec["volumes"].append({"name": "shm", "emptyDir": memory})
        mount = {"name": "shm", "mountPath": "/dev/shm"}  # noqa: S108 - the pod's own
        spec["containers"][0]["volumeMounts"].append(mount)
    if needs.node_selector:
        spec["nodeSelector"] = dict(needs.node_selector)
    if needs.tolerations:
        spec["tolerations"] = [toleration(item) for item in needs.tolerations]
    if cluster.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in cluster.image_pull_secrets]
    return {"metadata": {"labels": dict(labels)}, "spec": spec}


def toleration(item: Any) -> dict[str, str]:
    """A toleration as Kubernetes writes it: empty fields are left out."""
    return {name: value for name, value in item.model_dump().items() if value}


def _container(
    cluster: ClusterConfig, needs: StageNeeds, command: Sequence[str], env: Mapping[str, str], name: str
) -> dict[str, Any]:
    assert needs.image and needs.cpus and needs.memory, "the defaults are filled in"
    # Requests are limits: a pod that is guaranteed its CPUs is measured undisturbed and evicted last.
    amounts = {"cpu": f"{needs.cpus:g}", "memory": needs.memory}
    if needs.gpus:
        amounts[cluster.gpu_resource] = str(needs.gpus)
    return {
        "name": name,
        "image": cluster.image(needs.image),
        "imagePullPolicy": cluster.image_pull_policy,
        "command": [part.replace("$", "$$") for part in command],  # $(NAME) would be filled in
        "env": [{"name": key, "value": value} for key, value in sorted({"HOME": "/tmp", **env}.items())],  # noqa: S108
        "envFrom": [{"secretRef": {"name": cluster.store_secret}}],
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],  # noqa: S108 - likewise
    }
