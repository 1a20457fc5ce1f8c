"""cifar10: small archives in the two published forms, the pickles written as Python 2 wrote them."""

from __future__ import annotations

import datetime
import functools
import hashlib
import http.server
import io
import ipaddress
import pickle
import shutil
import socket
import ssl
import struct
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hpml.core.contract import Output, validate
from hpml.core.errors import ConfigInvalid, StageFailed, Unavailable
from hpml.tasks import AnySource, task_of
from hpml.tasks.image_classification.data.cifar_batches import BATCHES, read_batches
from hpml.tasks.image_classification.sources.cifar10 import CLASS_NAMES, Cifar10

ROWS = 20  # in a batch; two of each class
*TRAIN_BATCHES, TEST_BATCH = BATCHES


def pixels(batch: str) -> NDArray[np.uint8]:
    """The pixels of a batch, (rows, 3072): all red, then all green, then all blue of an image."""
    generator = np.random.default_rng(BATCHES.index(batch))
    return generator.integers(0, 256, (ROWS, 3072), dtype=np.uint8)


LABELS = [row % 10 for row in range(ROWS)]


# ----------------------------------------------------------------------- a pickle as Python 2's cPickle wrote


def py2_string(text: bytes) -> bytes:
    """A string, put into the memo as every string was."""
    length = b"U" + bytes([len(text)]) if len(text) < 256 else b"T" + struct.pack("<i", len(text))
    return length + text + b"q\x01"


def py2_integer(number: int) -> bytes:
    return b"K" + bytes([number]) if 0 <= number < 256 else b"J" + struct.pack("<i", number)


def py2_list(items: list[bytes]) -> bytes:
    """A list, filled in portions (of 1000 in the published files)."""
    portions = [items[start : start + 8] for start in range(0, len(items), 8)]
    return b"]r\x00\x01\x00\x00" + b"".join(b"(" + b"".join(portion) + b"e" for portion in portions)


def py2_array(raw: bytes, rows: int, *, fortran: bool = False) -> bytes:
    """A numpy array of bytes (rows, 3072) as numpy 1 on Python 2 reduced it, protocol 2."""
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = py2_integer(rows) + b"M\x00\x0c\x86"
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    order = b"\x88" if fortran else b"\x89"
    return empty + b"(K\x01" + shape + dtype + order + py2_string(raw) + b"tb"


def py2_batch(data: bytes, labels: list[int] = LABELS, rows: int = ROWS, *, fortran: bool = False) -> bytes:
    """A batch file: a dict with the keys, and in the order, of the published ones."""
    items = (
        (b"batch_label", py2_string(b"training batch 1 of 5")),
        (b"labels", py2_list([py2_integer(label) for label in labels])),
        (b"data", py2_array(data, rows, fortran=fortran)),
        (b"filenames", py2_list([py2_string(f"photo_s_{row:06}.png".encode()) for row in range(rows)])),
    )
    return b"\x80\x02}(" + b"".join(py2_string(key) + value for key, value in items) + b"u."


def python_files() -> dict[str, bytes]:
    return {f"cifar-10-batches-py/{name}": py2_batch(pixels(name).tobytes()) for name in BATCHES} | {
        "cifar-10-batches-py/batches.meta": b"\x80\x02}.",
        "cifar-10-batches-py/readme.html": b"<html>",
    }


def binary_batch(name: str) -> bytes:
    return b"".join(bytes([label]) + row.tobytes() for label, row in zip(LABELS, pixels(name), strict=True))


def binary_files() -> dict[str, bytes]:
    return {f"cifar-10-batches-bin/{name}.bin": binary_batch(name) for name in BATCHES} | {
        "cifar-10-batches-bin/batches.meta.txt": b"airplane\n",
    }


def archive_of(files: dict[str, bytes], place: Path) -> Path:
    with tarfile.open(place, "w:gz") as archive:
        for name, content in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    return place


def folder_of(files: dict[str, bytes], place: Path) -> Path:
    for name, content in files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return place


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return archive_of(python_files(), tmp_path / "cifar-10-python.tar.gz")


def test_the_pickle_made_here_is_one_that_python_reads() -> None:
    """The maker of the test's files is itself right: a real unpickler finds what was meant."""
    data = pixels("data_batch_1")
    for content in (py2_batch(data.tobytes()), py2_batch(data.tobytes(order="F"), fortran=True)):
        batch = pickle.loads(content, encoding="latin1")
        assert batch["labels"] == LABELS
        assert np.array_equal(batch["data"], data)


