"""The route that empties the prefix caches of all workers."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from frontend.api.app_state import AppState, json_response
from frontend.api.requests.response_types import PrefixCacheReset
from frontend.errors import Forbidden
from frontend.workers.prefix_reset import reset_prefix_caches


async def reset_prefix_cache(app: AppState, request: Request) -> Response:
    """Empties the caches. This needs API keys, because strangers could use it to slow down all other clients.

    A check of the client's address would not help: behind a proxy on this host, every client has the host's address.

    Raises Forbidden on a server without API keys, and Overloaded if a worker does not confirm the reset.
    """
    if not app.config.keyed:
        raise Forbidden("/reset_prefix_cache needs a server with --api-key or --api-keys", code="key_needed")
    each = await asyncio.gather(*(reset_prefix_caches(model.pool.membership) for model in app.models))
    return json_response(PrefixCacheReset(workers=sum(each)))
