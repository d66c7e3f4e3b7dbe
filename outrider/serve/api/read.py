"""Bodies of requests: read within limits, as JSON, as a checked model."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import pydantic_core
from starlette.requests import ClientDisconnect, Request

from outrider.core.inputs import shown
from outrider.serve.errors import ServeError, refuse
from outrider.serve.limits import Limits

Body = TypeVar("Body", bound=pydantic.BaseModel)
MOST_ERRORS = 10
"""Most wrong fields that an answer lists."""


async def read(request: Request, model: type[Body], limits: Limits) -> Body:
    """The request's body. Reading stops as soon as it is too long, whatever its header says.

    Raises:
        ServeError: The body is too long, not JSON, or its fields are wrong.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ServeError(415, f"the body must be JSON (Content-Type: application/json), got {shown(kind)}")
    body = b"".join([chunk async for chunk in _chunks(request, limits.max_body_bytes)])
    value = parsed(body, limits.max_json_depth)
    if not isinstance(value, dict):
        refuse(None, "the body must be a JSON object", "invalid_json")
    return checked(model, value)


def checked(model: type[Body], value: Any, place: str = "") -> Body:
    """A value as a model. Raises ServeError if fields are wrong.

    Args:
        place: The field of the body that it is.
    """
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as error:
        raise of_fields(error.errors(include_url=False, include_context=False), value, place) from None


def of_fields(errors: Sequence[Mapping[str, Any]], value: Any, place: str = "") -> ServeError:
    """The answer to wrong fields; the arguments are those of `checked`."""
    fields: dict[str, list[str]] = {}
    for each in errors:
        path, wrong = _path(each["loc"], value, missing=each["type"] == "missing")
        known = {"missing": "is missing", "extra_forbidden": "is unknown"}
        message = known.get(each["type"]) or _lower(each["msg"]) + f", got {shown(wrong)}"
        messages = fields.setdefault(".".join(filter(None, (place, path))), [])
        if message not in messages:
            messages.append(message)
    lines = [f"{path or 'the body'}: {' or '.join(messages[:3])}" for path, messages in fields.items()]
    more = f"; and {len(lines) - MOST_ERRORS} more" if len(lines) > MOST_ERRORS else ""
    return ServeError(400, "; ".join(lines[:MOST_ERRORS]) + more, param=next(iter(fields)) or None)


def parsed(body: bytes, most_depth: int) -> Any:
    """The value of a JSON text. Raises ServeError if it is none, or too deep."""
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        refuse(None, f"the body is not JSON: {error}", "invalid_json")
    if deeper(value, most_depth):
        refuse(None, f"the body's JSON is nested more than {most_depth} levels deep", "invalid_json")
    return value


async def save(request: Request, place: Path, most: int) -> None:
    """Write the body to a file. Raises ServeError as soon as it is too long, or if it ends early."""
    with place.open("wb") as file:
        async for chunk in _chunks(request, most):
            await asyncio.to_thread(file.write, chunk)


async def _chunks(request: Request, most: int) -> AsyncIterator[bytes]:
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > most):
        raise _too_large(most)
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                raise _too_large(most)
            yield chunk
    except ClientDisconnect:
        raise ServeError(400, "the body ended early", code="invalid_json") from None


def _too_large(most: int) -> ServeError:
    return ServeError(413, f"the body is longer than {most} bytes; shorten it", headers={"connection": "close"})


def deeper(value: Any, most: int) -> bool:
    """Whether a value of JSON is nested more than `most` levels deep."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _path(places: Sequence[int | str], value: Any, *, missing: bool) -> tuple[str, Any]:
    """The path of a field with dots, and what stands there. Names of types, which pydantic adds, are left out."""
    path: list[str] = []
    for i, place in enumerate(places):
        inside = place in value if isinstance(value, Mapping) else isinstance(place, int) and _holds(value, place)
        if inside:
            value = value[place]
        elif not (missing and i == len(places) - 1):
            continue
        path.append(str(place)[:200])
    return ".".join(path), value


def _holds(value: Any, place: int) -> bool:
    return isinstance(value, list) and place < len(value)


def _lower(message: str) -> str:
    """pydantic's message as the end of a sentence."""
    end = message.removeprefix("Value error, ").removeprefix("Input ")
    return end[:1].lower() + end[1:]
