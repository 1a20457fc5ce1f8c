"""Recipes and --set values that no honest user writes twice: one line, exit code 3, nothing echoed whole."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpml.core import strict_yaml
from hpml.core.errors import ConfigInvalid
from hpml.pipelines import recipe
from hpml.pipelines.__main__ import main

LONG = 200_000  # characters
MANY = "9" * 5000
BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(9)
)


def refusal(folder: Path, content: bytes | str, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `hpml run --dry-run` says of a recipe, which has to be one line with exit code 3."""
    file = folder / "mine.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(file), "--dry-run", *arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 3, said
    assert said.startswith("error: ") and said.count("\n") == 1
    assert len(said) < 5000
    return said


VALUES = {
    f"{{name: {MANY}}}": "an integer of 5,000 digits",
    f"{{name: -{MANY}}}": "an integer of 5,001 digits",
    f"{{name: 0x{'f' * 30}}}": "name: integers are from -2^63 to 2^63 - 1",
    '{name: "a\\0b"}': "name: 'a\\x00b' holds a NUL",
    '{licence: "\\ud800"}': "holds a character that UTF-8 cannot encode",
    "{test_fraction: 1e400}": "test_fraction: inf is not a finite number",
    "{test_fraction: .inf}": "test_fraction: inf is not a finite number",
    "{test_fraction: .nan}": "test_fraction: nan is not a finite number",
    "{[1]: 2}": "a key is a string, not a list or a mapping",
    "{{a: 1}: 2}": "a key is a string, not a list or a mapping",
    "{1: 2}": "the key 1 is a number; write it in quotes",
    "{yes: 2}": "the key yes is a truth value; write it in quotes",
    "{a: 1, a: 2}": "line 1: the key 'a' appears twice, first in line 1",
    "{a: !!int x}": "'x' is not a number",
    "{a: !!timestamp x}": "the tag tag:yaml.org,2002:timestamp is not allowed",
    "{a: !!binary x}": "the tag tag:yaml.org,2002:binary is not allowed",
    "{a: !!set {x}}": "the tag tag:yaml.org,2002:set is not allowed",
    "&a [*a]": "this value contains itself",
    "&a {b: *a}": "this value contains itself",
    "*nobody": "undefined alias",
    "[" * 100 + "]" * 100: "nested too deeply",
    "[" * 5000 + "]" * 5000: "nested too deeply",
    "{<<: 5}": "line 1: expected a mapping",
    "'" + "x" * LONG + "'": "(200,000 characters)",
    "{source: digits, ? '" + "x" * LONG + "' : 1}": "no such key",
}


