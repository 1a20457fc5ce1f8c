"""An incomplete artifact is handed on, and the next attempt goes on from its scratch: by path and by URI."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpml.artifacts.folder import MANIFEST, Artifact, Manifest, open_artifact, read_manifest
from hpml.artifacts.report import ReportSpec
from hpml.core.contract import Config, Events, Output, Result
from hpml.steps import container
from hpml.steps.job import Job, execute
from tests.components.conftest import Bucket


class Rounds(Config):
    needed: int = 2


def measure(config: Rounds, *, out: Output) -> Result[ReportSpec]:
    """Do one of the rounds that are needed; those of attempts before are in the scratch."""
    kept = out.scratch / "checkpoints-rounds"
    kept.mkdir(exist_ok=True)
    rounds = len(list(kept.iterdir())) + 1
    (kept / f"{rounds}.json").write_text("{}")
    (out.scratch / "engine.log").write_text("of no use to the next attempt")
    (out.path / "rounds").write_text(str(rounds))
    missing = f"{rounds} of {config.needed} rounds" if rounds < config.needed else ""
    return Result(ReportSpec(title=f"{rounds} rounds"), incomplete=missing)


def join(config: Rounds, *, measured: Artifact[ReportSpec], out: Output) -> Result[ReportSpec]:
    (out.path / "text").write_text(measured.file("rounds").read_text())
    return Result(ReportSpec(title="joined"))


RUN = f"{__name__}:measure"


@pytest.fixture
def job(bucket: Bucket) -> Job:
    return Job(RUN, {}, {}, f"{bucket.uri}/first", f"{bucket.uri}/scratch", code_digest="c0de")


# ----------------------------------------------------------------------------------------------------- a path


def test_it_is_read_as_any_other_and_its_scratch_stays(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    first = execute(Job(RUN, {}, {}, str(tmp_path / "first"), str(scratch)))
    assert first.incomplete == "1 of 2 rounds" and (scratch / "checkpoints-rounds" / "1.json").exists()
    execute(Job(f"{__name__}:join", {}, {"measured": str(tmp_path / "first")}, str(tmp_path / "joined")))
    assert (tmp_path / "joined" / "text").read_text() == "1"

    second = execute(Job(RUN, {}, {}, str(tmp_path / "second"), str(scratch)))
    assert second.incomplete == "" and not scratch.exists()
    assert open_artifact(tmp_path / "second", kind="report").file("rounds").read_text() == "2"


def test_that_it_is_incomplete_is_no_part_of_its_content(tmp_path: Path) -> None:
    lacking = execute(Job(RUN, {"needed": 2}, {}, str(tmp_path / "lacking")))
    whole = execute(Job(RUN, {"needed": 1}, {}, str(tmp_path / "whole")))
    assert lacking.incomplete and lacking.digest == whole.digest
    fields = json.loads((tmp_path / "whole" / MANIFEST).read_text())
    assert "incomplete" not in fields  # as versions before wrote it, and read it
    assert read_manifest(tmp_path / "whole").incomplete == ""


# -------------------------------------------------------------------------------------------------- in a pod


def kept(bucket: Bucket) -> list[str]:
    return [name for name in bucket.listing() if "scratch" in name]


def test_rounds_of_a_pod_come_to_the_store_and_the_next_adds_to_them(job: Job, bucket: Bucket) -> None:
    first = container.run(job)
    assert first.incomplete == "1 of 2 rounds"
    assert json.loads(bucket.get("first/manifest.json"))["incomplete"] == "1 of 2 rounds"
    assert kept(bucket) == ["scratch/checkpoints-rounds/1.json"]
    container.run(Job(f"{__name__}:join", {}, {"measured": f"{bucket.uri}/first"}, f"{bucket.uri}/joined"))
    assert bucket.get("joined/text") == b"1"

    second = container.run(replace(job, out=f"{bucket.uri}/second"))
    assert second.incomplete == "" and bucket.get("second/rounds") == b"2"
    assert kept(bucket) == []


def test_a_pod_that_is_started_again_neither_measures_again_nor_drops_the_rounds(
    job: Job, bucket: Bucket
) -> None:
    assert container.run(job) == container.run(job)
    assert kept(bucket) == ["scratch/checkpoints-rounds/1.json"]


def test_where_no_executor_knows_the_inputs_the_scratch_is_that_of_the_work(
    job: Job, bucket: Bucket, tmp_path: Path
) -> None:
    by_work = replace(job, scratch=f"{bucket.uri}/scratch/{container.WORK}/benchmark")

    def attempt(name: str, **changed: object) -> Manifest:
        return container.run(replace(by_work, out=str(tmp_path / name), **changed))  # type: ignore[arg-type]

    assert attempt("first").incomplete
    assert attempt("other code", code_digest="other").incomplete
    assert attempt("other config", config={"needed": 3}).incomplete
    assert len(kept(bucket)) == 3 and not any("{" in name for name in kept(bucket))
    assert not attempt("second").incomplete
    assert len(kept(bucket)) == 2


# ----------------------------------------------------------------------------------------------- what is told


def test_it_is_told_when_it_is_finished(job: Job, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    container.tell_finished(Events(file), container.run(job))
    [told] = [json.loads(line) for line in file.read_text().splitlines()]
    assert (told["event"], told["incomplete"]) == ("finished", "1 of 2 rounds")
