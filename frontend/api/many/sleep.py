"""Sleep and wake-up, with vLLM's names. A sleeping server has no model in memory, and refuses requests until woken.

Both levels of sleep unload all models. The next load is still quick if the files are in the page cache.
"""

from starlette.requests import Request
from starlette.responses import Response

from frontend.api.app_state import AppState, json_response
from frontend.api.many.fields import Sleeping
from frontend.errors import BadRequest
from frontend.server.auth import check_admin

LEVELS = ("1", "2")


async def fall_asleep(app: AppState, request: Request) -> Response:
    """Responds when all models are unloaded. Raises Forbidden unless an administrator asks, and BadRequest for an
    unknown level."""
    check_admin(request, keyed=True)
    if (level := request.query_params.get("level", "1")) not in LEVELS:
        raise BadRequest(f"`level` must be 1 or 2, not {level!r:.40}", param="level", code="out_of_range")
    await app.models.sleep(True)
    return json_response(Sleeping(is_sleeping=True))


async def wake_up(app: AppState, request: Request) -> Response:
    """Responds when requests are accepted again; they then wait for their models. Raises Forbidden unless an
    administrator asks."""
    check_admin(request, keyed=True)
    await app.models.sleep(False)
    return json_response(Sleeping(is_sleeping=False))


async def is_sleeping(app: AppState, request: Request) -> Response:
    return json_response(Sleeping(is_sleeping=app.models.asleep))
