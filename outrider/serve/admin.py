"""POST /v1/admin/drafter: another drafter for new requests, while the server runs."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from outrider.core.inputs import unknown
from outrider.serve.answers import json_response
from outrider.serve.errors import ApiError, refuse
from outrider.serve.gateway import gateway_of
from outrider.serve.keys import Keys
from outrider.serve.openapi import CHECKED, body_of
from outrider.serve.requests import DrafterBody

router = APIRouter()


@router.post("/v1/admin/drafter", responses=CHECKED, openapi_extra=body_of(DrafterBody))
async def swap(request: Request) -> Response:
    """Use a drafter of the server's list for requests that name none. Running requests keep theirs."""
    gateway = gateway_of(request)
    own = gateway.settings.admin_key
    if own is None or Keys((own,)).owner(request.headers) is None:
        raise ApiError(401, "this route needs the server's admin key", headers={"www-authenticate": "Bearer"})
    asked, drafters = (await gateway.read(request, DrafterBody)).drafter, gateway.service.drafters
    if asked not in drafters:
        refuse("drafter", str(unknown("drafter", asked, drafters)))
    await gateway.service.swap(drafters[asked])
    return json_response({"drafter": asked})
