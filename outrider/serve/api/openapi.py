"""What the OpenAPI description says of bodies and answers."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REF = "#/components/schemas/{model}"
ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
ANTHROPICS_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}
WHY = {
    400: "A field that cannot be followed, or no JSON",
    401: "No key, or a wrong one",
    404: "No such model",
    408: "Not done in time",
    413: "The body is too long",
    415: "The body is not JSON",
    429: "The queue is full",
    500: "A mistake of the server",
    503: "The server is ending, or its engine is dead",
    529: "The queue is full",
}
OPENAIS = tuple(status for status in WHY if status != 529)
"""Statuses of errors of routes that generate, in OpenAI's format."""


def errors(*statuses: int, schema: dict[str, Any] = ERROR) -> dict[int | str, dict[str, Any]]:
    """The answers that are errors."""
    return {
        status: {"description": WHY[status], "content": {"application/json": {"schema": schema}}} for status in statuses
    }


def answers(*kinds: str, described: str = "The answer") -> dict[int | str, dict[str, Any]]:
    """The answer with status 200, in one of some media types; without one it has no body."""
    return {200: {"description": described, **({"content": {kind: {} for kind in kinds}} if kinds else {})}}


CHECKED = errors(400, 401, 404, 413, 415, 500, 503)
"""Errors of routes that read a body."""
WHOLE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or its chunks",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}
POSTED = errors(*OPENAIS) | WHOLE
"""Answers of routes that generate."""
MESSAGES = errors(*WHY, schema=ANTHROPICS_ERROR) | WHOLE
"""The same in Anthropic's format."""


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The body of a route."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, models: list[type[BaseModel]]) -> None:
    """Let an app's description hold the schemas of bodies that routes read themselves."""
    describe_routes = app.openapi

    def described() -> dict[str, Any]:
        description = describe_routes()
        for operations in description["paths"].values():
            for operation in operations.values():
                # FastAPI's own status for wrong fields, which is never sent.
                operation["responses"].pop("422", None)
        schemas = models_json_schema([(model, "validation") for model in models], ref_template=REF)[1]["$defs"]
        known = description.setdefault("components", {}).setdefault("schemas", {})
        known.update(schemas)
        for name in ("HTTPValidationError", "ValidationError"):
            known.pop(name, None)
        return description

    app.openapi = described  # type: ignore[method-assign]
