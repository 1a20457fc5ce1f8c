"""`hpml deploy`: what it writes, for each destination; what it refuses; what it leaves alone."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from hpml.core import hardware
from hpml.pipelines.delivery.deploy import MADE
from hpml.pipelines.delivery.destinations import DESTINATIONS
from tests.conftest import Hpml
from tests.pipelines.delivery.bundles import PLAN, bundle_of, bundle_of_two_graphs
from tests.serving.small_bundles import as_request

GOLDEN = Path(__file__).with_name("golden")
H100 = "NVIDIA H100 80GB HBM3"
URI = ("--bundle-uri", "s3://models/small/3")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return bundle_of(tmp_path / "bundle")


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpu_names", lambda: (H100,))


def deployed(hpml: Hpml, *arguments: str) -> list[str]:
    """The commands that bring it up."""
    answer = hpml("deploy", *arguments)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.splitlines()


# ---------------------------------------------------------------------------------------- what was reviewed

IMAGE = ("--image", "registry.example/hpml-serving:0.1.0")
CASES = {
    "compose": ("--to", "compose", *IMAGE),
    "compose-all": (
        *(
            "--to",
            "compose",
            *IMAGE,
            "--name",
            "digits",
            "--port",
            "9000",
            "--cpus",
            "0.5",
            "--memory",
            "2Gi",
        ),
        *("--host", "0.0.0.0", "--token-file", "token", "--drain-s", "2.5", "--max-batch", "16"),
        *("--max-queue-ms", "20", "--run-code"),
    ),
    "kserve": ("--to", "kserve", *IMAGE, *URI),
    "kserve-all": (
        *("--to", "kserve", *IMAGE, "--bundle-uri", "pvc://models/small/3/", "--namespace", "team-a"),
        *("--service-account", "reader", "--replicas", "2", "--token-file", "token", "--max-batch", "16"),
    ),
    "kserve-canary": ("--to", "kserve", *IMAGE, *URI, "--canary-percent", "10"),
    "kserve-knative": ("--to", "kserve", *IMAGE, *URI, "--mode", "knative", "--canary-percent", "10"),
    "kubernetes": ("--to", "kubernetes", *IMAGE, *URI),
    "kubernetes-all": (
        *("--to", "kubernetes", *IMAGE, "--bundle-uri", "pvc://models/small/3/", "--namespace", "team-a"),
        *("--replicas", "3", "--max-replicas", "9", "--cpus", "2", "--cpu-limit", "3", "--memory", "4Gi"),
        *("--token-secret", "small-token", "--ingress-host", "small.example.org", "--drain-s", "10"),
        *("--gateway", "edge/public", "--max-batch", "16"),
    ),
    "kubernetes-ingress": (
        *(
            "--to",
            "kubernetes",
            *IMAGE,
            *URI,
            "--ingress-host",
            "small.example.org",
            "--ingress-class",
            "nginx",
        ),
        *("--ingress-tls-secret", "small-tls", "--ingress-annotation", "example.org/size=20m=a"),
        *("--ingress-annotation", "cert-manager.io/issuer=ca", "--store-cidr", "10.1.2.0/24"),
        *("--store-cidr", "fd00::/64", "--store-port", "9000"),
    ),
    "triton": ("--to", "triton", "--replicas", "2", "--cpus", "2", "--memory", "4Gi", "--max-queue-ms", "20"),
}


def told(folder: Path, commands: list[str], root: Path) -> dict[str, str]:
    """The texts in `folder` beside the bundle, and the commands, without what differs between machines."""
    files = [*folder.glob("*.yaml"), *folder.rglob("config.pbtxt")]
    texts = {file.relative_to(folder).as_posix(): file.read_text() for file in files}
    texts["commands"] = "\n".join([*commands, ""])
    return {
        name: re.sub(r"\b([0-9a-f]{64}|[0-9a-f]{12})\b", "DIGEST", text.replace(str(root), "/ROOT"))
        for name, text in texts.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_is_what_was_reviewed(hpml: Hpml, tmp_path: Path, bundle: Path, case: str) -> None:
    """What is meant to change: WRITE_GOLDEN=yes pytest tests/pipelines/delivery, then read the diff."""
    (tmp_path / "token").write_text("a-token-of-a-test")
    (tmp_path / "token").chmod(0o600)
    commands = deployed(hpml, str(bundle), *CASES[case], "--output", "out")
    found = told(tmp_path / "out", commands, tmp_path)
    place = GOLDEN / case
    if os.environ.get("WRITE_GOLDEN"):
        for name, text in found.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
    files = [file for file in place.rglob("*") if file.is_file()]
    assert found == {file.relative_to(place).as_posix(): file.read_text() for file in files}
    assert subprocess.run(["bash", "-n"], input="\n".join(commands), text=True).returncode == 0


# ------------------------------------------------------------------------------------------------- compose


def compose_file(folder: Path) -> Any:
    return yaml.safe_load((folder / "compose.yaml").read_text())["services"]["server"]


def test_compose_starts_a_server_that_its_own_check_finds_ready(
    hpml: Hpml, tmp_path: Path, bundle: Path
) -> None:
    """The command, the copy of the bundle and the check, with this machine in the place of the container."""
    (tmp_path / "token").write_text("a-token-of-a-test")
    deployed(hpml, str(bundle), "-o", "out", "--to", "compose", "--token-file", "token", "--max-batch", "16")
    service = compose_file(tmp_path / "out")
    copy = tmp_path / "out" / service["volumes"][0]["source"]
    (tmp_path / "bundle").rename(tmp_path / "gone")
    inside = {"/bundle": str(copy), "/run/secrets/token": str(tmp_path / "token"), "8000": "0"}
    command = [inside.get(one, one) for one in service["command"]]
    program = Path(sys.executable).with_name("hpml")
    server = subprocess.Popen([str(program), "serve", *command], stderr=subprocess.PIPE, text=True)
    assert server.stderr
    try:
        line = server.stderr.readline()
        port = line.strip().rpartition(":")[2]
        assert port.isdigit(), line
        with pytest.raises(urllib.request.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2", timeout=5)
        check = [one.replace(":8000/", f":{port}/") for one in service["healthcheck"]["test"]]
        assert check[:2] == ["CMD", "python"]
        assert subprocess.run([sys.executable, *check[2:]]).returncode == 0
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=30) in (0, 143)
        server.stderr.close()


def test_compose_gives_an_engine_of_a_gpu_one(hpml: Hpml, tmp_path: Path, h100: None) -> None:
    bundle = bundle_of(tmp_path / "bundle", {"identity": {"device": "cuda", "runtime": "onnxruntime 1.31.0"}})
    deployed(hpml, str(bundle), "-o", "out", "--to", "compose", *IMAGE)
    resources = compose_file(tmp_path / "out")["deploy"]["resources"]
    devices = [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}]
    assert resources["reservations"] == {"devices": devices}


def test_a_token_that_all_may_read_needs_no_other_owner(hpml: Hpml, tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-a-test")
    (tmp_path / "token").chmod(0o644)
    commands = deployed(hpml, str(bundle), "-o", "out", "--to", "compose", "--token-file", "token")
    assert not [one for one in commands if "chown" in one]


# -------------------------------------------------------------------------------------------------- triton


def triton_model(folder: Path, name: str) -> Any:
    """config.pbtxt by Triton's own schema; its graph and its warm-up are where it says."""
    place = folder / "model_repository" / name
    config = text_format.Parse((place / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
    assert config.name == name and (place / "3" / config.default_model_filename).is_file()
    for sample in config.model_warmup:
        for one in sample.inputs.values():
            size = (place / "warmup" / one.input_data_file).stat().st_size
            width = {"TYPE_FP32": 4, "TYPE_INT64": 8}[model_config_pb2.DataType.Name(one.data_type)]
            assert size == width * np.prod(one.dims)
    return config


def test_triton_refuses_who_waits_too_long_and_is_warm(hpml: Hpml, tmp_path: Path, bundle: Path) -> None:
    deployed(hpml, str(bundle), "-o", "out", "--to", "triton", "--max-queue-ms", "20", "--max-batch", "16")
    config = triton_model(tmp_path / "out", "small")
    policy = config.dynamic_batching.default_queue_policy
    assert policy.default_timeout_microseconds == 20_000 and policy.timeout_action == policy.REJECT
    assert config.max_batch_size == 16 and not config.dynamic_batching.max_queue_delay_microseconds
    assert [list(one.dims) for one in config.model_warmup[0].inputs.values()] == [[1, 4, 4]]


def test_triton_has_a_model_for_each_graph(hpml: Hpml, tmp_path: Path) -> None:
    bundle = bundle_of_two_graphs(tmp_path / "bundle")
    deployed(hpml, str(bundle), "-o", "out", "--to", "triton")
    names = {place.name for place in (tmp_path / "out" / "model_repository").iterdir()}
    assert names == {"small", "small.embed"}
    for name, file in (("small", "model.onnx"), ("small.embed", "embed.onnx")):
        config = triton_model(tmp_path / "out", name)
        assert config.default_model_filename == file and list(config.input[0].dims) == [-1]


def test_triton_serves_a_plan_on_the_gpu_it_was_compiled_on(hpml: Hpml, tmp_path: Path, h100: None) -> None:
    bundle = bundle_of(tmp_path / "bundle", PLAN)
    *_, run = deployed(hpml, str(bundle), "-o", "out", "--to", "triton")
    config = triton_model(tmp_path / "out", "small")
    assert config.platform == "tensorrt_plan" and config.max_batch_size == 32
    assert config.instance_group[0].kind == config.instance_group[0].KIND_GPU
    assert list(config.dynamic_batching.preferred_batch_size) == [8]
    assert "--gpus all" in run and "nvcr.io/nvidia/tritonserver:26.07-py3" in run
    assert "intra_op_thread_count" not in config.parameters


# -------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (
            ("--to", "swarm"),
            2,
            "there is no destination 'swarm' -> give --to one of local, kubernetes, compose, triton, vllm,",
        ),
        (("--to", "compose", "--name", "My_Model"), 2, "name: 'My_Model' is no name of a deployment: small"),
        (("--to", "compose", "--name", "3d"), 2, "a letter first"),
        (("--to", "compose", "--name", "a" * 64), 2, "at most 63"),
        (("--to", "compose", "--port", "70000"), 2, "at most 65,535 (got 70000)"),
        (("--to", "compose", "--port", "0"), 2, "port: it should be at least 1 (got 0)"),
        (("--to", "compose", "--host", "localhost"), 2, "host: 'localhost' is no IP address: give one"),
        (
            ("--to", "compose", "--memory", "2GB"),
            2,
            "memory: '2GB' is no size of memory: give one like 512Mi",
        ),
        (("--to", "compose", "--cpus", "0"), 2, "cpus: it should be more than 0 (got 0.0)"),
        (("--to", "compose", "--image", "a b"), 2, "image: 'a b' is no name of an image"),
        (
            ("--to", "compose", "--token-file", "none"),
            2,
            "the token in none cannot be used: it does not exist",
        ),
        (
            ("--to", "compose", "--replicas", "2"),
            2,
            "--replicas means nothing to compose: it is for kubernetes, triton,",
        ),
        (
            ("--to", "compose", *URI),
            2,
            "--bundle-uri means nothing to compose: it is for kubernetes, kserve -> leave it",
        ),
        (("--to", "triton", "--run-code"), 2, "--run-code means nothing to triton"),
        (
            ("--to", "kserve"),
            2,
            "--bundle-uri is not given: the pods get the bundle from there -> give s3://",
        ),
        (("--to", "kserve", "--bundle-uri", "gs://a/b"), 2, "'gs://a/b' is no place of a bundle: give s3://"),
        (("--to", "kserve", "--bundle-uri", "s3://bucket"), 2, "is no place of a bundle"),
        (("--to", "kserve", "--bundle-uri", "pvc://claim/"), 2, "is no place of a bundle"),
        (("--to", "kserve", "--bundle-uri", "s3://models/../all"), 2, "without .."),
        (("--to", "kserve", "--bundle-uri", "s3://models/a;reboot"), 2, "is no place of a bundle"),
        (("--to", "kserve", *URI, "--namespace", "Team A"), 2, "namespace: 'Team A' is no name in a cluster"),
        (
            ("--to", "kubernetes", *URI, "--ingress-annotation", "a"),
            2,
            "ingress_annotation: 'a' is no annotation: give KEY=VALUE, each key once",
        ),
        (
            ("--to", "kubernetes", *URI, "--ingress-annotation", "a=b", "--ingress-annotation", "a=c"),
            2,
            "each key once",
        ),
        (("--to", "kubernetes", *URI, "--store-cidr", "store.example"), 2, "give a network like 10.1.2.0/24"),
        (("--to", "compose", "--store-cidr", "10.0.0.0/8"), 2, "--store-cidr means nothing to compose"),
        (("--to", "kserve", *URI, "--mode", "raw"), 2, "mode: it should be 'standard' or 'knative'"),
        (("--to", "kserve", *URI, "--canary-percent", "101"), 2, "at most 100 (got 101)"),
        (("--to", "kserve", *URI, "--port", "80"), 2, "port 80 is refused: the server is no root"),
        (("--to", "kserve", *URI, "--name", "a" * 50), 2, "is too long: KServe makes"),
    ],
)
def test_what_is_wrong_is_one_line(
    hpml: Hpml, tmp_path: Path, bundle: Path, arguments: tuple[str, ...], code: int, said: str
) -> None:
    answer = hpml("deploy", str(bundle), "--output", "out", *arguments)
    assert answer.returncode == code, answer.stderr
    [line] = answer.stderr.splitlines()
    assert line.startswith("error: ") and said in line and answer.stdout == ""
    assert [file.name for file in tmp_path.iterdir()] == ["bundle"]  # nor half of anything


