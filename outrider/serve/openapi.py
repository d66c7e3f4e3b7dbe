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
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The answers that are errors."""
    return {
        status: {"description": WHY[status], "content": {"application/json": {"schema": ERROR}}} for status in statuses
    }


CHECKED = errors(400, 401, 404, 413, 415, 500, 503)
"""Errors of routes that read a body."""
POSTED: dict[int | str, dict[str, Any]] = errors(*WHY) | {
    200: {
        "description": "The answer, or its chunks",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}
"""Answers of routes that generate."""


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The body of a route."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, models: list[type[BaseModel]]) -> None:
    """Let an app's description hold the schemas of bodies that routes read themselves."""
    made = app.openapi

    def described() -> dict[str, Any]:
        found = made()
        schemas = models_json_schema([(model, "validation") for model in models], ref_template=REF)[1]["$defs"]
        found.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
        return found

    app.openapi = described  # type: ignore[method-assign]
