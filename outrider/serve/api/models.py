"""The routes beside generation: models, tokens, health, numbers, and what the server is."""

import time
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider import catalog
from outrider.lengths.experience import Experience
from outrider.serve.api.bodies import DetokenizeBody, TokenizeBody, read
from outrider.serve.api.gateway import Gateway, gateway_of
from outrider.serve.api.grammars import ToolUse
from outrider.serve.api.openapi import CHECKED, answers, body_of, errors
from outrider.serve.api.prompts import chat_prompt
from outrider.serve.api.sse import JsonResponse
from outrider.serve.errors import refuse

router = APIRouter()
PARTS = ("drafter", "tree", "verifier", "length")
"""The parts of an engine that a catalog lists."""
STATE = {"type": "object", "required": ["status"], "properties": {"status": {"type": "string"}}}
READY = answers(described="The server takes requests") | errors(503, schema=STATE)
LAW = (
    "Speculation does not change the law of outputs: greedy outputs are those of the target alone, and drawn outputs "
    "have the target's distribution."
)
LOSSY = "This server allows verifiers that change the law of outputs."
PLACES = ("_path", "_file", "_dir", "_hash")
"""Ends of the names of entries of a tokenizer's settings that say where its files lie."""


@router.get("/v1/models", responses=errors(401))
async def models(request: Request) -> Response:
    """The names of the model."""
    gateway = gateway_of(request)
    return JsonResponse({"object": "list", "data": [_card(gateway, name) for name in gateway.service.names]})


@router.get("/v1/models/{name:path}", responses=errors(401, 404))
async def model(request: Request, name: str) -> Response:
    """One name of the model."""
    gateway = gateway_of(request)
    gateway.check_model(name)
    return JsonResponse(_card(gateway, name))


@router.post("/tokenize", responses=CHECKED, openapi_extra=body_of(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """The token ids of a text or a conversation."""
    gateway = gateway_of(request)
    body = await read(request, TokenizeBody, gateway.service.limits)
    gateway.check_model(body.model)
    tokens = await _tokens(gateway, body)
    answer = {"count": len(tokens), "max_model_len": gateway.service.max_context, "tokens": tokens, "token_strs": None}
    if body.return_token_strs:
        answer["token_strs"] = [str(each) for each in gateway.service.tokenizer.convert_ids_to_tokens(tokens)]
    return JsonResponse(answer)


@router.post("/detokenize", responses=CHECKED, openapi_extra=body_of(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    gateway = gateway_of(request)
    body = await read(request, DetokenizeBody, gateway.service.limits)
    gateway.check_model(body.model)
    width = gateway.service.engine.parts.target.vocab_size
    if any(not 0 <= token < width for token in body.tokens):
        refuse("tokens", f"token ids must be 0 .. {width - 1}")
    return JsonResponse({"prompt": gateway.service.tokenizer.decode(body.tokens, skip_special_tokens=False)})


@router.get("/tokenizer_info", responses=errors(401))
async def tokenizer_info(request: Request) -> Response:
    """The settings of the tokenizer."""
    tokenizer = gateway_of(request).service.tokenizer
    info = {name: _plain(value) for name, value in tokenizer.init_kwargs.items() if not name.endswith(PLACES)}
    info |= {name: str(value) for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    info["tokenizer_class"] = type(tokenizer).__name__
    info["chat_template"] = tokenizer.chat_template
    return JsonResponse(info)


@router.get("/health", response_class=Response, responses=READY)
@router.get("/ping", response_class=Response, responses=READY)
@router.post("/ping", response_class=Response, responses=READY)
async def health(request: Request) -> Response:
    """Whether the server takes requests: an empty answer with status 200 if it does."""
    state = gateway_of(request).service.state
    return Response() if state == "ready" else JsonResponse({"status": state}, 503)


@router.get("/live", response_class=Response, responses=answers(described="The process answers"))
async def live() -> Response:
    """Whether the process answers."""
    return Response()


@router.get("/metrics", response_class=Response, responses=answers("text/plain", "application/openmetrics-text"))
async def metrics(request: Request) -> Response:
    """The numbers of the server, for Prometheus."""
    content, kind = gateway_of(request).service.metrics.exposition(request.headers.get("accept", ""))
    return Response(content, headers={"content-type": kind})


@router.get("/version")
async def version(request: Request) -> Response:
    """The version of Outrider."""
    return JsonResponse({"version": gateway_of(request).version})


@router.get("/load")
async def load(request: Request) -> Response:
    """The number of requests at work."""
    return JsonResponse({"server_load": gateway_of(request).service.in_flight})


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """What the server runs, and what it promises."""
    gateway = gateway_of(request)
    service, settings = gateway.service, gateway.settings
    parts, sampling = service.engine.parts, service.engine.sampling
    return JsonResponse(
        {
            "version": gateway.version,
            "models": list(service.names),
            "system_fingerprint": gateway.fingerprint,
            "law": LOSSY if settings.lossy else LAW,
            "parts": {name: catalog.name_of(getattr(parts, name)) for name in PARTS},
            "options": {name: _options(getattr(parts, name)) for name in PARTS},
            "max_context": service.max_context,
            "vocab_size": parts.target.vocab_size,
            "device": str(parts.target.device),
            "cost_table": _cost_table(parts.experience),
            "limits": asdict(service.limits),
            "sampling": {
                "order": "the request's value, the model's generation config, no change",
                "defaults": {
                    name: getattr(sampling, name)
                    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
                },
            },
            "chat_template": service.tokenizer.chat_template is not None,
            "response_template": gateway.parser.name,
            "request_metrics": settings.request_metrics,
            "priorities": settings.priorities,
        }
    )


def _options(part: object) -> dict[str, Any]:
    """The options of a part that are texts, numbers or lists of them."""
    options = {each.name: getattr(part, each.name) for each in fields(part)} if is_dataclass(part) else {}
    simple = str | int | float | None
    return {
        name: value
        for name, value in options.items()
        if isinstance(value, simple) or (isinstance(value, list | tuple) and all(isinstance(v, simple) for v in value))
    }


def _cost_table(experience: Experience) -> dict[str, Any] | None:
    """Which costs of steps draft lengths go by; None without any."""
    costs = experience.costs
    if costs is None:
        return None
    age = None if costs.measured is None else round(max(0.0, time.time() - costs.measured), 3)
    return {"age_seconds": age, "kept": costs.kept, "drift": experience.cost_drift}


def _card(gateway: Gateway, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(gateway.service.started),
        "owned_by": "outrider",
        "root": gateway.settings.target or gateway.name,
        "parent": None,
        "max_model_len": gateway.service.max_context,
        "permission": [],
    }


async def _tokens(gateway: Gateway, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        refuse("prompt", "give prompt or messages, one of them")
    if body.prompt is not None:
        special = True if body.add_special_tokens is None else body.add_special_tokens
        return await gateway.service.encode(body.prompt, special=special)
    return await gateway.service.encode_chat(chat_prompt(gateway, body, ToolUse(offered=body.tools or ())))


def _plain(value: Any) -> Any:
    """A setting as JSON; an added token is its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