def test_an_engine_that_is_not_verified_is_deployed_only_if_asked_for(hpml: Hpml, tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "bundle", unverified=["latency p99 is not measured: busy"])
    arguments = ("deploy", str(bundle), "--to", "compose", "-o", "out")
    refused = hpml(*arguments)
    [line] = refused.stderr.splitlines()
    assert refused.returncode == 5 and "latency p99 is not measured: busy" in line
    assert "hpml bench RUN" in line and line.endswith("or give --unverified")
    assert hpml(*arguments, "--unverified").returncode == 0


@pytest.mark.parametrize(
    ("engine", "to", "code", "said"),
    [
        (PLAN, "triton", 3, f"its plan was compiled on {H100}, and this machine has no NVIDIA GPU"),
        (PLAN, "compose", 3, "-> give --rebuild to build it again here, or --else"),
        ({"identity": {"device": "cuda"}}, "compose", 3, "it runs on a GPU, and this machine has no NVIDIA"),
        ({"identity": {"activations": "uint8", "weight_bits": "8"}}, "compose", 3, "CPUs with VNNI"),
        ({"target": {"target": "openvino"}}, "triton", 3, "of target openvino -> export it to onnx or"),
        (
            {"target": {"target": "openvino"}},
            "compose",
            3,
            "only ONNX graphs are opened -> export it to onnx",
        ),
    ],
)
def test_an_engine_for_other_hardware_or_another_server_is_refused(
    hpml: Hpml,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: dict[str, Any],
    to: str,
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr(hardware, "gpu_names", lambda: ())
    monkeypatch.setattr(hardware, "products_saturate", lambda: True)
    bundle = bundle_of(tmp_path / "bundle", engine)
    answer = hpml("deploy", str(bundle), "--to", to, "-o", "out")
    [line] = answer.stderr.splitlines()
    assert answer.returncode == code and said in line, line


def test_another_machine_need_not_be_like_this_one(
    hpml: Hpml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "gpu_names", lambda: ("NVIDIA L4",))
    deployed(hpml, str(bundle_of(tmp_path / "plan", PLAN)), "-o", "out", "--to", "triton", "--elsewhere")


def test_a_cluster_is_told_which_cpus_an_engine_needs(
    hpml: Hpml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "products_saturate", lambda: True)
    bundle = bundle_of(tmp_path / "int8", {"identity": {"activations": "uint8", "weight_bits": "8"}})
    commands = deployed(hpml, str(bundle), "-o", "out", "--to", "kserve", *URI)
    assert [one for one in commands if one.startswith("# ") and "VNNI" in one]


@pytest.mark.parametrize("to", ["compose", "kserve"])
def test_a_plan_is_left_to_triton(hpml: Hpml, tmp_path: Path, h100: None, to: str) -> None:
    bundle = bundle_of(tmp_path / "bundle", PLAN)
    answer = hpml("deploy", str(bundle), "--to", to, "-o", "out", *(URI if to == "kserve" else ()))
    assert answer.returncode == 3 and "-> hpml deploy --to triton serves it" in answer.stderr


def test_a_plan_of_another_tensorrt_needs_another_image(hpml: Hpml, tmp_path: Path, h100: None) -> None:
    identity = PLAN["identity"] | {"runtime": "tensorrt 10.13.3.9"}
    bundle = bundle_of(tmp_path / "bundle", {**PLAN, "identity": identity})
    arguments = ("deploy", str(bundle), "--to", "triton", "-o", "out")
    answer = hpml(*arguments)
    [line] = answer.stderr.splitlines()
    assert answer.returncode == 2 and "is of tensorrt 10.13.3.9, and --image is not given" in line
    assert hpml(*arguments, "--image", "nvcr.io/nvidia/tritonserver:25.12-py3").returncode == 0


def test_an_engine_of_a_gpu_needs_an_image_that_has_its_runtime(
    hpml: Hpml, tmp_path: Path, h100: None
) -> None:
    bundle = bundle_of(tmp_path / "bundle", {"identity": {"device": "cuda", "runtime": "onnxruntime 1.31.0"}})
    answer = hpml("deploy", str(bundle), "--to", "compose", "-o", "out")
    assert answer.returncode == 2 and "-> give an image with hpml-pipeline[serving]" in answer.stderr


@pytest.mark.parametrize(
    "told",
    [{"model_name": "../../elsewhere"}, {"model_name": "a\nservices: {}"}, {"model_version": "3; reboot"}],
)
def test_a_name_that_is_more_than_a_name_is_refused(hpml: Hpml, tmp_path: Path, told: dict[str, Any]) -> None:
    bundle = bundle_of(tmp_path / "bundle", **told)
    answer = hpml("deploy", str(bundle), "--to", "triton", "-o", "out")
    [line] = answer.stderr.splitlines()
    assert answer.returncode == 4 and line.endswith("is no name or version")
    assert not (tmp_path / "out").exists()


def test_a_bundle_that_was_changed_is_refused(hpml: Hpml, tmp_path: Path, bundle: Path) -> None:
    with (bundle / "engine" / "model.onnx").open("ab") as file:
        file.write(b"!")
    answer = hpml("deploy", str(bundle), "--to", "compose", "-o", "out")
    assert answer.returncode == 4 and "model.onnx was changed" in answer.stderr
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ the folder


def test_a_folder_of_ours_is_replaced_whole(hpml: Hpml, tmp_path: Path, bundle: Path) -> None:
    (tmp_path / "out").mkdir()  # an empty one is as good as none
    for to, destination in DESTINATIONS.items():
        if destination.write:
            if to == "vllm":  # of language models, see test_vllm.py
                continue
            of_a_cluster = URI if "bundle_uri" in destination.options else ()
            deployed(hpml, str(bundle), "--to", to, "-o", "out", *of_a_cluster)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"kserve.yaml", MADE}
    assert json.loads((tmp_path / "out" / MADE).read_text())["to"] == "kserve"
    assert {file.name for file in tmp_path.iterdir()} == {"bundle", "out"}  # no half, no old one


