"""`hpml gc`: what it lists, what it asks first, and what it waits for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from noop_stages import Number

from hpml.core.errors import StageFailed, Unavailable
from hpml.pipelines.__main__ import main
from hpml.pipelines.bench import measurable
from hpml.pipelines.bench import session as bench
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.store import Store
from hpml.pipelines.workspace.gc import collect_workspace
from tests.pipelines.conftest import plan_of


@pytest.fixture(autouse=True)
def _no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def interrupted_run(home: Path, key: str) -> None:
    """A run that was stopped in its first step, and the checkpoint it left."""
    record = run_record.start(home, run_record.new_run_id("five"), "five", "", plan_of(a=Number()))
    name = next(iter(record.steps))
    step = record.steps[name].model_copy(update={"status": "interrupted", "key": key})
    steps = {**record.steps, name: step}
    run_record.save(home, record.model_copy(update={"status": "interrupted", "steps": steps}))
    checkpoint = Path(Store(home).scratch(key)) / "checkpoints" / "weights"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(b"x" * 2_000_000)


def test_the_checkpoints_of_an_interrupted_run_stay_while_its_run_is_kept(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted_run(home, "k" * 64)
    main(["gc", "--home", str(home)])
    assert "removed 0 items, 0.0 MB" in capsys.readouterr().out
    main(["gc", "--home", str(home), "--keep-runs", "0", "--dry-run"])
    listed, total = capsys.readouterr().out.splitlines()
    assert listed.split() == ["2.0", "MB", "checkpoints", "k" * 12]
    assert total == "would remove 1 items, 2.0 MB"
    assert list((home / ".store" / "scratch").iterdir())
    main(["gc", "--home", str(home), "--keep-runs", "0"])
    assert not list((home / ".store" / "scratch").iterdir())


def test_nothing_goes_while_it_is_not_known_what_registered_versions_need(home: Path) -> None:
    interrupted_run(home, "k" * 64)
    (home / "mlflow.db").write_text("not a database, " * 100)
    with pytest.raises(Unavailable, match=r"nothing was removed: .* is damaged.* --no-keep-registered"):
        collect_workspace(home, 0, keep_registered=True, dry_run=False)
    assert list((home / ".store" / "scratch").iterdir())
    assert collect_workspace(home, 0, keep_registered=False, dry_run=False)


def test_a_bench_that_finds_the_disk_full_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench, "page", no_room)
    monkeypatch.setattr(bench.records, "figures_csv", lambda _: "")
    record: Any = SimpleNamespace(model_dump_json=lambda indent: "{}", measurements=None, subjects={})
    with pytest.raises(StageFailed, match=f"the disk is full: {tmp_path}"):
        bench._write(tmp_path / "bench", record, lambda file: np.savez(file, allow_pickle=False))
    assert not list(tmp_path.iterdir())


def test_what_is_measured_is_held_against_gc(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(Exception):
        pass

    def gc_meanwhile(*_: object, **__: object) -> None:
        with pytest.raises(Unavailable, match="under way"):
            collect_workspace(home, 0, keep_registered=False, dry_run=False)
        raise Refused

    def find(*_: object) -> dict[str, object]:
        with pytest.raises(Unavailable, match="under way"):
            collect_workspace(home, 0, keep_registered=False, dry_run=False)
        return {}

    monkeypatch.setattr(measurable, "measurables", find)
    monkeypatch.setattr(bench, "measure", gc_meanwhile)
    with pytest.raises(SystemExit):
        main(["bench", "latest:int8/onnx", "--home", str(home)])
    collect_workspace(home, 0, keep_registered=False, dry_run=False)