# ---------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("files", [python_files, binary_files])
@pytest.mark.parametrize("packed", [True, False])
def test_both_published_forms_are_read_packed_or_extracted(
    files: Callable[[], dict[str, bytes]],
    packed: bool,
    tmp_path: Path,
    prepare: Callable[..., Any],
    splits_of: Callable[..., Any],
    training_of: Callable[..., Any],
) -> None:
    make = archive_of if packed else folder_of
    data = prepare(source="cifar10", path=make(files(), tmp_path / "cifar"))
    assert task_of(data.spec.task).class_names == CLASS_NAMES
    assert task_of(data.spec.task).image_shape_hwc == (32, 32, 3)
    assert data.spec.splits["train"].class_counts == (8,) * 10
    assert data.spec.splits["validation"].class_counts == (2,) * 10
    assert data.spec.splits["test"].class_counts == (2,) * 10
    splits = splits_of(data)
    expected = np.concatenate([pixels(name) for name in TRAIN_BATCHES])
    images, labels = training_of(data)
    found = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    rows = zip(expected, LABELS * 5, strict=True)
    assert sorted(zip(map(bytes, found), labels.tolist(), strict=True)) == sorted(
        (bytes(image), label) for image, label in rows
    )
    assert np.array_equal(splits["test"][0].transpose(0, 3, 1, 2).reshape(ROWS, -1), pixels(TEST_BATCH))
    assert splits["test"][1].tolist() == LABELS


def test_the_folder_of_the_batches_itself_is_read(tmp_path: Path, prepare: Callable[..., Any]) -> None:
    folder = folder_of(python_files(), tmp_path) / "cifar-10-batches-py"
    assert prepare(source="cifar10", path=folder).spec.splits["train"].rows == 4 * ROWS


def test_an_array_in_fortran_order_is_read(tmp_path: Path) -> None:
    data = pixels("data_batch_1")
    (tmp_path / "fortran").write_bytes(py2_batch(data.tobytes(order="F"), fortran=True))
    read = read_batches([tmp_path / "fortran"])
    assert np.array_equal(read.images_nhwc.transpose(0, 3, 1, 2).reshape(ROWS, -1), data)


def test_a_pickle_that_runs_code_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "touched",)

    for protocol in (0, 2, 4):
        (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"labels": [0], "data": Touch()}, protocol))
        with pytest.raises(StageFailed, match="no use for"):
            read_batches([tmp_path / "data_batch_1"])
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (py2_batch(pixels("data_batch_1").tobytes())[:-9000], "expected 61440 bytes|not enough|exhausted"),
        (py2_batch(pixels("data_batch_1").tobytes()[:-1]), r"not an array of bytes of shape \(20, 3072\)"),
        (py2_batch(pixels("data_batch_1").tobytes(), labels=LABELS[:-1]), r"shape \(19, 3072\)"),
        (py2_batch(b"", labels=[], rows=0), "not a list of integers"),
        (b"\x80\x02}.", "not a list of integers"),
        (b"\x80\x02}(" + py2_string(b"labels") + b"](K\x00\x88eu.", "not a list of integers"),
        (b"just a text", ""),
        (b"", ""),
    ],
)
def test_a_damaged_python_batch_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(StageFailed, match=f"data_batch_1 is damaged.*({reason})"):
        read_batches([tmp_path / "data_batch_1"])


def test_a_binary_batch_cut_in_a_record_is_refused(tmp_path: Path) -> None:
    for content in (binary_batch("data_batch_1")[:-1], b""):
        (tmp_path / "data_batch_1.bin").write_bytes(content)
        with pytest.raises(StageFailed, match="not a whole number of records of 3073"):
            read_batches([tmp_path / "data_batch_1.bin"])


def test_a_huge_batch_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "data_batch_1").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(StageFailed, match="1099511627776 bytes"):
        read_batches([tmp_path / "data_batch_1"])


def test_a_label_out_of_range_is_listed_by_its_row(tmp_path: Path, prepare: Callable[..., Any]) -> None:
    files = binary_files()
    name = "cifar-10-batches-bin/data_batch_3.bin"
    files[name] = files[name][: 3073 * 7] + b"\x0a" + files[name][3073 * 7 + 1 :]
    with pytest.raises(StageFailed, match=r"1 row: data_batch_3.bin row 7 \(label 10\)"):
        prepare(source="cifar10", path=archive_of(files, tmp_path / "cifar"))


def test_a_missing_batch_is_named(tmp_path: Path, prepare: Callable[..., Any]) -> None:
    files = python_files()
    del files["cifar-10-batches-py/data_batch_4"]
    with pytest.raises(StageFailed, match="data_batch_4 missing"):
        prepare(source="cifar10", path=folder_of(files, tmp_path / "cifar"))
    shutil.rmtree(tmp_path / "cifar")
    (tmp_path / "cifar").mkdir()
    with pytest.raises(StageFailed, match=r"no data_batch_1 and no data_batch_1\.bin"):
        prepare(source="cifar10", path=tmp_path / "cifar")


