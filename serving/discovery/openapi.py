"""What a server answers, as an OpenAPI document: of the model at hand, so that it names no path in vain.

https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import models_json_schema

from hpml.artifacts.operation import DATATYPES, Operation, free_names
from hpml.serving.apis.completions import Chat, Completion
from hpml.serving.apis.open_inference import InferBody

if TYPE_CHECKING:
    from hpml.serving.model import ServedModel

_JSON, _ANY = "application/json", {"type": "object"}
_MOST_EXAMPLE_NUMBERS = 256


def document(model: ServedModel, *, needs_token: bool) -> dict[str, Any]:
    """The document for clients of `model`."""
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in (InferBody, Completion, Chat)],
        ref_template="#/components/schemas/{model}",
    )
    for kind in (Completion, Chat):
        schemas["$defs"][kind.__name__]["properties"]["model"] = {"const": model.name}
    told: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": model.name, "version": model.version},
        "paths": _of_server() | _of_models(model) | _of_task(model) | _of_texts(model),
        "components": {"schemas": schemas["$defs"]},
    }
    if needs_token:
        told["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        told["security"] = [{"token": []}]
    return told


def _of_server() -> dict[str, Any]:
    return {
        "/v2/health/live": {"get": _does("Whether the process runs", {_JSON: _ANY}) | {"security": []}},
        "/v2/health/ready": {"get": _does("Whether requests are answered", {_JSON: _ANY}) | {"security": []}},
        "/v2": {"get": _does("The server's name, version and extensions", {_JSON: _ANY})},
        "/v2/repository/index": {"post": _does("The models", {_JSON: {"type": "array", "items": _ANY}})},
        "/v1/models": {"get": _does("The models that go on with texts", {_JSON: _ANY})},
        "/metrics": {"get": _does("For Prometheus", {"text/plain": {"type": "string"}})},
        "/openapi.json": {"get": _does("This document", {_JSON: _ANY})},
    }


def _of_models(model: ServedModel) -> dict[str, Any]:
    """Each under its name alone, and with its version."""
    found: dict[str, Any] = {}
    body = _body({_JSON: _reference("InferBody")})
    body["requestBody"]["content"][_JSON]["examples"] = _examples(model.operations)
    tensors = {_JSON: _ANY, "application/octet-stream": {"type": "string", "format": "binary"}}
    for prefix, parameters in (
        ("/v2/models/{name}", [_parameter("name", model.operations)]),
        (
            "/v2/models/{name}/versions/{version}",
            [_parameter("name", model.operations), _parameter("version", [model.version])],
        ),
    ):
        shared = {"parameters": parameters}
        found[prefix] = shared | {"get": _does("Inputs and outputs", {_JSON: _ANY})}
        found[f"{prefix}/ready"] = shared | {"get": _does("Whether it is answered for", {_JSON: _ANY})}
        found[f"{prefix}/infer"] = shared | {"post": _does("Outputs for inputs", tensors) | body}
    return found


def _of_task(model: ServedModel) -> dict[str, Any]:
    if model.endpoint is None:
        return {}
    taken = {kind: {} if kind == _JSON else {"type": "string"} for kind in model.endpoint.content_types}
    return {model.endpoint.path: {"post": _does("In the words of the task", {_JSON: {}}) | _body(taken)}}


def _of_texts(model: ServedModel) -> dict[str, Any]:
    if model.texts is None:
        return {}
    told = {_JSON: _ANY, "text/event-stream": {}}
    found = {
        "/v1/chat/completions": {"post": _does("The next turn", told) | _body({_JSON: _reference("Chat")})}
    }
    if model.texts.continues:
        found["/v1/completions"] = {
            "post": _does("What follows a text", told) | _body({_JSON: _reference("Completion")})
        }
    return found


def _does(what: str, answers: Mapping[str, Any]) -> dict[str, Any]:
    """An operation; answers: schemas by content type."""
    refused = {"type": "object", "properties": {"error": {}}}
    content = {kind: {"schema": schema} for kind, schema in answers.items()}
    return {
        "summary": what,
        "responses": {
            "200": {"description": what, "content": content},
            "default": {"description": "Why not, in a line", "content": {_JSON: {"schema": refused}}},
        },
    }


def _body(schemas: Mapping[str, Any]) -> dict[str, Any]:
    content = {kind: {"schema": schema} for kind, schema in schemas.items()}
    return {"requestBody": {"required": True, "content": content}}


def _reference(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _parameter(name: str, allowed: Iterable[str]) -> dict[str, Any]:
    schema = {"type": "string", "enum": list(allowed)}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _examples(operations: Mapping[str, Operation]) -> dict[str, Any]:
    """A request of zeros for each that takes few numbers; free sizes are 1."""
    found = {}
    for name, operation in operations.items():
        free = {part: 1 for one in operation.inputs for size in one.shape for part in free_names(size)}
        sizes = {one.name: one.sizes(**free) for one in operation.inputs}
        if sum(map(math.prod, sizes.values())) <= _MOST_EXAMPLE_NUMBERS:
            inputs = [
                {
                    "name": one.name,
                    "datatype": DATATYPES[one.dtype],
                    "shape": sizes[one.name],
                    "data": [False if one.dtype == "bool" else 0] * math.prod(sizes[one.name]),
                }
                for one in operation.inputs
            ]
            found[name] = {"value": {"inputs": inputs}}
    return found
