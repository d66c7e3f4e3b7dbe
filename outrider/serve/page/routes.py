"""The page at `/`, its files, and the stream of tokens with their kinds that it shows."""

from collections.abc import AsyncIterator, Sequence
from importlib import resources
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from outrider.engine.kinds import kinds
from outrider.engine.output import Update
from outrider.engine.text import TextStream
from outrider.serve.api.bodies import ChatMessage, GenerationBody, read
from outrider.serve.api.call import outputs_of
from outrider.serve.api.errors import openai_error, served
from outrider.serve.api.gateway import Gateway, gateway_of, request_id
from outrider.serve.api.openapi import OPENAIS, answers, body_of, errors
from outrider.serve.api.prompts import messages_of
from outrider.serve.api.request import RequestPrompt, admit, answer_format, request_of
from outrider.serve.api.sse import DONE, EventStream, event
from outrider.serve.errors import ServeError, refuse
from outrider.serve.page.trees import ShownNode, Trees
from outrider.serve.run.outputs import OutputTask, Ticket
from outrider.serve.run.templates import ChatPrompt

FILES = {
    "": ("index.html", "text/html; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    # Nothing from elsewhere, and no page elsewhere may frame this one.
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

router = APIRouter()
USUAL_MOST = 16
"""Most tokens of an output whose request does not say."""
STREAMED = errors(*OPENAIS) | answers("text/event-stream", described="The tokens, step by step")


class PageBody(GenerationBody):
    """The body of `POST /v1/outrider/stream`.

    `prompt`: a text to continue, or else `messages`: a chat to answer. `tree`: whether each event brings the draft of
    its step.
    """

    prompt: str | None = Field(default=None, min_length=1)
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    n: int = Field(default=1, ge=1, le=1)
    tree: bool = False


@router.get("/", include_in_schema=False)
async def index() -> Response:
    """The page."""
    return _file("")


@router.get("/page/{name}", include_in_schema=False)
async def file(name: str) -> Response:
    """A file of the page."""
    if not name or name not in FILES:
        raise ServeError(404, "there is no such file")
    return _file(name)


@router.post(
    "/v1/outrider/stream", response_class=StreamingResponse, responses=STREAMED, openapi_extra=body_of(PageBody)
)
async def stream(request: Request) -> EventStream:
    """Continue a prompt or answer a chat. Each event has the tokens of one step, with the kind of each: accepted,
    recovered, bonus or plain.
    """
    gateway = gateway_of(request)
    body = await read(request, PageBody, gateway.service.limits)
    admit(gateway, request, body)
    task = await _task(gateway, request, body)
    trees = trees_of(request) if body.tree else None
    # Before the task begins: its first step may end at once.
    if trees is not None:
        trees.open(task.id)
    try:
        [ticket] = gateway.service.submit([task])
    except BaseException:
        if trees is not None:
            trees.close(task.id)
        raise

    def close() -> None:
        ticket.cancel()
        if trees is not None:
            trees.close(task.id)

    return EventStream(
        _events(gateway, task.id, ticket, trees),
        failed=lambda error: [event(openai_error(served(error))), DONE],
        close=close,
        keep_alive=gateway.settings.keep_alive_seconds,
        patience=gateway.service.limits.slow_client_seconds,
    )


def trees_of(request: Request) -> Trees:
    """The trees of the app that answers a request."""
    state = request.app.state
    if not hasattr(state, "trees"):
        state.trees = Trees(gateway_of(request).service.engine)
    trees: Trees = state.trees
    return trees


async def _task(gateway: Gateway, http: Request, body: PageBody) -> OutputTask:
    """What is asked of the engine."""
    service = gateway.service
    if (body.prompt is None) == (body.messages is None):
        refuse("prompt", "give prompt or messages, one of them")
    if body.messages is not None:
        prompts: Sequence[RequestPrompt] | ChatPrompt = ChatPrompt(messages=messages_of(body.messages))
    else:
        prompts = [RequestPrompt(tokens=tuple(await service.encode(body.prompt or "", special=True)))]
    request = await request_of(
        gateway,
        body,
        prompts,
        most_tokens=USUAL_MOST if body.max_tokens is None else body.max_tokens,
        format=answer_format(body, service.limits, logprobs=None, param="logprobs"),
        response_format=body.response_format,
    )
    [output] = outputs_of(gateway, request, gateway.unique(f"page-{request_id(None)}"), http.scope["state"]["key"])
    return output.task


async def _events(gateway: Gateway, id: str, ticket: Ticket, trees: Trees | None) -> AsyncIterator[bytes]:
    """The events of one output."""
    text = TextStream(gateway.service.tokenizer, special=True)
    async for each in ticket:
        fields = _fields(each, text)
        if trees is not None:
            fields["tree"] = [_drawn(gateway, node) for node in trees.newest(id)]
        yield event(fields)


def _fields(update: Update, text: TextStream) -> dict[str, Any]:
    """What an event brings: tokens with their texts and kinds, and at the end the sums."""
    tokens: list[dict[str, Any]] = []
    fields: dict[str, Any] = {"tokens": tokens}
    if (step := update.step) is not None:
        for token, kind in zip(update.tokens, kinds(step), strict=False):
            tokens.append({"id": token, "text": text.push(token), "kind": kind})
        names = ("num_draft_tokens", "num_accepted_tokens", "num_requests")
        fields["step"] = {name: getattr(step, name) for name in names}
    if (output := update.output) is not None:
        if tokens:
            tokens[-1]["text"] += text.finish()
        fields["output"] = {
            "text": output.text,
            "finish_reason": output.finish_reason,
            "num_tokens": len(output.tokens),
            "num_steps": output.num_steps,
            "num_draft_tokens": output.num_draft_tokens,
            "num_accepted_tokens": output.num_accepted_tokens,
            "accepted_per_position": output.accepted_per_position,
            "seconds": output.seconds,
        }
    return fields


def _drawn(gateway: Gateway, node: ShownNode) -> dict[str, Any]:
    """A node of a tree with its text."""
    text = gateway.service.tokenizer.decode([node.token])
    return {"id": node.token, "text": text, "parent": node.parent, "kind": node.kind}


def _file(name: str) -> Response:
    file_name, kind = FILES[name]
    content = resources.files("outrider.serve.page").joinpath(file_name).read_bytes()
    return Response(content, media_type=kind, headers=HEADERS)
