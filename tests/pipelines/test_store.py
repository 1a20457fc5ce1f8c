"""The store: locks, what gc takes and leaves, what is delivered twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from noop_stages import Number, add, start

from hpml.components.__main__ import Job, execute
from hpml.components.register.references import References
from hpml.core.errors import StageFailed, Unavailable
from hpml.pipelines.engine.cache_keys import CacheKeyInputs
from hpml.pipelines.engine.garbage import Needed, Removed
from hpml.pipelines.engine.store import Store, copy_out


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home)


def deliver(store: Store, value: int, key: str) -> str:
    place = Path(store.incoming("number"))
    config = Number(value=value).model_dump(mode="json")
    execute(Job(run=f"{start.__module__}:start", config=config, inputs={}, out=str(place)))
    return store.accept(str(place), key, CacheKeyInputs({"value": value}), "number")


def test_the_same_content_is_kept_once_and_found_by_both_keys(store: Store) -> None:
    assert deliver(store, 1, "a") == deliver(store, 1, "b") == store.lookup("a") == store.lookup("b")
    assert len(list((store.root / "objects").iterdir())) == 1
    assert list((store.root / "incoming").iterdir()) == []
    assert store.last_key_inputs("number") == CacheKeyInputs({"value": 1})


def test_a_key_whose_artifact_is_damaged_is_a_miss_and_is_mended(store: Store) -> None:
    digest = deliver(store, 1, "a")
    file = store.object_path(digest) / "number"
    file.chmod(0o644)
    file.write_text("22")
    assert store.lookup("a") is None
    with pytest.raises(StageFailed, match=r"number is damaged"):
        store.open(digest)
    assert deliver(store, 1, "a") == digest
    assert store.open(digest).file("number").read_text() == "1"


def exchange(store: Store, one: str, other: str) -> None:
    """Let the folders of two artifacts trade places."""
    aside = store.root / "aside"
    store.object_path(one).rename(aside)
    store.object_path(other).rename(store.object_path(one))
    aside.rename(store.object_path(other))


def test_artifacts_that_traded_places_are_misses_and_are_mended(store: Store) -> None:
    one, two = deliver(store, 1, "a"), deliver(store, 2, "b")
    exchange(store, one, two)
    assert store.lookup("a") is None and store.lookup("b") is None
    for read in (store.open, store.manifest):
        with pytest.raises(StageFailed, match=f"its digest is {two[:12]}, not {one[:12]}"):
            read(one)
    assert deliver(store, 1, "a") == one
    assert store.open(one).file("number").read_text() == "1"


def sum_of(store: Store, digest: str, out: Path, **known: Any) -> None:
    """The step that reads the artifact `digest`, as the executor starts it."""
    job = Job(
        run=f"{add.__module__}:add",
        config=Number().model_dump(mode="json"),
        inputs={"first": store.location(digest), "others": {"again": store.location(digest)}},
        out=str(out),
        **known,
    )
    execute(job)


def test_a_step_reads_no_other_artifact_than_the_one_meant_for_it(store: Store, tmp_path: Path) -> None:
    one, two = deliver(store, 1, "a"), deliver(store, 2, "b")
    exchange(store, one, two)
    for parents in ({"first": one}, {"others/again": one}):
        with pytest.raises(StageFailed, match="holds another artifact than the one asked for"):
            sum_of(store, one, tmp_path / "sum", parents=parents)
    sum_of(store, two, tmp_path / "sum", parents={"first": one})  # what is there under the other's name


def test_files_that_a_run_has_verified_are_not_hashed_again_in_it(store: Store, tmp_path: Path) -> None:
    digest = deliver(store, 1, "a")
    file = store.object_path(digest) / "number"
    file.chmod(0o644)
    file.write_text("2")  # of the same size
    parents = {"first": digest, "others/again": digest}
    with pytest.raises(StageFailed, match="number is damaged"):
        sum_of(store, digest, tmp_path / "sum", parents=parents)
    sum_of(store, digest, tmp_path / "sum", parents=parents, verified=(digest,))
    file.write_text("22")
    with pytest.raises(StageFailed, match="number is damaged"):  # its size is looked at all the same
        sum_of(store, digest, tmp_path / "other", parents=parents, verified=(digest,))


def collected(store: Store, *keep: str, **options: Any) -> list[Removed]:
    with store.alone():
        return store.collect(Needed(digests=frozenset(keep)), **options)


def test_gc_takes_what_no_kept_run_made_and_nothing_else(store: Store) -> None:
    kept, gone = deliver(store, 1, "a"), deliver(store, 2, "b")
    Path(store.scratch("c")).mkdir()
    names = [item.name for item in collected(store, kept, dry_run=True)]
    assert names == [f"report {gone[:12]}", "checkpoints c"]
    assert store.lookup("b") == gone
    removed = collected(store, kept)
    assert [item.name for item in removed] == names and removed[0].size_bytes > 0
    assert store.lookup("a") == kept and store.lookup("b") is None
    assert not Path(store.scratch("c")).exists()


def test_gc_leaves_the_checkpoints_of_runs_that_it_keeps(store: Store) -> None:
    for key in ("interrupted", "forgotten"):
        Path(store.scratch(key)).mkdir()
        (Path(store.scratch(key)) / "checkpoint").write_text("x" * 10)
    with store.alone():
        removed = store.collect(Needed(keys=frozenset({"interrupted"})))
    assert removed == [Removed("checkpoints forgotten", 10)]
    assert (Path(store.scratch("interrupted")) / "checkpoint").exists()


def test_gc_leaves_what_a_registered_version_was_made_from(store: Store, tmp_path: Path) -> None:
    data, other = deliver(store, 1, "data"), deliver(store, 9, "other")
    sum_of(store, data, tmp_path / "engine")
    engine, figures = store.add(tmp_path / "engine"), deliver(store, 3, "figures")
    with store.alone():
        removed = store.collect(Needed(versions=(References(engine, figures), References("0" * 64, ""))))
    assert [item.name for item in removed] == [f"report {other[:12]}"]
    assert store.open(data) and store.open(engine) and store.open(figures)


def test_gc_waits_for_no_run_and_harms_none(store: Store) -> None:
    with store.in_use(), pytest.raises(Unavailable, match="is under way"), store.alone():
        pass


def test_a_key_is_computed_by_one(store: Store) -> None:
    held = store.try_begin("a", alone=False)
    assert held is not None and store.try_begin("a", alone=False) is None
    assert store.try_begin("b", alone=False) is not None
    held.close()
    assert store.try_begin("a", alone=False) is not None


def test_who_measures_has_the_machine_alone(store: Store) -> None:
    shares = [store.try_begin(key, alone=False) for key in ("a", "b")]
    assert store.try_begin("c", alone=True) is None
    for share in shares:
        assert share is not None
        share.close()
    alone = store.try_begin("c", alone=True)
    assert alone is not None and store.try_begin("a", alone=False) is None
    alone.close()
    again = store.try_begin("a", alone=False)
    assert again is not None, "what was refused holds nothing"
    again.close()


def test_copy_out_replaces_the_folder_whole(store: Store, tmp_path: Path) -> None:
    place = tmp_path / "copy"
    place.mkdir()
    (place / "old").write_text("old")
    copy_out(store.open(deliver(store, 7, "a")), place)
    assert [file.name for file in place.iterdir()] == ["number"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["copy", "runs"]


def test_a_file_of_the_users_is_not_taken_for_a_workspace(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot use"):
        Store(tmp_path / "file")
