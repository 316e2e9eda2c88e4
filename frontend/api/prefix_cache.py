"""The route that empties the prefix caches of all workers."""

from starlette.requests import Request
from starlette.responses import Response

from frontend.api.app_state import AppState, json_response
from frontend.api.response_types import PrefixCacheReset
from frontend.errors import Forbidden
from frontend.workers.prefix_reset import reset_prefix_caches

LOOPBACK = ("127.", "::1", "::ffff:127.")  # how addresses of this host begin


async def reset_prefix_cache(app: AppState, request: Request) -> Response:
    """Empties the caches. Without API keys only clients on this host may: strangers could slow all others down.

    Raises Overloaded if a worker does not confirm it.
    """
    client = request.client.host if request.client else ""
    if not app.config.keyed and not client.startswith(LOOPBACK):
        raise Forbidden("/reset_prefix_cache needs a server with --api-key or --api-keys", code="key_needed")
    return json_response(PrefixCacheReset(workers=await reset_prefix_caches(app.pool.membership)))
