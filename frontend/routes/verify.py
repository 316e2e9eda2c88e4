"""/invocations, the only route that Amazon SageMaker calls. The fields of a body decide which other route handles
it."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from frontend.api.app_state import AppState
from frontend.api.routes.generate import generate
from frontend.api.routes.pooling_route import POOLING_FORMATS, pool
from frontend.errors import BadRequest

ROUTES = {  # field → the only route with this field. The first of these fields that a body has decides.
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    "text_1": "/v1/score",
    "query": "/v1/rerank",
}
_Fields = dict[str, msgspec.Raw]


async def invocations(app: AppState, request: Request) -> Response:
    """Responds like the route to which the body's fields belong. Raises BadRequest if no field decides."""
    body = await app.body(request)
    path = request.scope["path"] = _route(body)
    answered = Request(request.scope, _again(body, request))
    del body  # `answered` has it until it is read again
    return await (pool if path in POOLING_FORMATS else generate)(app, answered)


def _route(body: bytes) -> str:
    try:
        fields: Any = msgspec.json.decode(body, type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest("the body must be a JSON object") from None
    for field, path in ROUTES.items():
        if field in fields:
            return path
    names = ", ".join(f"`{field}`" for field in ROUTES)
    raise BadRequest(f"the body has none of {names}, which tell what it asks for", code="missing_field")


def _again(body: bytes, request: Request) -> Any:
    """Returns a `receive` that yields the body once more, without keeping it, and then the messages that follow it."""
    left = [body]

    async def receive() -> Message:
        if not left:
            return await request.receive()
        return {"type": "http.request", "body": left.pop(), "more_body": False}

    return receive
