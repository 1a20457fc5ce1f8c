"""`hpml bench` of what has several operations: an engine, and the network of a recipe by its import path."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hpml.artifacts.engine import EngineSpec
from hpml.artifacts.folder import Artifact
from hpml.core.errors import ConfigInvalid, UsageError
from hpml.pipelines.bench import measurable, session
from hpml.pipelines.bench.measurable import Hints, Measurable
from hpml.pipelines.bench.sample_file import SampleFile

Engine = Artifact[EngineSpec]
DECODER = "hpml.models.decoder:Decoder"


def shapes(item: Measurable) -> dict[str, tuple[int, ...]]:
    """Of the inputs, but for the cache of all blocks after the first."""
    return {one.name: one.shape for one in item.signature.inputs if ".1." not in one.name}


def test_an_engine_is_measured_in_the_operation_that_is_named(engine: Engine, tmp_path: Path) -> None:
    path = str(engine.path)
    [decode] = measurable.measurables([path], Hints(tmp_path)).values()
    [prefill] = measurable.measurables([path], Hints(tmp_path, operation="prefill")).values()
    cache = ("past_key_values.0.key", "past_key_values.0.value")
    assert shapes(decode) == {
        "input_ids": (1,), "attention_mask": (17,), **dict.fromkeys(cache, (2, 16, 16))
    }  # fmt: skip
    assert shapes(prefill) == {
        "input_ids": (32,), "attention_mask": (32,), **dict.fromkeys(cache, (2, 0, 16))
    }  # fmt: skip
    assert (decode.operations, prefill.operations) == (("decode", "prefill"), ("prefill", "decode"))
    ids = prefill.signature.inputs[0].filling
    assert (ids.kind, ids.below) == ("ids", 400)  # the graph tells how many there are
    [note] = session._notes({"it": prefill})
    assert note == "it was measured in its operation prefill; with --operation in decode."


def test_sizes_are_told_by_the_command_line_and_add_up(engine: Engine, tmp_path: Path) -> None:
    hints = Hints(tmp_path, sizes={"past": 5, "sequence": 2})
    [item] = measurable.measurables([str(engine.path)], hints).values()
    assert shapes(item)["attention_mask"] == (7,)
    with pytest.raises(ConfigInvalid, match="that is 17 by the other inputs, and 9 is given"):
        measurable.measurables([str(engine.path)], Hints(tmp_path, sizes={"past + sequence": 9}))


def test_real_samples_say_the_sizes_of_an_operation(engine: Engine, tmp_path: Path) -> None:
    empty = {f"past_key_values.{at}.{what}": np.zeros((3, 2, 0, 16), np.float32) for at in (0, 1)
             for what in ("key", "value")}  # fmt: skip
    ids = np.full((3, 9), 7)
    np.savez(tmp_path / "x.npz", input_ids=ids, attention_mask=np.ones_like(ids), **empty)
    hints = Hints(tmp_path, operation="prefill", samples=SampleFile(tmp_path / "x.npz"))
    [item] = measurable.measurables([str(engine.path)], hints).values()
    assert shapes(item)["attention_mask"] == (9,)
    np.savez(tmp_path / "x.npz", input_ids=ids + 400, attention_mask=np.ones_like(ids), **empty)
    hints = Hints(tmp_path, operation="prefill", samples=SampleFile(tmp_path / "x.npz"))
    with pytest.raises(ConfigInvalid, match="row 0 holds 407, allowed are 0 to 399"):
        measurable.measurables([str(engine.path)], hints)


def test_an_operation_that_is_not_there_is_refused_by_name(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"no operation 'predict' -> give one of decode, prefill"):
        measurable.measurables([str(engine.path)], Hints(tmp_path, operation="predict"))
    file = str(engine.file("model.onnx"))
    sizes = {"sequence": 1, "past": 3, "past + sequence": 4}
    with pytest.raises(UsageError, match=r"no operation 'decode': .* has no named operations"):
        measurable.measurables([file], Hints(tmp_path, operation="decode", sizes=sizes))


def test_the_network_of_a_recipe_is_asked_with_rows_of_its_data(engine: Engine, tmp_path: Path) -> None:
    """Beside an engine, which is given the same rows."""
    recipe = tmp_path / "r.yaml"
    arguments = {"dim": 32, "depth": 2, "heads": 2}
    data = {"source": "chitchat", "conversations": 60, "vocabulary_size": 400, "context": 32}
    train = {"model": {"architecture": "decoder", "arguments": arguments}}
    recipe.write_text(json.dumps({"data": data, "train": train}))
    hints = measurable.with_network(Hints(tmp_path / "runs", recipe=recipe, operation="prefill"), [DECODER])
    found = measurable.measurables([DECODER, str(engine.path)], hints)
    network, other = found.values()
    assert shapes(network) == shapes(other)
    assert hints.samples is not None and "validation split of" in str(hints.samples.file)
    arrays = hints.samples.arrays(network.signature.inputs, 8)
    opened = network.subject.open(threads=1)
    assert opened.outputs is not None
    assert opened.outputs(arrays)["logits"].shape == (8, 32, 400)
