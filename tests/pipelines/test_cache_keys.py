"""What a step depends on: code found by every kind of import, the user's networks, threads and kernels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpml.components import STAGES
from hpml.pipelines import recipe
from hpml.pipelines.engine import cache_keys
from hpml.pipelines.engine.cache_keys import CacheKeyInputs, RuntimeEnvironment, cache_key_inputs, code_of
from hpml.pipelines.graph import graph
from hpml.pipelines.plan import Plan, trace

ROOT = Path(__file__).parents[2]
RECIPE = {"data": "digits", "train": {"model": {"architecture": "mynets.net:net"}}}


def write(folder: Path, files: Mapping[str, str]) -> tuple[str, ...]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return (str(folder),)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"mynets/net.py": "from .blocks import Block", "mynets/blocks.py": ""}, "mynets.blocks"),
        ({"mynets/net.py": "from . import blocks", "mynets/blocks.py": ""}, "mynets.blocks"),
        ({"mynets/net.py": "from ..nets2 import blocks", "nets2/blocks.py": ""}, ""),  # leads out: no import
        ({"mynets/net.py": "from .deep.er import Block", "mynets/deep/er.py": ""}, "mynets.deep.er"),
        ({"mynets/net.py": "from .deep import er", "mynets/deep/er.py": ""}, "mynets.deep.er"),
        (
            {
                "mynets/__init__.py": "from .parts import *",
                "mynets/net.py": "",
                "mynets/parts/__init__.py": "from .conv import Conv",
                "mynets/parts/conv.py": "from ..blocks import Block",
                "mynets/blocks.py": "",
            },
            "mynets.blocks",
        ),
        ({"mynets/net.py": "def net():\n    from . import blocks", "mynets/blocks.py": ""}, "mynets.blocks"),
        (
            {"mynets/net.py": "import importlib\nimportlib.import_module('.blocks', __package__)",
             "mynets/blocks.py": ""},
            "mynets.blocks",
        ),
        ({"mynets/net.py": "ROWS = ['mynets.blocks:Block']", "mynets/blocks.py": ""}, "mynets.blocks"),
    ],
)  # fmt: skip
def test_every_kind_of_import_is_followed(tmp_path: Path, files: dict[str, str], found: str) -> None:
    code = code_of("mynets.net", write(tmp_path, files))
    others = set(code.modules) - {"mynets", "mynets.net", "mynets.parts", "mynets.parts.conv"}
    assert others == ({found} if found else set())


def test_libraries_beside_us_are_told_by_their_version_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in site-packages."""
    ours = {"hpml/__init__.py": "", "hpml/train/__init__.py": "import torch"}
    write(tmp_path, {**ours, "torch/__init__.py": "from . import nn", "torch/nn.py": ""})
    monkeypatch.setattr(cache_keys, "_ROOT", tmp_path)
    code = code_of.__wrapped__("hpml.train")
    assert set(code.modules) == {"hpml", "hpml.train"}
    assert code.libraries == {"torch": "torch"}


def test_templates_are_code_of_the_stage_that_renders_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {"hpml/__init__.py": "", "hpml/show/__init__.py": "", "hpml/show/page.py": ""}
    stages = {"hpml/a.py": "import hpml.show.page", "hpml/b.py": ""}
    write(tmp_path, {**ours, **stages, "hpml/show/templates/page.html": "<p>one</p>"})
    monkeypatch.setattr(cache_keys, "_ROOT", tmp_path)
    before = {stage: code_of.__wrapped__(f"hpml.{stage}") for stage in "ab"}
    write(tmp_path, {"hpml/show/templates/page.html": "<p>two</p>"})
    after = {stage: code_of.__wrapped__(f"hpml.{stage}") for stage in "ab"}
    assert before["a"].digest != after["a"].digest and before["b"].digest == after["b"].digest


def test_the_report_alone_has_templates() -> None:
    found = {
        stage: {name for name in code_of(f"hpml.components.{stage}.stage").modules if "/" in name}
        for stage in STAGES
    }
    places = {"hpml.reporting": "hpml/reporting", "hpml.components.report": "components/report"}
    templates = {
        f"{package}/{file.name}"
        for package, folder in places.items()
        for file in (ROOT / folder / "templates").iterdir()
    }
    assert found == {stage: set() for stage in STAGES} | {"report": templates}
    assert "hpml.reporting/page.html" in templates


