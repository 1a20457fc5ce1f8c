"""What is compiled for Kubeflow: the IR against the plan, and against what a real KFP 2.17 backend does."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from google.protobuf import json_format
from kfp import components as kfp_components
from kfp.kubernetes import kubernetes_executor_config_pb2
from kfp.pipeline_spec import pipeline_spec_pb2

from hpml.core.contract import Output
from hpml.core.errors import ConfigInvalid
from hpml.measuring.goals import Goals
from hpml.pipelines import graph, recipe
from hpml.pipelines.kubeflow import compile as kubeflow
from hpml.pipelines.kubeflow.compile import MAX_BYTES, Compiled, compile_pipeline
from hpml.pipelines.kubeflow.steps import _may_be_cached, components_of
from hpml.pipelines.plan import Plan, trace
from hpml.tasks.image_classification.sources.base import ImageSource as Source
from hpml.tasks.image_classification.sources.base import Loaded
from tests.compiling import compile_anew, compiled
from tests.kubeflow_launcher import Kubeflow

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"


class Ir:
    """A compiled pipeline, by steps."""

    def __init__(self, compiled: Compiled) -> None:
        self.text, self._tasks = compiled.text, compiled.tasks
        self.spec, platform = yaml.safe_load_all(compiled.text)
        self.dag: dict[str, Any] = self.spec["root"]["dag"]["tasks"]
        self._configs = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        self.parameters: dict[str, Any] = self.spec["root"]["inputDefinitions"]["parameters"]

    def task(self, step: str) -> dict[str, Any]:
        found: dict[str, Any] = self.dag[self._tasks[step]]
        return found

    def component(self, step: str) -> dict[str, Any]:
        found: dict[str, Any] = self.spec["components"][self.task(step)["componentRef"]["name"]]
        return found

    def container(self, step: str) -> dict[str, Any]:
        label = self.component(step)["executorLabel"]
        found: dict[str, Any] = self.spec["deploymentSpec"]["executors"][label]["container"]
        return found

    def config(self, step: str) -> dict[str, Any]:
        """What kfp-kubernetes adds."""
        found: dict[str, Any] = self._configs[self.component(step)["executorLabel"]]
        return found

    def arguments(self, step: str) -> list[str]:
        found: list[str] = self.container(step)["args"]
        return found

    def flag(self, step: str, name: str) -> str:
        arguments = self.arguments(step)
        return arguments[arguments.index(name) + 1]

    def types(self, step: str, side: str) -> dict[str, str]:
        declared = self.component(step).get(side, {}).get("artifacts", {})
        return {name: item["artifactType"]["schemaTitle"] for name, item in declared.items()}


def plan_of(file: Path, *overrides: str) -> Plan:
    return trace(graph.graph, recipe.load(file, overrides).recipe)


@pytest.fixture
def ir() -> Ir:
    return Ir(compiled(QUICKSTART))


Write = Callable[[Mapping[str, Any]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(fields: Mapping[str, Any]) -> Path:
        file = tmp_path / "mine.yaml"
        file.write_text(yaml.safe_dump(dict(fields)))
        return file

    return write


# ------------------------------------------------------------------------------------------------- the graph


@pytest.mark.parametrize("name", ["quickstart", "resnet18"])
def test_the_compiled_graph_is_the_local_graph(name: str) -> None:
    file = ROOT / "recipes" / f"{name}.yaml"
    ir, plan = Ir(compiled(file)), plan_of(file)
    steps = {ir.task(step)["taskInfo"]["name"]: step for step in plan.nodes}
    assert set(steps) == set(plan.nodes) and len(ir.dag) == len(plan.nodes)
    step_of = {task: details["taskInfo"]["name"] for task, details in ir.dag.items()}
    for step, node in plan.nodes.items():
        task = ir.task(step)
        assert {step_of[name] for name in task.get("dependentTasks", ())} == set(node.parents())
        source = {}
        for artifact, given in task.get("inputs", {}).get("artifacts", {}).items():
            produced = given["taskOutputArtifact"]
            assert produced["outputArtifactKey"] == "out"
            source[artifact] = step_of[produced["producerTask"]]
        names = json.loads(ir.flag(step, "--names")) if node.inputs else {}
        seen = {
            name: source[given]
            if isinstance(given, str)
            else {key: source[one] for key, one in given.items()}
            for name, given in names.items()
        }
        assert seen == node.inputs


@pytest.mark.parametrize("name", ["quickstart", "resnet18", "distributed"])
def test_no_component_reads_one_artifact_under_two_names(name: str) -> None:
    """ML Metadata takes one input event for an artifact and an execution: the driver ends of a second one."""
    text = compiled(ROOT / "recipes" / f"{name}.yaml").text
    run = Kubeflow(text, root="minio://mlpipeline/v2/artifacts", outputs="/tmp/kfp_outputs")
    assert {task.name for task in run.tasks()} >= {"train", "compress-quantize", "report"}


def test_inputs_that_are_the_same_artifact_are_told_by_the_command_line(ir: Ir) -> None:
    assert json.loads(ir.flag("compress-quantize", "--names")) == {
        "model": "train",
        "teacher": "train",
        "data": "prepare",
    }
    assert ir.types("compress-quantize", "inputDefinitions") == {
        "train": "system.Model",
        "prepare": "system.Dataset",
    }


def test_engines_keep_their_order(ir: Ir) -> None:
    given = plan_of(QUICKSTART).nodes["benchmark"].inputs["engines"]
    assert list(json.loads(ir.flag("benchmark", "--names"))["engines"]) == list(given)


def test_artifacts_are_typed(ir: Ir) -> None:
    assert ir.types("prepare", "outputDefinitions") == {"out": "system.Dataset", "metrics": "system.Metrics"}
    assert ir.types("train", "inputDefinitions") == {"prepare": "system.Dataset"}
    assert ir.types("train", "outputDefinitions")["out"] == "system.Model"
    assert ir.types("benchmark", "inputDefinitions")["export_quantize_onnx"] == "system.Model"
    assert ir.types("report", "outputDefinitions") == {
        "out": "system.Artifact",
        "metrics": "system.Metrics",
        "html": "system.HTML",
        "summary": "system.Markdown",
    }


def test_kfp_reads_what_was_compiled(ir: Ir) -> None:
    spec, platform = yaml.safe_load_all(ir.text)
    json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
    json_format.ParseDict(platform, pipeline_spec_pb2.PlatformSpec())
    for config in platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values():
        json_format.ParseDict(config, kubernetes_executor_config_pb2.KubernetesExecutorConfig())
    assert kfp_components.load_component_from_text(ir.text).name == "quickstart"


def test_equal_recipes_give_equal_bytes() -> None:
    code = (
        "import sys; from pathlib import Path; from hpml.pipelines import recipe;"
        "from hpml.pipelines.kubeflow.compile import compile_pipeline;"
        "sys.stdout.write(compile_pipeline(recipe.load(Path(sys.argv[1]))).text)"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code, str(QUICKSTART)],
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": zone},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, zone in (("1", "UTC"), ("2", "Asia/Tokyo"))
    }
    texts |= {compiled(QUICKSTART).text, compile_anew(QUICKSTART).text}
    assert len(texts) == 1


@pytest.mark.parametrize("name", ["quickstart", "resnet18"])
def test_the_recipes_fit(name: str) -> None:
    text = compiled(ROOT / "recipes" / f"{name}.yaml").text
    assert len(text.encode()) <= 128 * 1024 == MAX_BYTES


def test_a_pipeline_that_is_too_large_is_refused(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubeflow, "MAX_BYTES", 16 << 10)
    with pytest.raises(ConfigInvalid, match=r"KiB: Kubeflow takes 16, and its 14 steps.* -> split"):
        compile_anew(write({"data": "digits", "targets": ["onnx"]}))


# ------------------------------------------------------------------------------- what a real backend is like


def test_a_step_is_one_task_without_conditions_loops_or_importers(ir: Ir) -> None:
    """Each task is two pods and about 16 s; conditions and loops would add pods."""
    assert all("dag" not in component for component in ir.spec["components"].values())
    assert all(set(executor) == {"container"} for executor in ir.spec["deploymentSpec"]["executors"].values())
    for task in ir.dag.values():
        assert not {"triggerPolicy", "parameterIterator", "artifactIterator", "iteratorPolicy"} & set(task)


def test_kubeflow_is_not_asked_to_retry(ir: Ir) -> None:
    """It would not retry an exit code; what may pass by itself is retried in the step."""
    assert all("retryPolicy" not in task for task in ir.dag.values())


def test_pods_may_be_started_again_with_the_same_arguments(ir: Ir) -> None:
    """Whole levels are, when a pod is lost: nothing in a command differs from one attempt to the next."""
    for step in plan_of(QUICKSTART).nodes:
        changing = {"KFP_POD_NAME", "KFP_POD_UID", "uuid", "workflow.creationTimestamp"}
        assert not [mark for mark in changing if any(mark in text for text in ir.arguments(step))]


def test_checkpoints_go_to_a_place_of_their_own(ir: Ir) -> None:
    """A step has 0.6 s after SIGTERM, and nothing of a failed attempt is uploaded."""
    assert ir.flag("train", "--scratch") == "s3://hpml/scratch/$(HPML_RUN)/train"
    distill = next(step for step in plan_of(QUICKSTART).nodes if step.endswith("-distill"))
    assert ir.flag(distill, "--scratch") == f"s3://hpml/scratch/$(HPML_RUN)/{distill}"
    assert "--scratch" not in ir.arguments("prepare")


def test_an_incomplete_measurement_is_not_handed_out_and_a_next_run_adds_to_it(ir: Ir) -> None:
    """KFP's cache knows nothing of what is missing, and the id of a run is another each time."""
    assert ir.flag("benchmark", "--scratch") == "s3://hpml/scratch/{work}/benchmark"
    assert not ir.dag["benchmark"].get("cachingOptions", {}).get("enableCache", False)


