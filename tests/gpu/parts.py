"""The parts of `make test-gpu`: python parts.py PART DEVICE FOLDER runs one and writes FOLDER/PART.json.

A part returns what it found in a line, raises NotHere with what is lacking, or fails with another exception.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpml.artifacts.dataset import DatasetSpec, SplitSpec
from hpml.artifacts.folder import Artifact, Lineage, open_artifact, seal_artifact
from hpml.core import hardware, nvml
from hpml.core.contract import Config, signature
from hpml.steps.job import Job, execute, load_run
from hpml.tasks import task_of
from hpml.tasks.image_classification.task import ImageClassification

try:
    import safetensors  # noqa: F401
except ModuleNotFoundError:
    import stand_in_for_safetensors  # beside this file

    stand_in_for_safetensors.install()

CLASSES = 10
LEAST_ACCURACY = 0.5  # 0.1 is chance
REQUESTS = 50
LOAD_S = 3.0
GPU_TESTS = (
    "tests/components/peaks/test_gemm.py",
    "tests/components/targets/test_tensorrt_target.py",
    "tests/components/diagnose/test_tensorrt_profile.py",
)


class NotHere(Exception):
    """What a part lacks on this machine."""


# ------------------------------------------------------------------------------------------------ its inputs


def data(folder: Path, device: str) -> Artifact[DatasetSpec]:
    """Noise with a bright bar whose angle is the class: on a GPU 8,192 + 2 x 1,024 images of 32x32x3."""
    place = folder / "data"
    side, train, judged = (32, 8192, 1024) if device == "cuda" else (8, 512, 256)
    rows = {"train": train, "validation": judged, "test": judged}
    if not place.exists():
        place.mkdir()
        random = np.random.default_rng(0)
        splits = {}
        for split, count in rows.items():
            labels = np.arange(count) % CLASSES
            np.save(place / f"{split}_images.npy", _bars(labels, side, random))
            np.save(place / f"{split}_labels.npy", labels.astype(np.int64))
            splits[split] = SplitSpec(rows=count, class_counts=tuple(np.bincount(labels).tolist()))
        task = ImageClassification(
            class_names=tuple(str(number) for number in range(CLASSES)),
            image_shape_hwc=(side, side, 3),
            mean=(0.5,) * 3,
            std=(0.25,) * 3,
        )
        spec = DatasetSpec(
            task=task.model_dump(mode="json"),
            splits=splits,
            source="bars",
            licence="none",
        )
        seal_artifact(place, spec=spec, metrics={}, lineage=_lineage())
    return open_artifact(place, kind="dataset")


def _bars(labels: np.ndarray, side: int, random: np.random.Generator) -> np.ndarray:
    """uint8 (rows, side, side, 3)."""
    y, x = np.mgrid[0:side, 0:side] - (side - 1) / 2
    angles = labels * np.pi / CLASSES
    distance = np.abs(x * np.sin(angles)[:, None, None] - y * np.cos(angles)[:, None, None])
    images = random.integers(0, 120, (len(labels), side, side, 3))
    return (images + 120 * (distance < side / 8)[..., None]).astype(np.uint8)


def _lineage() -> Lineage:
    return Lineage(
        stage="tests.gpu",
        code_digest="",
        config=None,
        parents={},
        libraries={},
        started_at_s=0.0,
        seconds=0.0,
        peak_rss_bytes=0,
    )


def stage(name: str, config: Config, place: Path, **inputs: Artifact[Any]) -> Artifact[Any]:
    """Run a stage of the pipeline as its container does, unless it has been."""
    run = f"hpml.components.{name}.stage:run"
    if not place.exists():
        paths = {name: str(artifact.path) for name, artifact in inputs.items()}
        # One thread of a CPU: in bf16 several wait for each other by spinning, for minutes on a busy machine.
        execute(Job(run, config.model_dump(mode="json"), paths, str(place), threads=1))
    return open_artifact(place, kind=signature(load_run(run)).output_kind)


def trained(folder: Path, device: str, precision: str = "fp32", workers: int = 1) -> Artifact[Any]:
    """A network trained in this precision: a ResNet-18 on a GPU, a small one on a CPU."""
    from hpml.components.train.config import TrainConfig

    model = (
        {"architecture": "resnet18"}
        if device == "cuda"
        else {"architecture": "cnn", "arguments": {"width": 8}}
    )
    config = TrainConfig(
        model=model,
        epochs=3,
        batch_size=256 if device == "cuda" else 32,
        augment={"shift": 0.0, "rotation_degrees": 0.0, "scale": 0.0},
        device=device,
        precision=precision,
        nproc_per_node=workers,
    )
    if reason := config.unsupported_reason():
        raise NotHere(reason)
    if device == "cuda":
        _require_cuda()
        if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise NotHere(f"{torch.cuda.get_device_name()} only emulates bf16")
    name = f"model-{precision}-{workers}"
    return stage("train", config, folder / name, data=data(folder, device))


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        built = "a CPU build" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        raise NotHere(f"torch {torch.__version__} is {built} and finds no GPU")


def _require(*modules: str) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise NotHere(f"no {error.name} here") from None
        except (ImportError, OSError) as error:
            raise NotHere(f"{module} cannot be imported: {' '.join(str(error).split())[:200]}") from None


# ------------------------------------------------------------------------------------------------- the parts


def installed(folder: Path, device: str) -> str:
    """The machine and the versions that the rest is about."""
    names = (
        "torch",
        "numpy",
        "pydantic",
        "safetensors",
        "onnx",
        "onnxscript",
        "onnxruntime",
        "tensorrt",
        "pytest",
    )
    versions = []
    for name in names:
        try:
            module = sys.modules.get(name) or importlib.import_module(name)
            versions.append(f"{name} {getattr(module, '__version__', '')}".strip())
        except ImportError:
            versions.append(f"no {name}")
    identity = hardware.identity()
    gpus = f"{identity['gpus']}, driver {identity['gpu_driver']}" if identity["gpus"] else "no GPU"
    return f"{gpus}; Python {sys.version.split()[0]}, {', '.join(versions)}"


def training(precision: str, workers: int = 1) -> Callable[[Path, str], str]:
    """Of a network, with AMP where the precision is of 16 bits."""

    def run(folder: Path, device: str) -> str:
        if workers > max(1, torch.cuda.device_count()):
            raise NotHere(f"{torch.cuda.device_count()} GPU(s) here")
        model = trained(folder, device, precision, workers)
        history = json.loads(model.file("history.json").read_text())
        metrics = model.manifest.metrics
        assert history[-1]["loss"] < history[0]["loss"], history
        accuracy = model.spec.quality["accuracy_top1"]
        assert accuracy > LEAST_ACCURACY, accuracy
        return (
            f"top-1 {accuracy:.1%},"
            f" loss {history[0]['loss']:.2f} to {history[-1]['loss']:.2f},"
            f" {metrics['images_per_s']:,.0f} images/s, {metrics['gflop_per_s'] / 1e3:.2f} Tflop/s"
        )

    return run


def images(folder: Path, device: str) -> str:
    """A split that is kept on the GPU and one that is sent there batch by batch are the same."""
    from hpml.training import stored_split

    if device == "cuda":
        _require_cuda()
    dataset, where = data(folder, device), torch.device(device)
    arrays = task_of(dataset.spec.task).stored(dataset, "train")
    kept = stored_split.StoredSplit(arrays, "train", where)
    stored_split.RESIDENT_SHARE = 0.0
    sent = stored_split.StoredSplit(arrays, "train", where)
    parts = torch.randperm(len(kept)).split(256)
    begun_s = time.monotonic()
    with closing(sent.stream(parts)) as batches:
        for part, batch in zip(kept.stream(parts), batches, strict=True):
            assert all(torch.equal(part[name], batch[name]) for name in arrays)
    rate = len(kept) / (time.monotonic() - begun_s)
    return f"{kept.residence or 'read from their file'}; in batches the same, {rate:,.0f} images/s"


def exported(folder: Path, device: str, config: Config, name: str, model: Artifact[Any]) -> str:
    """An engine through its gate, and its latency at batch 1."""
    from hpml.targets import Target

    assert isinstance(config, Target)
    engine = stage("export", config, folder / name, model=model, data=data(folder, device))
    if engine.spec.status != "built":
        raise NotHere(engine.spec.reason)
    assert engine.spec.identity["device"].startswith(device), engine.spec.identity
    session = config.load(engine.path, engine.spec, threads=1)
    request = {"x_nchw": np.load(engine.file("golden_x_nchw.npy"))[:1]}
    times_ms = []
    for _ in range(REQUESTS):
        begun_s = time.perf_counter()
        session.run(request)
        times_ms.append(1e3 * (time.perf_counter() - begun_s))
    return (
        f"on {engine.spec.identity['device']}: {engine.spec.agreement:.2%} of the classes agree,"
        f" logits off by {engine.spec.max_abs_error:.2g}, p50 {np.median(times_ms):.3f} ms at batch 1"
    )


def eager(folder: Path, device: str) -> str:
    """torch itself as an engine, against the same network on the CPU."""
    from hpml.targets import Eager

    return exported(folder, device, Eager(device=device), "eager", trained(folder, device))


def peaks(folder: Path, device: str) -> str:
    """Bandwidths and matrix products, by the probes of `peaks`."""
    from hpml.components.peaks import gpu
    from hpml.components.peaks.gemm import torch_series
    from hpml.components.peaks.rounds import prepare

    if device == "cuda":
        _require_cuda()
        probes = list(gpu.probes((1024, 4096, 8192)))
    else:
        probes = [probe for series in torch_series(1) for probe in series.probes((128, 256))]
    timed, reasons = prepare(probes)
    best: dict[str, float] = {}
    for index, item in timed.items():
        point: Any = probes[index].point
        name = getattr(point, "precision", "") or f"{point.device} {point.kernel}"
        best[name] = max(best.get(name, 0.0), item.rate())
    assert best, reasons
    units = {name: "Gflop/s" if " " not in name else "GB/s" for name in best}
    absent = [f"{len(reasons)} points not measured: {next(iter(reasons.values()))}"] if reasons else []
    return "; ".join([*(f"{name} {rate:,.0f} {units[name]}" for name, rate in best.items()), *absent])


def clocks_energy(folder: Path, device: str) -> str:
    """What NVML says before and after some seconds of matrix products, and what those used."""
    from hpml.measuring.machine import gpu
    from hpml.measuring.machine.energy import gpu_counter

    with nvml.opened() as library:
        if library is None:
            raise NotHere("NVML, the driver's library, does not answer")
    _require_cuda()
    counter, source = gpu_counter()
    before, before_mj = gpu.read(), counter() if counter else 0.0
    x = torch.randn(4096, 4096, device="cuda")
    products, until_s = 0, time.monotonic() + LOAD_S
    while time.monotonic() < until_s:
        for _ in range(20):
            torch.mm(x, x)
        torch.cuda.synchronize()
        products += 20
    after = gpu.read()
    assert len(before) == len(after) > 0
    words = "; ".join(f"{name}: {told}" for name, told in gpu.describe(before, after).items())
    if counter is None:
        return f"{words}; energy not measured: {source}"
    used_mj = counter() - before_mj
    assert used_mj > 0, "the energy counter stood still under load"
    return f"{words}; {used_mj / products:,.0f} mJ a product of 4096 in fp32 ({source})"


def onnxruntime(folder: Path, device: str) -> str:
    """ONNX Runtime, by its CUDA execution provider."""
    _require("onnx", "onnxscript", "onnxruntime")
    from hpml.targets import Onnx
    from hpml.targets.onnx_session import has_cuda

    if device == "cuda" and not has_cuda():
        raise NotHere("this onnxruntime runs on CPUs only; pip install onnxruntime-gpu in its place")
    return exported(folder, device, Onnx(device=device), "onnx", trained(folder, device))


def tensorrt(precision: str) -> Callable[[Path, str], str]:
    """A plan, built twice: the second time with the timings of the first in the cache."""

    def run(folder: Path, device: str) -> str:
        from hpml.targets import TensorRT

        if missing := TensorRT().missing():
            raise NotHere("no tensorrt here" if "not installed" in missing else missing)
        _require("tensorrt", "onnx", "onnxscript")
        if precision != "fp32":
            _require("onnxruntime")  # whose tools write fp16 and Q/DQ nodes into a graph
        model = trained(folder, device)
        if precision == "int8":
            model = _quantized(folder, device, model)
        timings = folder / f"timings-{precision}"
        config = TensorRT(
            float_precision="fp32" if precision == "fp32" else "fp16", max_batch=32, timing_cache=str(timings)
        )
        begun_s = time.monotonic()
        said = exported(folder, device, config, f"tensorrt-{precision}", model)
        first_s = time.monotonic() - begun_s
        size = timings.stat().st_size
        assert size, "the timing cache is empty"
        exported(folder, device, config, f"tensorrt-{precision}-again", model)
        again_s = time.monotonic() - begun_s - first_s
        return (
            f"{said}; built in {first_s:.0f} s, again in {again_s:.0f} s with {size / 1e3:.0f} kB of timings"
        )

    return run


def _quantized(folder: Path, device: str, model: Artifact[Any]) -> Artifact[Any]:
    from hpml.components.compress.quantize import Quantize

    inputs = {"model": model, "teacher": model, "data": data(folder, device)}
    return stage("compress", Quantize(), folder / "model-int8", **inputs)


def pytest(folder: Path, device: str) -> str:
    """The tests of the suite that need a GPU and are skipped elsewhere."""
    _require("pytest", "hypothesis", "moto", "sklearn")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "gpu or plan",
        *GPU_TESTS,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
    assert done.returncode == 0, last
    return last


PARTS: dict[str, Callable[[Path, str], str]] = {
    "installed": installed,
    "training-fp32": training("fp32"),
    "training-bf16": training("bf16"),
    "training-fp16": training("fp16"),
    "training-two-gpus": training("auto", workers=2),
    "images": images,
    "eager": eager,
    "peaks": peaks,
    "clocks-energy": clocks_energy,
    "onnxruntime": onnxruntime,
    "tensorrt-fp32": tensorrt("fp32"),
    "tensorrt-fp16": tensorrt("fp16"),
    "tensorrt-int8": tensorrt("int8"),
    "pytest": pytest,
}


def main(part: str, device: str, folder: Path) -> None:
    """Run one part and write what became of it."""
    try:
        state, said = "passed", PARTS[part](folder, device)
    except NotHere as reason:
        state, said = "not run", str(reason)
    (folder / f"{part}.json").write_text(json.dumps({"state": state, "said": said}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
