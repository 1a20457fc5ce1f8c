"""The store in S3, against moto's server: what is found again, what is brought here, what damage does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from hpml.artifacts.dataset import DatasetSpec, SplitSpec
from hpml.artifacts.folder import Lineage, read_manifest, seal_artifact
from hpml.artifacts.report import ReportSpec
from hpml.components.register.references import References
from hpml.core.contract import Config
from hpml.core.errors import ExitCode, StageFailed
from hpml.io import storage
from hpml.pipelines.__main__ import main
from hpml.pipelines.cluster import store as cluster_store
from hpml.pipelines.engine.cache_keys import CacheKeyInputs
from hpml.pipelines.engine.garbage import Needed
from hpml.pipelines.engine.object_store import ObjectStore
from hpml.pipelines.engine.store import Store
from hpml.pipelines.executors.base import ArtifactStore

URI = "s3://shelf/of/ours"
MATERIAL = CacheKeyInputs({"stage": "x:run", "config": {"value": 1}})
LINEAGE = Lineage(
    stage="x",
    code_digest="",
    config=None,
    parents={},
    libraries={},
    started_at_s=0,
    seconds=1.5,
    peak_rss_bytes=1,
)
REPORT = ReportSpec(title="of a test")
DATASET = DatasetSpec(
    task={"task": "image_classification"},
    splits={"train": SplitSpec(rows=1, class_counts=(1,))},
    source="",
    licence="",
)


@pytest.fixture(autouse=True)
def _bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty bucket, in the environment as the store's Secret gives it."""
    import boto3
    import requests

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    requests.post(f"{s3_endpoint}/moto-api/reset", timeout=10)
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="shelf")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def open_store(tmp_path: Path, said: list[str]) -> Callable[..., ObjectStore]:
    """A store, with a workspace of its own."""
    return lambda name="home": ObjectStore(tmp_path / name, URI, said.append)


def deliver(
    store: ObjectStore,
    tmp_path: Path,
    spec: Config,
    text: str = "hello",
    rejected: str = "",
    incomplete: str = "",
    lineage: Lineage = LINEAGE,
) -> str:
    """What a pod does: make an artifact, and upload it to where it was told to."""
    uri = store.incoming("step")
    folder = tmp_path / uri.rpartition("/")[2]
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "text").write_text(text)
    seal_artifact(
        folder, spec=spec, metrics={"m": 2.0}, lineage=lineage, rejected=rejected, incomplete=incomplete
    )
    storage.upload(folder, uri)
    return uri


def test_it_is_an_artifact_store(open_store: Callable[..., ObjectStore]) -> None:
    store: ArtifactStore = open_store()
    with store.in_use():
        assert store.lookup("0" * 64) is None
        assert store.last_key_inputs("step") is None


def test_what_one_workspace_accepted_another_finds(
    open_store: Callable[..., ObjectStore], tmp_path: Path
) -> None:
    ours = open_store()
    uri = deliver(ours, tmp_path, REPORT)
    digest = ours.accept(uri, "key", MATERIAL, "step")
    theirs = open_store("another")
    assert theirs.lookup("key") == digest
    assert theirs.location(digest) == uri
    assert theirs.last_key_inputs("step") == MATERIAL
    assert theirs.manifest(digest).metrics == {"m": 2.0}
    assert json.loads(storage.read_text(f"{URI}/keys/key.json"))["uri"] == uri


def test_what_is_incomplete_is_handed_on_and_made_again(
    open_store: Callable[..., ObjectStore], tmp_path: Path
) -> None:
    ours, theirs = open_store(), open_store("another")
    digest = ours.accept(deliver(ours, tmp_path, REPORT, incomplete="busy"), "key", MATERIAL, "step")
    assert storage.exists(f"{ours.location(digest)}/deep/text")
    for store in (ours, theirs):
        assert store.lookup("key") is None and store.incomplete("key") == "busy"
        assert store.last_key_inputs("step") == MATERIAL
    storage.write_text(f"{ours.scratch('key')}/checkpoints-1/round", "x")
    needed = Needed(digests=frozenset({digest}), keys=frozenset({"key"}))
    assert ours.collect(needed, grace_s=-1) == []
    whole = theirs.accept(deliver(theirs, tmp_path, REPORT), "key", MATERIAL, "step")
    assert ours.lookup("key") == whole == digest and ours.incomplete("key") == ""


