"""Routes below /v1/admin: drafters and their weights, while the server runs, and the log of answers."""

import asyncio
import tempfile
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from outrider.core.inputs import unknown
from outrider.serve.api.bodies import DrafterBody, read, save
from outrider.serve.api.gateway import Gateway, gateway_of
from outrider.serve.api.openapi import CHECKED, body_of
from outrider.serve.api.sse import JsonResponse
from outrider.serve.errors import ServeError, refuse
from outrider.serve.keys import Keys
from outrider.serve.observe.answers_log import ROUTE
from outrider.serve.run.renewal import WEIGHTS

router = APIRouter()
OF_WEIGHTS = {
    "parameters": [{"name": "drafter", "in": "path", "required": True, "schema": {"type": "string"}}],
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    },
}


@router.post("/v1/admin/drafter", responses=CHECKED, openapi_extra=body_of(DrafterBody))
async def swap(request: Request) -> Response:
    """Use a drafter of the server's list for requests that name none. Running requests keep theirs."""
    gateway = _allowed(request)
    asked, drafters = (await read(request, DrafterBody, gateway.service.limits)).drafter, gateway.service.drafters
    if asked not in drafters:
        refuse("drafter", str(unknown("drafter", asked, drafters)))
    await gateway.service.swap(drafters[asked])
    return JsonResponse({"drafter": asked})


@router.put("/v1/admin/drafter/{drafter}/weights", responses=CHECKED, openapi_extra=OF_WEIGHTS)
async def renew(request: Request) -> Response:
    """Give a drafter the weights in the body, a file of safetensors. Running requests keep the old ones."""
    gateway, asked = _allowed(request), request.path_params["drafter"]
    service = gateway.service
    if asked not in service.drafters:
        refuse("drafter", str(unknown("drafter", asked, service.drafters)))
    if service.renewal is None:
        refuse("drafter", "this server takes no weights")
    with tempfile.TemporaryDirectory(prefix="outrider-") as scratch:
        place = Path(scratch) / WEIGHTS
        await save(request, place, service.renewal.most_bytes(asked))
        await service.renew(asked, place)
    return JsonResponse({"drafter": asked})


@router.get(ROUTE, include_in_schema=False)
async def answers(request: Request) -> Response:
    """The log of answers. Lines that come meanwhile are not sent: the length is told before."""
    log = _allowed(request).answers
    if log is None:
        raise ServeError(404, "this server keeps no answers; start it with --log-answers FILE")
    length = (await asyncio.to_thread(log.file.stat)).st_size
    headers = {"content-length": str(length)}
    return StreamingResponse(log.pieces(length), headers=headers, media_type="application/jsonl")


def _allowed(request: Request) -> Gateway:
    """The gateway. Raises ServeError without the admin key."""
    gateway = gateway_of(request)
    key = gateway.settings.admin_key
    if key is None or Keys((key,)).owner(request.headers) is None:
        raise ServeError(401, "this route needs the server's admin key", headers={"www-authenticate": "Bearer"})
    return gateway
