"""POST /v1/responses: OpenAI's newer format around chat completions. No response is stored."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.serve.api.answers import answered, as_api
from outrider.serve.api.bodies import ChatBody
from outrider.serve.api.chat import ChatAnswer
from outrider.serve.api.errors import ApiError
from outrider.serve.api.gateway import gateway_of
from outrider.serve.api.openapi import POSTED, body_of, errors
from outrider.serve.api.read import checked
from outrider.serve.api.responses_body import ResponsesRequest, chat_body
from outrider.serve.api.responses_writer import Event, ResponseAnswer
from outrider.serve.api.sse import EventStream, event

router = APIRouter()
UNSTORED = errors(401, 404)


@router.post("/v1/responses", responses=POSTED, openapi_extra=body_of(ResponsesRequest))
async def responses(request: Request) -> Response:
    """Answer an input of messages, calls and their outputs."""
    gateway = gateway_of(request)
    asked = await gateway.read(request, ResponsesRequest)
    chat = await ChatAnswer.begun(gateway, request, checked(ChatBody, chat_body(asked)))
    answer = ResponseAnswer(
        id=f"resp_{chat.id.removeprefix('chatcmpl-')}", model=gateway.name, request=asked, created=chat.created
    )

    async def whole() -> dict[str, Any]:
        async for chunk in chat.chunks():
            for _ in answer.add(chunk):
                pass
        for _ in answer.end():
            pass
        return answer.response()

    def failed(error: Exception) -> list[bytes]:
        found = as_api(error)
        return [_written([answer.fail(found.code, found.message)])]

    if not asked.stream:
        return await answered(request, chat.call, whole)
    return EventStream(
        _events(chat, answer),
        failed=failed,
        close=chat.call.close,
        keep_alive=gateway.settings.keep_alive_seconds,
        patience=gateway.service.limits.slow_client_seconds,
    )


@router.get("/v1/responses/{id}", status_code=404, responses=UNSTORED)
@router.delete("/v1/responses/{id}", status_code=404, responses=UNSTORED)
@router.post("/v1/responses/{id}/cancel", status_code=404, responses=UNSTORED)
@router.get("/v1/responses/{id}/input_items", status_code=404, responses=UNSTORED)
async def stored(id: str) -> Response:
    """Nothing is stored."""
    raise ApiError(404, f"there is no response {id[:200]!r}, because none is stored", param="id")


async def _events(chat: ChatAnswer, answer: ResponseAnswer) -> AsyncIterator[bytes]:
    """The answer as a stream."""
    yield _written(answer.start())
    async for chunk in chat.chunks():
        if found := _written(answer.add(chunk)):
            yield found
    yield _written(answer.end())


def _written(events: Iterator[Event] | list[Event]) -> bytes:
    """Events as they are sent, in one write."""
    return b"".join(event(each, each["type"]) for each in events)
