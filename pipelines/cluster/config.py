"""The `cluster:` section of a recipe: where its steps run when they run in Kubernetes, and with what."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, StringConstraints, field_validator

from hpml.core.contract import Config
from hpml.core.needs import Family
from hpml.pipelines.stage_needs import needs_of

FAMILIES: tuple[Family, ...] = get_args(Family)

DnsLabel = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
StoreUri = Annotated[str, StringConstraints(pattern=r"^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w.=-]+)*$")]


class Toleration(Config):
    """A taint of a node that a pod accepts; fields as in Kubernetes."""

    key: str = ""
    operator: Literal["Equal", "Exists"] = "Exists"
    value: str = ""
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""


class StageNeeds(Config):
    """What the pods of one stage get; None: what `needs.py` of the stage says."""

    cpus: float | None = Field(default=None, ge=0.01)  # 0.5 is half of one
    memory: Quantity | None = None
    gpus: int = Field(default=0, ge=0, le=16)  # of the cluster's gpu_resource; of each worker, for train
    image: Family | None = None  # None: gpu for a stage with GPUs, otherwise the stage's own
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    timeout_s: int | None = Field(default=None, ge=1)

    @property
    def threads(self) -> int:
        """How many a step may use with its CPUs."""
        return max(1, int(self.cpus or 1))


class ClusterConfig(Config):
    """Where in a cluster, with which images, store and accounts; `k8s/` sets up what the defaults name."""

    namespace: DnsLabel = "hpml"
    images: dict[Family, str] = Field(default_factory=dict)  # by family; others are hpml-<family>:<version>
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: tuple[DnsLabel, ...] = ()
    store: StoreUri = "s3://hpml"  # artifacts, checkpoints, unsent tracking events
    store_secret: DnsLabel = "hpml-store"  # noqa: S105 - its name; its keys are AWS_ACCESS_KEY_ID and so on
    tracking_uri: str = "http://mlflow.hpml:5000"  # as pods see it; empty: runs are not tracked there
    stage_account: DnsLabel = "hpml-stage"
    launcher_account: DnsLabel = "hpml-launcher"
    trainer: Literal["pytorchjob", "trainjob"] = "pytorchjob"  # what makes the pods of train.nodes above 1
    gpu_resource: str = "nvidia.com/gpu"  # or a MIG profile, such as nvidia.com/mig-1g.10gb
    # Of the containers of --executor container whose step needs one: bridge, host, or one of your engine's.
    container_network: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][\w.-]*$")] = "bridge"
    shared_memory: Quantity = "1Gi"  # /dev/shm of a pod with GPUs or workers; counts as its memory
    timeout_s: int = Field(default=4 * 3600, ge=1)  # of one step
    pending_s: int = Field(default=900, ge=1)  # a pod may wait so long for its image; a training's, for room
    keep_failed_s: int = Field(default=3600, ge=0)  # how long what failed is kept for a look
    queue: str = ""  # Kueue's LocalQueue, where Kueue admits jobs
    stages: dict[str, StageNeeds] = Field(default_factory=dict)

    @field_validator("stages")
    @classmethod
    def _known(cls, stages: dict[str, StageNeeds]) -> dict[str, StageNeeds]:
        from hpml.components import STAGES

        for name in stages:
            if name not in STAGES:
                raise ValueError(f"there is no stage {name!r}, there are {', '.join(STAGES)}")
        return stages

    def needs(self, stage: str) -> StageNeeds:
        """What the pods of `stage` get, every default filled in."""
        given, row = self.stages.get(stage, StageNeeds()), needs_of(stage)
        return given.model_copy(
            update={
                "cpus": given.cpus or row.cpus or row.cluster_cpus,
                "memory": given.memory or row.memory,
                "image": given.image or ("gpu" if given.gpus else row.family),
                "timeout_s": given.timeout_s or self.timeout_s,
            }
        )

    @property
    def launcher(self) -> tuple[str, ...]:
        """The command of a train step whose workers are other pods."""
        return ("python", "-m", f"hpml.pipelines.operators.{self.trainer}")

    def image(self, family: Family) -> str:
        """The reference of the image of a family."""
        import importlib.metadata

        version = importlib.metadata.version("hpml-pipeline")
        return self.images.get(family) or f"hpml-{family}:{version}"
