"""What an ONNX graph itself tells of its inputs: which index an embedding, and which are masks.

Each input is followed through what leaves its values as they are, to the nodes that use them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from hpml.measuring.subjects.fills import Fill, by_name

if TYPE_CHECKING:
    import onnx

# The values of the first input go on; those of a second one say a shape, a place, a bound.
_PASS_FIRST = frozenset(
    {"Cast", "CastLike", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Expand"}
    | {"Tile", "Pad", "Dropout"}
)
_PASS_PARTS = frozenset({"Slice", "Split", "Gather", "GatherND", "GatherElements"})  # of their first input
_PASS_ALL = frozenset({"And", "Or", "Concat"})
# Leave the number of rows of a table as it is.
_PASS_TABLE = frozenset({"Cast", "Identity", "DequantizeLinear", "Dropout"})
# Of operators that have embeddings: input that holds ids -> input that holds the table.
_TABLES = {
    ("", "Gather"): {1: 0},
    ("", "GatherElements"): {1: 0},
    ("com.microsoft", "GatherBlockQuantized"): {1: 0},
    ("com.microsoft", "EmbedLayerNormalization"): {0: 2, 1: 4, 8: 3},
    ("com.microsoft", "QEmbedLayerNormalization"): {0: 2, 1: 4},
}
# Inputs that hold 1 where something is attended to.
_MASKS = {
    ("", "Attention"): 3,
    ("com.microsoft", "Attention"): 3,
    ("com.microsoft", "MultiHeadAttention"): 4,
    ("com.microsoft", "EmbedLayerNormalization"): 7,
}
_VERY_NEGATIVE = -1e4  # what a masked score is set to; the smallest of fp16 is -65504
_MOST_STEPS = 10_000  # of following one input
_MOST_NODES = 100_000  # of a graph with its functions in it: those that call others twice double it each time


class _Reached(NamedTuple):
    """A tensor that holds values of an input: only parts of them, or negated, 1 where they are 0."""

    tensor: str
    negated: bool = False
    parts: bool = False


def fills(model: onnx.ModelProto) -> dict[str, Fill]:
    """What each input of the graph is to be filled with, by its name, where the graph tells.

    Names count first where the graph cannot tell: positions and types of tokens are ids like others. The
    model is somebody's: what it says need not make sense.
    """
    import onnx.inliner

    from hpml.targets.onnx_file import inlined_nodes

    if model.functions and inlined_nodes(model) <= _MOST_NODES:
        model = onnx.inliner.inline_local_functions(model)
    graph = _Graph(model.graph)
    found = {}
    for value in model.graph.input:
        if value.name in graph.constants:
            continue
        kind = value.type.tensor_type.elem_type
        is_float = kind in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE)
        if fill := _fill(graph, value.name, is_float=is_float):
            found[value.name] = fill
    return found


def _fill(graph: _Graph, name: str, *, is_float: bool) -> Fill | None:
    tables: dict[str, int] = {}
    parts = True  # whether no table is indexed by all of its values
    masked: bool | None = None  # whether it hides what it is 1 for
    for reached, node, index in graph.uses(name):
        if table := graph.table(node, index):
            tables[table[0]] = table[1]
            parts = parts and reached.parts
        if masked is None:
            masked = graph.hides(node, index, negated=reached.negated)
    if tables and not is_float:
        table_name, rows = min(tables.items(), key=lambda item: item[1])
        named = by_name(name, "int64")
        is_id = named.kind not in ("positions", "zeros")
        reason = f"{'' if is_id else 'by its name; '}it indexes {table_name!r}, {rows} entries"
        return Fill(kind="ids" if is_id else named.kind, below=rows, parts=parts, reason=reason)
    if masked is None:
        return None
    reason = "the graph masks with it: nothing is hidden"
    return Fill(kind="zeros" if masked else "ones", is_mask=True, reason=reason)


class _Graph:
    """Who uses a tensor, and what is constant."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.users: dict[str, list[tuple[onnx.NodeProto, int]]] = defaultdict(list)
        self.constants = {tensor.name: tensor for tensor in graph.initializer}
        self._made_of: dict[str, str] = {}  # a table -> that which it is converted from
        for node in graph.node:
            for index, name in enumerate(node.input):
                self.users[name].append((node, index))
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                self.constants[node.output[0]] = node.attribute[0].t
            if node.op_type in _PASS_TABLE and node.input:
                self._made_of[node.output[0]] = node.input[0]

    def uses(self, name: str) -> Iterator[tuple[_Reached, onnx.NodeProto, int]]:
        """Each node that the values of `name` reach, and as which of its inputs."""
        pending, seen = [_Reached(name)], {_Reached(name)}
        while pending and len(seen) < _MOST_STEPS:
            reached = pending.pop()
            for node, index in self.users[reached.tensor]:
                yield reached, node, index
                goes_on = self._goes_on(node, index)
                parts = reached.parts or node.op_type in _PASS_PARTS
                for output in node.output if goes_on is not None else ():
                    following = _Reached(output, reached.negated ^ bool(goes_on), parts)
                    if output and following not in seen:
                        seen.add(following)
                        pending.append(following)

    def _goes_on(self, node: onnx.NodeProto, index: int) -> bool | None:
        """Whether a node turns 0 and 1 of an input around; None if it makes other numbers of them."""
        if (node.op_type in _PASS_FIRST | _PASS_PARTS and index == 0) or node.op_type in _PASS_ALL:
            return False
        if node.op_type == "Not":
            return True
        if node.op_type == "Sub" and index == 1 and self._number(node.input[0]) == 1:
            return True
        if node.op_type == "Equal" and (number := self._other_number(node, index)) in (0, 1):
            return number == 0
        return None

    def table(self, node: onnx.NodeProto, index: int) -> tuple[str, int] | None:
        """The table that input `index` of a node indexes, and how many entries it has."""
        source = _TABLES.get((_domain(node), node.op_type), {}).get(index)
        if source is None or source >= len(node.input):
            return None
        name = node.input[source]
        seen: set[str] = set()
        while name not in self.constants and name in self._made_of and name not in seen:
            seen.add(name)
            name = self._made_of[name]
        tensor = self.constants.get(name)
        if tensor is None or not tensor.dims:
            return None
        axis = next((one.i for one in node.attribute if one.name in ("axis", "gather_axis")), 0)
        if not -len(tensor.dims) <= axis < len(tensor.dims) or tensor.dims[axis] < 1:
            return None
        return name, int(tensor.dims[axis])

    def hides(self, node: onnx.NodeProto, index: int, *, negated: bool) -> bool | None:
        """Whether a 1 of the input that reaches a node there hides something; None if it is no mask there."""
        if _MASKS.get((_domain(node), node.op_type)) == index:
            return negated
        if node.op_type == "Where" and index == 0:
            hidden = [(self._number(name) or 0) <= _VERY_NEGATIVE for name in node.input[1:3]]
            return hidden[0] != negated if any(hidden) else None
        if node.op_type == "Mul" and (self._other_number(node, index) or 0) <= _VERY_NEGATIVE:
            return not negated
        return None

    def _other_number(self, node: onnx.NodeProto, index: int) -> float | None:
        """The other of two inputs, see `_number`."""
        return self._number(node.input[1 - index]) if index < 2 and len(node.input) == 2 else None

    def _number(self, name: str) -> float | None:
        """The constant `name`, if it is a single number that is in the file itself."""
        import onnx

        name = self._made_of.get(name, name)
        tensor = self.constants.get(name)
        external = onnx.TensorProto.EXTERNAL
        if tensor is None or math.prod(tensor.dims) != 1 or tensor.data_location == external:
            return None
        try:
            return float(onnx.numpy_helper.to_array(tensor).ravel()[0])
        except (TypeError, ValueError, IndexError):  # it holds no number
            return None


def _domain(node: onnx.NodeProto) -> str:
    return "" if node.domain == "ai.onnx" else str(node.domain)
