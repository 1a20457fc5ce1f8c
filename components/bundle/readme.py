"""The README of a bundle: what it is, what it takes, and the three ways to serve it."""

from __future__ import annotations

import textwrap

from hpml.artifacts.interval import Interval
from hpml.artifacts.measurements import EngineFigures
from hpml.artifacts.metric import MetricFacts
from hpml.components.bundle.inventory import REQUIREMENTS, SCRIPT, TRITON_SCRIPT, Contents
from hpml.measuring.goals import COMPLETION
from hpml.tasks import task_of
from hpml.tasks.drift.baseline import DRIFT_FILE


def readme(contents: Contents) -> str:
    """The text of README.md. Its Python snippets run as they stand, in the bundle's folder."""
    ways = [_in_python(contents), _on_a_server(contents), _from_the_registry(contents)]
    numbered = [f"## {number}. {way}" for number, way in enumerate((way for way in ways if way), 1)]
    script = SCRIPT if contents.target.is_standalone else ""
    section = contents.packaging.section(contents.spec.operations, script=script)
    return "\n".join([_head(contents), *_on_doubts(contents), section, *numbered])


def _head(contents: Contents) -> str:
    spec, figures = contents.spec, contents.decision.figures
    packaging, operation = contents.packaging, contents.spec.operations[0]
    settings = contents.settings or "not measured: those of its runtime's default"
    rows = [
        ("engine", f"{contents.decision.chosen}, {spec.precision}, {spec.size_bytes / 1e6:.3g} MB"),
        ("runs on", ", ".join(f"{name} {value}" for name, value in spec.identity.items())),
        *([("trained from", spec.origin.in_words())] if spec.origin else []),
        ("takes", packaging.takes(operation)),
        ("gives", packaging.gives(operation)),
        *(
            (f"{metric.label}, {contents.evaluation.rows:,} test rows", _quality(contents, metric))
            for metric in contents.evaluation.metrics
        ),
        *([] if contents.runs_on_gpu else [("settings", str(settings))]),
        *_latencies(figures, operation.name if contents.decision.operations else ""),
        *(
            row
            for name, one in contents.decision.operations.items()
            for row in _latencies(one.engines[contents.decision.chosen], name)
        ),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    name, number = contents.version.model_name, contents.version.version
    told = (
        f"`preprocessing.json` {packaging.facts_in_words}, `bundle.json` what a server needs to know and the"
        f" SHA-256 of every file, {packaging.samples_in_words} and the answers to expect."
    )
    if DRIFT_FILE in contents.engine.manifest.files:
        told += f" `{DRIFT_FILE}` is what a server holds requests against, to notice drift."
    if files := task_of(spec.task).files:
        told += f" Files of the task: {', '.join(f'`{contents.engine_folder}/{name}`' for name in files)}."
    return f"""\
# {name}, version {number}

| | |
|---|---|
{table}

Latencies hold for the machine and the settings they were measured with. Chosen: {contents.decision.reason}.

{textwrap.fill(told, 110)}
{_self_check(contents)}"""


def _latencies(figures: EngineFigures, operation: str) -> list[tuple[str, str]]:
    """operation: "" where there is one."""
    what = f" of `{operation}`" if operation else ""
    return [
        (f"latency {level}{what}, batch 1", _figure(getattr(figures, f"latency_ms_{level}"), " ms"))
        for level in ("p50", "p99")
    ]


def _on_doubts(contents: Contents) -> list[str]:
    """What is not known of the engine, and what completes it; nothing where all is."""
    decision = contents.decision
    doubts = [
        f"**Not verified:** {'; '.join(decision.unverified)}." if decision.unverified else "",
        f"**Not decided:** {decision.undecided}." if decision.undecided else "",
    ]
    said = " ".join(doubt for doubt in doubts if doubt)
    if not said:
        return []
    said += f" `{COMPLETION}`, RUN being the run that made this bundle, completes the measurement."
    if decision.unverified and contents.triton_platform:
        said += f" `{TRITON_SCRIPT}` refuses to place it until then, unless it is given `--unverified`."
    return [f"{textwrap.fill(said, 110)}\n"]


def _quality(contents: Contents, metric: MetricFacts) -> str:
    figure = contents.evaluation.quality[metric.name]
    low, high = metric.in_words(figure.low), metric.in_words(figure.high)
    return f"{metric.in_words(figure.value)} ({low} to {high})"


def _figure(interval: Interval | None, unit: str) -> str:
    if interval is None:
        return "not measured"
    return f"{interval.value:.3g}{unit} ({interval.low:.3g} to {interval.high:.3g})"


def _self_check(contents: Contents) -> str:
    if not contents.target.is_standalone:
        return ""
    needed = contents.packaging.needs_in_words
    return f"""
On the machine that will serve it, check it first. `{REQUIREMENTS}` has what it needs{needed}.

    python {SCRIPT}
"""


def _in_python(contents: Contents) -> str:
    if contents.target.is_standalone:
        return _in_python_alone(contents)
    threads = contents.settings.threads if contents.settings else 1
    extras = ",".join(filter(None, ("stages", contents.target.extra)))
    return f"""\
In Python

The project that built the engine (`pip install 'hpml-pipeline[{extras}]'`) loads it, on the hardware it is
bound to.

```python
import json
from pathlib import Path
import numpy as np
from hpml.artifacts.engine import EngineSpec
from hpml.targets import TARGETS

spec = EngineSpec.model_validate(json.loads(Path("bundle.json").read_text())["engine"])
target = TARGETS[spec.target["target"]].model_validate(spec.target)
session = target.load(Path("{contents.engine_folder}"), spec, threads={threads})
{contents.packaging.inputs_code()}
outputs = session.run(inputs, "{contents.spec.operations[0].name}")
{contents.packaging.answers_code()}
```
"""


def _in_python_alone(contents: Contents) -> str:
    usage = contents.packaging.usage_in_words(SCRIPT)
    return f"""\
In Python, with ONNX Runtime

```python
import json, os
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read when onnxruntime is imported
import numpy as np, onnxruntime

{contents.packaging.inputs_code()}
{_session(contents)}
names = [output.name for output in session.get_outputs()]
outputs = dict(zip(names, session.run(names, inputs)))
{contents.packaging.answers_code()}
```

`{SCRIPT}` does the same and checks the files before it opens them: {usage}.
"""


def _session(contents: Contents) -> str:
    """Python that opens the engine, with the settings it was measured with."""
    provider = "CUDAExecutionProvider" if contents.runs_on_gpu else "CPUExecutionProvider"
    lines, given = [], ""
    if contents.settings:
        lines = [
            "options = onnxruntime.SessionOptions()",
            f"options.intra_op_num_threads = {contents.settings.threads}",
        ]
        given = "options, "
        if contents.settings.spinning is not None:
            entry = f'"session.intra_op.allow_spinning", "{int(contents.settings.spinning)}"'
            lines.append(f"options.add_session_config_entry({entry})")
    opened = f'onnxruntime.InferenceSession("{contents.file}", {given}providers=["{provider}"])'
    return "\n".join([*lines, f"session = {opened}"])


def _on_a_server(contents: Contents) -> str:
    if not contents.target.triton_platform:
        return ""
    if not contents.triton_platform:
        files = " and ".join(contents.spec.graphs.values())
        return f"""\
On a server

There is no model repository for NVIDIA Triton here: a model of its is one graph, and this engine has
{len(contents.spec.graphs)}, {files}. Let a program serve it that opens it as in way 1.
"""
    name = contents.version.model_name
    gpus = " --gpus=all" if contents.runs_on_gpu else ""
    return f"""\
On a server that speaks the Open Inference Protocol

`model_repository/` is a model repository of NVIDIA Triton, `config.pbtxt` included. Let
TRITON_IMAGE be the server's image in NVIDIA's catalogue, of a release whose runtime is not older than the one
the engine was built with (above). No server was started when this bundle was made: what was checked is the
engine and its answers.

    docker run --rm -p 8000:8000{gpus} -v "$PWD/model_repository:/models:ro" \\
      "$TRITON_IMAGE" tritonserver --model-repository=/models
{_threads_of_triton(contents)}
To serve it beside other versions of the model, place it into the repository that the server has:

    python {TRITON_SCRIPT} REPOSITORY

It becomes version {contents.version.version} there, as in the model registry. Nothing that is there is
replaced, and what does not fit is refused.
{_which_versions(contents)}

In KServe, copy `model_repository/` to storage that the cluster reads, and name that folder as `storageUri` of
an InferenceService with `modelFormat: {{name: {contents.target.target}}}` and `runtime: kserve-tritonserver`.

Either answers requests like this:

```python
import json, urllib.request
import numpy as np

{contents.packaging.inputs_code()}
datatypes = {{one["name"]: one["datatype"] for one in json.load(open("bundle.json"))["inputs"]}}
tensors = [
    {{"name": name, "datatype": datatypes[name], "shape": array.shape, "data": array.ravel().tolist()}}
    for name, array in inputs.items()
]
request = urllib.request.Request(
    "http://localhost:8000/v2/models/{name}/infer",
    json.dumps({{"inputs": tensors}}).encode(),
    {{"Content-Type": "application/json"}},
)
answer = json.load(urllib.request.urlopen(request))["outputs"]
outputs = {{one["name"]: np.reshape(one["data"], one["shape"]) for one in answer}}
{contents.packaging.answers_code()}
```
"""


def _threads_of_triton(contents: Contents) -> str:
    """What `config.pbtxt` says of threads, and what it cannot say."""
    settings = contents.settings
    if settings is None:
        return ""
    told = f"`config.pbtxt` gives the engine the {str(settings).partition(',')[0]} that it was measured with."
    if settings.spinning is False:
        told += (
            " That its waiting threads sleep rather than spin cannot be said there: Triton's ONNX Runtime"
            " backend has no parameter for it. They spin, and the latency is not the one above."
        )
    return f"\n{textwrap.fill(told, 110)}\n"


def _which_versions(contents: Contents) -> str:
    name, number = contents.version.model_name, contents.version.version
    if contents.config.serve_versions == "latest":
        return "Triton serves the highest version (`version_policy` in `config.pbtxt`)."
    return f"""\
Triton serves all versions (`version_policy` in `config.pbtxt`): this one is
`/v2/models/{name}/versions/{number}/infer`, and requests that name no version get the highest."""


def _from_the_registry(contents: Contents) -> str:
    name, number = contents.version.model_name, contents.version.version
    files = list(contents.spec.graphs.values()) or [contents.spec.file]
    digests = {file: contents.engine.manifest.files[file].sha256 for file in files}
    if contents.triton_platform:
        used = "Then serve that file in way 1 or 2."
    else:
        used = "Then load it as in way 1: `folder` takes the place of the engine's folder there."
    return f"""\
From the model registry

Where only the registry is at hand (`MLFLOW_TRACKING_URI` names it), fetch the engine from there and take it
only if it is this one. MLflow's own loaders are not needed; they would run code from the registry.

```python
import hashlib, pathlib
import mlflow

folder = pathlib.Path(mlflow.artifacts.download_artifacts("models:/{name}/{number}"))
for name, sha256 in {digests}.items():
    engine = folder / name
    if hashlib.sha256(engine.read_bytes()).hexdigest() != sha256:
        raise SystemExit(f"{{engine}} is not the engine of this bundle")
    print(engine)
```

{used}
"""
