"""The command's manners: exit codes, one clear line, help, init, doctor, schema. Nothing is run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import Hpml

PROGRAM = Path(sys.executable).with_name("hpml")


def in_a_process(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PROGRAM), *arguments],
        cwd=folder,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["runn"], 2, "No such command 'runn'"),
        (["run"], 2, "Missing argument 'RECIPE'"),
        (["run", "a.yaml", "--frobnicate"], 2, "--frobnicate"),
        (["run", "absent.yaml"], 3, "cannot read the recipe absent.yaml"),
        (["run", "ok.yaml", "--only", "tain"], 2, "no step 'tain'"),
        (["run", "ok.yaml", "--force", "tain"], 2, "no step 'tain'"),
        (["run", "ok.yaml", "--set", "train.epoch=1"], 3, "did you mean 'epochs'?"),
        (
            ["run", "ok.yaml", "--set", "train.device=cuda", "--set", "train.nproc_per_node=2"],
            3,
            "no NVIDIA GPU",
        ),
        (["run", "ok.yaml", "--set", "targets=[tensorrt]"], 3, "none of the recipe's targets"),
        (
            ["run", "ok.yaml", "--set", "targets=[{target: tensorrt, when_absent: refuse}, onnx]"],
            3,
            "cannot run on this machine",
        ),
        (["run", "ok.yaml", "--set", "data={source: folder, path: nowhere}"], 3, "nowhere"),
        (
            ["run", "ok.yaml", "--set", "train.model=no_such_module:Net", "--only", "train"],
            3,
            "no_such_module",
        ),
        (["run", "ok.yaml", "--home", "ok.yaml"], 6, "as the workspace"),
        (["status"], 2, "there is no run 'latest'"),
        (["logs", "train"], 2, "there is no run 'latest'"),
        (["report", "x"], 2, "there is no run 'x'"),
        (["init", "ok.yaml", "--data", "digits", "--model", "cnn", "--max-accuracy-drop", "0"], 2, "exists"),
        (["init", "new.yaml", "--data", "digits"], 2, "--model, --max-accuracy-drop"),
        (["init", "new.yaml", "--data", "digits", "--model", "nn", "--max-accuracy-drop", "0"], 3, "'nn'"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_exit_code(
    hpml: Hpml, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "ok.yaml").write_text("data: digits\ntrain: {model: cnn, epochs: 1}\n")
    answer = hpml(*arguments)
    assert answer.returncode == code, answer.stderr
    last = answer.stderr.splitlines()[-1]
    assert last.startswith("error: ") and said in last
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""


def test_debug_shows_the_traceback(hpml: Hpml) -> None:
    assert "Traceback" in hpml("--debug", "run", "absent.yaml").stderr


def test_help_lists_the_commands(hpml: Hpml) -> None:
    text = hpml("--help").stdout
    for command in ("run", "status", "logs", "report", "explain", "doctor", "schema", "gc", "init"):
        assert f"  {command} " in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_version(tmp_path: Path) -> None:
    answer = in_a_process(tmp_path, "--version")
    assert answer.returncode == 0 and re.fullmatch(r"hpml \d+\.\d+\.\d+\n", answer.stdout)


def test_completion_completes_commands(tmp_path: Path) -> None:
    answer = in_a_process(
        tmp_path, _HPML_COMPLETE="complete_bash", COMP_WORDS="hpml st", COMP_CWORD="1", COMP_POINT="7"
    )
    assert "status" in answer.stdout.split()


def test_without_arguments_it_shows_the_help(hpml: Hpml) -> None:
    answer = hpml()
    assert answer.returncode == 2
    assert "Usage: hpml" in answer.stdout + answer.stderr


def test_init_writes_a_recipe_that_is_valid(hpml: Hpml, tmp_path: Path) -> None:
    answers = ["--data", "digits", "--model", "cnn", "--max-accuracy-drop", "0.02"]
    answer = hpml("init", "mine.yaml", *answers)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "mine.yaml\n"
    assert len((tmp_path / "mine.yaml").read_text().splitlines()) < 10
    plan = hpml("run", "mine.yaml", "--dry-run", "-o", "json")
    assert json.loads(plan.stdout)[0] == {
        "step": "prepare",
        "outcome": "would run",
        "reasons": ["this step has not been run before"],
        "digest": "",
    }


def test_an_init_that_is_refused_leaves_no_file(hpml: Hpml, tmp_path: Path) -> None:
    answers = ["--data", "digits", "--model", "nn", "--max-accuracy-drop", "0.02"]
    assert hpml("init", "mine.yaml", *answers).returncode == 3
    assert not (tmp_path / "mine.yaml").exists()


def test_doctor_names_what_is_here_and_what_to_do(hpml: Hpml) -> None:
    findings = {item["name"]: item for item in json.loads(hpml("doctor", "-o", "json").stdout)}
    assert findings["torch"]["state"] == "ok"
    assert "switched off" in findings["telemetry"]["found"]
    assert all(item["advice"] for item in findings.values() if item["state"] != "ok")
    table = hpml("doctor").stdout
    assert "torch" in table and all(len(line) <= 80 for line in table.splitlines())


def test_the_schema_describes_a_recipe(hpml: Hpml) -> None:
    schema = json.loads(hpml("schema").stdout)
    assert "data" in schema["required"]


def test_colour_only_where_it_is_wanted(tmp_path: Path) -> None:
    coloured = re.compile(r"\x1b\[(\d+;)*3\dm")
    (tmp_path / "ok.yaml").write_text("data: digits\n")
    (tmp_path / "broken.npz").write_text("no archive")
    broken = "data={source: npz, path: broken.npz}"
    arguments = ("run", "ok.yaml", "--set", broken, "--only", "prepare", "--no-tracking")
    assert "\x1b" not in in_a_process(tmp_path, *arguments).stderr
    assert coloured.search(in_a_process(tmp_path, *arguments, FORCE_COLOR="1").stderr)
    assert not coloured.search(in_a_process(tmp_path, *arguments, FORCE_COLOR="1", NO_COLOR="1").stderr)


def test_the_client_needs_no_torch(tmp_path: Path) -> None:
    """Everything but a run works where only the client is installed."""
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'scipy', 'onnx', 'onnxruntime', 'mlflow', 'sklearn', 'PIL'):\n"
        "    sys.modules[name] = None\n"
        "if not sys.argv[1:]:\n"
        "    import hpml.pipelines, importlib, pkgutil\n"
        "    for module in pkgutil.walk_packages(hpml.pipelines.__path__, 'hpml.pipelines.'):\n"
        "        if not module.name.endswith(('__main__', '.judge', '.samples', 'quantize.worker')):\n"
        "            importlib.import_module(module.name)\n"
        "    sys.exit()\n"
        "from hpml.pipelines.__main__ import main\n"
        "main(sys.argv[1:])\n"
    )
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(yaml.safe_dump({"data": "digits", "train": {"model": "cnn"}}))

    def client(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True
        )

    for arguments in ([], ["schema"], ["doctor"], ["status", "--all"]):  # []: every module is imported
        answer = client(*arguments)
        assert answer.returncode == 0, answer.stderr
    plan = client("run", "mine.yaml", "--dry-run", "-o", "json")
    assert plan.returncode == 3 and "scikit-learn, which ships the data, is not installed" in plan.stderr
    assert [item["step"] for item in json.loads(plan.stdout) if item["outcome"] == "would fail"] == [
        "prepare"
    ]