def test_the_runs_id_is_there_without_spoiling_the_cache(ir: Ir) -> None:
    """KFP labels pods with it. As a parameter, it would make every step's cache key new."""
    for step in plan_of(QUICKSTART).nodes:
        fields = {item["name"]: item["fieldPath"] for item in ir.config(step)["fieldPathAsEnv"]}
        assert fields == {"HPML_RUN": "metadata.labels['pipeline/runid']"}
        assert "pipeline_job" not in json.dumps(ir.container(step))


def test_a_step_tells_its_exit_code_in_its_log(ir: Ir) -> None:
    """Kubeflow shows every exit code but 0 as 1."""
    assert all(ir.flag(step, "--events") == "-" for step in plan_of(QUICKSTART).nodes)


def test_kubeflow_says_where_artifacts_are(ir: Ir) -> None:
    """By the executor input; the entrypoint makes the output folder, and nothing else is replaced."""
    for step in plan_of(QUICKSTART).nodes:
        assert ir.flag(step, "--executor-input") == "{{$}}"
        for text in ir.arguments(step):
            rest = text.replace("{{$}}", "").replace("$(HPML_RUN)", "")
            assert "$(" not in rest
            assert rest.count("{{") == rest.count("{{$.inputs.parameters['")


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("train.model.arguments.name='{{workflow.name}}'", "the config of step train"),
        ("train.model.arguments={'$(HOME)': 1}", "the config of step train"),
        ("registry.tags.team='$(AWS_SECRET_ACCESS_KEY)'", "the config of step register"),
        ("cluster.tracking_uri='http://$(HOST)'", "the recipe's cluster"),
        ("cluster.images.cpu='{{$.inputs}}'", "the recipe's cluster"),
    ],
)
def test_what_would_be_replaced_on_the_way_is_refused(override: str, what: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"^{what} cannot be handed to Kubeflow.*replaced on the way"):
        compile_pipeline(recipe.load(QUICKSTART, (override,)))


