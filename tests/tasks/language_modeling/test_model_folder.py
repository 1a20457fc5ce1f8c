"""A model's folder: where it may be, what is refused before anything is read of it, what its cache key is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

from hpml.components.train.config import TrainConfig
from hpml.core.contract import Output
from hpml.core.errors import ConfigInvalid
from hpml.data_files import model_folder
from hpml.data_files.model_folder import OF_NETWORK, OF_TOKENIZER
from hpml.tasks.language_modeling.sources import Chitchat
from tests.conftest import Hpml
from tests.tasks.language_modeling.hub import COMMIT, serving
from tests.tasks.language_modeling.model_folders import write_folder

ADDRESS = f"hf://org/llama@{COMMIT}"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "llama"))


def training(weights: Any, **options: Any) -> TrainConfig:
    return TrainConfig(model={"architecture": "transformers"}, weights=weights, epochs=0, **options)


def changed(name: str, **fields: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return change


def without_safetensors(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()


def pickled(folder: Path) -> None:
    without_safetensors(folder)
    (folder / "pytorch_model.bin").touch()


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-00001-of-*.safetensors"))


def index_with(*names: str) -> Callable[[Path], object]:
    return changed("model.safetensors.index.json", weight_map={str(n): name for n, name in enumerate(names)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shutil.rmtree, "does not exist: a model's folder is needed"),
        (lambda folder: (folder / "config.json").unlink(), "config.json does not exist"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[" * 99_999), "config.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "is not an object of JSON"),
        (pickled, r"are pickles \(pytorch_model.bin\), which run code when they are read"),
        (without_safetensors, "has no model.safetensors, nor shards"),
        (lambda folder: first_shard(folder).unlink(), r"1 of \d+ shards are not in"),
        (index_with("../../secret/model-1.safetensors"), "shards are model-....safetensors beside it"),
        (index_with("/etc/passwd"), "shards are model-....safetensors beside it"),
        (changed("config.json", quantization_config={"quant_method": "gptq"}), r"are quantized \(gptq\)"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "merge it into its model"),
    ],
)
def test_what_cannot_be_used_is_said_before_a_run(
    folder: Path, change: Callable[[Path], object], said: str
) -> None:
    assert not training(folder).unsupported_reason()
    change(folder)
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(training(folder).unsupported_reason())


def test_a_folder_without_a_tokenizer_says_how_to_make_one(folder: Path) -> None:
    assert not Chitchat(tokenizer=folder).unsupported_reason()
    assert not Chitchat(tokenizer=folder / "tokenizer.json").unsupported_reason()
    (folder / "tokenizer.json").unlink()
    assert "AutoTokenizer.from_pretrained" in Chitchat(tokenizer=folder).unsupported_reason()


def test_a_folder_is_for_transformers_alone(folder: Path) -> None:
    other = TrainConfig(model={"architecture": "decoder"}, weights=folder, epochs=0)
    assert "set model: transformers" in other.unsupported_reason()
    with pytest.raises(ValueError, match="set model: transformers"):
        TrainConfig(model={"architecture": "decoder"}, weights=ADDRESS, epochs=0)


@pytest.mark.parametrize("address", ["hf://org/llama", "hf://org/llama@main", "hf://org/llama@0123", "hf://"])
def test_an_address_on_the_hub_names_a_commit(address: str) -> None:
    for make in (training, lambda given: Chitchat(tokenizer=given)):
        with pytest.raises(ValueError, match=r"does not say which commit.*give hf://.*@COMMIT"):
            make(address)
    assert training(ADDRESS).weights == Chitchat(tokenizer=ADDRESS).tokenizer == ADDRESS


# ------------------------------------------------------------------------------------------------- cache keys


def test_a_cache_key_is_of_what_is_in_the_folder(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    network, tokenizer = training(folder).fingerprint(), Chitchat(tokenizer=folder).fingerprint()
    assert network == training(copy).fingerprint() and tokenizer == Chitchat(tokenizer=copy).fingerprint()
    assert Chitchat(tokenizer=folder / "tokenizer.json").fingerprint() == tokenizer

    weights = first_shard(copy)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert training(copy).fingerprint() != network and Chitchat(tokenizer=copy).fingerprint() == tokenizer
    changed("config.json", rms_norm_eps=0.1)(copy)
    assert Chitchat(tokenizer=copy).fingerprint() != tokenizer

    (folder / "notes.txt").write_text("of no use")
    assert training(folder).fingerprint() == network


def test_on_the_hub_the_commit_says_it_all() -> None:
    config = training(ADDRESS)
    assert config.fingerprint() == "" and not config.reads_unpinned_data
    assert training("s3://bucket/llama").reads_unpinned_data


def test_a_licence_is_what_the_head_of_the_model_card_states(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    assert model_folder.licence(tmp_path) == ""
    for text, stated in (
        ("# A model\nlicense: mit\n", ""),
        ("---\nlicense: 'mit'\ntags: [a]\n---\n", "mit"),
        ("---\nlicense: other\nlicense_name: llama3\n---\n", "llama3"),
    ):
        card.write_text(text)
        assert model_folder.licence(tmp_path) == stated


# ------------------------------------------------------------------------------------------ where it may be


def test_a_folder_in_s3_is_fetched_and_has_a_key(
    folder: Path, tmp_path: Path, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": s3_endpoint}.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", region_name="us-east-1")
    client.create_bucket(Bucket="models")
    for file in (*folder.iterdir(), folder / "config.json"):
        client.upload_file(str(file), "models", f"llama/{file.name}")
    client.put_object(Bucket="models", Key="llama/original/model-1.safetensors", Body=b"another")
    out = Output(tmp_path, tmp_path)
    with model_folder.opened("s3://models/llama", OF_NETWORK, out) as here:
        assert model_folder.digests(here, OF_NETWORK) == model_folder.digests(folder, OF_NETWORK)
        assert not model_folder.network_problem(here)
    assert not here.exists()
    before = training("s3://models/llama").fingerprint()
    client.put_object(Bucket="models", Key="llama/config.json", Body=b"{}")
    assert before != training("s3://models/llama").fingerprint()
    with pytest.raises(ConfigInvalid, match="there is no model's folder at"):
        model_folder.opened("s3://models/none", OF_TOKENIZER, out).__enter__()


RECIPE = f"""
data: {{source: chitchat, conversations: 40, context: 32, tokenizer: "{ADDRESS}"}}
train: {{model: transformers, weights: "{ADDRESS}", epochs: 0}}
"""

# What becomes of each address, in a process that knows the hub by its environment.
ASK = """
import sys
from hpml.core.errors import HpmlError
from hpml.data_files.model_folder import OF_NETWORK, opened
for address in sys.argv[1:]:
    try:
        with opened(address, OF_NETWORK, None) as folder:
            print("opened", len(list(folder.iterdir())))
    except HpmlError as error:
        print(int(error.exit_code), error)