def test_what_commands_read_is_brought_here_and_the_large_kinds_are_not(
    open_store: Callable[..., ObjectStore], tmp_path: Path
) -> None:
    store, local = open_store(), Store(tmp_path / "home")
    small = store.accept(deliver(store, tmp_path, REPORT), "small", MATERIAL, "step")
    large = store.accept(deliver(store, tmp_path, DATASET), "large", MATERIAL, "step")
    assert local.open(small).file("deep/text").read_text() == "hello"
    assert store.manifest(large).lineage.seconds == 1.5
    assert not local.object_path(large).exists()
    assert store.open(large).file("deep/text").read_text() == "hello"
    assert local.object_path(large).exists()


def test_a_result_found_in_the_store_is_brought_here_as_well(
    open_store: Callable[..., ObjectStore], tmp_path: Path
) -> None:
    ours = open_store()
    digest = ours.accept(deliver(ours, tmp_path, REPORT), "key", MATERIAL, "step")
    open_store("another").lookup("key")
    assert Store(tmp_path / "another").open(digest).digest == digest


@pytest.mark.parametrize("damage", ["manifest gone", "file gone", "manifest changed", "record is no JSON"])
def test_what_is_no_longer_whole_is_a_miss(
    open_store: Callable[..., ObjectStore], tmp_path: Path, damage: str
) -> None:
    store = open_store()
    uri = deliver(store, tmp_path, DATASET)
    store.accept(uri, "key", MATERIAL, "step")
    assert store.lookup("key")
    match damage:
        case "manifest gone":
            storage.delete(f"{uri}/manifest.json")
        case "file gone":
            storage.delete(f"{uri}/deep/text")
        case "manifest changed":
            text = storage.read_text(f"{uri}/manifest.json")
            storage.write_text(f"{uri}/manifest.json", text.replace('"m": 2.0', '"m": 3.0'))
        case "record is no JSON":
            storage.write_text(f"{URI}/keys/key.json", "{")
    assert store.lookup("key") is None


def test_a_record_that_leads_out_of_the_store_is_a_miss(
    open_store: Callable[..., ObjectStore], tmp_path: Path
) -> None:
    store = open_store()
    uri = deliver(store, tmp_path, REPORT)
    digest = store.accept(uri, "key", MATERIAL, "step")
    elsewhere = "s3://shelf/of/others/x"
    storage.upload(tmp_path / uri.rpartition("/")[2], elsewhere)
    storage.write_text(
        f"{URI}/keys/key.json", json.dumps({"digest": digest, "uri": elsewhere, "material": {}})
    )
    assert store.lookup("key") is None


def test_a_file_that_was_changed_in_the_store_is_refused(
    open_store: Callable[..., ObjectStore], tmp_path: Path
) -> None:
    store = open_store()
    uri = deliver(store, tmp_path, DATASET)
    digest = store.accept(uri, "key", MATERIAL, "step")
    storage.write_text(f"{uri}/deep/text", "HELLO")
    with pytest.raises(StageFailed, match="SHA-256 differs"):
        store.open(digest)


def test_nothing_delivered_is_not_accepted(open_store: Callable[..., ObjectStore]) -> None:
    store = open_store()
    with pytest.raises(StageFailed, match="there is nothing at"):
        store.accept(store.incoming("step"), "key", MATERIAL, "step")
    assert store.lookup("key") is None