def test_what_is_not_ours_or_was_changed_stays(hpml: Hpml, tmp_path: Path, bundle: Path) -> None:
    arguments = ("deploy", str(bundle), "--to", "compose", "-o", "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    refused = hpml(*arguments)
    assert refused.returncode == 2 and "is not empty: hpml deploy did not make it" in refused.stderr
    (tmp_path / "out" / "thesis.tex").unlink()
    deployed(hpml, *arguments[1:])
    (tmp_path / "out" / "notes").write_text("mine")
    refused = hpml(*arguments)
    assert refused.returncode == 2 and "notes was changed, added or removed since" in refused.stderr
    (tmp_path / "out" / "notes").unlink()
    (tmp_path / "out" / "notes").mkdir()  # that nothing is in it yet is somebody's, too
    refused = hpml(*arguments)
    assert refused.returncode == 2 and "notes was changed, added or removed since" in refused.stderr
    (tmp_path / "out" / "notes").rmdir()
    (tmp_path / "out" / "notes").symlink_to(tmp_path)
    refused = hpml(*arguments)
    assert refused.returncode == 2 and "notes was changed, added or removed since" in refused.stderr
    (tmp_path / "out" / "notes").unlink()
    with (tmp_path / "out" / "compose.yaml").open("a") as file:
        file.write("# mine\n")
    refused = hpml(*arguments)
    assert refused.returncode == 2 and "compose.yaml was changed" in refused.stderr
    assert (tmp_path / "out" / "compose.yaml").read_text().endswith("# mine\n")


def test_a_refusal_leaves_the_folder_before(hpml: Hpml, tmp_path: Path, bundle: Path) -> None:
    deployed(hpml, str(bundle), "--to", "compose", "-o", "out")
    before = (tmp_path / "out" / "compose.yaml").read_text()
    assert hpml("deploy", str(bundle), "--to", "kserve", "-o", "out").returncode == 2
    assert (tmp_path / "out" / "compose.yaml").read_text() == before


def test_others_may_read_what_a_server_reads(hpml: Hpml, tmp_path: Path, bundle: Path) -> None:
    """The server is another user, whatever umask the files of a run were written with."""
    for file in bundle.rglob("*"):
        file.chmod(0o700 if file.is_dir() else 0o600)
    mask = os.umask(0o077)
    try:
        deployed(hpml, str(bundle), "--to", "compose", "-o", "out")
    finally:
        os.umask(mask)
    paths = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o755}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o644}


