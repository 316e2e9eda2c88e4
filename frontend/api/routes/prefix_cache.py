"""The route that empties the prefix caches of all workers."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from frontend.api.app_state import AppState, json_response
from frontend.api.requests.response_types import PrefixCacheReset
from frontend.errors import Forbidden
from frontend.workers.prefix_reset import reset_prefix_caches


async def reset_prefix_cache(app: AppState, request: Request) -> Response:
    """Empties the caches. Only a server with API keys does: strangers could slow all others down.

    The client's address says nothing: behind a proxy on this host, everyone has this host's.

    Raises Forbidden without API keys, and Overloaded if a worker does not confirm it.
    """
    if not app.config.keyed:
        raise Forbidden("/reset_prefix_cache needs a server with --api-key or --api-keys", code="key_needed")
    each = await asyncio.gather(*(reset_prefix_caches(model.pool.membership) for model in app.models))
    return json_response(PrefixCacheReset(workers=sum(each)))