def test_what_a_gate_refused_is_downloaded_for_a_look(
    open_store: Callable[..., ObjectStore], tmp_path: Path
) -> None:
    store, folder = open_store(), tmp_path / "run" / "rejected" / "step"
    folder.parent.parent.mkdir()
    assert not store.keep_rejected(store.incoming("step"), folder)
    assert store.keep_rejected(deliver(store, tmp_path, REPORT, rejected="too slow"), folder)
    assert read_manifest(folder).rejected == "too slow"


def test_a_store_that_is_lost_does_not_hide_why_the_step_failed(
    open_store: Callable[..., ObjectStore], tmp_path: Path, said: list[str]
) -> None:
    store = open_store()
    uri = deliver(store, tmp_path, REPORT, rejected="too slow")
    storage.delete("s3://shelf/of")
    import boto3

    boto3.client("s3", region_name="us-east-1").delete_bucket(Bucket="shelf")
    assert not store.keep_rejected(uri, tmp_path / "rejected" / "step")
    assert len(said) == 1
    assert uri in said[0]
    assert "no bucket" in said[0]


def test_two_runs_may_compute_the_same_key(open_store: Callable[..., ObjectStore], tmp_path: Path) -> None:
    stores = [open_store("a"), open_store("b")]
    assert all(store.try_begin("key", alone=True) for store in stores)
    uris = [deliver(store, tmp_path, REPORT) for store in stores]
    found: list[str] = []

    def accept(store: ObjectStore, uri: str) -> None:
        found.append(store.accept(uri, "key", MATERIAL, "step"))

    threads = [threading.Thread(target=accept, args=pair) for pair in zip(stores, uris, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    third = open_store("c")
    assert third.lookup("key") == found[0]
    assert third.location(found[0]) in uris


# --------------------------------------------------------------------------------------------------------- gc

DAY_S = 24 * 3600.0


def days_pass(days: float) -> None:
    """Let all that is in the store be that much older."""
    from moto.s3.models import s3_backends

    for found in s3_backends["123456789012"]["aws"].buckets["shelf"].keys.values():
        found.last_modified -= timedelta(days=days)


def collect(store: ObjectStore, needed: Needed = Needed(), **options: Any) -> set[str]:  # noqa: B008
    return {item.name for item in store.collect(needed, grace_s=14 * DAY_S, **options)}


def name_of(uri: str) -> str:
    return uri.removeprefix(f"{URI}/")


def test_gc_takes_what_nobody_used_for_longer_than_the_grace(
    open_store: Callable[..., ObjectStore], tmp_path: Path
) -> None:
    store = open_store()
    old = deliver(store, tmp_path, REPORT, "old")
    store.accept(old, "old", MATERIAL, "step")
    crashed = deliver(store, tmp_path, REPORT, "crashed")
    storage.write_text(f"{URI}/scratch/key/checkpoint", "x")
    storage.write_text(f"{URI}/handover/run/train/data", "x")
    storage.write_text(f"{URI}/tracking/run/unsent.jsonl", "{}")
    assert collect(store) == set()
    days_pass(15)
    young = deliver(store, tmp_path, REPORT, "young")
    store.accept(young, "young", MATERIAL, "step")
    going = {name_of(old), name_of(crashed), "scratch/key", "handover/run"}
    assert collect(store, dry_run=True) == going
    assert set(storage.list_names(f"{URI}/keys")) == {"old.json", "young.json"}
    sizes = {item.name: item.size_bytes for item in store.collect(Needed(), grace_s=14 * DAY_S)}
    assert sizes.keys() == going and sizes["scratch/key"] == 1
    assert store.lookup("old") is None and store.lookup("young")
    left = storage.list_names(URI)
    assert not [name for name in left if name.startswith(("scratch", name_of(old), name_of(crashed)))]
    assert "tracking/run/unsent.jsonl" in left


def test_gc_leaves_what_a_run_of_another_workspace_used_lately(
    open_store: Callable[..., ObjectStore], tmp_path: Path
) -> None:
    ours = open_store()
    digest = ours.accept(deliver(ours, tmp_path, DATASET), "key", MATERIAL, "step")
    days_pass(300)
    theirs = open_store("another")
    assert theirs.lookup("key") == digest
    assert collect(ours) == set()
    assert theirs.open(digest)


def test_gc_sees_what_is_used_while_it_reads(
    open_store: Callable[..., ObjectStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = open_store(), open_store("another")
    digest = ours.accept(deliver(ours, tmp_path, DATASET), "key", MATERIAL, "step")
    days_pass(300)

    def read_slowly(key: str) -> object:
        theirs.lookup("key")
        return type(ours)._record(ours, key)

    monkeypatch.setattr(ours, "_record", read_slowly)
    assert collect(ours) == set()
    assert theirs.open(digest)


def test_gc_leaves_what_kept_runs_and_registered_versions_need(
    open_store: Callable[..., ObjectStore], tmp_path: Path
) -> None:
    store = open_store()
    data = store.accept(deliver(store, tmp_path, DATASET), "data", MATERIAL, "prepare")
    of_data = LINEAGE.model_copy(update={"parents": {"data": data}})
    engine = store.accept(deliver(store, tmp_path, REPORT, "e", lineage=of_data), "e", MATERIAL, "export")
    made = store.accept(deliver(store, tmp_path, REPORT, "made"), "made", MATERIAL, "report")
    gone = deliver(store, tmp_path, REPORT, "gone")
    store.accept(gone, "gone", MATERIAL, "report")
    for key in ("interrupted", "forgotten"):
        storage.write_text(f"{URI}/scratch/{key}/checkpoint", "x")
    days_pass(300)
    needed = Needed(frozenset({made}), frozenset({"interrupted"}), (References(engine, "0" * 64),))
    assert collect(store, needed) == {name_of(gone), "scratch/forgotten"}
    assert store.lookup("data") == data and store.lookup("e") == engine and store.lookup("made") == made


def test_artifacts_that_traded_places_are_misses(
    open_store: Callable[..., ObjectStore], tmp_path: Path
) -> None:
    store = open_store()
    one, two = (deliver(store, tmp_path, DATASET, text) for text in ("fp32!", "int8!"))
    digest = store.accept(one, "one", MATERIAL, "step")
    for name in ("manifest.json", "deep/text"):
        storage.write_text(f"{one}/{name}", storage.read_text(f"{two}/{name}"))
    assert open_store("another").lookup("one") is None
    with pytest.raises(StageFailed, match=f"not {digest[:12]}"):
        store.open(digest)


def test_the_command_clears_the_store_of_a_recipe(
    open_store: Callable[..., ObjectStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = open_store()
    old = deliver(store, tmp_path, REPORT, "x" * 3_000_000)
    store.accept(old, "old", MATERIAL, "step")
    days_pass(10)
    (tmp_path / "mine.yaml").write_text(f"data: digits\ncluster: {{store: '{URI}'}}\n")
    monkeypatch.setattr(
        cluster_store, "open_store", lambda home, config, say: ObjectStore(home, config.store, say)
    )
    command = ["gc", "--home", str(tmp_path / "home"), "--recipe", str(tmp_path / "mine.yaml")]
    main([*command, "--no-keep-registered"])
    assert "removed 0 items" in capsys.readouterr().out
    main([*command, "--no-keep-registered", "--grace-days", "7", "--dry-run"])
    listed, total = capsys.readouterr().out.splitlines()
    assert listed.split() == ["3.0", "MB", name_of(old)]
    assert total == "would remove 1 items, 3.0 MB"
    assert storage.exists(f"{old}/manifest.json")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(SystemExit) as left:
        main([*command, "--grace-days", "7"])
    assert left.value.code == ExitCode.UNAVAILABLE
    assert "nothing was removed" in capsys.readouterr().err
    main([*command, "--no-keep-registered", "--grace-days", "7"])
    assert not storage.list_names(old)
