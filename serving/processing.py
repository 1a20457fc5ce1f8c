"""A user's own pre- and post-processing, which a bundle ships as a Python file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from pydantic import JsonValue

from hpml.core.errors import StageFailed
from hpml.tasks.endpoint import Endpoint
from hpml.tasks.packaging.base import PROCESSING
from hpml.tasks.packaging.engine_script import SourceAlone

if TYPE_CHECKING:
    from hpml.tasks.base import Arrays


def processing_endpoint(bundle: Path) -> Endpoint:
    """`POST /v1/predict` with the JSON that the bundle's `preprocess` takes, answered by its `postprocess`.

    Runs the file. Raises StageFailed if it cannot be run.
    """
    loader = SourceAlone("processing", str(bundle / PROCESSING))
    spec = importlib.util.spec_from_loader("processing", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
        preprocess, postprocess = module.preprocess, module.postprocess
    except Exception as error:  # a user's own code
        raise StageFailed(
            f"{PROCESSING} of the bundle cannot be run", why=f"{type(error).__name__}: {error}"
        ) from None
    facts = json.loads((bundle / "preprocessing.json").read_text())

    def feeds(body: bytes) -> Arrays:
        try:
            given: Arrays = preprocess(orjson.loads(body), facts)
        except Exception as error:  # a user's own code
            raise ValueError(f"these inputs are refused: {type(error).__name__}") from None
        return given

    def answer(outputs: Arrays) -> JsonValue:
        told: JsonValue = postprocess(outputs, facts)
        return told

    return Endpoint("/v1/predict", ("application/json",), feeds, answer)
