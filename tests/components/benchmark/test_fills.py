"""What inputs are filled with where there are no samples: ids of an embedding, masks, positions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hpml.core.errors import ConfigInvalid
from hpml.measuring.subjects import OnnxSubject
from hpml.measuring.subjects.fills import Fill, by_name
from hpml.measuring.subjects.onnx_fills import fills
from tests.small_subjects import write_transformer

make = helper.make_node


def told(nodes: Sequence[onnx.NodeProto], *, name: str = "a", kind: int = TensorProto.INT64) -> Fill | None:
    """What a graph of these nodes tells of its input `name` (n, 4)."""
    constants = {
        "table": np.zeros((9, 2), np.float32),
        "int8_table": np.zeros((9, 2), np.int8),
        "two": np.zeros((2, 9), np.float32),
        "scale": np.float32(0.1),
        "shape": np.array([-1, 2], np.int64),
        "one": np.float32(1),
        "zero": np.float32(0),
        "least": np.float32(-1e9),
        "scores": np.zeros((1, 4), np.float32),
        "start": np.array([0], np.int64),
        "end": np.array([2], np.int64),
        "axis": np.array([1], np.int64),
    }
    graph = helper.make_graph(
        nodes,
        "told",
        [helper.make_tensor_value_info(name, kind, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return fills(helper.make_model(graph)).get(name)


@pytest.mark.parametrize(
    ("nodes", "kind", "below", "parts"),
    [
        ([make("Gather", ["table", "a"], ["y"])], "ids", 9, False),
        ([make("Gather", ["two", "a"], ["y"], axis=1)], "ids", 9, False),
        (
            [
                make("Cast", ["a"], ["b"], to=TensorProto.INT32),
                make("Reshape", ["b", "shape"], ["c"]),
                make("Unsqueeze", ["c", "axis"], ["d"]),
                make("Identity", ["d"], ["e"]),
                make("Gather", ["table", "e"], ["y"]),
            ],
            "ids",
            9,
            False,
        ),
        (
            [
                make("DequantizeLinear", ["int8_table", "scale"], ["real"]),
                make("Gather", ["real", "a"], ["y"]),
            ],
            "ids",
            9,
            False,
        ),
        (  # two tables: the smaller one bounds what can be made up, not what samples may hold
            [
                make("Slice", ["a", "start", "end", "axis"], ["b"]),
                make("Gather", ["table", "b"], ["y"]),
                make("Gather", ["two", "b"], ["z"]),
            ],
            "ids",
            2,
            True,
        ),
    ],
)
def test_an_input_that_indexes_a_table_gets_its_ids(
    nodes: list[Any], kind: str, below: int, parts: bool
) -> None:
    found = told(nodes)
    assert found and (found.kind, found.below, found.parts) == (kind, below, parts)


CAST = make("Cast", ["a"], ["m"], to=TensorProto.FLOAT)
TO_BOOL = make("Cast", ["a"], ["m"], to=TensorProto.BOOL)


@pytest.mark.parametrize(
    ("nodes", "kind"),
    [
        ([CAST, make("Sub", ["one", "m"], ["p"]), make("Mul", ["p", "least"], ["y"])], "ones"),
        ([CAST, make("Mul", ["m", "least"], ["y"])], "zeros"),  # it is 1 where there is padding
        ([TO_BOOL, make("Where", ["m", "scores", "least"], ["y"])], "ones"),
        ([TO_BOOL, make("Where", ["m", "least", "scores"], ["y"])], "zeros"),
        ([TO_BOOL, make("Not", ["m"], ["p"]), make("Where", ["p", "least", "scores"], ["y"])], "ones"),
        ([CAST, make("Equal", ["m", "zero"], ["p"]), make("Where", ["p", "least", "scores"], ["y"])], "ones"),
        ([make("Attention", ["q", "k", "v", "a"], ["y"])], "ones"),
    ],
)
def test_what_the_graph_masks_with_hides_nothing(nodes: list[Any], kind: str) -> None:
    found = told(nodes)
    assert found and found.kind == kind


def test_the_graph_cannot_tell_everything() -> None:
    assert told([make("Gather", ["a", "axis"], ["y"])]) is None  # its own numbers, no table
    assert told([make("Where", ["a", "scores", "one"], ["y"])]) is None
    assert told([make("Gather", ["table", "a"], ["y"])], kind=TensorProto.FLOAT) is None


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        ("attention_mask", "int64", "ones"),
        ("encoder/input_mask:0", "int32", "ones"),
        ("mask", "float32", "ones"),
        ("key_padding_mask", "bool", "zeros"),
        ("token_type_ids", "int64", "zeros"),
        ("position_ids", "int64", "positions"),
        ("position_ids", "float32", "normal"),
        ("x", "float16", "normal"),
        ("unmasked", "int64", "bits"),
    ],
)
def test_names_tell_what_graphs_do_not(name: str, dtype: str, kind: str) -> None:
    assert by_name(name, dtype).kind == kind


def test_a_transformer_is_fed_with_what_it_takes(tmp_path: Path) -> None:
    subject = OnnxSubject(file=write_transformer(tmp_path / "t.onnx"))
    inputs = subject.signature({"seq": 12}).inputs
    ids, mask, places = (tensor.draw(50, seed=0) for tensor in inputs)
    assert ids.dtype == np.int64 and set(np.unique(ids)) == set(range(20))
    assert (mask == 1).all() and (places == np.arange(12)).all()
    assert inputs[0].filling.in_words((12,)) == "random ids from 0 to 19 (it indexes 'tokens', 20 entries)"
    with pytest.raises(ConfigInvalid, match=r"'position_ids' would have positions from 0 to 16.* has 16"):
        subject.signature({"seq": 17}).inputs[2].draw(1, seed=0)


@pytest.mark.parametrize(
    "nodes",
    [
        [  # a table that is made of itself
            make("Identity", ["t"], ["u"]),
            make("Identity", ["u"], ["t"]),
            make("Gather", ["t", "a"], ["y"]),
        ],
        [make("Identity", ["a"], ["b"]), make("Identity", ["b"], ["a"])],
        [make("Equal", ["a"], ["y"]), make("Mul", ["a"], ["z"]), make("Gather", ["a"], ["w"])],
        [make("Gather", ["table", "a"], ["y"], axis=7)],
        [make("Split", ["a"], [""]), make("Where", ["a"], ["y"])],
    ],
)
def test_a_graph_that_makes_no_sense_tells_nothing(nodes: list[Any]) -> None:
    assert told(nodes) is None


@pytest.mark.parametrize("calls", [2, 1])
def test_functions_that_grow_without_end_are_left_alone(calls: int) -> None:
    """Forty functions that call the next one twice are a trillion nodes; one that calls itself has no end."""
    functions = [
        helper.make_function(
            "own",
            f"f{level}",
            ["i"],
            ["o"],
            [make(f"f{(level + 1) % 40 if calls == 1 else level + 1}", ["i"], ["o"], domain="own")] * calls,
            [helper.make_opsetid("own", 1)],
        )
        for level in range(40)
    ]
    graph = helper.make_graph(
        [make("f0", ["a"], ["y"], domain="own"), make("Gather", ["table", "a"], ["z"])],
        "of functions",
        [helper.make_tensor_value_info("a", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(np.zeros((9, 2), np.float32), "table")],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    found = fills(helper.make_model(graph, functions=functions, opset_imports=opsets))
    assert found["a"].below == 9


def test_a_function_of_the_model_is_looked_into() -> None:
    """Newer exporters of torch keep layers as functions."""
    look_up = helper.make_function(
        "own", "LookUp", ["t", "i"], ["o"], [make("Gather", ["t", "i"], ["o"])], [helper.make_opsetid("", 20)]
    )
    graph = helper.make_graph(
        [make("LookUp", ["table", "a"], ["y"], domain="own")],
        "of functions",
        [helper.make_tensor_value_info("a", TensorProto.INT64, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])],
        [numpy_helper.from_array(np.zeros((9, 2), np.float32), "table")],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, functions=[look_up], opset_imports=opsets)
    assert fills(model)["a"].below == 9
