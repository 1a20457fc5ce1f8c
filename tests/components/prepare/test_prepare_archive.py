"""Archives: what is honest comes out whole, what is hostile or damaged is refused and leaves nothing."""

from __future__ import annotations

import gzip
import io
import stat
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpml.core.errors import StageFailed
from hpml.data_files import archive as archives
from hpml.data_files.archive import extract

NOISE = np.random.default_rng(0).bytes(300_000)  # does not compress
Member = tuple[str, bytes | None]


def tar_file(place: Path, members: list[Member | tarfile.TarInfo], mode: str = "w:gz") -> Path:
    """A tar of files (name, content), folders (name, None) and raw headers without content."""
    with tarfile.open(place, mode) as archive:  # type: ignore[call-overload]
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            header = tarfile.TarInfo(member[0])
            header.size = len(member[1] or b"")
            header.type = tarfile.DIRTYPE if member[1] is None else tarfile.REGTYPE
            archive.addfile(header, io.BytesIO(member[1] or b""))
    return place


def zip_file(place: Path, members: list[Member | zipfile.ZipInfo]) -> Path:
    """A zip of files (name, content), folders (name ending in /, None) and raw entries."""
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in members:
            if isinstance(member, zipfile.ZipInfo):
                archive.writestr(member, b"target")
            else:
                archive.writestr(member[0], member[1] or b"")
    return place


def special(kind: bytes, name: str = "inner", target: str = "") -> tarfile.TarInfo:
    """The header of a link or a device."""
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, target
    return header


def linked(name: str) -> zipfile.ZipInfo:
    """A symbolic link, as zip knows it."""
    entry = zipfile.ZipInfo(name)
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


def refused(archive: Path, tmp_path: Path, *, match: str) -> None:
    """The archive is refused with this reason, and nothing is left of it, nor put elsewhere."""
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StageFailed, match=match) as caught:
        extract(archive, tmp_path / "extracted")
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


HONEST: list[Member | tarfile.TarInfo] = [
    ("./", None),
    ("set/", None),
    ("set/noise.bin", NOISE),
    ("set/deep/er/empty", b""),
]


@pytest.mark.parametrize("make", ["tar", "tar.gz", "zip"])
def test_an_honest_archive_comes_out_whole(make: str, tmp_path: Path) -> None:
    if make == "zip":
        archive = zip_file(tmp_path / "a.zip", [("set/noise.bin", NOISE), ("set/deep/er/empty", b"")])
    else:
        archive = tar_file(tmp_path / "a", HONEST, "w" if make == "tar" else "w:gz")
    extract(archive, tmp_path / "extracted")
    assert (tmp_path / "extracted/set/noise.bin").read_bytes() == NOISE
    assert (tmp_path / "extracted/set/deep/er/empty").read_bytes() == b""


def test_modes_of_an_archive_are_not_taken_over(tmp_path: Path) -> None:
    header = tarfile.TarInfo("tool")
    header.mode = 0o6777
    extract(tar_file(tmp_path / "a", [header]), tmp_path / "extracted")
    assert (tmp_path / "extracted/tool").stat().st_mode & 0o7111 == 0


@pytest.mark.parametrize("name", ["../escaped", "set/../../escaped", "/tmp/hpml-escaped", "..\\escaped"])
@pytest.mark.parametrize("form", [tar_file, zip_file])
def test_a_member_outside_the_folder_is_refused(form: Callable[..., Path], name: str, tmp_path: Path) -> None:
    refused(form(tmp_path / "a", [("fine", b"1"), (name, b"x")]), tmp_path, match="reaches outside")
    assert not Path("/tmp/hpml-escaped").exists()


@pytest.mark.parametrize(
    "member",
    [
        special(tarfile.SYMTYPE, target="/etc/passwd"),
        special(tarfile.LNKTYPE, target="fine"),
        special(tarfile.CHRTYPE),
        special(tarfile.BLKTYPE),
        special(tarfile.FIFOTYPE),
    ],
    ids=["symlink", "hardlink", "character device", "block device", "fifo"],
)
def test_a_tar_with_a_link_or_device_is_refused(member: tarfile.TarInfo, tmp_path: Path) -> None:
    refused(tar_file(tmp_path / "a", [("fine", b"1"), member]), tmp_path, match="link, a device")


def test_a_zip_with_a_link_is_refused(tmp_path: Path) -> None:
    refused(zip_file(tmp_path / "a", [("fine", b"1"), linked("inner")]), tmp_path, match="link, a device")


@pytest.mark.parametrize("form", [tar_file, zip_file])
def test_a_bomb_is_stopped_by_its_ratio(form: Callable[..., Path], tmp_path: Path) -> None:
    archive = form(tmp_path / "a", [("zeros", bytes(50_000_000))])
    refused(archive, tmp_path, match="100 times its own size")


