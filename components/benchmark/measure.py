"""The benchmark: start the engines, time them, compute the figures, write the samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from components.artifacts import Artifact, DatasetSpec, EngineSpec
from components.benchmark.engine_process import EngineProcess
from components.benchmark.environment import Pressure, describe
from components.benchmark.figures import best_fp32, figures
from components.benchmark.protocol import Latencies, batch_sizes, time_rounds, warm_up
from components.benchmark.stage import BenchmarkConfig
from components.contract import Output, Result
from components.errors import ConfigInvalid, StageFailed
from components.measurements import Conditions, MeasurementsSpec

_POOL_IMAGES = 64  # distinct test images that the requests cycle through, more where a batch needs more

Engines = Mapping[str, Artifact[EngineSpec]]


def measure(
    config: BenchmarkConfig, engines: Engines, data: Artifact[DatasetSpec], out: Output
) -> Result[MeasurementsSpec]:
    """Time all built engines and describe all; see `components.benchmark.stage.run`."""
    _check_reference(config.reference, engines)
    threads = config.threads or out.threads
    environment = describe()
    with _started(engines, config, data, threads, out.scratch) as (processes, harness_us):
        warm_up(processes, config)
        before = Pressure.read()
        latencies = time_rounds(processes, config, out)
        after = Pressure.read()
    _write_samples(out.path / "samples.npz", latencies)
    fastest_fp32 = best_fp32(engines, latencies, reference=config.reference)
    described = figures(
        engines,
        latencies,
        data=data.spec,
        batch_sizes=tuple(sorted(set(config.batch_sizes))),
        reference=config.reference,
        fastest_fp32=fastest_fp32,
        seed=config.seed,
    )
    spec = MeasurementsSpec(
        reference=config.reference,
        best_fp32=fastest_fp32,
        engines=described,
        rounds=len(latencies[config.reference][1]),
        requests_per_round=config.requests_per_round,
        threads=threads,
        seed=config.seed,
        environment=environment,
        harness_us_per_request=harness_us,
        conditions=Conditions(cpu_pressure=after.share_since(before) if before and after else None),
    )
    return Result(spec, metrics=_metrics(spec))


def _check_reference(reference: str, engines: Engines) -> None:
    if reference not in engines:
        raise ConfigInvalid(
            f"benchmark.reference is {reference!r}",
            why="the run has no such engine",
            fix=f"name one of {', '.join(engines)}",
        )
    spec = engines[reference].spec
    if spec.status != "built":
        raise StageFailed(f"the reference engine {reference!r} was not built", why=spec.reason)


@contextmanager
def _started(
    engines: Engines, config: BenchmarkConfig, data: Artifact[DatasetSpec], threads: int, scratch: Path
) -> Iterator[tuple[dict[str, EngineProcess], float]]:
    """The processes of the built engines, loaded and checked, and what timing costs (us a request)."""
    built = {name: engine for name, engine in engines.items() if engine.spec.status == "built"}
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(EngineProcess(name, scratch / f"engine-{index}.log"))
            for index, name in enumerate(built)
        }
        for name, process in processes.items():
            process.send(
                "load",
                "loading",
                folder=str(built[name].path.resolve()),
                data=str(data.path.resolve()),
                rows=_input_rows(config, data),
                batch_sizes=batch_sizes(config),
                threads=threads,
                golden_tolerance=config.golden_tolerance,
            )
        loaded = [process.receive() for process in processes.values()]
        yield processes, max(reply["harness_us_per_request"] for reply in loaded)


def _input_rows(config: BenchmarkConfig, data: Artifact[DatasetSpec]) -> list[int]:
    """Test rows that all engines get as inputs, in this order; repeated where a batch outnumbers them."""
    rows = np.random.default_rng(config.seed).permutation(data.spec.splits["test"].rows)
    wanted = max(max(batch_sizes(config)), min(_POOL_IMAGES, len(rows)))
    return [int(row) for row in np.resize(rows, wanted)]


def _write_samples(path: Path, latencies: Latencies) -> None:
    arrays = {
        f"{name}@{batch}": latency_ms
        for name, of_batch in latencies.items()
        for batch, latency_ms in of_batch.items()
    }
    np.savez(path, allow_pickle=False, **arrays)


def _metrics(spec: MeasurementsSpec) -> dict[str, float]:
    """For the tracker: latency and speed-up of each engine."""
    metrics = {}
    for name, engine in spec.engines.items():
        for figure in ("latency_ms_p50", "latency_ms_p99", "speedup_vs_reference"):
            interval = getattr(engine, figure)
            if interval is not None:
                metrics[f"{figure}/{name}"] = interval.value
    return metrics