def test_pods_are_what_a_restricted_namespace_accepts(ir: Ir) -> None:
    for step in plan_of(QUICKSTART).nodes:
        context = ir.config(step)["securityContext"]
        assert context == {"runAsNonRoot": True, "runAsUser": "10001", "runAsGroup": "10001"}
        assert {"mountPath": "/tmp", "volumeName": "tmp"} in ir.config(step)["emptyDirMounts"]


# --------------------------------------------------------------------------------------- what a step is given


def test_credentials_come_from_the_secret_and_from_nowhere_else(ir: Ir) -> None:
    given = {
        pair["envVar"]: (item["secretName"], item["optional"])
        for item in ir.config("prepare")["secretAsEnv"]
        for pair in item["keyToEnv"]
    }
    assert given == {
        "AWS_ACCESS_KEY_ID": ("hpml-store", False),
        "AWS_SECRET_ACCESS_KEY": ("hpml-store", False),
        "AWS_ENDPOINT_URL": ("hpml-store", True),
        "AWS_REGION": ("hpml-store", True),
    }


def test_a_step_knows_its_names(ir: Ir) -> None:
    told = {item["name"]: item["value"] for item in ir.container("export-eager")["env"]}
    assert told == {
        "HOME": "/tmp",
        "HPML_RECIPE": "quickstart",
        "HPML_STEP": "export-eager",
        "HPML_STORE": "s3://hpml",
        "MLFLOW_TRACKING_URI": "http://mlflow.hpml:5000",
    }
    last = {item["name"]: item["value"] for item in ir.container("bundle")["env"]}
    assert last["HPML_LAST"] == "1"


