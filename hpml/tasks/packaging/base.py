"""What a bundle ships of a task: whole for any task whose operations take and give named arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hpml.artifacts.operation import Operation, TensorSpec
from hpml.core.errors import GateFailed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Answer = Callable[[Mapping[str, NDArray[Any]]], Mapping[str, NDArray[Any]]]  # the first operation

_FUTURE = "from __future__ import annotations\n"
_IMPORT_OF_OURS = re.compile(r"^from hpml\S* import (\([^)]*\)|.*)\n", re.MULTILINE)
PROCESSING = "processing.py"


class Packaging:
    """The part of a bundle that depends on the task. A task with more than arrays to ship gives a subclass.

    facts: the content of preprocessing.json. golden_folder: where the
    golden samples of the operations lie in a bundle; "" is the bundle itself. facts_in_words,
    samples_in_words: what the README says of preprocessing.json and of the golden samples.
    """

    golden_folder: ClassVar[str] = "golden"
    facts_in_words: ClassVar[str] = "has what the task knows of its data"
    samples_in_words: ClassVar[str] = "`golden/` has sample inputs of each operation"

    def __init__(
        self, facts: dict[str, Any], *, processing: Path | None = None, requirements: Sequence[str] = ()
    ) -> None:
        """Of any task.

        facts: such as the task's fields. processing: a Python file with `preprocess(raw, facts)`, the named
        arrays that the first operation takes, and `postprocess(outputs, facts)`, answers that can be JSON.
        `raw` is parsed JSON. It is shipped as processing.py, without torch and this project.
        requirements: of it, as lines of a requirements.txt.
        """
        self.facts, self.processing, self._requirements = facts, processing, requirements

    @property
    def requirements(self) -> Sequence[str]:
        """What bundle.py needs beside numpy and ONNX Runtime, as lines of a requirements.txt."""
        return self._requirements

    @property
    def needs_in_words(self) -> str:
        """The same for readers, after "what it needs"."""
        return f": numpy and onnxruntime{f', and what {PROCESSING} imports' if self._requirements else ''}"

    @property
    def script(self) -> Path:
        """What bundle.py does beside opening the engine, see `script_of_bundle`."""
        from hpml.tasks.packaging import arrays_script

        return Path(arrays_script.__file__)

    def write(self, bundle: Path, answer: Answer, tolerance: float) -> dict[str, Any]:
        """Put into `bundle`, which has the engine's golden samples, what else the task ships.

        answer: asks the engine. What bundle.json is to say of these files. Raises GateFailed if one of them
        does not do what the task does itself.
        """
        if self.processing is None:
            return {}
        (bundle / PROCESSING).write_bytes(self.processing.read_bytes())
        return {"processing": PROCESSING}

    def allowed_error(self, expected: NDArray[Any], tolerance: float) -> float:
        """How far a number of an output may be from the golden one: `tolerance` of the largest of them."""
        import numpy as np

        return tolerance * float(np.abs(expected.astype(np.float64)).max(initial=0)) or tolerance

    def compare(self, output: str, answer: NDArray[Any], expected: NDArray[Any], allowed: float) -> float:
        """How far an output is from the golden one. Raises GateFailed beyond what is `allowed`."""
        from hpml.tasks.packaging.engine_script import distance

        error = distance(answer, expected)
        if not error <= allowed:  # NaN is an error too
            raise answers_otherwise(f"{output} differs by {error:.3g}, allowed {allowed:.3g}")
        return error

    def verified(self, error: float) -> tuple[str, ...]:
        """What the check of a bundle has shown, the largest error of an output being `error`."""
        return (f"the golden samples of every operation, to {error:.1g}",)

    # -------------------------------------------------------------------------------------------- the README

    def takes(self, operation: Operation) -> str:
        """What the first operation takes, in a line."""
        return _in_a_line(operation.inputs)

    def gives(self, operation: Operation) -> str:
        """What it gives, in a line."""
        return _in_a_line(operation.outputs)

    def section(self, operations: Sequence[Operation], *, script: str) -> str:
        """A section of the README. script: the name of bundle.py; "" where the bundle has none."""
        rows = [
            f"| {one.name} | {kind} | `{tensor.name}` | {tensor.dtype} {_shape(tensor)} | {tensor.content} |"
            for one in operations
            for kind, tensors in (("takes", one.inputs), ("gives", one.outputs))
            for tensor in tensors[:_LISTED]
        ]
        longest = max(len(tensors) for one in operations for tensors in (one.inputs, one.outputs))
        rest = f"\nThe first {_LISTED} of each; bundle.json has all.\n" if longest > _LISTED else ""
        return "\n".join(
            [
                "## Inputs and outputs\n",
                "Named arrays with rows in front.\n",
                "| operation | | name | type and shape | content |\n|---|---|---|---|---|",
                *rows,
                rest + (self._usage(script, len(operations)) if script else ""),
            ]
        )

    def _usage(self, script: str, operations: int) -> str:
        lines = [
            (f"python {script} INPUTS.npz", "the outputs for its arrays, as JSON"),
            (f"python {script} INPUTS.npz --out OUTPUTS.npz", "the same as arrays"),
        ]
        if operations > 1:
            lines.append(
                (f"python {script} INPUTS.npz --operation NAME", "of another than the first operation")
            )
        if self.processing:
            lines.append((f"python {script} FILE.json", f"the answers of `{PROCESSING}` to what it reads"))
        width = max(len(command) for command, _ in lines)
        return "\n" + "\n".join(f"    {command:{width}}   {told}" for command, told in lines) + "\n"

    def inputs_code(self) -> str:
        """Python of the README that makes `inputs` of golden samples, by name, in the bundle's folder.

        json and numpy, as np, are imported.
        """
        return """\
told = json.load(open("bundle.json"))["operations"][0]
inputs = {one["name"]: np.load(told["golden"][one["name"]]) for one in told["inputs"]}  # or yours"""

    def answers_code(self) -> str:
        """Python of the README that prints what `outputs`, by name, say; it follows `inputs_code`."""
        return "print(outputs)"

    def usage_in_words(self, script: str) -> str:
        """How else `script` is used: on the command line, and its class Model in Python."""
        return f"`python {script} INPUTS.npz`, or\n`from bundle import Model`, `Model().predict(inputs)`"


_LISTED = 8


def script_of_bundle(script: Path) -> str:
    """bundle.py: `script` with the module that it imports, engine_script.py, put in its place.

    The two are one file because a script that is run by its path, or loaded from it, finds no other.
    """
    of_all = Path(__file__).with_name("engine_script.py").read_text().partition(_FUTURE)[2]
    docstring, _, of_task = script.read_text().partition(_FUTURE)
    return f"{docstring}{_FUTURE}{of_all}\n\n{_IMPORT_OF_OURS.sub('', of_task).strip()}\n"


def answers_otherwise(why: str) -> GateFailed:
    """Of a bundle."""
    return GateFailed("the bundle answers otherwise than the exported engine", why=why)


def _in_a_line(tensors: Sequence[TensorSpec]) -> str:
    told = [f"`{one.name}` {one.dtype} {_shape(one)}" for one in tensors[:2]]
    return ", ".join(told) + (f" and {len(tensors) - 2} more" if len(tensors) > 2 else "")


def _shape(one: TensorSpec) -> str:
    return f"({', '.join(map(str, one.shape))})"
