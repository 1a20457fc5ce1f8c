"""The traced pipeline: one definition, equal steps once, names without a second list of names."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpml.core.contract import signature
from hpml.core.errors import UsageError
from hpml.pipelines import recipe
from hpml.pipelines.graph import graph
from hpml.pipelines.plan import Plan, trace

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture
def quickstart() -> Plan:
    return trace(graph, recipe.load(RECIPES / "quickstart.yaml").recipe)


def test_the_quickstart_is_the_chain_of_the_issue(quickstart: Plan) -> None:
    stages = {node.stage for node in quickstart.nodes.values()}
    assert stages == {
        "prepare",
        "train",
        "compress",
        "export",
        "benchmark",
        "peaks",
        "diagnose",
        "evaluate",
        "report",
        "select",
        "register",
        "bundle",
    }
    assert set(quickstart.nodes["benchmark"].inputs["engines"]) == {
        "fp32/eager",
        "fp32/onnx",
        "int8/onnx",
        "pruned-distilled/onnx",
        "pruned-distilled-int8/onnx",
    }


def test_variants_share_their_common_steps(quickstart: Plan) -> None:
    prunes = [name for name in quickstart.nodes if name.startswith("compress-prune")]
    # two variants prune and distill alike: one prune, one distill, and a quantize on top of it
    assert len(prunes) == 3


def test_every_input_names_an_earlier_step_of_the_right_kind(quickstart: Plan) -> None:
    seen: set[str] = set()
    for node in quickstart.nodes.values():
        assert set(node.parents()) <= seen
        assert set(node.inputs) == set(signature(node.run).inputs)
        seen.add(node.name)


def test_step_names_are_fit_for_files_and_clusters(quickstart: Plan) -> None:
    for name in quickstart.nodes:
        assert name == name.lower()
        assert name.replace("-", "").replace(".", "").isalnum()


def test_two_methods_of_the_same_label_get_two_names() -> None:
    fields = {
        "data": "digits",
        "variants": {
            "a": [{"method": "quantize", "seed": 1}],
            "b": [{"method": "quantize", "seed": 2}],
        },
    }
    plan = trace(graph, recipe.Recipe.model_validate(fields))
    assert {"compress-quantize", "compress-quantize-2"} <= set(plan.nodes)


def test_needed_for_keeps_ancestors_only(quickstart: Plan) -> None:
    assert list(quickstart.needed_for("train").nodes) == ["prepare", "train"]
    with pytest.raises(UsageError, match="no step 'tain'"):
        quickstart.needed_for("tain")
