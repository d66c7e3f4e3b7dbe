"""POST /v1/messages and its count of tokens: Anthropic's format around chat completions."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.core.inputs import InputError
from outrider.serve.api.answers import answered, as_api, json_response
from outrider.serve.api.bodies import ChatBody
from outrider.serve.api.chat import ChatAnswer, prompt_of
from outrider.serve.api.errors import ApiError
from outrider.serve.api.gateway import gateway_of
from outrider.serve.api.messages_body import CountRequest, MessagesRequest, chat_body, prompt_body
from outrider.serve.api.messages_writer import OVERLOADED, Event, MessageAnswer, error_body
from outrider.serve.api.openapi import ANTHROPICS_ERROR, CHECKED, MESSAGES, answers, body_of, errors
from outrider.serve.api.read import checked
from outrider.serve.api.sse import EventStream, event
from outrider.serve.run.service import JobError

router = APIRouter()
Route = Callable[[Request], Awaitable[Response]]
FULL = ("queue_full", "too_many_tokens_queued", "overloaded")
"""Codes of a queue without room."""
COUNTED = errors(*(int(status) for status in CHECKED), schema=ANTHROPICS_ERROR) | answers("application/json")
PING = event({"type": "ping"}, "ping")


def in_anthropics_words(route: Route) -> Route:
    """A route whose errors have Anthropic's format."""

    @functools.wraps(route)
    async def answer(request: Request) -> Response:
        try:
            return await route(request)
        except (ApiError, JobError, InputError) as error:
            found = as_api(error)
            request.scope["state"]["code"] = found.code
            return error_response(found, request)

    return answer


def error_response(error: ApiError, request: Request) -> Response:
    """An error as an answer in Anthropic's format."""
    status = status_of(error)
    found = json_response(error_body(status, error.message, request.scope["state"]["request_id"]), status)
    found.headers.update(error.headers)
    return found


def status_of(error: ApiError) -> int:
    """The status of an error; Anthropic has one of its own for a queue without room."""
    return OVERLOADED if error.code in FULL else error.status


@router.post("/v1/messages", responses=MESSAGES, openapi_extra=body_of(MessagesRequest))
@in_anthropics_words
async def messages(request: Request) -> Response:
    """Answer the messages of a conversation."""
    gateway = gateway_of(request)
    asked = await gateway.read(request, MessagesRequest)
    chat = await ChatAnswer.begun(gateway, request, checked(ChatBody, chat_body(asked)))
    message = MessageAnswer(id=f"msg_{chat.id.removeprefix('chatcmpl-')}", model=gateway.name)

    async def whole() -> dict[str, Any]:
        async for chunk in chat.chunks():
            for _ in message.add(chunk):
                pass
        for _ in message.end():
            pass
        return message.message()

    def failed(error: Exception) -> list[bytes]:
        found = as_api(error)
        body = error_body(status_of(found), found.message, request.scope["state"]["request_id"])
        return [event(body, "error")]

    if not asked.stream:
        return await answered(request, chat.call, whole)
    return EventStream(
        _events(chat, message),
        failed=failed,
        close=chat.call.close,
        keep_alive=gateway.settings.keep_alive_seconds,
        patience=gateway.service.limits.slow_client_seconds,
        pulse=PING,
    )


@router.post("/v1/messages/count_tokens", responses=COUNTED, openapi_extra=body_of(CountRequest))
@in_anthropics_words
async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a request would have, tools included."""
    gateway = gateway_of(request)
    asked = await gateway.read(request, CountRequest)
    gateway.check_model(asked.model)
    prompt = await prompt_of(gateway, checked(ChatBody, prompt_body(asked)))
    return json_response({"input_tokens": len(prompt)})


async def _events(chat: ChatAnswer, message: MessageAnswer) -> AsyncIterator[bytes]:
    """The answer as a stream."""
    begun = False
    async for chunk in chat.chunks():
        if not begun:
            begun = True
            yield _written([message.start(chunk)])
        if found := _written(message.add(chunk)):
            yield found
    yield _written(message.end())


def _written(events: Iterator[Event] | list[Event]) -> bytes:
    """Events as they are sent, in one write."""
    return b"".join(event(each, each["type"]) for each in events)
