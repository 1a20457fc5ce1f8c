"""The README of a bundle: what it is, how it reads pictures, and the three ways to serve it."""

from __future__ import annotations

import textwrap
from pathlib import Path

from hpml.artifacts.interval import Interval
from hpml.components.bundle.inventory import (
    GOLDEN,
    OUTPUT,
    PICTURES,
    REQUIREMENTS,
    SCRIPT,
    TRITON_SCRIPT,
    Contents,
)
from hpml.measuring.goals import COMPLETION


def readme(contents: Contents) -> str:
    """The text of README.md. Its Python snippets run as they stand, in the bundle's folder."""
    ways = [_in_python(contents), _on_a_server(contents), _from_the_registry(contents)]
    numbered = [f"## {number}. {way}" for number, way in enumerate((way for way in ways if way), 1)]
    return "\n".join([_head(contents), *_on_doubts(contents), _on_pictures(contents), *numbered])


def _head(contents: Contents) -> str:
    spec, figures = contents.spec, contents.decision.figures
    channels, height, width = spec.input.shape_chw
    settings = contents.settings or "not measured: those of its runtime's default"
    rows = [
        ("engine", f"{contents.decision.chosen}, {spec.precision}, {spec.size_bytes / 1e6:.3g} MB"),
        ("runs on", ", ".join(f"{name} {value}" for name, value in spec.identity.items())),
        ("takes", f"images of {height} x {width} with {channels} channel{'s' * (channels > 1)}, uint8"),
        ("gives", f"{len(spec.class_names)} logits, in the order of `class_names` in preprocessing.json"),
        ("top-1 accuracy", _figure(figures.accuracy_top1, "")),
        *([] if contents.runs_on_gpu else [("settings", str(settings))]),
        ("latency p50, batch 1", _figure(figures.latency_ms_p50, " ms")),
        ("latency p99, batch 1", _figure(figures.latency_ms_p99, " ms")),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    name, number = contents.version.model_name, contents.version.version
    return f"""\
# {name}, version {number}

| | |
|---|---|
{table}

Latencies hold for the machine and the settings they were measured with. Chosen: {contents.decision.reason}.

`preprocessing.json` says how pixels become the network's input, `bundle.json` what a server needs to know
and the SHA-256 of every file, `{GOLDEN["images"]}` and `{GOLDEN["logits"]}` are sample images and the answers
to expect.
{_self_check(contents)}"""


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
    if decision.unverified and contents.target.triton_platform:
        said += f" `{TRITON_SCRIPT}` refuses to place it until then, unless it is given `--unverified`."
    return [f"{textwrap.fill(said, 110)}\n"]


def _figure(interval: Interval | None, unit: str) -> str:
    if interval is None:
        return "not measured"
    return f"{interval.value:.3g}{unit} ({interval.low:.3g} to {interval.high:.3g})"


def _self_check(contents: Contents) -> str:
    if not contents.target.is_standalone:
        return ""
    return f"""
On the machine that will serve it, check it first. `{REQUIREMENTS}` has what it needs: numpy and onnxruntime,
and Pillow if it is to read pictures.

    python {SCRIPT}
"""


def _on_pictures(contents: Contents) -> str:
    facts = contents.pictures
    if facts is None:
        return """\
## Pictures

This bundle takes pixels and no picture files: when its data were prepared, it was not noted how pictures are
read.
"""
    colour = "grey (299 R + 587 G + 114 B) / 1000" if facts.mode == "L" else "RGB"
    (height, width), (within_height, within_width) = facts.size_hw, facts.fit_within_hw
    if facts.resize == "none":
        size = f"All have to be {width} x {height} (width x height), as the training pictures were."
    else:
        size = (
            f"Larger ones are shrunk in proportion into {within_width} x {within_height} (width x height,"
            f" {facts.resampling.title()}), smaller ones are not enlarged, and black around makes them"
            f" {width} x {height}."
        )
    if facts.data_from == "pictures":
        origin = f"as the training pictures were, bit for bit where Pillow is {facts.pillow}"
    else:
        origin = (
            "by convention: the training images came as arrays, not from files. Give pictures that look like"
            " them"
        )
    told = (
        f"`{PICTURES}` turns a {' or '.join(facts.formats)} file into pixels, {origin}. Pictures are turned"
        f" upright by their EXIF tag, laid on black where they are transparent, and made {colour}. {size}"
        " The facts are in preprocessing.json under `pictures`."
    )
    return f"""\
## Pictures

{textwrap.fill(told, 110)}
{_pictures_alone() if contents.target.is_standalone else _pictures_elsewhere()}"""


def _pictures_alone() -> str:
    return f"""
    python {SCRIPT} photo.jpg scan.png          the class of each, and its probability
    python {SCRIPT} --json photo.jpg scan.png   the same for programs
"""


def _pictures_elsewhere() -> str:
    return f"""
```python
import json, pathlib
from {Path(PICTURES).stem} import read

facts = json.load(open("preprocessing.json"))["pictures"]
images_nhwc = read(pathlib.Path("photo.jpg"), facts)[None]
```
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
from hpml.tasks.images import to_x_nchw
from hpml.targets import TARGETS

spec = EngineSpec.model_validate(json.loads(Path("bundle.json").read_text())["engine"])
target = TARGETS[spec.target["target"]].model_validate(spec.target)
session = target.load(Path("{contents.engine_folder}"), spec, threads={threads})
images_nhwc = np.load("{GOLDEN["images"]}")  # or yours
logits = session.predict(to_x_nchw(images_nhwc, spec.input))
print([spec.class_names[row] for row in logits.argmax(axis=1)])
```
"""


def _in_python_alone(contents: Contents) -> str:
    spec = contents.spec
    reads = ' and `Model().read("photo.jpg")`, which gives images_nhwc of a picture'
    return f"""\
In Python, with ONNX Runtime

```python
import json, os
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read when onnxruntime is imported
import numpy as np, onnxruntime

how = json.load(open("preprocessing.json"))
images_nhwc = np.load("{GOLDEN["images"]}")  # or yours
x = (images_nhwc / np.float32(255) - np.float32(how["mean"])) / np.float32(how["std"])
{_session(contents)}
[logits] = session.run(["{OUTPUT}"], {{"{spec.input.name}": np.ascontiguousarray(x.transpose(0, 3, 1, 2))}})
print([how["class_names"][row] for row in logits.argmax(axis=1)])
```

`{SCRIPT}` does the same and checks the files before it opens them: `python {SCRIPT} IMAGES.npy`, or
`from bundle import Model`, `Model().predict(images_nhwc)`{reads if contents.pictures else ""}.
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
    name, spec = contents.version.model_name, contents.spec
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

how = json.load(open("preprocessing.json"))
images_nhwc = np.load("{GOLDEN["images"]}")  # or yours
x = (images_nhwc / np.float32(255) - np.float32(how["mean"])) / np.float32(how["std"])
x_nchw = x.transpose(0, 3, 1, 2)
tensor = {{"name": "{spec.input.name}", "datatype": "FP32", "shape": x_nchw.shape}}
tensor["data"] = x_nchw.ravel().tolist()
request = urllib.request.Request(
    "http://localhost:8000/v2/models/{name}/infer",
    json.dumps({{"inputs": [tensor]}}).encode(),
    {{"Content-Type": "application/json"}},
)
[output] = json.load(urllib.request.urlopen(request))["outputs"]
logits = np.reshape(output["data"], output["shape"])
print([how["class_names"][row] for row in logits.argmax(axis=1)])
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
    name, number, file = contents.version.model_name, contents.version.version, contents.spec.file
    sha256 = contents.engine.manifest.files[file].sha256
    used = (
        "Then serve that file in way 1 or 2."
        if contents.target.triton_platform
        else "Then load it as in way 1: `folder` takes the place of the engine's folder there."
    )
    return f"""\
From the model registry

Where only the registry is at hand (`MLFLOW_TRACKING_URI` names it), fetch the engine from there and take it
only if it is this one. MLflow's own loaders are not needed; they would run code from the registry.

```python
import hashlib, pathlib
import mlflow

folder = pathlib.Path(mlflow.artifacts.download_artifacts("models:/{name}/{number}"))
engine = folder / "{file}"
if hashlib.sha256(engine.read_bytes()).hexdigest() != "{sha256}":
    raise SystemExit(f"{{engine}} is not the engine of this bundle")
print(engine)
```

{used}
"""
