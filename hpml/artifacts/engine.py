"""An engine, as `export` and `select` write it, and its builds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue

from hpml.artifacts.folder import Artifact, copy_files
from hpml.artifacts.model_input import InputSpec
from hpml.core.contract import Config


class EngineSpec(Config):
    """What a runtime loads, with golden samples: `golden_x_nchw.npy` and `golden_logits.npy`.

    `test_logits.npy`, float32 (rows, classes), is what the engine says of the whole test split.

    variants: the same engine built otherwise, where only a measurement can say which is faster; each in a
    folder of that name, with files of the same names.
    """

    kind: Literal["engine"] = "engine"
    target: dict[str, JsonValue]  # the resolved config of the target that built it
    status: Literal["built", "not built"]
    reason: str = ""  # why it was not built
    file: str = ""  # what the runtime opens
    precision: str
    methods: tuple[str, ...]
    input: InputSpec
    class_names: tuple[str, ...]
    identity: dict[str, str] = Field(default_factory=dict)  # runtime, version, ISA or GPU it is bound to
    notes: tuple[str, ...] = ()  # choices made while building that a reader should know
    size_bytes: int = 0
    parameters: int = 0
    macs: int = 0
    accuracy_top1: float = 0.0  # measured on this engine, on the test split
    max_abs_error: float = 0.0  # of logits, against the model in torch
    top1_agreement: float = 0.0  # with the model in torch
    variants: dict[str, EngineSpec] = Field(default_factory=dict)

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
