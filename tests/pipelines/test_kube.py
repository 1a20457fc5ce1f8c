"""A namespace of a cluster: what goes wrong in plain words, and logs with no line too few or too many."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpml.core.errors import ConfigInvalid, ExitCode, HpmlError, Unavailable
from hpml.pipelines.cluster import client as kube
from hpml.pipelines.cluster.client import EVENTS, JOBS, PODS, Namespace, Resource, connect
from tests.pipelines.fake_cluster import TOKEN, FakeCluster


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    """A cluster that KUBECONFIG names."""
    monkeypatch.setattr(kube, "RETRY_EVERY_S", 0.05)
    monkeypatch.setattr(kube, "LOOK_EVERY_S", 0.02)
    with FakeCluster().serving() as serving:
        monkeypatch.setenv("KUBECONFIG", str(serving.kubeconfig(tmp_path / "kubeconfig")))
        yield serving


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def namespace(cluster: FakeCluster, said: list[str]) -> Namespace:
    return connect("hpml", patience_s=0.3, say=said.append)


# ------------------------------------------------------------------------------------------------- objects


def test_objects_are_made_found_changed_and_removed(namespace: Namespace) -> None:
    assert namespace.get(PODS, "one") is None
    assert namespace.find(PODS) == []
    for name in ("one", "two"):
        made = namespace.create(PODS, {"metadata": {"name": name, "labels": {"app": name}}})
        assert made and made["metadata"]["uid"]
    [two] = namespace.find(PODS, labels="app=two")
    assert two == namespace.get(PODS, "two")
    changed = namespace.patch(PODS, "two", {"metadata": {"annotations": {"a": "b"}}})
    assert changed and changed["metadata"]["annotations"] == {"a": "b"}
    assert namespace.delete(PODS, "two")
    assert not namespace.delete(PODS, "two")
    assert namespace.patch(PODS, "two", {}) is None


def test_a_name_that_is_taken_is_no_error(namespace: Namespace) -> None:
    assert namespace.create(PODS, {"metadata": {"name": "one"}})
    assert namespace.create(PODS, {"metadata": {"name": "one"}}) is None


def test_another_object_of_the_same_name_is_not_deleted(namespace: Namespace) -> None:
    first = namespace.create(PODS, {"metadata": {"name": "one"}})
    namespace.delete(PODS, "one")
    namespace.create(PODS, {"metadata": {"name": "one"}})
    assert first and not namespace.delete(PODS, "one", uid=first["metadata"]["uid"])
    assert namespace.get(PODS, "one")
    namespace.wait_until_gone(PODS, "one", uid=first["metadata"]["uid"], timeout_s=0)
    with pytest.raises(Unavailable, match="still there"):
        found = namespace.get(PODS, "one")
        assert found
        namespace.wait_until_gone(PODS, "one", uid=found["metadata"]["uid"], timeout_s=0)


def test_events_are_of_one_object_oldest_first(cluster: FakeCluster, namespace: Namespace) -> None:
    pod, other = cluster.add_pod("one"), cluster.add_pod("two")
    for number in range(3):
        cluster.add_event(pod, f"Reason{number}", "")
    cluster.add_event(other, "Another", "")
    assert [event["reason"] for event in namespace.events(pod["metadata"]["uid"])] == [
        "Reason0",
        "Reason1",
        "Reason2",
    ]
    assert len(namespace.find(EVENTS)) == 4


# -------------------------------------------------------------------------------------------------- errors


def complaint(act: object) -> HpmlError:
    assert callable(act)
    with pytest.raises(HpmlError) as caught:
        act()
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("content", [None, "", "not: [yaml", "apiVersion: v1\nkind: Config\n"])
def test_no_cluster_is_configured(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(file))
    error = complaint(lambda: connect("hpml"))
    assert error.exit_code == ExitCode.UNAVAILABLE
    assert "no cluster is configured" in str(error) and "KUBECONFIG" in error.fix


def test_a_cluster_that_refuses_connections(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    text = cluster.kubeconfig(tmp_path / "other").read_text().replace(cluster.url, "http://127.0.0.1:1")
    (tmp_path / "other").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "other"))
    error = complaint(lambda: connect("hpml", patience_s=0.2, say=said.append).find(PODS))
    assert error.exit_code == ExitCode.UNAVAILABLE
    assert "http://127.0.0.1:1 does not answer" in str(error) and "connection refused" in str(error)
    assert len(said) == 1 and "trying for" in said[0]


def test_a_cluster_that_does_not_know_us(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    text = cluster.kubeconfig(tmp_path / "other").read_text().replace(TOKEN, "of-yesterday")
    (tmp_path / "other").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "other"))
    error = complaint(lambda: connect("hpml", say=said.append).find(PODS))
    assert error.exit_code == ExitCode.UNAVAILABLE and "does not know who you are" in str(error)
    assert not said  # waiting does not help


def test_what_is_forbidden_is_named(cluster: FakeCluster, namespace: Namespace) -> None:
    cluster.refuse = lambda verb, plural: (403, f'pods is forbidden: User "me" cannot {verb} resource "pods"')
    error = complaint(lambda: namespace.find(PODS))
    assert error.exit_code == ExitCode.UNAVAILABLE
    assert error.what == "not allowed to list pods in the namespace hpml"
    assert 'User "me"' in error.why and "k8s/base" in error.fix


def test_a_namespace_that_is_not_there(cluster: FakeCluster) -> None:
    error = complaint(lambda: connect("nowhere").create(PODS, {"metadata": {"name": "one"}}))
    assert error.exit_code == ExitCode.UNAVAILABLE and "has no namespace nowhere" in str(error)


@pytest.mark.parametrize("name", ["", "one"])
def test_a_kind_that_the_cluster_does_not_know(namespace: Namespace, name: str) -> None:
    kind = Resource("kubeflow.org/v9", "nosuchjobs")
    error = complaint(lambda: namespace.get(kind, name) if name else namespace.find(kind))
    assert error.exit_code == ExitCode.UNAVAILABLE
    assert "does not know nosuchjobs of kubeflow.org/v9" in str(error)


def test_what_admission_refuses_is_quoted(cluster: FakeCluster, namespace: Namespace) -> None:
    cluster.refuse = lambda verb, plural: (403, 'admission webhook "x" denied the request: too large')
    error = complaint(lambda: namespace.create(PODS, {"metadata": {"name": "one"}}))
    assert isinstance(error, ConfigInvalid) and "too large" in str(error)


def test_a_short_outage_is_waited_for_aloud(
    cluster: FakeCluster, namespace: Namespace, said: list[str]
) -> None:
    cluster.outage.set()
    threading.Timer(0.15, cluster.outage.clear).start()
    assert namespace.find(PODS) == []
    assert len(said) == 2
    assert "does not answer" in said[0] and "answers again" in said[1]


def test_a_webhook_that_does_not_answer_is_waited_for_and_named(
    cluster: FakeCluster, namespace: Namespace, said: list[str]
) -> None:
    cluster.refuse = lambda verb, plural: (500, "failed calling webhook validator.pytorchjob: refused")
    error = complaint(lambda: namespace.create(JOBS, {"metadata": {"name": "one"}}))
    assert isinstance(error, Unavailable)
    cluster.plurals += ("jobs",)
    error = complaint(lambda: namespace.create(JOBS, {"metadata": {"name": "one"}}))
    assert isinstance(error, Unavailable) and "validator.pytorchjob" in str(error)
    assert len(said) == 1


def test_a_server_that_has_too_much_to_do_is_asked_again(cluster: FakeCluster, namespace: Namespace) -> None:
    answers = iter([(429, "too many requests"), (429, "too many requests"), None])
    cluster.refuse = lambda verb, plural: next(answers)
    assert namespace.create(PODS, {"metadata": {"name": "one"}})


def test_who_was_told_to_stop_does_not_wait(cluster: FakeCluster, namespace: Namespace) -> None:
    cluster.outage.set()
    before = len(cluster.requests)
    complaint(lambda: namespace.delete(PODS, "one", patience_s=0))
    assert len(cluster.requests) == before


# ---------------------------------------------------------------------------------------------------- logs


def test_a_log_is_followed_while_it_is_written(cluster: FakeCluster, namespace: Namespace) -> None:
    pod = cluster.add_pod("one")
    cluster.set_state(pod, "Running", running={})
    lines = namespace.log(pod, "pytorch")
    for number in range(3):
        cluster.log(pod, f"line {number}")
        assert next(lines) == f"line {number}"  # it is there before the next is written
    cluster.log(pod, "", "last")
    cluster.set_state(pod, "Succeeded", terminated={"exitCode": 0})
    assert list(lines) == ["", "last"]


@pytest.mark.parametrize("lines_per_stream", [1, 2, 7])
def test_a_stream_that_breaks_loses_and_repeats_nothing(
    lines_per_stream: int, cluster: FakeCluster, namespace: Namespace
) -> None:
    pod = cluster.add_pod("one")
    cluster.set_state(pod, "Running", running={})
    written = [f"line {number}" for number in range(20)] + ["the same", "the same", "the same"]
    for number, line in enumerate(written):
        cluster.log(pod, line, at=f"2026-01-01T00:00:{number:02}.{number % 3}00000000Z")
    cluster.cut_log_after = lines_per_stream

    def end() -> None:
        while sum("log" in request for request in cluster.requests) < 3:
            time.sleep(0.01)
        cluster.cut_log_after = None
        cluster.set_state(pod, "Failed", terminated={"exitCode": 1})

    threading.Thread(target=end, daemon=True).start()
    assert list(namespace.log(pod, "pytorch")) == written


def test_equal_lines_of_one_moment_are_all_there(cluster: FakeCluster, namespace: Namespace) -> None:
    pod = cluster.add_pod("one")
    for _ in range(4):
        cluster.log(pod, "again", at="2026-01-01T00:00:00.000000000Z")
    cluster.set_state(pod, "Running", running={})
    lines = namespace.log(pod, "pytorch")
    cluster.cut_log_after = 3
    assert [next(lines) for _ in range(3)] == ["again"] * 3
    cluster.cut_log_after = None
    cluster.set_state(pod, "Succeeded", terminated={"exitCode": 0})
    assert list(lines) == ["again"]


def test_a_pod_that_took_the_name_is_not_read(cluster: FakeCluster, namespace: Namespace) -> None:
    old = cluster.add_pod("one")
    cluster.set_state(old, "Running", running={})
    cluster.log(old, "of the old")
    lines = namespace.log(old, "pytorch")
    assert next(lines) == "of the old"
    new = cluster.add_pod("one")
    cluster.set_state(new, "Running", running={})
    cluster.log(new, "of the new")
    assert list(lines) == []
    cluster.set_state(new, "Succeeded", terminated={"exitCode": 0})
    assert list(namespace.log(new, "pytorch")) == ["of the new"]


def test_a_log_goes_on_after_an_outage(cluster: FakeCluster, namespace: Namespace, said: list[str]) -> None:
    pod = cluster.add_pod("one")
    cluster.set_state(pod, "Running", running={})
    cluster.log(pod, "before")
    lines = namespace.log(pod, "pytorch")
    assert next(lines) == "before"
    cluster.outage.set()
    threading.Timer(0.15, cluster.outage.clear).start()
    cluster.log(pod, "during")
    assert next(lines) == "during"
    cluster.log(pod, "after")
    cluster.set_state(pod, "Succeeded", terminated={"exitCode": 0})
    assert list(lines) == ["after"]


def test_a_log_that_may_not_be_read(cluster: FakeCluster, namespace: Namespace) -> None:
    pod = cluster.add_pod("one")
    cluster.set_state(pod, "Running", running={})
    cluster.refuse = lambda verb, plural: (
        (403, 'User "me" cannot get resource "pods/log"') if plural == "pods/log" else None
    )
    error = complaint(lambda: list(namespace.log(pod, "pytorch")))
    assert error.what == "not allowed to get pods/log in the namespace hpml"


def test_the_log_of_a_pod_whose_node_is_gone_comes_to_an_end(
    cluster: FakeCluster, namespace: Namespace, said: list[str]
) -> None:
    pod = cluster.add_pod("one")
    cluster.set_state(pod, "Failed", terminated={"exitCode": 1})
    cluster.refuse = lambda verb, plural: (
        (502, "dial tcp: no route to host") if plural == "pods/log" else None
    )
    assert list(namespace.log(pod, "pytorch")) == []
    assert len(said) == 1 and "the rest of the log of one cannot be read" in said[0]
