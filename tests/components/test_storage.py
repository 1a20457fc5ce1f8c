"""Artifacts and checkpoints in S3 (moto's server): whole or not at all, and clear about what is wrong."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from hpml.artifacts.folder import open_artifact, seal_artifact
from hpml.artifacts.report import ReportSpec
from hpml.core.errors import HpmlError, StageFailed, Unavailable, UsageError
from hpml.io import patience, storage
from tests.components.conftest import Bucket
from tests.conftest import LINEAGE
from tests.ports import free_port


def artifact(folder: Path, *, files: int = 3, title: str = "a") -> Path:
    (folder / "below").mkdir(parents=True)
    for number in range(files):
        (folder / "below" / f"{number}.bin").write_bytes(os.urandom(1000 + number))
    (folder / "report.html").write_text("<p>")
    seal_artifact(folder, spec=ReportSpec(title=title), metrics={}, lineage=LINEAGE)
    return folder


def wait_until(happened: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PAUSES_S", (0, 0, 0))


# ------------------------------------------------------------------------------------------------- artifacts


def test_an_artifact_there_and_back(bucket: Bucket, tmp_path: Path) -> None:
    written = artifact(tmp_path / "a", files=20)
    uri = f"{bucket.uri}/objects/a"
    storage.upload(written, uri)
    fetched = storage.fetch(uri, tmp_path / "b")
    assert fetched == tmp_path / "b"
    assert open_artifact(fetched, kind="report").digest == open_artifact(written, kind="report").digest
    assert {file.name for file in fetched.iterdir()} == {file.name for file in written.iterdir()}
    assert storage.exists(f"{uri}/manifest.json") and not storage.exists(f"{uri}/manifest")
    assert len(storage.list_names(uri)) == 22


def test_a_path_is_used_in_place(tmp_path: Path) -> None:
    written = artifact(tmp_path / "a")
    assert storage.fetch(str(written), tmp_path / "elsewhere") == written
    assert not (tmp_path / "elsewhere").exists()
    storage.write_text(str(tmp_path / "new" / "text"), "é")
    assert storage.read_text(str(tmp_path / "new" / "text")) == "é"
    assert storage.exists(str(tmp_path / "new" / "text")) and not storage.exists(str(tmp_path / "old"))
    for only_in_s3 in (storage.list_names, storage.delete, storage.stored):
        with pytest.raises(UsageError, match="is not s3://BUCKET/PREFIX"):
            only_in_s3(str(tmp_path / "new"))  # type: ignore[operator]
    assert storage.exists(str(tmp_path / "new" / "text"))


def test_texts(bucket: Bucket) -> None:
    uri = f"{bucket.uri}/a/text"
    storage.write_text(uri, "é\n")
    storage.write_text(uri, "ü\n")
    assert storage.read_text(uri) == "ü\n"
    assert storage.list_names(bucket.uri) == ["a/text"]
    with pytest.raises(StageFailed, match=r"there is nothing at s3://.*/a/other"):
        storage.read_text(f"{bucket.uri}/a/other")
    bucket.put("a/bytes", b"\xff")
    with pytest.raises(StageFailed, match="is no text"):
        storage.read_text(f"{bucket.uri}/a/bytes")


def test_delete_takes_what_is_below_and_nothing_beside(bucket: Bucket) -> None:
    for key in ("a/1", "a/b/2", "ab", "a"):
        bucket.put(key)
    storage.delete(f"{bucket.uri}/a")
    storage.delete(f"{bucket.uri}/absent")
    assert bucket.listing() == ["ab"]
    with pytest.raises(UsageError, match="whole bucket"):
        storage.delete(bucket.uri)


def test_another_artifact_is_never_overwritten(bucket: Bucket, tmp_path: Path) -> None:
    uri = f"{bucket.uri}/a"
    storage.upload(artifact(tmp_path / "a"), uri)
    before = {key: bucket.get(key) for key in bucket.listing()}
    storage.upload(tmp_path / "a", uri)
    with pytest.raises(StageFailed, match="holds another artifact"):
        storage.upload(artifact(tmp_path / "b"), uri)
    assert {key: bucket.get(key) for key in bucket.listing()} == before
    bucket.put("b/manifest.json", b"[]")
    with pytest.raises(StageFailed, match=r"b/manifest\.json is no manifest"):
        storage.upload(tmp_path / "a", f"{bucket.uri}/b")


def test_a_killed_upload_leaves_no_manifest_and_is_completed_by_the_next(
    bucket: Bucket, tmp_path: Path
) -> None:
    """The manifest comes last."""
    uri, written = f"{bucket.uri}/a", artifact(tmp_path / "a", files=150)
    code = (
        "import sys; from pathlib import Path; from hpml.io import storage;"
        "print('ready', flush=True); storage.upload(Path(sys.argv[1]), sys.argv[2])"
    )
    sender = subprocess.Popen([sys.executable, "-c", code, str(written), uri], stdout=subprocess.PIPE)
    wait_until(lambda: len(bucket.listing()) > 20)
    sender.kill()
    sender.communicate()
    there = bucket.listing()
    assert 20 < len(there) < 152 and "a/manifest.json" not in there
    storage.upload(written, uri)
    assert open_artifact(storage.fetch(uri, tmp_path / "b"), kind="report")


def test_nothing_there_is_told(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("ab/file")
    bucket.put("folder/")  # as consoles show an empty folder
    for name in ("a", "folder"):
        with pytest.raises(StageFailed, match=f"there is nothing at {bucket.uri}/{name} -> run the step"):
            storage.fetch(f"{bucket.uri}/{name}", tmp_path / "x")
    assert list(storage.fetch(f"{bucket.uri}/a", tmp_path / "x", may_be_empty=True).iterdir()) == []


# ---------------------------------------------------------------------------------------------- hostile names


@pytest.mark.parametrize("key", ["a/../../evil", "a//etc/evil", "a/./evil", "a/b/../../../evil"])
def test_a_name_that_leads_out_of_the_folder_is_refused(bucket: Bucket, tmp_path: Path, key: str) -> None:
    bucket.put("a/good", b"1")
    bucket.put(key, b"2")
    with pytest.raises(StageFailed, match="hostile name"):
        storage.fetch(f"{bucket.uri}/a", tmp_path / "deep" / "folder")
    assert list(tmp_path.rglob("*")) == []


def test_a_file_that_is_a_folder_too_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    for key in ("a/b", "a/b/c"):
        bucket.put(key)
    with pytest.raises(StageFailed, match="a/b is a file and a folder"):
        storage.fetch(f"{bucket.uri}/a", tmp_path / "x")


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///a", "s3://b/../c", "s3://b/a//c", "gs://b/a", "http://u:p@h"]
)
def test_what_is_no_uri_of_ours_is_a_mistake_of_usage(uri: str) -> None:
    with pytest.raises(UsageError) as caught:
        storage.is_remote(uri)
    assert "u:p" not in str(caught.value)


# --------------------------------------------------------------------------------------------------- outages


@contextmanager
def answering(status: int, code: str) -> Iterator[tuple[str, list[str]]]:
    """A store that answers every request with an error; its URL, and the requests so far."""
    seen: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            seen.append(self.command)
            body = f"<Error><Code>{code}</Code><Message>you sent hunter2</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_HEAD = _answer

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()


def refusal(action: Callable[[], object]) -> HpmlError:
    with pytest.raises(HpmlError) as caught:
        action()
    assert "hunter2" not in str(caught.value)
    return caught.value


@pytest.mark.usefixtures("no_pauses", "bucket")
@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "InternalError"), (503, "SlowDown"), (429, "Whatever"), (400, "RequestTimeout")],
)
def test_an_outage_is_waited_for_aloud_and_not_forever(
    status: int, code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status, code) as (url, seen):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        error = refusal(lambda: storage.read_text("s3://b/text"))
    assert isinstance(error, Unavailable) and error.exit_code == 6
    assert f"it answers {status} {code}" in str(error) and "run again" in str(error)
    assert len(seen) == 4
    said = capsys.readouterr().err.splitlines()
    assert [line.rpartition("; ")[2] for line in said] == [
        f"attempt {number} of 4, the next in 0 s" for number in (1, 2, 3)
    ]
    assert all(f"the store does not serve s3://b/text: it answers {status} {code}" in line for line in said)


@pytest.mark.usefixtures("no_pauses", "bucket")
def test_no_connection_is_an_outage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    error = refusal(lambda: storage.exists("s3://b/a"))
    assert isinstance(error, Unavailable) and "cannot be reached" in str(error) and "127.0.0.1" in str(error)
    assert "check AWS_ENDPOINT_URL and that the store is up" in str(error)
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_the_waits_are_whole_doubling_seconds_of_about_two_minutes() -> None:
    assert 100 <= sum(patience.PAUSES_S) <= 140
    assert all(isinstance(pause, int) and pause > 0 for pause in patience.PAUSES_S)
    assert all(later <= 2 * earlier for earlier, later in pairwise(patience.PAUSES_S))


@pytest.fixture
def gate(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The way to the store, which can be shut."""
    gate = Gate(s3_environment["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", gate.url)
    try:
        yield gate
    finally:
        gate.close()


class Gate:
    """A port that leads to a server while it is open, and cuts every connection while it is not."""

    def __init__(self, url: str) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self._there = (host, int(port))
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._pairs: list[socket.socket] = []
        self._is_open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def open(self) -> None:
        self._is_open = True

    def shut(self) -> None:
        self._is_open = False
        for end in self._pairs:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listening.accept()
                if not self._is_open:
                    ours.close()
                    continue
                theirs = socket.create_connection(self._there)
                self._pairs += [ours, theirs]
                for pair in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    @staticmethod
    def _copy(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def test_a_store_that_comes_back_is_used(
    bucket: Bucket,
    gate: Gate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    storage.upload(artifact(tmp_path / "a"), f"{bucket.uri}/a")
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            gate.open()

    monkeypatch.setattr(patience.time, "sleep", nap)
    gate.shut()
    assert open_artifact(storage.fetch(f"{bucket.uri}/a", tmp_path / "b"), kind="report")
    assert naps == [1, 2]
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "AccessDenied", "refuses access to s3://b/a: AccessDenied -> check AWS_ACCESS_KEY_ID"),
        (403, "InvalidAccessKeyId", "InvalidAccessKeyId"),
        (401, "Unauthorized", "refuses access"),
        (404, "NoSuchBucket", "there is no bucket 'b' -> create it"),
        (400, "InvalidRequest", "it answers 400 InvalidRequest"),
    ],
)
def test_what_no_waiting_mends_is_told_at_once(
    status: int, code: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(status, code) as (url, seen):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        error = refusal(lambda: storage.read_text("s3://b/a"))
    assert isinstance(error, Unavailable) and said in str(error)
    assert len(seen) == 1 and capsys.readouterr().err == ""


def test_a_bucket_that_is_not_there(bucket: Bucket, tmp_path: Path) -> None:
    for action in (
        lambda: storage.fetch("s3://absent-bucket/a", tmp_path / "x"),
        lambda: storage.upload(artifact(tmp_path / "a"), "s3://absent-bucket/a"),
        lambda: storage.write_text("s3://absent-bucket/a", ""),
    ):
        assert "there is no bucket 'absent-bucket'" in str(refusal(action))


def test_no_credentials(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    error = refusal(lambda: storage.exists(f"{bucket.uri}/a"))
    assert isinstance(error, Unavailable) and "credentials" in str(error)


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("url", ["not an address", "http://127.0.0.1:notaport"])
def test_an_endpoint_that_is_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    error = refusal(lambda: storage.exists("s3://b/a"))
    assert isinstance(error, Unavailable) and "check AWS_ENDPOINT_URL" in str(error)


def test_importing_it_does_not_import_boto3() -> None:
    code = "import sys, hpml.io.storage as s; s.exists('/x'); print({'boto3', 'botocore'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---------------------------------------------------------------------------------------------------- mirror


def appear(file: Path, content: bytes) -> None:
    """As checkpoints do: written under another name, and renamed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    part.write_bytes(content)
    part.replace(file)


def test_a_mirror_follows_a_folder(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("s/c/0", b"from before")
    folder = tmp_path / "scratch"
    with storage.mirrored(folder, f"{bucket.uri}/s"):
        assert (folder / "c" / "0").read_bytes() == b"from before"
        appear(folder / "c" / "1", b"one")
        wait_until(lambda: "s/c/1" in bucket.listing())
        (folder / "c" / "0").unlink()
        appear(folder / "c" / "2", b"two")
        (folder / "c" / ".3.part").write_bytes(b"half")
        wait_until(lambda: bucket.listing() == ["s/c/1", "s/c/2"])
        appear(folder / "c" / "2", b"changed")
        wait_until(lambda: bucket.get("s/c/2") == b"changed")
        appear(folder / "c" / "4", b"the last")
    assert bucket.listing() == ["s/c/1", "s/c/2", "s/c/4"]


def test_a_mirror_makes_a_last_pass_when_the_work_fails(bucket: Bucket, tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        storage.mirrored(tmp_path / "s", f"{bucket.uri}/s", only=("c-*/*",)),
    ):
        appear(tmp_path / "s" / "c-1" / "a", b"1")
        appear(tmp_path / "s" / "logs" / "b", b"2")
        raise ZeroDivisionError
    assert bucket.listing() == ["s/c-1/a"]


def test_a_mirror_outlives_an_outage_and_says_so_once(
    bucket: Bucket,
    gate: Gate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(storage, "_MIRROR_EVERY_S", 0.02)
    told: list[str] = []

    def said(words: str) -> bool:
        told.extend(capsys.readouterr().err.splitlines())
        return any(words in line for line in told)

    with storage.mirrored(tmp_path / "s", f"{bucket.uri}/s"):
        gate.shut()
        appear(tmp_path / "s" / "a", b"1")
        wait_until(lambda: said("checkpoints do not reach the store: the store of s3://"))
        assert bucket.listing() == []
        gate.open()
        wait_until(lambda: said(f"checkpoints reach {bucket.uri}/s again"))
    assert bucket.listing() == ["s/a"]
    assert len(told) == 2


def test_a_mirror_whose_store_stays_away_says_what_is_lost_and_fails_nothing(
    bucket: Bucket, gate: Gate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with storage.mirrored(tmp_path / "s", f"{bucket.uri}/s"):
        gate.shut()
        appear(tmp_path / "s" / "a", b"1")
    assert capsys.readouterr().err.splitlines()[-1].endswith("; this is the last attempt")
