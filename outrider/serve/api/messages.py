"""POST /v1/messages and its count of tokens: Anthropic's format."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.serve.api.bodies import read
from outrider.serve.api.call import respond
from outrider.serve.api.gateway import gateway_of
from outrider.serve.api.messages_body import CountRequest, MessagesRequest
from outrider.serve.api.messages_writer import MessageWriter
from outrider.serve.api.openapi import ANTHROPICS_ERROR, CHECKED, MESSAGES, answers, body_of, errors
from outrider.serve.api.request import AnswerFormat, admit, request_of
from outrider.serve.api.sse import JsonResponse

router = APIRouter()
COUNTED = errors(*(int(status) for status in CHECKED), schema=ANTHROPICS_ERROR) | answers("application/json")


@router.post("/v1/messages", responses=MESSAGES, openapi_extra=body_of(MessagesRequest))
async def messages(request: Request) -> Response:
    """Answer the messages of a conversation."""
    gateway = gateway_of(request)
    body = await read(request, MessagesRequest, gateway.service.limits)
    admit(gateway, request, body)
    body.check()
    tools = body.tool_use(gateway)
    asked = await request_of(
        gateway,
        body,
        body.prompt(gateway, tools),
        most_tokens=body.max_tokens,
        format=AnswerFormat(stream=body.stream),
        stops=body.stop_sequences or (),
        response_format=body.form,
        tools=tools,
    )
    return await respond(gateway, request, asked, MessageWriter)


@router.post("/v1/messages/count_tokens", responses=COUNTED, openapi_extra=body_of(CountRequest))
async def count_tokens(request: Request) -> Response:
    """Count the tokens of the prompt that a request would have, tools included."""
    gateway = gateway_of(request)
    body = await read(request, CountRequest, gateway.service.limits)
    gateway.check_model(body.model)
    prompt = body.prompt(gateway, body.tool_use(gateway))
    return JsonResponse({"input_tokens": len(await gateway.service.encode_chat(prompt))})