@pytest.mark.parametrize(("value", "why"), VALUES.items(), ids=lambda text: text[:30])
def test_a_value_that_cannot_be_used_is_one_line(
    value: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refusal(tmp_path, f"data: {value}\n", capsys=capsys)


@pytest.mark.parametrize(("value", "why"), VALUES.items(), ids=lambda text: text[:30])
def test_the_same_value_by_set_is_one_line(
    value: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refusal(tmp_path, "data: digits\n", "--set", f"data={value}", capsys=capsys)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (BOMB, "expands to more than 100,000 values"),
        ("data: digits\ntrain:\n  epochs: 1\n  model: cnn\n  epochs: 2\n", "line 5: the key 'epochs'"),
        ("data: digits\ntrain:\n\tepochs: 1\n", "line 3: found character '\\t'"),
        ("data: digits\n---\ndata: digits\n", "line 2: but found another document"),
        ("data: digits\nname: caf\xe9\n".encode("latin-1"), "it is not UTF-8 text: byte 22 is 0xe9"),
        ("data: digits\n".encode("utf-16"), "not UTF-8"),
        (b"data: digits\0\n", "is not valid YAML"),
        ("#" * 1_000_001, "more than 1,000,000 characters"),
        ("data: digits\ntrain: {seed: 9223372036854775808}\n", "train.seed: integers are from"),
        ("data: {source: npz, path: ~nobody-here/x.npz}", "no home folder for ~nobody-here"),
        (f"data: {{source: npz, path: /{'x' * 5000}}}", "ile name too long"),
        (f"data: digits\nname: {'n' * LONG}", "name: "),
        (f"data: digits\n? {'k' * LONG}\n: 1", "no such key"),
        (f"data: digits\ntrain: {{model: {'m' * LONG}}}", "there is no architecture"),
    ],
    ids=lambda content: repr(content[:40]),
)
def test_a_file_that_cannot_be_used_is_one_line(
    content: bytes | str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refusal(tmp_path, content, capsys=capsys)


@pytest.mark.parametrize(
    "override",
    ["data..path=1", ".=1", "=1", ".".join("a" * 40) + "=1", f"targets.{MANY}=onnx", "targets.²=onnx"],
    ids=lambda text: text[:20],
)
def test_a_key_of_set_that_leads_nowhere_is_one_line(
    override: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--set" in refusal(tmp_path, "data: digits", "--set", override, capsys=capsys)


@pytest.mark.parametrize("device", ["/dev/zero", "pipe"])
def test_a_recipe_that_is_no_regular_file_is_not_read(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SystemExit) as ended:
        main(["run", str(tmp_path / device), "--dry-run"])
    assert ended.value.code == 3
    assert "a regular file is needed" in capsys.readouterr().err


def load(folder: Path, content: bytes | str) -> recipe.Recipe:
    file = folder / "mine.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return recipe.load(file).recipe


def test_merge_keys_work_and_what_stands_beside_them_wins(tmp_path: Path) -> None:
    text = (
        "data: digits\n"
        "train: &training {model: cnn, epochs: 7, batch_size: 32}\n"
        "variants:\n"
        "  one: [{method: distill, <<: {epochs: 2, batch_size: 16}}]\n"
        "  two: [{<<: &few {epochs: 3, seed: 5}, method: distill, epochs: 4}, {<<: *few, method: distill}]\n"
    )
    loaded = load(tmp_path, text)
    (one,), (two, three) = loaded.variants["one"], loaded.variants["two"]
    assert (one.epochs, one.batch_size) == (2, 16)  # type: ignore[attr-defined]
    assert (two.epochs, two.seed, three.epochs) == (4, 5, 3)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfdata: digits\r\ntrain: {epochs: 3}\r\n",
        b"data: digits\rtrain: {epochs: 3}\r",
        b"{data: digits, train: {epochs: 3}}",
        b'{"data": "digits", "train": {"epochs": 3}}',
    ],
)
def test_other_editors_write_recipes_too(content: bytes, tmp_path: Path) -> None:
    assert load(tmp_path, content).train.epochs == 3


def test_numbers_of_yaml_1_2_are_numbers_and_dates_are_strings(tmp_path: Path) -> None:
    text = "data: digits\nname: 2024-01-01\ntrain: {model: {arguments: {dropout: 1e-3, width: '1e3'}}}\n"
    loaded = load(tmp_path, text)
    assert loaded.name == "2024-01-01"
    assert loaded.train.model.arguments == {"dropout": 0.001, "width": "1e3"}
    assert load(tmp_path, recipe.to_yaml(loaded)) == loaded


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text("{}[]&*!<>:,-?|'\"\n #a1.e~%@`\t\\x\u0085\ufeff", max_size=30))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        value = strict_yaml.parse(text, where="it")
    except ConfigInvalid:
        return
    assert strict_yaml.parse(strict_yaml.dump(value), where="it") == value or value != value


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("x" * 300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(section=st.sampled_from(sorted(recipe.Recipe.model_fields)), value=JSON)
def test_any_value_of_a_section_is_taken_or_refused_in_one_line(
    tmp_path: Path, section: str, value: object
) -> None:
    (tmp_path / "ok.yaml").write_text("data: digits\n")
    try:
        override = f"{section}={strict_yaml.dump(value)}"
        assert recipe.load(tmp_path / "ok.yaml", (override,)).recipe
    except ConfigInvalid as error:
        assert "\n" not in str(error) and len(str(error)) < 5000


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "{pipe}.onnx"],
        ["bench", "/dev/zero"],
        ["bench", "{folder}"],
        ["bench", "--from", "{pipe}"],
        ["bench", "--from", "{folder}"],
        ["compare", "{pipe}", "{pipe}"],
        ["doctor", "--recipe", "{pipe}"],
        ["compile", "/dev/zero"],
        ["init", "{folder}/new.yaml", "--data", "{pipe}", "--model", "cnn", "--max-accuracy-drop", "0"],
    ],
    ids=" ".join,
)
def test_no_command_opens_a_pipe_or_a_device(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    folder.mkdir()
    for place in (pipe, tmp_path / "pipe.onnx", folder / "bundle.json", folder / "bench.json"):
        os.mkfifo(place)
    os.mkfifo(folder / "manifest.json")
    with pytest.raises(SystemExit) as ended:
        main([argument.format(pipe=pipe, folder=folder) for argument in arguments])
    assert ended.value.code in (2, 3)
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
