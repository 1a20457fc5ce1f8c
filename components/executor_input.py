"""A step of Kubeflow Pipelines v2: what its launcher passes as `{{$}}`, and what it reads back.

The launcher has put input artifacts on this machine's disk, uploads what lies at the paths of the output
artifacts, and reads `executor_output.json`, whose scalar metadata KFP shows on the run's page.
"""

from __future__ import annotations

import html
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from hpml.artifacts.folder import Manifest
from hpml.core.errors import UsageError

OUT = "out"  # the artifact that a stage writes
METRICS, HTML, SUMMARY = "metrics", "html", "summary"  # what else a component may declare, for KFP's page
MAX_HTML_BYTES = 256 * 1000  # what KFP's page shows
_MOUNTS = {"s3://": "/s3/", "gs://": "/gcs/", "minio://": "/minio/"}

Named = str | Mapping[str, str]  # an artifact, or artifacts by key


class _RuntimeArtifact(BaseModel):
    name: str = ""
    uri: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    custom_path: str = Field(default="", alias="customPath")

    def path(self) -> Path:
        """Where the launcher keeps it on this machine's disk."""
        path = self.custom_path or self.uri
        for scheme, mount in _MOUNTS.items():
            if path.startswith(scheme):
                path = mount + path.removeprefix(scheme)
        if not path.startswith("/") or ".." in path.split("/"):
            raise UsageError(
                f"the artifact {self.name or self.uri!r} has no path on this machine",
                why=f"{self.uri!r} is none of {', '.join(_MOUNTS)}, and no absolute path",
            )
        return Path(path)


class _Artifacts(BaseModel):
    artifacts: tuple[_RuntimeArtifact, ...] = ()


class _Inputs(BaseModel):
    artifacts: dict[str, _Artifacts] = Field(default_factory=dict)


class _Outputs(_Inputs):
    output_file: str = Field(alias="outputFile", min_length=1)


class ExecutorInput(BaseModel):
    """The part of KFP's ExecutorInput that concerns artifacts."""

    inputs: _Inputs = _Inputs()
    outputs: _Outputs

    def input_paths(self, names: Mapping[str, Named]) -> dict[str, Named]:
        """The paths of a stage's inputs.

        names: which artifact each input is; for a mapping of artifacts, which each of its keys is. Raises
        UsageError if there is no such artifact, or one that is no input.
        """
        used = {
            artifact
            for given in names.values()
            for artifact in ([given] if isinstance(given, str) else given.values())
        }
        for artifact in self.inputs.artifacts.keys() - used:
            raise UsageError(
                f"the stage has no input for the artifact {artifact!r}", fix="name it in --names"
            )
        return {
            name: self._input_path(given)
            if isinstance(given, str)
            else {key: self._input_path(artifact) for key, artifact in given.items()}
            for name, given in names.items()
        }

    def _input_path(self, artifact: str) -> str:
        given = self.inputs.artifacts.get(artifact, _Artifacts()).artifacts
        if not given:
            raise UsageError(f"--names has {artifact!r}", why="the executor input has no such artifact")
        return str(given[0].path())

    def out(self) -> str:
        """The path where the stage's artifact is to be. Raises UsageError if there is no such output."""
        return str(self._output(OUT).path())

    def _output(self, name: str) -> _RuntimeArtifact:
        given = self.outputs.artifacts.get(name, _Artifacts()).artifacts
        if not given:
            raise UsageError(f"the executor input has no output artifact {name!r}")
        return given[0]

    def deliver(self, stage: str, manifest: Manifest) -> None:
        """Write what KFP's page shows of the artifact at `out`, and `executor_output.json`.

        The metrics are with the output `metrics` only, which no step reads: what an artifact is told to be is
        part of the spec of every pod that reads it.
        """
        scalars = {name: _scalar(value) for name, value in manifest.metrics.items()}
        metadata: dict[str, dict[str, Any]] = {OUT: {"digest": manifest.digest}, METRICS: scalars}
        if stage == "report":
            self._show_report(self._output(OUT).path(), str(manifest.spec["title"]))
        shown = {}
        for name in self.outputs.artifacts:
            given = self._output(name)
            told = given.metadata | metadata.get(name, {})
            shown[name] = {"artifacts": [{"name": given.name, "uri": given.uri, "metadata": told}]}
        _write(Path(self.outputs.output_file), json.dumps({"artifacts": shown}, allow_nan=False))

    def _show_report(self, report: Path, title: str) -> None:
        """Fill the outputs `html` and `summary`, where the component has them."""
        from hpml.components.report.summary import markdown

        summary = markdown(title, json.loads((report / "figures.json").read_text()))
        if SUMMARY in self.outputs.artifacts:
            _write(self._output(SUMMARY).path(), summary)
        if HTML in self.outputs.artifacts:
            page, place = report / "report.html", self._output(HTML).path()
            if page.stat().st_size <= MAX_HTML_BYTES:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(page, place)
            else:
                _write(place, _instead_of(page, summary))


def read_executor_input(text: str) -> ExecutorInput:
    """Raises UsageError if `text` is no ExecutorInput of KFP v2."""
    try:
        return ExecutorInput.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            "--executor-input is no executor input of KFP v2", why=f"{where or 'the whole'}: {first['msg']}"
        ) from None


def _scalar(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no word for the others


def _instead_of(page: Path, summary: str) -> str:
    size_kb, limit_kb = page.stat().st_size / 1000, MAX_HTML_BYTES // 1000
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Report</title>'
        f"<p>The report has {size_kb:,.0f} KB, and this page shows {limit_kb} KB at most."
        f" It is <code>{page.name}</code> in the artifact <code>{OUT}</code> of this step.</p>"
        f"<pre>{html.escape(summary)}</pre></html>\n"
    )


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
