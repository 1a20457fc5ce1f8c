"""`hpml run` says before training which variants cannot be built, and refuses if that is all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpml.core.errors import ExitCode
from hpml.pipelines import recipe
from hpml.pipelines.__main__ import main
from hpml.pipelines.preflight.applicability import unbuildable

VIT = "{architecture: vit, arguments: {image_size: 8, dim: 16, depth: 1, heads: 2}}"


def write(folder: Path, variants: str, model: str = VIT) -> Path:
    file = folder / "a.yaml"
    file.write_text(f"data: digits\ntrain: {{model: {model}, epochs: 1}}\nvariants: {variants}\n")
    return file


def test_a_dry_run_names_the_variant_and_the_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, "{fp32: [], pruned: [prune], both: [prune, quantize], int8: [quantize]}")
    main(["run", str(file), "--dry-run"])
    said = " ".join(capfd.readouterr().err.split())
    assert said.count("will not be built") == 2
    for variant in ("pruned", "both"):
        assert f"variant {variant} will not be built, the others will: prune cannot prune" in said


def test_a_recipe_of_which_nothing_can_be_built_is_refused_before_it_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpml.pipelines.preflight.applicability.ask", lambda *_, **__: ["prune cannot"])
    with pytest.raises(SystemExit) as ending:
        main(["run", str(write(tmp_path, "{pruned: [prune]}")), "--no-tracking"])
    assert ending.value.code == ExitCode.CONFIG_INVALID
    assert "none of the recipe's variants can be built: prune cannot" in capfd.readouterr().err
    assert not list((tmp_path / "runs").glob("*/run.json"))


@pytest.mark.slow  # imports torch several times; test_preflight does it once
def test_a_users_own_network_is_looked_at_and_its_mistakes_are_left_to_training(tmp_path: Path) -> None:
    (tmp_path / "mynets.py").write_text(
        "from torch import nn\n"
        "print('hello')\n"
        "def net(in_channels, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.Linear(8, num_classes))\n"
        "def broken(in_channels, num_classes):\n"
        "    raise RuntimeError('no')\n"
    )
    loaded = recipe.load(write(tmp_path, "{fp32: [], pruned: [prune]}", "mynets:net"))
    assert "LazyLinear" in unbuildable(loaded)["pruned"]
    assert unbuildable(recipe.load(write(tmp_path, "{fp32: [], p: [prune]}", "mynets:broken"))) == {}


def test_methods_that_apply_to_any_network_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpml.pipelines.preflight.applicability.ask", lambda *_, **__: pytest.fail("asked"))
    assert unbuildable(recipe.load(write(tmp_path, "{fp32: [], int8: [quantize]}"))) == {}