def test_the_cluster_section_is_heeded() -> None:
    ir = Ir(
        compiled(
            QUICKSTART,
            "cluster.images.gpu='registry.example/hpml-gpu:1'",
            "cluster.image_pull_policy=Always",
            "cluster.image_pull_secrets=[pull]",
            "cluster.gpu_resource=nvidia.com/mig-1g.10gb",
            "cluster.shared_memory=2Gi",
            "cluster.queue=ours",
            "cluster.timeout_s=100",
            "cluster.stages.train={cpus: 4, memory: 8Gi, gpus: 2, timeout_s: 7200,"
            " node_selector: {disk: ssd, zone: a}, tolerations: [{key: gpu, effect: NoSchedule}]}",
        )
    )
    container, config = ir.container("train"), ir.config("train")
    assert container["image"] == "registry.example/hpml-gpu:1"
    resources = container["resources"]
    assert (resources["resourceCpuRequest"], resources["resourceCpuLimit"]) == ("4", "4")
    assert (resources["resourceMemoryRequest"], resources["resourceMemoryLimit"]) == ("8Gi", "8Gi")
    assert resources["accelerator"]["resourceType"] == "nvidia.com/mig-1g.10gb"
    assert resources["accelerator"]["resourceCount"] == "2"
    assert ir.flag("train", "--threads") == "4"
    assert config["activeDeadlineSeconds"] == "7200"
    assert config["nodeSelector"] == {"labels": {"disk": "ssd", "zone": "a"}}
    assert config["tolerations"] == [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert config["imagePullPolicy"] == "Always"
    assert [item["secretName"] for item in config["imagePullSecret"]] == ["pull"]
    assert config["podMetadata"] == {"labels": {"kueue.x-k8s.io/queue-name": "ours"}}
    shm = {"mountPath": "/dev/shm", "volumeName": "shm", "medium": "Memory", "sizeLimit": "2Gi"}
    assert shm in config["emptyDirMounts"]
    assert ir.config("prepare")["activeDeadlineSeconds"] == "100"
    assert "nodeSelector" not in ir.config("prepare")
    assert "accelerator" not in ir.container("prepare")["resources"]


# ---------------------------------------------------------------------------------------------------- caching


def test_only_what_kfp_can_compare_is_cached(ir: Ir) -> None:
    cached = {
        step for step in plan_of(QUICKSTART).nodes if ir.task(step)["cachingOptions"] == {"enableCache": True}
    }
    stages = {"prepare", "train", "compress", "select"}
    assert cached == {node.name for node in plan_of(QUICKSTART).nodes.values() if node.stage in stages}


def test_a_training_that_begins_with_weights_at_an_address_is_not_cached() -> None:
    node = plan_of(QUICKSTART).nodes["train"]
    config = node.config.model_copy(update={"weights": "s3://ours/net.safetensors"})
    assert _may_be_cached(node) and not _may_be_cached(dataclasses.replace(node, config=config))


def test_other_code_is_another_cache_key(ir: Ir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpml.pipelines.kubeflow.steps.source_digest", lambda: "0" * 64)
    other = Ir(compile_anew(QUICKSTART))
    assert json.loads(other.flag("prepare", "--lineage"))["code_digest"] == "0" * 64
    assert ir.flag("prepare", "--lineage") != other.flag("prepare", "--lineage")


class Shelf(Source):
    """Data at an address."""

    source: Literal["shelf"] = "shelf"
    path: str = "s3://ours/images.npz"
    sha256: str | None = None

    def load(self, out: Output) -> Loaded:
        raise NotImplementedError


@pytest.mark.parametrize(("sha256", "cached"), [("ab" * 32, True), (None, False)])
def test_data_that_may_have_changed_is_read_again(sha256: str | None, cached: bool) -> None:
    node = plan_of(QUICKSTART).nodes["prepare"]
    other = Plan({"prepare": dataclasses.replace(node, config=Shelf(sha256=sha256))})
    (component,) = components_of(other, recipe.load(QUICKSTART).recipe)
    assert component.cached is cached
    assert [parameter.name for parameter in component.parameters] == ["data_path", "data_sha256"]


# ------------------------------------------------------------------------------------------------- parameters


def test_what_people_change_is_a_parameter(ir: Ir) -> None:
    assert {name: item["defaultValue"] for name, item in ir.parameters.items()} == {
        "epochs": 8,
        "metric": "",
        "max_quality_loss": 0.01,
        "max_latency_ms_p99": "",
        "max_size_mb": "",
        "objective": "latency_ms_p50",
    }
    assert ir.parameters["epochs"]["parameterType"] == "NUMBER_INTEGER"
    assert ir.parameters["max_quality_loss"]["parameterType"] == "NUMBER_DOUBLE"
    assert ir.parameters["max_size_mb"]["parameterType"] == "STRING"
    assert "epochs={{$.inputs.parameters['epochs']}}" in ir.arguments("train")
    for step in ("report", "select"):
        assert "max_size_mb={{$.inputs.parameters['max_size_mb']}}" in ir.arguments(step)


def test_parameters_are_checked_by_a_step_that_starts_at_once_and_always_runs(ir: Ir, write: Write) -> None:
    """And by no other: they would be a part of its key in KFP's cache."""
    checked = {
        f"{stage}.{name}={{{{$.inputs.parameters['{name}']}}}}"
        for stage, name in [("train", "epochs"), *(("select", name) for name in Goals.model_fields)]
    }
    assert {text for text in ir.arguments("peaks") if "=" in text and "$" in text} == checked
    assert ir.task("peaks")["cachingOptions"] == {} and "dependentTasks" not in ir.task("peaks")
    assert not [step for step in plan_of(QUICKSTART).nodes if "--check" in ir.arguments(step)][1:]
    unknown = Ir(compile_anew(write({"data": {"source": "folder", "path": "s3://ours/x"}})))
    assert "--check" in unknown.arguments("prepare")  # which is not cached, so nothing is trained before


def test_the_recipes_values_are_the_defaults() -> None:
    ir = Ir(compiled(QUICKSTART, "train.epochs=3", "goals.max_latency_ms_p99=2.5"))
    assert ir.parameters["epochs"]["defaultValue"] == 3
    assert ir.parameters["max_latency_ms_p99"]["defaultValue"] == "2.5"


def test_the_address_of_the_data_is_a_parameter(write: Write) -> None:
    digest = "cd" * 32
    data = {"source": "cifar10", "url": "https://data.example/cifar.tar.gz", "sha256": digest}
    ir = Ir(compile_anew(write({"data": data})))
    assert ir.parameters["data_url"]["defaultValue"] == "https://data.example/cifar.tar.gz"
    assert ir.parameters["data_sha256"]["defaultValue"] == digest
    assert "url={{$.inputs.parameters['data_url']}}" in ir.arguments("prepare")


def test_a_file_of_this_machine_is_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"step prepare cannot read path.*of this machine.*s3://"):
        compile_pipeline(recipe.load(write({"data": {"source": "npz", "path": str(tmp_path / "x.npz")}})))


# ------------------------------------------------------------------------------------------ training on nodes


def test_training_on_nodes_is_a_launcher() -> None:
    ir = Ir(
        compiled(QUICKSTART, "train.nodes=2", "cluster.stages.train.gpus=1", "cluster.namespace=elsewhere")
    )
    container = ir.container("train")
    assert container["image"].startswith("hpml-client:")
    assert container["command"][:4] == ["python", "-m", "hpml.pipelines.operators.pytorchjob", "--cluster"]
    assert json.loads(container["command"][4])["namespace"] == "elsewhere"
    assert ir.flag("train", "--names") == '{"data": "prepare"}'
    assert "--data" not in ir.arguments("train") and "--out" not in ir.arguments("train")
    assert ir.flag("train", "--scratch").startswith("s3://hpml/scratch/")
    assert "accelerator" not in container["resources"]  # the workers have them
    assert "KFP_POD_NAME" not in {item["name"] for item in container["env"]}  # KFP's own names the owner
    assert "defaultPipelineRoot" not in ir.spec  # servers ignore it, and none is needed


# --------------------------------------------------------------------------------------------------- the rest


def test_without_kfp_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kfp.dsl", None)
    with pytest.raises(
        ConfigInvalid, match=r"kfp.* is not installed.*pip install 'hpml-pipeline\[cluster\]'"
    ):
        compile_pipeline(recipe.load(QUICKSTART))


def test_importing_the_module_does_not_import_kfp() -> None:
    modules = "hpml.pipelines.kubeflow.compile, hpml.pipelines.kubeflow.remote_runs"
    code = f"import sys, {modules}; print('kfp' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert answer.stdout.strip() == "False"
    assert kubeflow.__doc__
