"""What was reviewed is what Compose and KServe take, by the schemas that they publish.

Compose's is in the Go module of its reference implementation. KServe's CRDs are in no package that could be
fetched here. Its Python client is generated from the OpenAPI of the same types: it has every field, its type,
and whether it has to be there, but neither patterns nor bounds.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

GOLDEN = Path(__file__).with_name("golden")
COMPOSE = "github.com/compose-spec/compose-go/v2@v2.16.2"
KSERVE = "kserve==0.21.0"

pytestmark = pytest.mark.slow  # each fetches a package


def fetched(command: list[str], folder: Path, **env: str) -> str:
    """What the command printed; without a network the test is skipped, and says so."""
    done = subprocess.run(command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{shutil.which(command[0])} cannot fetch it: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


# ------------------------------------------------------------------------------------------------- compose


@pytest.fixture(scope="module")
def compose_schema(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not shutil.which("go"):
        pytest.skip("there is no go, whose modules have the schema")
    folder = tmp_path_factory.mktemp("go")
    said = fetched(["go", "mod", "download", "-json", COMPOSE], folder, GOFLAGS="-mod=mod")
    return json.loads((Path(json.loads(said)["Dir"]) / "schema" / "compose-spec.json").read_text())


@pytest.mark.parametrize("case", ["compose", "compose-all", "vllm"])
def test_compose_takes_the_file(compose_schema: Any, case: str) -> None:
    told = yaml.safe_load((GOLDEN / case / "compose.yaml").read_text())
    jsonschema.validate(told, compose_schema)
    told["services"]["server"]["read_onyl"] = True
    with pytest.raises(jsonschema.ValidationError, match="read_onyl"):
        jsonschema.validate(told, compose_schema)


# -------------------------------------------------------------------------------------------------- kserve


@dataclass(frozen=True)
class Type:
    """What an object may and has to have: the types of its fields, by their names in JSON."""

    fields: dict[str, str]
    needed: frozenset[str]


_PLAIN: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "object": (object,),
    "ResourceQuantity": (str, int),
}


def _type(source: str) -> Type:
    """Of the source of a generated class."""
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("openapi_types", "attribute_map")
    }
    names = tables["attribute_map"]
    needed = re.findall(r"Invalid value for `(\w+)`, must not be `None`", source)
    return Type(
        {names[name]: kind for name, kind in tables["openapi_types"].items()},
        frozenset(names[name] for name in needed),
    )


class Types:
    """KServe's, and those of Kubernetes that they consist of."""

    def __init__(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as files:
            sources = [
                files.read(name).decode()
                for name in files.namelist()
                if re.fullmatch(r"kserve/models/v1\w+\.py", name)
            ]
        self._own = {
            found[1]: source for source in sources if (found := re.search(r"^class (\w+)\(", source, re.M))
        }

    def _named(self, name: str) -> Type:
        if name in self._own:
            return _type(self._own[name])
        module = importlib.import_module("kubernetes.client.models")
        return _type(inspect.getsource(inspect.getmodule(getattr(module, name))))  # type: ignore[arg-type]

    def problems(self, value: Any, kind: str, where: str = "") -> Iterator[str]:
        """What of `value` is not as `kind` has it."""
        if kind in _PLAIN:
            if not isinstance(value, _PLAIN[kind]) or (kind == "int" and isinstance(value, bool)):
                yield f"{where}: {value!r} is no {kind}"
        elif found := re.fullmatch(r"list\[(.+)\]", kind):
            for index, one in enumerate(value):
                yield from self.problems(one, found[1], f"{where}[{index}]")
        elif found := re.fullmatch(r"dict\(str, (.+)\)", kind):
            for name, one in value.items():
                yield from self.problems(one, found[1], f"{where}.{name}")
        else:
            wanted = self._named(kind)
            yield from (f"{where}: there is no {name}" for name in value.keys() - wanted.fields.keys())
            yield from (f"{where}: {name} is missing" for name in wanted.needed - value.keys())
            for name in value.keys() & wanted.fields.keys():
                yield from self.problems(value[name], wanted.fields[name], f"{where}.{name}")


@pytest.fixture(scope="module")
def types(tmp_path_factory: pytest.TempPathFactory) -> Types:
    folder = tmp_path_factory.mktemp("wheel")
    fetched([sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", KSERVE], folder)
    [wheel] = folder.glob("*.whl")
    return Types(wheel)


KINDS = {"ServingRuntime": "V1alpha1ServingRuntime", "InferenceService": "V1beta1InferenceService"}


@pytest.mark.parametrize(
    "file", ["kserve/kserve", "kserve-all/kserve", "kserve-knative/kserve", "kserve-canary/runtime"]
)
def test_kserve_takes_the_objects(types: Types, file: str) -> None:
    for told in yaml.safe_load_all((GOLDEN / f"{file}.yaml").read_text()):
        assert not list(types.problems(told, KINDS[told["kind"]]))


@pytest.mark.parametrize("file", ["canary", "promote", "roll-back"])
def test_kserve_takes_the_service_that_a_patch_makes(types: Types, file: str) -> None:
    """A merge patch puts its lists in the place of those that are there, and its fields beside the others."""
    *_, service = yaml.safe_load_all((GOLDEN / "kserve" / "kserve.yaml").read_text())
    told = yaml.safe_load((GOLDEN / "kserve-canary" / f"{file}.yaml").read_text())["spec"]
    service["spec"]["predictor"] |= told.pop("predictor", {})
    service["spec"] |= told
    assert not list(types.problems(service, KINDS["InferenceService"]))


def test_a_field_that_kserve_does_not_have_is_noticed(types: Types) -> None:
    runtime, service = yaml.safe_load_all((GOLDEN / "kserve-knative" / "kserve.yaml").read_text())
    wrong = copy.deepcopy(service)
    wrong["spec"]["predictor"]["canaryPercent"] = 10
    wrong["spec"]["predictor"]["model"].pop("modelFormat")
    wrong["spec"]["predictor"]["minReplicas"] = "1"
    assert sorted(types.problems(wrong, KINDS["InferenceService"])) == [
        ".spec.predictor.minReplicas: '1' is no int",
        ".spec.predictor.model: modelFormat is missing",
        ".spec.predictor: there is no canaryPercent",
    ]
    runtime["spec"]["containers"][0]["securityContext"]["runAsRoot"] = False
    assert [*types.problems(runtime, KINDS["ServingRuntime"])] == [
        ".spec.containers[0].securityContext: there is no runAsRoot"
    ]
