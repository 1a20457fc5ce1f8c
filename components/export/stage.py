"""Build an engine of a model for one target, and refuse it unless it agrees with the model."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.core.contract import Output, Result
from hpml.targets import TOLERANCES, AnyTarget, Built, NotBuilt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hpml.targets import Target

GOLDEN_ROWS = 16


def run(
    config: AnyTarget, *, model: Artifact[ModelSpec], data: Artifact[DatasetSpec], out: Output
) -> Result[EngineSpec]:
    """Write an engine, its golden samples, and its logits on the test split.

    The engine is loaded again as its users will load it and compared with the model in torch over the whole
    test split; beyond the target's tolerance the artifact is rejected. The same holds for each variant of it;
    one that fails is left out. Where there is no model, or the machine lacks what the target needs, the
    artifact says so and holds no engine.
    """
    import numpy as np

    unbuilt = _describe(config, model.spec)
    missing = model.spec.reason or config.missing()
    built = NotBuilt(missing) if missing else config.build(model, data, out)
    if isinstance(built, NotBuilt):
        return Result(unbuilt.model_copy(update={"reason": built.reason}))
    examination = _Examination(config, unbuilt, _TorchReference.of(model, data), out.threads)
    variants, notes = {}, []
    for name, variant in built.variants.items():
        result = examination.of(variant, out.path / name)
        if result.rejected:
            shutil.rmtree(out.path / name)
            notes.append(f"there is no build with {name.replace('-', ' ')}: {result.rejected}")
        else:
            variants[name] = result.spec
    result = examination.of(built, out.path)
    np.save(out.path / "golden_x_nchw.npy", examination.truth.golden_x_nchw)
    more = {"variants": variants, "notes": (*built.notes, *notes)}
    return replace(result, spec=result.spec.model_copy(update=more))


def _describe(config: Target, model: ModelSpec) -> EngineSpec:
    return EngineSpec(
        target=config.model_dump(mode="json"),
        status="not built",
        precision="int8" if model.quantization else "fp32",
        methods=model.methods,
        input=model.input,
        class_names=model.class_names,
        parameters=model.parameters,
        macs=model.macs,
    )


@dataclass(frozen=True)
class _TorchReference:
    """The test split, what the network in torch says of it, and the golden samples among its images."""

    images_nhwc: NDArray[np.uint8]
    labels: NDArray[np.int64]
    logits: NDArray[np.float32]
    golden_x_nchw: NDArray[np.float32]

    @classmethod
    def of(cls, model: Artifact[ModelSpec], data: Artifact[DatasetSpec]) -> _TorchReference:
        """That of `model` on `data`."""
        import numpy as np

        from hpml import models
        from hpml.tasks.images import load_split, to_x_nchw
        from hpml.training.loop import evaluate

        images_nhwc, labels = load_split(data, "test")
        logits = evaluate(models.load(model), data, model.spec.input)
        # Spread over the split: a folder of images is sorted by class.
        rows = np.linspace(0, len(images_nhwc) - 1, GOLDEN_ROWS).astype(int)
        return cls(images_nhwc, labels, logits, to_x_nchw(images_nhwc[rows], model.spec.input))


@dataclass(frozen=True)
class _Examination:
    """Describes and judges what was built of one model."""

    config: Target
    unbuilt: EngineSpec
    truth: _TorchReference
    threads: int

    def of(self, built: Built, folder: Path) -> Result[EngineSpec]:
        """The engine in `folder`, and there what it says of the golden samples and of the test split."""
        import numpy as np

        from hpml.components.export.gate import compare, objections
        from hpml.tasks.images import predict_split

        files = (file for file in folder.iterdir() if file.is_file() and file.name not in built.companions)
        spec = self.unbuilt.model_copy(
            update={
                "status": "built",
                "file": built.file,
                "precision": built.precision,
                "identity": built.identity,
                "notes": built.notes,
                "size_bytes": sum(file.stat().st_size for file in files),
            }
        )
        # Other steps run beside this one: threads that spin would take their CPUs.
        session = self.config.load(folder, spec, threads=self.threads, spinning=False)
        logits = predict_split(session.predict, self.truth.images_nhwc, spec.input)
        np.save(folder / "test_logits.npy", logits)
        np.save(folder / "golden_logits.npy", session.predict(self.truth.golden_x_nchw))
        agreement = compare(logits, self.truth.logits, self.truth.labels)
        told = ("accuracy_top1", "max_abs_error", "top1_agreement")
        spec = spec.model_copy(update={name: getattr(agreement, name) for name in told})
        tolerance = self.config.tolerance.or_else(TOLERANCES[built.precision])
        metrics = {**asdict(agreement), "size_bytes": float(spec.size_bytes)}
        return Result(spec, metrics, rejected=objections(agreement, tolerance))
