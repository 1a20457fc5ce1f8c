"""k8s/make-secrets and k8s/kind/up, with stand-ins for the programs they call."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TOOLS = (
    "base64", "bash", "cat", "cut", "dirname", "env", "grep", "head", "mktemp", "rm", "sed", "sleep", "touch",
    "tr",
)  # fmt: skip

# Each stand-in appends its command line to $WORLD/calls and keeps what it made as files of $WORLD.
STAND_INS = {
    "docker": """
case $1 in
  info)
    [[ ! -e $WORLD/docker-is-down ]] || exit 1
    case $* in
      *NCPU*) cat "$WORLD/cpus" ;;
      *MemTotal*) echo $(($(cat "$WORLD/memory_gib") * 1024 ** 3)) ;;
    esac ;;
  image) [[ ! -e $WORLD/no-images ]] ;;
esac""",
    "podman": """
case "$1 $*" in
  info*CPUs*) cat "$WORLD/cpus" ;;
  info*MemTotal*) echo $(($(cat "$WORLD/memory_gib") * 1024 ** 3)) ;;
esac""",
    "kind": """
case "$1 ${2:-}" in
  "get clusters") if [[ -e $WORLD/cluster ]]; then echo hpml; fi ;;
  "get kubeconfig") echo "apiVersion: v1" ;;
  "create cluster") touch "$WORLD/cluster" ;;
  "delete cluster") rm -f "$WORLD/cluster" ;;
  "version ") echo "kind v0.30.0" ;;
esac""",
    "kubectl": """
echo "${KUBECONFIG:-none}" >>"$WORLD/kubeconfigs"
case "$*" in
  version*) echo "Client Version: v1.34.0" ;;
  *" get secret "*go-template*) echo "data:"; echo "  AWS_ACCESS_KEY_ID: Y29waWVk" ;;
  *" get secret "*) if [[ -e $WORLD/secret-$2-$5 ]]; then echo "secret/$5"; fi ;;
  "create -f -")
    text=$(cat); echo "$text" >"$WORLD/manifest"
    line=$(grep '^metadata' <<<"$text")
    name=$(sed -E 's/.*name: ([a-z-]+).*/\\1/' <<<"${line%%, namespace*}")
    namespace=$(sed -E 's/.*namespace: ([a-z-]+).*/\\1/' <<<"$line")
    echo "$text" >"$WORLD/secret-$namespace-$name" ;;
  wait*) [[ ! -e $WORLD/no-definitions ]] ;;
  *" wait deployment "*) [[ ! -e $WORLD/never-ready ]] ;;
esac""",
    "git": "",
}


@dataclass
class World:
    """A PATH of stand-ins, and what they were told."""

    root: Path

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(ROOT / "k8s" / script), *arguments],
            env={
                "PATH": str(self.root / "bin"),
                "WORLD": str(self.root),
                "HOME": str(self.root),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def forget(self) -> None:
        (self.root / "calls").unlink(missing_ok=True)

    @property
    def calls(self) -> list[str]:
        return (self.root / "calls").read_text().splitlines()

    def without(self, program: str) -> None:
        (self.root / "bin" / program).unlink()

    def put(self, name: str, text: str = "") -> None:
        (self.root / name).write_text(text)

    def secret(self, namespace: str, name: str) -> dict[str, str]:
        text = (self.root / f"secret-{namespace}-{name}").read_text()
        found: dict[str, str] = yaml.safe_load(text).get("stringData", {})
        return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A machine that has all that is needed, and no cluster yet."""
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or pytest.fail(f"no {tool}"))
    for name, body in STAND_INS.items():
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/bash\nset -euo pipefail\necho "{name} $*" >>"$WORLD/calls"\n{body}\n')
        program.chmod(0o755)
    found = World(tmp_path)
    found.put("cpus", "8")
    found.put("memory_gib", "15")
    return found


# ---------------------------------------------------------------- make-secrets


def test_secrets_are_random_and_only_on_standard_input(world: World, tmp_path: Path) -> None:
    first = world.run("make-secrets")

    assert first.returncode == 0, first.stderr
    store = world.secret("hpml", "hpml-store")
    assert store.keys() == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION"}
    assert len(store["AWS_ACCESS_KEY_ID"]) == 20
    assert len(store["AWS_SECRET_ACCESS_KEY"]) == 40
    password = world.secret("hpml", "hpml-postgres")["password"]
    for value in (store["AWS_ACCESS_KEY_ID"], store["AWS_SECRET_ACCESS_KEY"], password):
        assert value.isalnum()
        assert value not in first.stdout + first.stderr + "\n".join(world.calls)

    for secret in tmp_path.glob("secret-*"):
        secret.unlink()
    world.run("make-secrets")
    assert world.secret("hpml", "hpml-store")["AWS_SECRET_ACCESS_KEY"] != store["AWS_SECRET_ACCESS_KEY"]


def test_a_secret_that_is_there_stays(world: World) -> None:
    world.run("make-secrets", "kubeflow")
    before = world.secret("hpml", "hpml-store")
    world.forget()

    again = world.run("make-secrets", "kubeflow")

    assert again.returncode == 0
    assert not [call for call in world.calls if "create" in call]
    assert world.secret("hpml", "hpml-store") == before