# ------------------------------------------------------------------------------------------------------- keys


def plan() -> Plan:
    return trace(graph, recipe.Recipe.model_validate(RECIPE))


def materials(
    folder: Path, files: Mapping[str, str], *, threads: int = 2, kernels: Mapping[str, str] | None = None
) -> dict[str, CacheKeyInputs]:
    """Of every step, as if all inputs had the same content."""
    paths, steps = write(folder, files), plan()
    runtime_environment = RuntimeEnvironment(
        "3.12",
        {"cpu": "x", "cpu_flags": "avx2", "cpus": "2", "gpus": ""},
        lambda name: "1.0" if name == "timm" else "",
        kernels=kernels or {},
    )
    return {
        name: cache_key_inputs(
            node,
            {},
            ancestors=steps.needed_for(name).nodes.values(),
            import_paths=paths,
            registry="",
            runtime_environment=runtime_environment,
            threads=threads,
        )
        for name, node in steps.nodes.items()
    }


def changed(before: Mapping[str, CacheKeyInputs], after: Mapping[str, CacheKeyInputs]) -> set[str]:
    stages = {name: node.stage for name, node in plan().nodes.items()}
    return {stages[name] for name in before if before[name].key != after[name].key}


def test_an_edit_of_the_users_network_reaches_every_step_that_builds_it(tmp_path: Path) -> None:
    files = {"mynets/net.py": "from .blocks import Block", "mynets/blocks.py": "Block = 1"}
    before = materials(tmp_path / "a", files)
    after = materials(tmp_path / "b", {**files, "mynets/blocks.py": "Block = 2"})
    built = changed(before, after)
    assert {"train", "compress", "export", "benchmark", "diagnose"} <= built
    assert not built & {"prepare", "peaks", "report", "select", "register"}
    reasons = cache_keys.explain(after["compress-quantize"], before["compress-quantize"])
    assert [reason.partition(" changed")[0] for reason in reasons] == ["your code: mynets.blocks"]


def test_words_and_layout_are_no_part_of_the_key(tmp_path: Path) -> None:
    said = '"""A net."""\ndef net():\n    """Make it."""  # slowly\n    return f(1,\n        2)\n'
    unsaid = "# Nets.\ndef net():\n    return f(1, 2)\n"
    before = materials(tmp_path / "a", {"mynets/net.py": said})
    assert not changed(before, materials(tmp_path / "b", {"mynets/net.py": unsaid}))
    assert changed(before, materials(tmp_path / "c", {"mynets/net.py": unsaid.replace("2", "3")}))


def test_a_stage_depends_on_the_kinds_of_artifacts_that_it_reads_and_writes() -> None:
    kinds = {
        stage: {
            name.removeprefix("hpml.artifacts.")
            for name in code_of(f"hpml.components.{stage}.stage").modules
            if name.startswith("hpml.artifacts.")
        }
        for stage in ("prepare", "train", "diagnose")
    }
    assert kinds["prepare"] == {"dataset", "folder", "metric", "operation"}
    assert not kinds["train"] & {"measurements", "diagnosis", "peaks", "bundle", "registration", "report"}
    assert {"diagnosis", "peaks", "measurements"} <= kinds["diagnose"]


def test_what_the_users_network_imports_is_part_of_the_key(tmp_path: Path) -> None:
    found: dict[str, Any] = dict(materials(tmp_path, {"mynets/net.py": "import timm"})["train"].fields)
    assert found["libraries"]["timm"] == "1.0"


def test_the_same_place_makes_the_same_keys(tmp_path: Path) -> None:
    assert not changed(materials(tmp_path, {}), materials(tmp_path, {}))


def test_threads_are_named_where_the_last_digit_depends_on_them(tmp_path: Path) -> None:
    before, after = materials(tmp_path, {}, threads=2), materials(tmp_path, {}, threads=4)
    assert changed(before, after) == {"train", "compress"}
    assert cache_keys.explain(after["train"], before["train"]) == ["arithmetic: threads changed: 2 -> 4"]


def test_kernels_that_the_user_asks_for_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    kernels = cache_keys.here().kernels
    assert kernels["OPENBLAS_CORETYPE"] == "Haswell"
    touched = changed(materials(tmp_path, {}), materials(tmp_path, {}, kernels=kernels))
    assert {"train", "compress", "benchmark"} <= touched
    assert "prepare" not in touched  # it counts in whole numbers
