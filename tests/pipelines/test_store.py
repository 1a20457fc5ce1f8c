"""The store: locks, what gc takes and leaves, what is delivered twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from noop_stages import Number, start

from components.__main__ import Job, execute
from components.errors import StageFailed, Unavailable
from pipelines.provenance import Material
from pipelines.store import Store, copy_out


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home)


def deliver(store: Store, value: int, key: str) -> str:
    place = Path(store.incoming("number"))
    config = Number(value=value).model_dump(mode="json")
    execute(Job(run=f"{start.__module__}:start", config=config, inputs={}, out=str(place)))
    return store.accept(str(place), key, Material({"value": value}), "number")


def test_the_same_content_is_kept_once_and_found_by_both_keys(store: Store) -> None:
    assert deliver(store, 1, "a") == deliver(store, 1, "b") == store.lookup("a") == store.lookup("b")
    assert len(list((store.root / "objects").iterdir())) == 1
    assert list((store.root / "incoming").iterdir()) == []
    assert store.last_material("number") == Material({"value": 1})


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


def test_gc_takes_what_no_kept_run_made_and_nothing_else(store: Store) -> None:
    kept, gone = deliver(store, 1, "a"), deliver(store, 2, "b")
    Path(store.scratch("c")).mkdir()
    assert store.collect({kept}, dry_run=True)[0] == 1
    assert store.lookup("b") == gone
    count, freed_bytes = store.collect({kept})
    assert (count, freed_bytes > 0) == (1, True)
    assert store.lookup("a") == kept and store.lookup("b") is None
    assert not Path(store.scratch("c")).exists()


def test_gc_waits_for_no_run_and_harms_none(store: Store) -> None:
    with store.in_use(), pytest.raises(Unavailable, match="a run is under way"):
        store.collect(set())


def test_a_key_is_computed_by_one(store: Store) -> None:
    lock = store.try_lock("a")
    assert lock is not None and store.try_lock("a") is None and store.try_lock("b") is not None
    lock.release()
    assert store.try_lock("a") is not None


def test_who_measures_has_the_machine_alone(store: Store) -> None:
    shares = [store.try_machine(alone=False) for _ in range(2)]
    assert store.try_machine(alone=True) is None
    for share in shares:
        assert share is not None
        share.release()
    alone = store.try_machine(alone=True)
    assert alone is not None and store.try_machine(alone=False) is None
    alone.release()


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
