"""Kinds of artifacts: the file that is named after one, and what is read of versions before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpml.artifacts import folder
from hpml.artifacts.folder import MANIFEST, open_artifact, seal_artifact, spec_type
from hpml.artifacts.peaks import PeaksSpec
from hpml.core.errors import StageFailed
from tests.conftest import LINEAGE


@pytest.mark.parametrize(
    "kind",
    ["dataset", "model", "engine", "measurements", "peaks", "diagnosis", "report", "registration", "bundle"],
)
def test_a_kind_is_the_file_named_after_it(kind: str) -> None:
    assert spec_type(kind).model_fields["kind"].default == kind


@pytest.mark.parametrize("kind", ["", "os", "folder", "interval", "model.os", "../model", "x" * 1000])
def test_what_is_no_kind_is_refused(kind: str) -> None:
    with pytest.raises(StageFailed, match="no kind of artifact") as caught:
        spec_type(kind)
    assert len(str(caught.value)) < 100


def test_the_ceilings_of_before_are_read_as_peaks(tmp_path: Path) -> None:
    spec = PeaksSpec(hardware={"cpu": "x"}, bandwidths=(), gemms=())
    manifest = seal_artifact(tmp_path, spec=spec, metrics={}, lineage=LINEAGE)
    fields = json.loads((tmp_path / MANIFEST).read_text())
    fields["kind"] = fields["spec"]["kind"] = "ceilings"
    fields["digest"] = folder.content_digest("ceilings", fields["spec"], manifest.files, "")
    fields["seal"] = folder._seal_of(fields)
    (tmp_path / MANIFEST).write_text(json.dumps(fields))
    for kind in ("peaks", "ceilings"):
        found = open_artifact(tmp_path, kind=kind, digest=fields["digest"])
        assert found.spec == spec
