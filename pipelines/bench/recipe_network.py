"""`hpml bench module:network --recipe FILE`: the recipe's task says what the network takes and answers."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from hpml.artifacts.dataset import DatasetSpec
from hpml.artifacts.folder import Artifact
from hpml.artifacts.operation import Operation
from hpml.components.prepare import stage as prepare
from hpml.core.contract import validate
from hpml.core.errors import ConfigInvalid, StageFailed
from hpml.pipelines.bench.sample_file import SampleFile
from hpml.pipelines.engine import run_record
from hpml.pipelines.engine.execution import Execution, Settings, first_failure
from hpml.pipelines.engine.store import Store
from hpml.pipelines.executors.process import Processes
from hpml.pipelines.plan import Step, trace
from hpml.pipelines.preflight.asking import ask
from hpml.pipelines.recipe import LoadedRecipe
from hpml.pipelines.terminal import console
from hpml.tasks.data_source import Source

_MODULE = "hpml.pipelines.bench.recipe_requests"
_ROWS = 64  # validation rows that the requests cycle through
_LIMIT_S = 600.0


@dataclass(frozen=True)
class RecipeNetwork:
    """What the network of a recipe takes.

    task: as in a manifest. arguments: of its callable, by its data. operations: by name, that which is
    measured in front; none where there is one only. samples: validation rows, as its requests. import_paths:
    where its modules may lie.
    """

    task: dict[str, JsonValue]
    arguments: dict[str, JsonValue]
    operation: Operation
    operations: tuple[str, ...]
    samples: SampleFile
    import_paths: tuple[str, ...]


def network_of(
    home: Path, loaded: LoadedRecipe, arguments: dict[str, JsonValue], operation: str
) -> RecipeNetwork:
    """Prepare the data of the recipe, or find it in the workspace, and ask its task.

    arguments: of the network, beside those that its data says. operation: "" is the first.
    Raises StageFailed if the data cannot be prepared, and ConfigInvalid if the network does not take it, or
    has no such operation.
    """
    data = _prepared(home.resolve(), loaded)
    with tempfile.TemporaryDirectory(prefix="hpml-bench-") as folder:
        file = Path(folder) / "requests.npz"
        question = {
            "data": str(data.path),
            "architecture": {"name": loaded.recipe.train.model.architecture, "arguments": arguments},
            "operation": operation,
            "rows": _ROWS,
            "file": str(file),
        }
        told = ask(_MODULE, question, loaded.import_paths, timeout_s=_LIMIT_S)
        if problem := told.get("problem"):
            raise ConfigInvalid(f"the network of {loaded.file} cannot be measured", why=problem)
        samples = SampleFile(file, called=f"the validation split of {loaded.file}")
    found: Operation = validate(Operation, told["operation"], where="the operation")
    others = [name for name in told["operations"] if name != found.name]
    return RecipeNetwork(
        task=data.spec.task,
        arguments=told["arguments"],
        operation=found,
        operations=(found.name, *others) if others else (),
        samples=samples,
        import_paths=loaded.import_paths,
    )


def _prepared(home: Path, loaded: LoadedRecipe) -> Artifact[DatasetSpec]:
    """The step that a run of the recipe has for its data, run alone, or found in the store."""

    def graph(step: Step[str], data: Source) -> None:
        step(prepare.run, data)

    plan, place = trace(graph, loaded.recipe.data), Processes(home)
    place.check(plan)
    settings = Settings(home=home, import_paths=loaded.import_paths, becomes_latest=False)
    with console.watcher() as watcher:
        run_id = run_record.new_run_id(loaded.recipe.name)
        record = run_record.start(home, run_id, loaded.recipe.name, str(loaded.file), plan)
        record = Execution(plan, record, settings, watcher, place).execute()
    if failure := first_failure(record):
        raise StageFailed(f"the data of {loaded.file} cannot be prepared", why=failure[1].error)
    if record.status == "interrupted":
        raise SystemExit(record.exit_code)
    [step] = record.steps.values()
    return Store(home).open(step.digest)
