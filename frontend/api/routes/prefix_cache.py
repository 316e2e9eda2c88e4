"""The route that empties the prefix caches of all workers."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from frontend.api.app_state import AppState, json_response
from frontend.api.requests.response_types import PrefixCacheReset
from frontend.server.auth import check_admin
from frontend.workers.prefix_reset import reset_prefix_caches


async def reset_prefix_cache(app: AppState, request: Request) -> Response:
    """Empties the caches. Only administrators may do this, because it slows down all other clients.

    A check of the client's address would not help: behind a proxy on this host, every client has the host's address.

    Raises Forbidden if another key, or none, asks; and Overloaded if a worker does not confirm the reset.
    """
    check_admin(request, keyed=True)
    each = await asyncio.gather(*(reset_prefix_caches(model.pool.membership) for model in app.models))
    return json_response(PrefixCacheReset(workers=sum(each)))
