"""A model's folder as the `transformers` library writes it: where it is, and what in it is refused.

It holds config.json, weights in safetensors (one file, or shards with an index) and tokenizer.json, and is on
this machine, at s3://BUCKET/KEY, or on the Hugging Face hub at hf://OWNER/NAME@COMMIT. Nothing in it is run:
neither pickles nor Python. Imports neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, StringConstraints

from hpml.core import regular_files
from hpml.core.contract import Output, canonical_json
from hpml.core.errors import ConfigInvalid, Unavailable, causes
from hpml.io import storage
from hpml.io.storage import S3Uri

HUB = "hf://"
_ON_HUB = r"hf://(?:[\w.-]+/)?[\w.-]+@[0-9a-f]{40}"
HubUri = Annotated[str, StringConstraints(pattern=rf"^{_ON_HUB}$")]


def _with_a_commit(given: Any) -> Any:
    if isinstance(given, str) and given.startswith(HUB) and not re.fullmatch(_ON_HUB, given):
        name = given.removeprefix(HUB).partition("@")[0] or "OWNER/NAME"
        raise ValueError(
            f"{given} does not say which commit: a branch moves, so give hf://{name}@COMMIT, all 40 digits;"
            f" https://huggingface.co/{name}/commits/main lists them"
        )
    return given


ModelFolder = Annotated[S3Uri | HubUri | Path, BeforeValidator(_with_a_commit)]

CONFIG, TOKENIZER, TOKENIZER_CONFIG, CARD = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OF_TOKENIZER = (TOKENIZER, TOKENIZER_CONFIG, CONFIG)
OF_NETWORK = (CONFIG, TOKENIZER, CARD, WEIGHTS, INDEX, "model-*.safetensors", "adapter_config.json")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MOST_JSON_BYTES = 2**28


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigInvalid if it is missing, too large or something else."""
    why = regular_files.problem(file)
    if not why and file.stat().st_size > _MOST_JSON_BYTES:
        why = f"is larger than {_MOST_JSON_BYTES >> 20} MiB"
    if not why:
        try:
            found = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            why = f"is not JSON: {' '.join(str(error).split())[:200]}"
        else:
            if isinstance(found, dict):
                return found
            why = "is not an object of JSON"
    raise ConfigInvalid(f"{file} {why}", fix="give a folder as save_pretrained of transformers writes it")


# ------------------------------------------------------------------------------------- what cannot be used


def tokenizer_problem(given: ModelFolder) -> str:
    """Why the folder has no tokenizer that can be used; empty if it has, or if it is elsewhere."""
    if isinstance(given, str):
        return ""
    if why := _no_folder(given):
        return why
    if why := regular_files.problem(given / TOKENIZER):
        return (
            f"{given / TOKENIZER} {why}; where there is a tokenizer of another format,"
            " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes it"
        )
    return ""


def network_problem(given: ModelFolder) -> str:
    """Why the network in the folder cannot be used; empty if it can, or if it is elsewhere."""
    if isinstance(given, str):
        return ""
    if why := _no_folder(given):
        return why
    if (given / "adapter_config.json").exists():
        return (
            f"{given} has an adapter (adapter_config.json): merge it into its model first (merge_and_unload)"
        )
    try:
        quantization = read_json(given / CONFIG).get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            return f"the weights in {given} are quantized ({method}): give those in fp32, bf16 or fp16"
        return _weights_problem(given)
    except ConfigInvalid as error:
        return str(error)


def _no_folder(given: Path) -> str:
    why = regular_files.problem(given, or_folder=True) or ("" if given.is_dir() else "is not a folder")
    return f"{given} {why}: a model's folder is needed, or hf://OWNER/NAME@COMMIT" if why else ""


def _weights_problem(folder: Path) -> str:
    if (folder / WEIGHTS).exists():
        why = regular_files.problem(folder / WEIGHTS)
        return f"{folder / WEIGHTS} {why}" if why else ""
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            return f"{folder / INDEX} has no weight_map"
        shards = sorted({str(name) for name in index.values()})
        # The library opens whatever path stands there.
        if strange := [name for name in shards if not fnmatch(name, "model-*.safetensors") or "/" in name]:
            return f"{folder / INDEX} names {strange[0]!r}: shards are model-....safetensors beside it"
        if lacking := [name for name in shards if regular_files.problem(folder / name)]:
            return f"{len(lacking)} of {len(shards)} shards are not in {folder}: {', '.join(lacking[:4])}"
        return ""
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    if pickled:
        return (
            f"the weights in {folder} are pickles ({', '.join(pickled[:3])}), which run code when they are"
            " read: where you trust them, AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
            " writes safetensors"
        )
    return f"{folder} has no {WEIGHTS}, nor shards with {INDEX}"