def test_the_commands_begin_where_the_files_are(hpml: Hpml, tmp_path: Path, bundle: Path) -> None:
    first, *_ = deployed(hpml, str(bundle), "--to", "compose", "-o", "some where")
    assert shlex.split(first) == ["cd", str(tmp_path / "some where")]


# --------------------------------------------------------------------------------------- recorded requests


def recorded(file: Path, *pictures: np.ndarray) -> Path:
    file.write_bytes(b"".join(as_request(one)[0] + b"\n" for one in pictures))
    return file


@pytest.mark.parametrize("to", ["local", "kubernetes"])
def test_requests_that_do_not_fit_are_named_before_anything_is_rolled_out(
    hpml: Hpml, tmp_path: Path, bundle: Path, to: str
) -> None:
    """Nor is a cluster asked: there is none."""
    fits, other = np.zeros((1, 1, 4, 4), np.float32), np.zeros((1, 1, 5, 5), np.float32)
    recorded(tmp_path / "requests", fits, other)
    answer = hpml(
        "deploy", str(bundle), "--to", to, "--replay", "requests", KUBECONFIG=str(tmp_path / "none")
    )
    [line] = answer.stderr.splitlines()
    assert answer.returncode == 2 and "line 2 of requests is no request to this model" in line
    assert "has the shape [1, 1, 5, 5], the model takes [-1, 1, 4, 4]" in line
    assert {path.name for path in tmp_path.iterdir()} == {"bundle", "requests"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--to", "local", "--replay", "absent"), "requests in absent cannot be replayed: it does not exist"),
        (("--to", "local", "--replay", "requests", "--max-batch", "1"), "has 2 rows, 1 to 1 are allowed"),
        (("--to", "local", "--replay-agreement", "0.9"), "--replay-agreement is given without --replay"),
        (
            ("--to", "kubernetes", *URI, "-o", "out", "--replay", "requests"),
            "--replay means nothing with --output",
        ),
        (("--to", "compose", "-o", "out", "--replay", "requests"), "--replay means nothing to compose"),
        (
            ("--to", "local", "--replay", "requests", "--replay-agreement", "98"),
            "'--replay-agreement': Input should be less than",
        ),
    ],
)
def test_a_replay_that_cannot_be_is_a_wrong_command(
    hpml: Hpml, tmp_path: Path, bundle: Path, arguments: tuple[str, ...], said: str
) -> None:
    recorded(tmp_path / "requests", np.zeros((2, 1, 4, 4), np.float32))
    answer = hpml("deploy", str(bundle), *arguments)
    assert answer.returncode == 2 and said in " ".join(answer.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_client_without_the_servers_packages_cannot_replay(
    hpml: Hpml, tmp_path: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path / "requests", np.zeros((1, 1, 4, 4), np.float32))
    monkeypatch.delitem(sys.modules, "hpml.serving.recording", raising=False)
    monkeypatch.setitem(sys.modules, "orjson", None)
    answer = hpml("deploy", str(bundle), "--to", "local", "--replay", "requests")
    assert answer.returncode == 2
    assert "--replay needs the package orjson -> pip install 'hpml-pipeline[serving]'" in answer.stderr


def test_a_folder_that_cannot_be_made_is_a_wrong_command(hpml: Hpml, bundle: Path) -> None:
    answer = hpml("deploy", str(bundle), "--to", "compose", "-o", "/proc/out")
    assert answer.returncode == 2 and answer.stderr.startswith("error: /proc/out cannot be made")