"""


def asked(*addresses: str, **env: str) -> list[str]:
    command = [sys.executable, "-c", ASK, *addresses]
    said = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=True)
    return [line for line in said.stdout.splitlines() if not line.startswith("hf://")]


def test_a_commit_of_the_hub_is_fetched_once_and_used(
    original: Path, tmp_path: Path, hpml: Hpml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By two steps: the first wants the tokenizer only."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with serving() as hub:
        hub.repositories, hub.gated = {"org/llama": original, "org/gated": original}, {"org/gated"}
        told = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "hub")}
        done = hpml("run", "recipe.yaml", "--only", "train", "--no-tracking", "-o", "json", **told)
        assert done.returncode == 0, done.stderr
        wanted = model_folder.named_files(original, [*OF_NETWORK, *OF_TOKENIZER])
        fetched = [path.rpartition("/")[2] for path in hub.asked if path.startswith("GET /org")]
        assert sorted(fetched) == sorted({file.name for file in wanted})
        digest = json.loads(done.stdout)["steps"]["train"]["digest"]
        [manifest] = (tmp_path / "runs").glob(f".store/**/{digest}/manifest.json")
        origin = json.loads(manifest.read_text())["spec"]["origin"]
        assert origin["source"] == ADDRESS and "config.json" in origin["sha256"]

        hub.asked.clear()
        assert asked(ADDRESS, **told) == [f"opened {len(fetched)}"] and not hub.asked
        refused = asked(
            f"hf://org/llama@{'f' * 40}", f"hf://org/none@{COMMIT}", f"hf://org/gated@{COMMIT}", **told
        )
    for line, said in zip(
        refused,
        (f"3 org/llama has no commit {'f' * 40}", "3 there is no org/none", "3 org/gated may not be read"),
        strict=True,
    ):
        assert line.startswith(said)
    told |= {"HF_HUB_OFFLINE": "1"}  # else the library asks for half a minute
    again, gone = asked(ADDRESS, f"hf://org/another@{COMMIT}", **told)
    assert again == f"opened {len(fetched)}" and gone.startswith("6 cannot fetch hf://org/another@")
