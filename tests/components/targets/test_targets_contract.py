"""What holds for every row of TARGETS."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpml.components.export import stage as export
from hpml.core.contract import validate
from hpml.core.errors import ConfigInvalid
from hpml.targets import TARGETS, TOLERANCES, AnyTarget
from hpml.tasks import task_of
from hpml.tasks.judging import rows_of

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", TARGETS)
def test_a_row_is_its_configs_own_name(name):
    config = TARGETS[name]()
    assert config.target == config.label == name
    assert type(validate(AnyTarget, name, where="targets")) is TARGETS[name]


@pytest.mark.parametrize("name", TARGETS)
def test_a_config_survives_json(name):
    config = TARGETS[name]()
    assert validate(AnyTarget, config.model_dump(mode="json"), where="targets") == config


@pytest.mark.parametrize("name", TARGETS)
def test_an_engine_is_built_and_loaded_or_says_why_not(run_stage, small_model, digits_data, name):
    engine = run_stage(export.run, TARGETS[name](), model=small_model, data=digits_data)
    assert validate(AnyTarget, engine.spec.target, where="engine") == TARGETS[name]()
    if engine.spec.status == "not built":
        assert engine.spec.reason and not engine.manifest.files
        return
    session = TARGETS[name]().load(engine.path, engine.spec, threads=1)
    task = task_of(engine.spec.task)
    feeds = task.features(rows_of(task.stored(digits_data, "validation"), slice(5)))
    logits = session.run(feeds)["logits"]
    assert logits.dtype == np.float32 and logits.shape == (5, 10)
    np.testing.assert_allclose(session.run(rows_of(feeds, slice(1)))["logits"], logits[:1], atol=1e-3)
    assert engine.spec.precision in TOLERANCES
    assert engine.spec.identity["runtime"] and engine.spec.size_bytes > 0


def test_a_wrong_target_is_named_with_the_nearest_right_one():
    with pytest.raises(ConfigInvalid, match="did you mean 'tensorrt'"):
        validate(AnyTarget, "tensorr", where="targets")
    with pytest.raises(ConfigInvalid, match="did you mean 'opset'"):
        validate(AnyTarget, {"target": "onnx", "opst": 20}, where="targets")
    with pytest.raises(ConfigInvalid, match="at most 1"):
        validate(AnyTarget, {"target": "onnx", "tolerance": {"min_agreement": 2}}, where="targets")


def test_a_gpu_that_is_not_there_is_not_asked_for(monkeypatch):
    monkeypatch.setattr("hpml.core.hardware.gpu_names", tuple)
    for name in ("eager", "onnx"):
        config = validate(AnyTarget, {"target": name, "device": "cuda"}, where="targets")
        assert "no NVIDIA GPU" in config.unsupported_reason()


def test_importing_the_targets_and_their_stage_does_not_import_a_library():
    script = (
        "import sys, hpml.components.export.stage, hpml.components.compress.stage;"
        "heavy = ('torch', 'numpy', 'onnx', 'onnxruntime', 'tensorrt');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
