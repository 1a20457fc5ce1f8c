"""`make setup` on a machine that reaches neither torch's index nor PyPI, but has a mirror that pip knows."""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
UV = Path(sys.executable).with_name("uv")

# A build backend of its own, because this mirror has no setuptools.
BACKEND = """
import pathlib, zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as wheel:
        wheel.writestr("tiny.py", "")
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1.0\\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    return name
"""


def add_wheel(mirror: Path, name: str) -> str:
    """An empty package in a simple index; its digest."""
    folder = mirror / "simple" / name
    folder.mkdir(parents=True)
    file = folder / f"{name}-99.0-py3-none-any.whl"
    info = f"{name}-99.0.dist-info"
    with zipfile.ZipFile(file, "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (folder / "index.html").write_text(f'<a href="{file.name}">{file.name}</a>')
    return hashlib.sha256(file.read_bytes()).hexdigest()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[Path]:
    """A folder that is served as a package index; `address` in it says where."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        (folder / "address").write_text(f"http://127.0.0.1:{server.server_port}/simple")
        yield folder
        server.shutdown()
        thread.join()


@pytest.fixture
def project(tmp_path: Path, mirror: Path) -> Path:
    """Our Makefile beside a project of one locked package."""
    folder = tmp_path / "clone"
    folder.mkdir()
    shutil.copy(REPOSITORY / "Makefile", folder)
    digest = add_wheel(mirror, "locked")
    add_wheel(mirror, "uv")  # what runs is the real one
    (folder / "requirements.lock").write_text(f"locked==99.0 --hash=sha256:{digest}\n")
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tiny"\nversion = "1.0"\n'
    )
    return folder


def make_setup(project: Path, mirror: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`make setup` where only the mirror answers, which pip's configuration names and uv's does not."""
    others = ("PIP_", "UV_", "MAKE")  # the last, so that it is no part of a `make test`
    environment = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    dead = "http://127.0.0.1:9"
    environment |= {
        "PIP_INDEX_URL": (mirror / "address").read_text(),
        "UV_HTTP_RETRIES": "0",
        "UV_NO_CACHE": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        **{name: dead for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy")},
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    return subprocess.run(
        ["make", "setup", f"PYTHON={sys.executable}", f"UV={UV}", *words],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow  # each of the three makes environments; .ci/run does so, too
def test_what_uv_cannot_reach_pip_installs_from_the_mirror_it_knows(project: Path, mirror: Path) -> None:
    add_wheel(mirror, "torch")
    made = make_setup(project, mirror)
    assert made.returncode == 0, made.stderr
    notes = [line for line in made.stderr.splitlines() if line.startswith("note: no torch")]
    assert len(notes) == 1
    assert "6.7 GB" in notes[0]
    python = project / ".venv" / "bin" / "python"
    subprocess.run([python, "-c", "import torch, locked, tiny"], check=True)
    assert make_setup(project, mirror).stdout == "make: Nothing to be done for 'setup'.\n"


@pytest.mark.slow  # likewise
def test_where_pip_finds_no_torch_either_the_error_says_what_to_give(project: Path, mirror: Path) -> None:
    made = make_setup(project, mirror)
    assert made.returncode == 2
    assert "error: pip finds no torch -> name a folder with its wheel" in made.stderr
    assert not (project / ".venv" / ".ready").exists()


@pytest.mark.slow  # likewise
def test_a_build_of_torch_that_was_asked_for_is_not_replaced_by_another(project: Path, mirror: Path) -> None:
    add_wheel(mirror, "torch")
    made = make_setup(project, mirror, "TORCH=cu128")
    assert made.returncode == 2
    assert "error: no torch for TORCH=cu128 -> make setup takes what pip finds" in made.stderr