@pytest.mark.parametrize("form", [tar_file, zip_file])
def test_an_archive_over_the_size_limit_is_refused(
    form: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MOST_BYTES", 100_000)
    archive = form(tmp_path / "a", [("noise", NOISE)])
    refused(archive, tmp_path, match="more than 100000 bytes")


@pytest.mark.parametrize("form", [tar_file, zip_file])
def test_an_archive_with_too_many_members_is_refused(
    form: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MOST_MEMBERS", 10)
    archive = form(tmp_path / "a", [(f"{number}", b"") for number in range(11)])
    refused(archive, tmp_path, match="more than 10 members")


def test_a_tar_bomb_in_a_header_is_stopped_without_filling_the_memory(tmp_path: Path) -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 200_000_000
    content = header.tobuf(tarfile.USTAR_FORMAT) + bytes(header.size)
    archive = tmp_path / "a"
    archive.write_bytes(gzip.compress(content + NOISE * 10))
    del content
    tracemalloc.start()
    refused(archive, tmp_path, match="header is endless")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 20_000_000


def test_a_sparse_tar_member_is_refused(tmp_path: Path) -> None:
    header = tarfile.TarInfo("sparse")
    header.type = tarfile.GNUTYPE_SPARSE
    buffer = bytearray(header.tobuf(tarfile.GNU_FORMAT))
    buffer[483:495] = b"77777777777\0"  # the size it claims, of which nothing is stored
    buffer[148:156] = b" " * 8
    buffer[148:156] = f"{sum(buffer[:512]):06o}\0 ".encode()
    archive = tmp_path / "a"
    archive.write_bytes(bytes(buffer) + bytes(10240))
    refused(archive, tmp_path, match="special file")


@pytest.mark.parametrize("form", [tar_file, zip_file])
@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("a", b"1"), ("a", b"2")], "twice"),
        ([("a", b"1"), ("a/b", b"2")], "both a file and a folder"),
        ([("a/b", b"1"), ("a", b"2")], "twice"),
    ],
)
def test_a_name_that_is_taken_is_refused(
    form: Callable[..., Path], members: list[Member], reason: str, tmp_path: Path
) -> None:
    refused(form(tmp_path / "a", members), tmp_path, match=reason)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("form", [tar_file, zip_file])
def test_a_truncated_archive_is_refused(form: Callable[..., Path], share: float, tmp_path: Path) -> None:
    archive = form(tmp_path / "a", [("noise", NOISE), ("more", NOISE)])
    content = archive.read_bytes()
    archive.write_bytes(content[: int(len(content) * share)])
    refused(archive, tmp_path, match="truncated, corrupt")


def test_a_gzip_without_its_last_bytes_is_refused(tmp_path: Path) -> None:
    archive = tar_file(tmp_path / "a", HONEST)
    archive.write_bytes(archive.read_bytes()[:-4])
    refused(archive, tmp_path, match="truncated, corrupt")


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_plain_tar_cut_between_two_members_is_refused(blocks: int, tmp_path: Path) -> None:
    archive = tar_file(tmp_path / "a", [("first", bytes(512)), ("second", b"")], "w")
    archive.write_bytes(archive.read_bytes()[: 1024 + 512 * blocks])
    refused(archive, tmp_path, match="truncated, corrupt")


def test_a_plain_tar_with_a_damaged_header_is_refused(tmp_path: Path) -> None:
    archive = tar_file(tmp_path / "a", [("first", bytes(512)), ("second", b"2")], "w")
    content = bytearray(archive.read_bytes())
    content[1024 + 5] ^= 0xFF
    archive.write_bytes(content)
    refused(archive, tmp_path, match="truncated, corrupt")


@pytest.mark.parametrize("form", [tar_file, zip_file])
def test_an_archive_with_a_flipped_bit_is_refused(form: Callable[..., Path], tmp_path: Path) -> None:
    archive = form(tmp_path / "a", [("noise", NOISE)])
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    archive.write_bytes(content)
    refused(archive, tmp_path, match="truncated, corrupt")


def test_an_encrypted_zip_is_refused(tmp_path: Path) -> None:
    archive = zip_file(tmp_path / "a", [("secret", b"1")])
    content = bytearray(archive.read_bytes())
    content[content.index(b"PK\x01\x02") + 8] |= 1
    content[6] |= 1
    archive.write_bytes(content)
    refused(archive, tmp_path, match="encrypted")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x1f\x8b", b"just a text", NOISE])
def test_what_is_no_archive_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    refused(tmp_path / "a", tmp_path, match="not a .tar, .tar.gz or .zip")
