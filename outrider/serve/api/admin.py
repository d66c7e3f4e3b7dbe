"""Routes below /v1/admin: another drafter for new requests, or new weights for one, while the server runs."""

import tempfile
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.core.inputs import unknown
from outrider.serve.api.answers import json_response
from outrider.serve.api.bodies import DrafterBody
from outrider.serve.api.errors import ApiError, refuse
from outrider.serve.api.gateway import Gateway, gateway_of
from outrider.serve.api.openapi import CHECKED, body_of
from outrider.serve.api.read import save
from outrider.serve.keys import Keys
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
    asked, drafters = (await gateway.read(request, DrafterBody)).drafter, gateway.service.drafters
    if asked not in drafters:
        refuse("drafter", str(unknown("drafter", asked, drafters)))
    await gateway.service.swap(drafters[asked])
    return json_response({"drafter": asked})


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
    return json_response({"drafter": asked})


def _allowed(request: Request) -> Gateway:
    """The gateway. Raises ApiError without the admin key."""
    gateway = gateway_of(request)
    own = gateway.settings.admin_key
    if own is None or Keys((own,)).owner(request.headers) is None:
        raise ApiError(401, "this route needs the server's admin key", headers={"www-authenticate": "Bearer"})
    return gateway
