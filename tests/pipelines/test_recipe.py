"""Recipes: what is taken, and what a user is told about what is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hpml.core.errors import ConfigInvalid
from hpml.pipelines import recipe
from hpml.pipelines.engine.run_record import RunRecord
from hpml.targets import TARGETS

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    file = folder / "mine.yaml"
    file.write_text(text)
    return file


def refusal(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigInvalid) as caught:
        recipe.load(write(folder, text), overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.name)
def test_the_recipes_we_ship_are_valid_and_resolve_to_themselves(file: Path, tmp_path: Path) -> None:
    loaded = recipe.load(file).recipe
    again = recipe.load(write(tmp_path, recipe.to_yaml(loaded))).recipe
    assert again == loaded


RETIRED = """
data: digits
benchmark:
  rounds: 7
  requests_per_round: 20
  images_per_round: 16
  scenario_backend: loadgen
  quiet: {enforce: false, max_stolen: 0.03, max_drift: 1, max_disagreement: 1, max_others: 1}
"""


def test_a_target_is_named_once(tmp_path: Path) -> None:
    told = refusal(tmp_path, "data: digits\ntargets: [onnx, {target: onnx, opset: 18}]")
    assert "targets" in told and "onnx is there twice" in told


def test_sections_of_before_are_taken_by_the_names_of_now_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = "data: digits\nceilings: {rounds: 9}\ndeploy: {serve_versions: latest}"
    found = recipe.load(write(tmp_path, before), ("ceilings.time_budget_s=3", "peaks.seed=4")).recipe
    now = "data: digits\npeaks: {rounds: 9, time_budget_s: 3, seed: 4}\nbundle: {serve_versions: latest}"
    said = capsys.readouterr().err.splitlines()
    assert said == ["ceilings in a recipe is called peaks now", "deploy in a recipe is called bundle now"]
    assert found == recipe.load(write(tmp_path, now)).recipe
    both = "data: digits\nceilings: {rounds: 9}\npeaks: {seed: 1}"
    assert "has both ceilings and peaks" in refusal(tmp_path, both)


def test_keys_of_before_are_taken_in_the_file_and_on_top_of_it(tmp_path: Path) -> None:
    before = "data: digits\ngoals: {max_accuracy_drop: 0.5}\ntrain: {min_accuracy: 0.1}"
    overrides = ("goals.max_accuracy_drop=0.02", "train.min_accuracy=0.9")
    for found in (
        recipe.load(write(tmp_path, before), overrides).recipe,
        recipe.load(write(tmp_path, "data: digits"), overrides).recipe,
    ):
        assert found.goals.max_quality_loss == 0.02
        assert found.train.required == {"accuracy_top1": 0.9}


def test_retired_keys_do_nothing_and_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("benchmark.quiet.max_slowdown=0.1", "benchmark.quiet.enforce=true")
    found = recipe.load(write(tmp_path, RETIRED), overrides).recipe
    plain = "data: digits\nbenchmark: {rounds: 7, quiet: {max_stolen: 0.03}}"
    assert found == recipe.load(write(tmp_path, plain)).recipe
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and all(" no longer do" in line for line in lines)
    slices = next(line for line in lines if line.startswith("benchmark.requests_per_round"))
    assert slices.startswith("benchmark.requests_per_round, benchmark.images_per_round no longer do anything")
    assert "benchmark.slice_ms" in slices
    [enforce] = [line for line in lines if line.startswith("benchmark.quiet.enforce no longer does anything")]
    assert "benchmark.require_quiet" in enforce


def test_a_whole_section_with_a_retired_key_is_taken(tmp_path: Path) -> None:
    override = "benchmark={rounds: 7, requests_per_round: 20, quiet: {enforce: false}}"
    assert recipe.load(write(tmp_path, "data: digits"), (override,)).recipe.benchmark.rounds == 7
    assert "benchmark.quiet" in refusal(tmp_path, "data: digits\nbenchmark: {quiet: enforce}")


def test_the_stored_recipe_of_an_old_run_opens_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RunRecord(
        id="it", recipe="it", recipe_file="/there/it.yaml", status="done", started_at_s=1.0, steps={}
    )
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / recipe.STORED).write_text(RETIRED)
    found = recipe.load_of_run(tmp_path, record)
    assert found.recipe.benchmark.rounds == 7 and found.import_paths == ("/there",)
    assert capsys.readouterr().err == ""


def test_three_lines_suffice(tmp_path: Path) -> None:
    text = "data: digits\ntrain: {model: cnn}\ngoals: {max_accuracy_drop: 0.02}\n"
    loaded = recipe.load(write(tmp_path, text)).recipe
    assert loaded.name == "mine" == loaded.registry.model_name
    assert list(loaded.variants) == ["fp32", "int8"]
    assert [target.label for target in loaded.targets] == ["onnx"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: digits\ntrane: {}", "trane: no such key, did you mean 'train'?"),
        ("data: digits\ntrain: {epoch: 3}", "train.epoch: no such key, did you mean 'epochs'?"),
        (
            "data: digits\ngoals: {max_quality_los: 0.9}",
            "goals.max_quality_los: no such key, did you mean 'max_quality_loss'",
        ),
        ("data: digits\ngoals: {optimize: 1}", "goals.optimize: no such key"),
        ("data: digits\nvariants: {a: [{method: prune, chanels: 0.5}]}", "did you mean 'channels'?"),
        ("data: digits\ntrain: {epochs: many}", "train.epochs: it should be a whole number (got 'many')"),
        ("data: digits\ntrain: {epochs: 0}", "epochs 0 trains nothing: set epochs, or `weights`"),
        ("data: digits\ntrain: {epochs: -1}", "train.epochs: it should be at least 0 (got -1)"),
        ("data: digit", "'digit' is unknown, allowed: mnist5k, digits"),
        ("data: digits\ntrain: {model: resnet81}", "did you mean 'resnet18'?"),
        ("data: digits\nvariants: {a: [qantize]}", "did you mean 'quantize'?"),
        ("data: digits\ntargets: [onix]", "did you mean 'onnx'?"),
        ("data: digits\ntargets: []", "targets:"),
        ("data: digits\ngoals: {max_quality_loss: .nan}", "goals.max_quality_loss"),
        (
            "data: digits\ngoals: {max_accuracy_drop: 0.1, max_quality_loss: 0.1}",
            "goals: max_accuracy_drop and max_quality_loss are both there: remove max_accuracy_drop, which",
        ),
        (
            "data: digits\ntrain: {min_accuracy: 0.9, required: {accuracy_top1: 0.9}}",
            "train: min_accuracy and required are both there: remove min_accuracy, which is required: {acc",
        ),
        (
            "data: chitchat\ntrain: {model: cnn}",
            "train.model: cnn is not for data of chitchat; give one of decoder, transformers, or your own as",
        ),
        ("data: digits\ntrain: {model: encoder_decoder}", "give one of cnn, resnet18, vit, or"),
        ("train: {}", "data: it is missing"),
        (
            "data: {source: custom, task: 'a:B', test_fraction: null}",
            "not valid: data.test_fraction: it should be a number (got null)",
        ),
        ("data: folder", "not valid: data.path: it is missing"),
        ("data: {source: folder, path: 3}", "not valid: data.path: it should be text (got 3)"),
        ("data: {}", "data: it needs the key 'source'"),
        (
            "data: digits\ntrain: {channels_last: 3}",
            "train.channels_last: it should be true or false (got 3)",
        ),
        ("data: digits\ntrain: {optimizer: adm}", "train.optimizer: it should be 'sgd', 'adamw', "),
        (
            "data: digits\ntargets: [{target: onnx, opset: 99}]",
            "not valid: targets.0.opset: it should be at most 23",
        ),
        ("data: digits\ngoals: {metric: bleu}", "not valid: goals.metric: the task has no metric 'bleu'"),
        ("", "it holds no keys"),
        ("- data", "it holds no keys"),
        ("data: [", "is not valid YAML"),
        ("data: digits\ndata: mnist5k", "the key 'data' appears twice"),
        ("data: !!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("data: digits\nvariants: {'../a': []}", "variants.../a"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


def test_a_missing_recipe_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"cannot read the recipe .*hpml init"):
        recipe.load(tmp_path / "absent.yaml")


def test_set_reaches_below_shorthands_and_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "data: mnist5k\ntrain: {model: resnet18}\n")
    overrides = (
        "train.epochs=3",
        "train.model.arguments.width=16",
        "data.image_size=28",
        "targets.0.target=onnx",
    )
    loaded = recipe.load(file, overrides).recipe
    assert loaded.train.epochs == 3
    assert loaded.train.model.arguments == {"width": 16}
    assert loaded.data.image_size == 28


def test_another_source_by_set_leaves_the_defaults_of_the_one_before(tmp_path: Path) -> None:
    file = write(tmp_path, "data: {source: mnist5k, test_fraction: 0.3}\ntrain: {model: cnn}\n")
    overrides = ("targets.0.opset=19", "data.source=npz", "data.path=mine.npz", "targets.0.target=onnx")
    loaded = recipe.load(file, overrides).recipe
    assert (loaded.data.source, loaded.data.test_fraction) == ("npz", 0.3)
    assert loaded.targets[0].opset == 19  # type: ignore[attr-defined]
    said = refusal(tmp_path, "data: {source: text, path: mine.txt}", "data.source=digits")
    assert "path: no such key" in said and said.count("no such key") == 1


def test_set_leaves_the_network_to_the_data(tmp_path: Path) -> None:
    file = write(tmp_path, "data: chitchat\n")
    assert recipe.load(file, ("train.epochs=1",)).recipe.train.model.architecture == "decoder"


def test_set_can_mend_what_is_missing(tmp_path: Path) -> None:
    assert recipe.load(write(tmp_path, "train: {}"), ("data=digits",)).recipe.data.source == "digits"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.epochs", "is not KEY=VALUE"),
        ("train.epoch=3", "did you mean 'epochs'?"),
        ("targets.7=onnx", "not an index below 1"),
        ("train.epochs.x=3", "nothing to set below 'x'"),
        ("train.epochs=[", "--set"),
    ],
)
def test_a_wrong_set_is_named(tmp_path: Path, override: str, said: str) -> None:
    assert said in refusal(tmp_path, "data: digits", override)


def test_paths_are_relative_to_the_recipe(tmp_path: Path) -> None:
    file = write(tmp_path, "data: {source: folder, path: photos}")
    assert recipe.load(file).recipe.data.path == tmp_path / "photos"  # type: ignore[attr-defined]


def test_targets_that_cannot_be_built_here_are_refused_when_there_is_no_other(tmp_path: Path) -> None:
    from hpml.core import hardware

    if hardware.gpu_names():
        pytest.skip("this machine has a GPU")
    only = recipe.load(write(tmp_path, "data: digits\ntargets: [tensorrt]")).recipe
    with pytest.raises(ConfigInvalid, match="none of the recipe's targets"):
        recipe.check_targets(only)
    both = recipe.load(write(tmp_path, "data: digits\ntargets: [tensorrt, onnx]")).recipe
    recipe.check_targets(both)


def test_the_schema_lets_editors_check_our_recipes() -> None:
    schema = recipe.Recipe.model_json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert {"data", "train", "variants", "targets", "goals"} <= set(schema["properties"])
    assert "mnist5k" in schema["properties"]["data"]["anyOf"][0]["enum"]
    assert schema["properties"]["targets"]["items"]["anyOf"][0]["enum"] == sorted(TARGETS)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=10,
    )
)
def test_any_yaml_is_taken_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, value: object
) -> None:
    file = write(tmp_path_factory.mktemp("recipe"), yaml.safe_dump({"data": "digits", "train": value}))
    try:
        recipe.load(file)
    except ConfigInvalid as error:
        assert "\n" not in str(error)
