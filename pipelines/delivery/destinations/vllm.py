"""vLLM on one machine with a GPU: the model as transformers keeps it, and how vLLM serves that.

Its options and variables: https://docs.vllm.ai (CLI reference, environment variables, security).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpml import models
from hpml.artifacts.folder import Artifact
from hpml.artifacts.model import ModelSpec
from hpml.core import regular_files
from hpml.core.errors import ConfigInvalid, UsageError
from hpml.data_files.model_folder import TOKENIZER, TOKENIZER_CONFIG
from hpml.pipelines.delivery.deploy_options import DeployOptions
from hpml.pipelines.delivery.deployable import Deployable
from hpml.pipelines.delivery.destinations import compose_file
from hpml.pipelines.delivery.origin import origin_of
from hpml.tasks import task_of
from hpml.tasks.language_modeling.task import LanguageModeling

if TYPE_CHECKING:
    from hpml.models.transformers_decoder import TransformersDecoder

_IMAGE = "vllm/vllm-openai:v0.33.0"
_HEALTH = "/health"
_ROOT = 0  # the user of its image
_START_S = 900  # to load the weights, compile the kernels and reserve the GPU's memory
_DTYPES = ("bfloat16", "float16", "float32")
# vLLM takes an empty token for none, and would answer everybody.
_WITH_TOKEN = (
    f'VLLM_API_KEY="$(cat {compose_file.TOKEN})"'
    ' && export VLLM_API_KEY="${VLLM_API_KEY:?the token is empty}"'
    ' && exec "$@"'
)


def write(bundle: Deployable, options: DeployOptions, folder: Path) -> list[str]:
    """`compose.yaml`, and the network that the bundle's engine was built from in a folder of its digest."""
    task = _task(bundle)
    if options.token_file and (why := regular_files.problem(options.token_file)):
        raise UsageError(f"the token in {options.token_file} cannot be used", why=f"it {why}")
    model = origin_of(bundle).model
    _check_can_serve(bundle, model.spec)
    place = f"model-{model.digest[:12]}"
    (folder / place).mkdir()
    _write_model(model, task, bundle.subject.engine_folder / TOKENIZER, folder / place)
    head = f"{bundle.title}, by hpml deploy --to vllm"
    compose_file.write(folder, head, options, _service(model.spec, task, options, place))
    return [
        "# vLLM is another engine than the one that was measured: no figure or goal of the run is its",
        *compose_file.commands(options, _HEALTH, uid=_ROOT),
    ]


def _task(bundle: Deployable) -> LanguageModeling:
    described = bundle.facts.engine.task
    if described.get("task") != "language_modeling":  # a user's own, whose code is not run for this
        raise ConfigInvalid(
            f"vLLM does not serve {bundle.title}",
            why=f"it is for language models, and this is of the task {str(described.get('task'))[:60]}",
            fix="give another --to",
        )
    task = task_of(described)
    assert isinstance(task, LanguageModeling)
    return task


def _check_can_serve(bundle: Deployable, model: ModelSpec) -> None:
    """Raise ConfigInvalid for a network that vLLM would not load, or of which it would serve another one."""
    name, cannot = model.architecture.name, f"vLLM does not serve {bundle.title}"
    if name != "transformers":
        raise ConfigInvalid(
            cannot,
            why=f"it has models of the transformers library, and this is a {name}",
            fix="train one with train.model: transformers, or give another --to",
        )
    if changed := [
        word for word, done in (("pruned", model.channel_plan), ("int8", model.quantization)) if done
    ]:
        raise ConfigInvalid(
            cannot,
            why=f"it is {' and '.join(changed)}, and a model's folder of transformers holds no such network",
            fix="run its recipe with variants that are neither, such as {fp32: []}: its training is stored",
        )
    if problem := models.missing(name):
        raise ConfigInvalid("the model cannot be written", why=problem)


def _write_model(model: Artifact[ModelSpec], task: LanguageModeling, tokenizer: Path, folder: Path) -> None:
    from hpml.models.transformers_folder import write_folder
    from hpml.tasks.language_modeling.tokenizer import load_tokenizer

    decoder: TransformersDecoder = models.load(model)  # type: ignore[assignment]
    write_folder(decoder, task.end_id, folder)
    shutil.copyfile(tokenizer, folder / TOKENIZER)
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # which reads tokenizer.json as it is
        "eos_token": load_tokenizer(tokenizer).id_to_token(task.end_id),
        "model_max_length": task.context,
    }
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _service(model: ModelSpec, task: LanguageModeling, options: DeployOptions, place: str) -> dict[str, Any]:
    command = [
        *("/model", "--served-model-name", options.name),
        *("--host", "0.0.0.0", "--port", str(options.port)),  # noqa: S104 - of the container
        *("--max-model-len", str(task.context), "--dtype", _dtype(model)),
    ]
    with_token = ["sh", "-c", compose_file.escaped(_WITH_TOKEN), "sh"] if options.token_file else []
    return {
        "image": options.image or _IMAGE,
        "entrypoint": [*with_token, "vllm", "serve"],
        "command": command,
        # Nothing is fetched, and nothing is reported to its makers.
        "environment": {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1"},
        "restart": "unless-stopped",
        **compose_file.CONFINED,
        "shm_size": "10gb",  # its processes hand tensors to each other there
        "ports": compose_file.ports(options),
        "volumes": compose_file.read_only(place, "/model"),
        "healthcheck": compose_file.healthcheck("python3", _HEALTH, options, start_s=_START_S),
        "deploy": {"resources": _resources(options)},
    }


def _dtype(model: ModelSpec) -> str:
    """The type that the weights were published in; fp32, in which they were trained, if that is not told."""
    config = model.architecture.arguments
    stated = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return stated if stated in _DTYPES else "float32"


def _resources(options: DeployOptions) -> dict[str, Any]:
    limits = {}
    if options.cpus:
        limits["cpus"] = f"{options.cpus:g}"
    if options.memory_mib:
        limits["memory"] = f"{options.memory_mib}m"
    return {**({"limits": limits} if limits else {}), "reservations": compose_file.ONE_GPU}
