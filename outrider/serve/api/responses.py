"""POST /v1/responses: OpenAI's newer format. No response is stored."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.serve.api.bodies import read
from outrider.serve.api.call import respond
from outrider.serve.api.gateway import gateway_of
from outrider.serve.api.openapi import POSTED, body_of, errors
from outrider.serve.api.request import AnswerFormat, admit, request_of
from outrider.serve.api.responses_body import ResponsesRequest
from outrider.serve.api.responses_writer import ResponseWriter
from outrider.serve.errors import ServeError

router = APIRouter()
UNSTORED = errors(401, 404)


@router.post("/v1/responses", responses=POSTED, openapi_extra=body_of(ResponsesRequest))
async def responses(request: Request) -> Response:
    """Answer an input of messages, calls and their outputs."""
    gateway = gateway_of(request)
    body = await read(request, ResponsesRequest, gateway.service.limits)
    admit(gateway, request, body)
    body.check(gateway.service.limits.max_logprobs)
    tools = body.tool_use(gateway)
    asked = await request_of(
        gateway,
        body,
        body.chat_prompt(gateway, tools),
        most_tokens=body.max_output_tokens,
        format=AnswerFormat(stream=body.stream, logprobs=body.logprobs),
        response_format=body.form,
        tools=tools,
    )
    return await respond(gateway, request, asked, partial(ResponseWriter, body=body))


@router.get("/v1/responses/{id}", status_code=404, responses=UNSTORED)
@router.delete("/v1/responses/{id}", status_code=404, responses=UNSTORED)
@router.post("/v1/responses/{id}/cancel", status_code=404, responses=UNSTORED)
@router.get("/v1/responses/{id}/input_items", status_code=404, responses=UNSTORED)
async def stored(id: str) -> Response:
    """Nothing is stored."""
    raise ServeError(404, f"there is no response {id[:200]!r}, because none is stored", param="id")
