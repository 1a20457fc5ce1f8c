"""Builds the network of a recipe and makes requests of prepared rows: python -m ...recipe_requests < JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from hpml.core.errors import HpmlError


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    """The operations, that which is measured, and its requests in `question["file"]`; or the `problem`."""
    import numpy as np

    from hpml import models
    from hpml.artifacts.folder import open_artifact
    from hpml.artifacts.model import ArchitectureSpec
    from hpml.measuring.subjects.tensors import operation_named, write_arrays
    from hpml.tasks import task_of
    from hpml.tasks.judging import rows_of
    from hpml.tasks.torch_session import TorchSession

    try:
        data = open_artifact(Path(question["data"]), kind="dataset")
        task = task_of(data.spec.task)
        architecture = ArchitectureSpec.model_validate(question["architecture"])
        network = models.materialise(models.build(architecture, task), task)
        operations = task.operations(network)
        operation = operation_named(architecture.name, operations, question["operation"])
        stored = task.stored(data, "validation")
        rows = np.random.default_rng(0).permutation(data.spec.splits["validation"].rows)[: question["rows"]]
        runs = TorchSession(network, task, operations)
        write_arrays(Path(question["file"]), dict(task.requests(runs, rows_of(stored, rows), operation)))
        return {
            "operation": operation.model_dump(mode="json"),
            "operations": [one.name for one in operations],
            "arguments": task.model_arguments(),
        }
    except HpmlError as error:
        return {"problem": str(error)}
    except Exception as error:  # a user's network and task can fail in any way
        return {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def main() -> None:
    """Answer the question on stdin with a line of JSON on stdout."""
    from hpml.core import memory

    memory.limit_process()
    answer = _answer(json.load(sys.stdin))
    print(f"\n{json.dumps(answer)}", flush=True)
    os._exit(0)  # whatever threads the user's code has started


if __name__ == "__main__":
    main()