# ------------------------------------------------------------------------------------ what is known of one


def named_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of `folder` that `patterns` name, sorted."""
    return sorted(file for pattern in patterns for file in folder.glob(pattern) if file.is_file())


def digests(folder: Path, patterns: Sequence[str]) -> dict[str, str]:
    """The SHA-256 of each file that `patterns` name, by its name."""
    return {file.name: regular_files.sha256(file) for file in named_files(folder, patterns)}


def fingerprint(given: ModelFolder, patterns: Sequence[str]) -> str:
    """A digest of what is in the files that `patterns` name, wherever the folder is (in S3: of their ETags).

    Empty on the hub, where the commit in the address says it. Raises Unavailable.
    """
    if isinstance(given, Path):
        found = digests(given, patterns)
    elif given.startswith(HUB):
        return ""
    else:
        found = {name: tag for name, tag in storage.etags(given).items() if _is_named(name, patterns)}
    return hashlib.sha256(canonical_json(found).encode()).hexdigest()


def licence(folder: Path) -> str:
    """The licence that the model card, README.md, states at its head; empty if it states none."""
    if regular_files.problem(folder / CARD):
        return ""
    with (folder / CARD).open(encoding="utf-8", errors="replace") as file:
        head = re.match(r"---\n(.*?)\n---", file.read(2**16), re.DOTALL)
    stated = dict(re.findall(r"^(license|license_name): *(\S[^\n]*)$", head[1], re.MULTILINE)) if head else {}
    name = stated.get("license_name") or stated.get("license") or ""
    return name.strip("\"' ")[:100]


# ------------------------------------------------------------------------------------------- bringing it here


@contextmanager
def opened(given: ModelFolder, patterns: Sequence[str], out: Output) -> Iterator[Path]:
    """The folder on this machine, with at least the files that `patterns` name.

    What is on the hub comes from the cache of `huggingface_hub`, and once into it; what is in S3 is fetched
    for as long as this is entered. Raises ConfigInvalid if it is not there or may not be read, Unavailable.
    """
    if isinstance(given, Path):
        yield given
    elif given.startswith(HUB):
        yield _from_hub(given, patterns)
    else:
        with tempfile.TemporaryDirectory(dir=out.scratch) as scratch:
            names = [name for name in storage.etags(given) if _is_named(name, patterns)]
            if not names:
                raise ConfigInvalid(
                    f"there is no model's folder at {given}", fix="it has to hold config.json"
                )
            for name in names:
                storage.fetch_file(f"{given.rstrip('/')}/{name}", Path(scratch, name))
            yield Path(scratch)


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in patterns)


def _from_hub(given: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # they are of a terminal, and this goes to a log
    name, _, commit = given.removeprefix(HUB).partition("@")
    print(f"{given}: taken from the cache of huggingface_hub, or fetched into it", flush=True)
    try:
        return Path(snapshot_download(name, revision=commit, allow_patterns=list(patterns)))
    except RevisionNotFoundError:
        raise ConfigInvalid(
            f"{name} has no commit {commit}", fix=f"https://huggingface.co/{name}/commits/main lists them"
        ) from None
    except GatedRepoError:
        why, fix = (
            "its owner asks for an agreement",
            f"agree at https://huggingface.co/{name}, then set HF_TOKEN",
        )
        raise ConfigInvalid(f"{name} may not be read", why=why, fix=fix) from None
    except RepositoryNotFoundError:
        fix = "check the name; for one that is private, set HF_TOKEN"
        raise ConfigInvalid(f"there is no {name} on the hub", fix=fix) from None
    except Exception as error:  # of its HTTP client, which changes between versions; a full disk is explained
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Unavailable(
            f"cannot fetch {given}",
            why=" ".join(str([*causes(error)][-1]).split())[:300] or type(error).__name__,
            fix="check the network, or give a folder that you fetched elsewhere: hf download",
        ) from None