# ------------------------------------------------------------------------------------------- config, checksum


def test_the_checksum_of_a_path_is_verified(archive: Path, prepare: Callable[..., Any]) -> None:
    right = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert prepare(source="cifar10", path=archive, sha256=right).spec.splits["test"].rows == ROWS
    with pytest.raises(StageFailed, match=f"its SHA-256 is {right}, the recipe says {'0' * 64}"):
        prepare(source="cifar10", path=archive, sha256="0" * 64)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "give either `path`"),
        ({"path": "a", "url": "https://host/a", "sha256": "0" * 64}, "give either `path`"),
        ({"url": "https://host/a"}, "needs the `sha256`"),
        ({"url": "http://host/a", "sha256": "0" * 64}, "https address"),
        ({"url": "file:///etc/passwd", "sha256": "0" * 64}, "https address"),
        ({"url": "https://user:word@host/a", "sha256": "0" * 64}, "without user name"),
        ({"path": "a", "sha256": "abc"}, "sha256"),
    ],
)
def test_a_config_without_a_sound_origin_is_refused(config: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigInvalid, match=reason):
        validate(AnySource, {"source": "cifar10", **config}, where="data")


def test_unmet_names_a_missing_path_and_a_checksum_of_a_folder(tmp_path: Path, archive: Path) -> None:
    assert Cifar10(path=archive).unsupported_reason() == ""
    assert "gone.tar.gz does not exist" in Cifar10(path=tmp_path / "gone.tar.gz").unsupported_reason()
    assert "is a folder" in Cifar10(path=tmp_path, sha256="0" * 64).unsupported_reason()
    assert Cifar10(url="https://host/a", sha256="0" * 64).unsupported_reason() == ""


def test_the_fingerprint_is_the_checksum_or_follows_the_files(archive: Path) -> None:
    assert Cifar10(url="https://host/a", sha256="0" * 64).fingerprint() == "0" * 64
    before = Cifar10(path=archive).fingerprint()
    assert before == Cifar10(path=archive).fingerprint()
    archive.write_bytes(b"other")
    assert before != Cifar10(path=archive).fingerprint() != ""


# --------------------------------------------------------------------------------------------------- download


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an https server on this machine, trusted, that serves tmp_path/served."""
    folder = tmp_path / "served"
    folder.mkdir()
    certificate, key = _self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/moved-to-http":
                self.send_response(302)
                self.send_header("Location", "http://localhost/archive")
                self.end_headers()
            elif self.path == "/cut-short":
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"only this")
            else:
                super().do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(
        ("localhost", 0), functools.partial(Handler, directory=str(folder))
    )
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("no_proxy", "localhost")
    yield f"https://localhost:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def _self_signed(folder: Path) -> tuple[Path, Path]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(pem))
    (folder / "key.pem").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder / "certificate.pem", folder / "key.pem"


def test_an_archive_is_fetched_over_https(
    served: str, archive: Path, tmp_path: Path, prepare: Callable[..., Any]
) -> None:
    shutil.move(archive, tmp_path / "served/archive")
    sha256 = hashlib.sha256((tmp_path / "served/archive").read_bytes()).hexdigest()
    data = prepare(source="cifar10", url=f"{served}/archive", sha256=sha256)
    assert data.spec.splits["train"].rows == 4 * ROWS


def test_a_fetched_file_with_another_checksum_is_refused_and_not_kept(
    served: str, archive: Path, tmp_path: Path, out: Output
) -> None:
    shutil.move(archive, tmp_path / "served/archive")
    with pytest.raises(StageFailed, match=f"the recipe says {'0' * 64}"):
        Cifar10(url=f"{served}/archive", sha256="0" * 64).load(out)
    assert list(out.scratch.iterdir()) == []


@pytest.mark.parametrize(
    ("page", "error", "reason"),
    [
        ("gone", Unavailable, "404"),
        ("cut-short", Unavailable, "9 of 1000|IncompleteRead"),
        ("moved-to-http", StageFailed, "only https is followed"),
    ],
)
def test_what_a_server_does_wrong_is_named(
    served: str, page: str, error: type[Exception], reason: str, out: Output
) -> None:
    with pytest.raises(error, match=reason):
        Cifar10(url=f"{served}/{page}", sha256="0" * 64).load(out)
    assert list(out.scratch.iterdir()) == []


def test_a_server_that_nobody_trusts_or_that_is_not_there_is_unavailable(
    served: str, monkeypatch: pytest.MonkeyPatch, out: Output
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(Unavailable, match="certificate"):
        Cifar10(url=f"{served}/archive", sha256="0" * 64).load(out)
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        port = unused.getsockname()[1]
        with pytest.raises(Unavailable, match="refused"):
            Cifar10(url=f"https://localhost:{port}/archive", sha256="0" * 64).load(out)
