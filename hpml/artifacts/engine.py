"""An engine, as `export` and `select` write it, and its builds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, model_validator

from hpml.artifacts.dataset import of_images
from hpml.artifacts.folder import Artifact, copy_files
from hpml.artifacts.model import WeightsOrigin
from hpml.artifacts.operation import Operation
from hpml.core.contract import Config


class EngineSpec(Config):
    """What a runtime loads, with golden samples: `golden_<name>.npy` for each input and output of `predict`.

    `judged.npz` is what its answers to the whole validation split are worth, rows in front: the statistics
    of each metric, by its name, and what the task keeps of the outputs, such as all logits.

    variants: the same engine built otherwise, where only a measurement can say which is faster; each in a
    folder of that name, with files of the same names.
    """

    kind: Literal["engine"] = "engine"
    target: dict[str, JsonValue]  # the resolved config of the target that built it
    status: Literal["built", "not built"]
    reason: str = ""  # why it was not built
    file: str = ""  # what the runtime opens
    graphs: dict[str, str] = Field(default_factory=dict)  # graph -> its file, where there are several
    precision: str
    origin: WeightsOrigin | None = None  # of the weights that its network's training began with
    methods: tuple[str, ...]
    task: dict[str, JsonValue]  # see `hpml.tasks`
    operations: tuple[Operation, ...]  # as the model has them
    identity: dict[str, str] = Field(default_factory=dict)  # runtime, version, ISA or GPU it is bound to
    notes: tuple[str, ...] = ()  # choices made while building that a reader should know
    size_bytes: int = 0
    parameters: int = 0
    macs: int = 0
    quality: dict[str, float] = Field(default_factory=dict)  # metric -> its value on the validation split
    max_abs_error: float = 0.0  # of the judged output, against the model in torch
    agreement: float | None = (
        None  # share of decisions that are the model's in torch; None: it decides nothing
    )
    generation_agreement: float | None = None  # likewise of what is generated step by step
    variants: dict[str, EngineSpec] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _of_versions_before(cls, given: Any) -> Any:
        if isinstance(given, dict) and "top1_agreement" in given:
            given = {"agreement": given["top1_agreement"]} | {
                k: given[k] for k in given if k != "top1_agreement"
            }
        return of_images(given)

    def of_variant(self, name: str) -> EngineSpec:
        """The engine as it is in the folder `name`, alone; "" is the one that is not in a folder."""
        return self.variants[name] if name else self.model_copy(update={"variants": {}})


def build_of(engine: Artifact[EngineSpec], variant: str) -> Artifact[EngineSpec]:
    """The build `variant` of an engine as an artifact of its own (no golden inputs); "" is `engine`."""
    if not variant:
        return engine
    folder = f"{variant}/"
    files = {
        name.removeprefix(folder): entry
        for name, entry in engine.manifest.files.items()
        if name.startswith(folder)
    }
    manifest = engine.manifest.model_copy(update={"files": files})
    return Artifact(engine.path / variant, manifest, engine.spec.of_variant(variant))


def copy_engine(source: Artifact[EngineSpec], variant: str, folder: Path) -> EngineSpec:
    """Put one of the builds of an engine into `folder`, "" for that which is no variant; its description."""
    copy_files(source, folder)
    if variant:
        for file in (folder / variant).iterdir():
            file.replace(folder / file.name)
    for name in source.spec.variants:
        shutil.rmtree(folder / name)
    return source.spec.of_variant(variant)