def test_another_namespace_gets_a_copy(world: World) -> None:
    world.run("make-secrets", "kubeflow")

    copied = yaml.safe_load((world.root / "secret-kubeflow-hpml-store").read_text())
    assert copied["metadata"]["namespace"] == "kubeflow"
    assert copied["data"] == {"AWS_ACCESS_KEY_ID": "Y29waWVk"}
    assert "stringData" not in copied


def test_every_secret_of_the_manifests_is_made(world: World, render: Callable[[str], list[dict]]) -> None:
    world.run("make-secrets")
    needed: dict[str, set[str]] = {}
    for each in [*render("base"), *render("base+postgres"), *render("overlays/test")]:
        if each["kind"] != "Deployment":
            continue
        spec = each["spec"]["template"]["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            for source in container.get("envFrom", []):
                needed.setdefault(source["secretRef"]["name"], set())
            for variable in container.get("env", []):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference:
                    needed.setdefault(reference["name"], set()).add(reference["key"])
        for volume in spec["volumes"]:
            if "secret" in volume:
                needed.setdefault(volume["secret"]["secretName"], set())

    assert needed.keys() == {"hpml-store", "hpml-postgres"}
    for name, keys in needed.items():
        assert keys <= world.secret("hpml", name).keys()


# ---------------------------------------------------------------- kind/up, kind/down


def test_up_makes_everything_once(world: World) -> None:
    first = world.run("kind/up")

    assert first.returncode == 0, first.stderr
    assert [call for call in world.calls if call.startswith("kind create cluster")]
    applied = [call for call in world.calls if call.startswith("kubectl apply")]
    assert len(applied) == 4  # Kubeflow's cluster-wide part, Kubeflow, the operator, ours
    assert "k8s/overlays/kind" in applied[-1]
    assert all("?ref=" in call for call in applied[:-1]), "what comes from elsewhere has its version"
    loaded = [call.split()[3] for call in world.calls if call.startswith("kind load docker-image")]
    assert loaded == ["hpml-cpu:0.1.0", "hpml-client:0.1.0"]
    assert (world.root / "secret-kubeflow-hpml-store").exists()
    assert "http://localhost:5000" in first.stdout

    world.forget()
    second = world.run("kind/up")

    assert second.returncode == 0, second.stderr
    assert not [call for call in world.calls if " create " in call]


def test_up_touches_no_other_cluster(world: World) -> None:
    world.run("kind/up", KUBECONFIG="/the/cluster/of/somebody/else")

    used = (world.root / "kubeconfigs").read_text().splitlines()
    asked_for_its_version, *rest = used
    assert asked_for_its_version == "/the/cluster/of/somebody/else"
    assert rest
    assert "/the/cluster/of/somebody/else" not in rest


def test_up_with_podman_loads_under_the_name_that_kubernetes_looks_for(world: World) -> None:
    world.without("docker")

    assert world.run("kind/up").returncode == 0
    assert "podman tag hpml-cpu:0.1.0 docker.io/library/hpml-cpu:0.1.0" in world.calls
    assert [call for call in world.calls if call.startswith("kind load image-archive")]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda world: world.without("kind"), "kind is not installed"),
        (lambda world: world.without("kubectl"), "kubectl is not installed"),
        (lambda world: world.without("git"), "git is not installed"),
        (lambda world: (world.without("docker"), world.without("podman")), "podman is not installed"),
        (lambda world: world.put("docker-is-down"), "docker does not answer"),
        (lambda world: world.put("cpus", "2"), "docker has 2 CPUs, 4 are needed"),
        (lambda world: world.put("memory_gib", "4"), "docker has 4 GiB of memory, 10 are needed"),
        (lambda world: world.put("no-images"), "there is no image hpml-cpu:0.1.0 -> make images"),
        (lambda world: world.put("no-definitions"), "Kubeflow's resource definitions are not ready"),
        (lambda world: world.put("never-ready"), "not everything in hpml came up"),
    ],
)
def test_what_is_missing_is_one_line(world: World, spoil: Callable[[World], object], said: str) -> None:
    spoil(world)

    answer = world.run("kind/up")

    assert answer.returncode == 6
    (line,) = answer.stderr.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert " -> " in line


@pytest.mark.parametrize("script", ["kind/up", "make-secrets"])
def test_wrong_usage_says_how(world: World, script: str) -> None:
    answer = world.run(script, "--help-me")

    assert answer.returncode == 2
    assert "k8s/" in answer.stderr
    assert not (world.root / "calls").exists()


def test_an_unknown_engine_is_wrong_usage(world: World) -> None:
    answer = world.run("kind/up", CONTAINER_ENGINE="lxc")

    assert answer.returncode == 2
    assert answer.stderr == "error: CONTAINER_ENGINE=lxc -> docker or podman\n"


def test_down_deletes_the_cluster_and_may_be_repeated(world: World) -> None:
    world.run("kind/up")

    for _ in range(2):
        assert world.run("kind/down").returncode == 0
        assert not (world.root / "cluster").exists()


def test_the_version_is_the_project_s() -> None:
    import importlib.metadata

    version = importlib.metadata.version("hpml-pipeline")
    assert f"\nversion={version} " in (ROOT / "k8s" / "kind" / "up").read_text()


def test_the_scripts_may_be_run() -> None:
    for script in ("make-secrets", "kind/up", "kind/down"):
        assert os.access(ROOT / "k8s" / script, os.X_OK)
