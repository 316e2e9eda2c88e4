"""Routes whose body holds another route's request: receipts to verify, SageMaker's /invocations, and POST /.

/invocations is the only route that Amazon SageMaker calls, and Hugging Face's clients call / of a server of Text
Embeddings Inference. The fields of a body decide which other route handles it; for `input` and `inputs` the model
does, too.
"""

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from frontend.api.formats import API_FORMATS
from frontend.api.pooling import rerank
from frontend.api.pooling.fields import PoolingFields
from frontend.api.verification import VerifyRequest, read_claim
from frontend.app_state import AppState, json_response
from frontend.errors import BadRequest
from frontend.model_context import check_task
from frontend.routes.generate import generate, while_connected
from frontend.routes.pooling import POOLING_FORMATS, pool
from frontend.schema.base import RequestModel
from frontend.server.middleware import RECORD, RequestRecord

ROUTES = {  # field → the route that needs this field. The first of these fields that a body has decides.
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
    **dict.fromkeys(rerank.FIRST, "/v1/score"),
    "query": "/v1/rerank",
    "inputs": "/embed",
}
OF_LABELS = {"/v1/embeddings": "/v1/classify", "/embed": "/predict"}  # route of vectors → that of labels
_Fields = dict[str, msgspec.Raw]


async def invocations(app: AppState, request: Request) -> Response:
    """Responds like the route to which the body's fields belong. Raises BadRequest if no field decides."""
    body = await app.body(request)
    path, fields = _route(body)
    request.scope["path"] = path
    if path in OF_LABELS:
        path = request.scope["path"] = await _of_inputs(app, request, path, fields)
    del fields
    answered = Request(request.scope, _again(body, request))
    del body  # `answered` has it until it is read again
    return await (pool if path in POOLING_FORMATS else generate)(app, answered)


async def _of_inputs(app: AppState, request: Request, path: str, fields: "_Fields") -> str:
    """Returns which route a body with `input` or `inputs` belongs to. path: that of vectors, in the body's format"""
    if bytes(fields.get("inputs", b"")).startswith(b"{"):
        return "/similarity"
    name = msgspec.json.decode(fields["model"]) if "model" in fields else None
    model = await app.usable_model(request, PoolingFields(model=name if isinstance(name, str) else None))
    return OF_LABELS[path] if model.context.task.labels else path


def _route(body: bytes) -> "tuple[str, _Fields]":
    """Returns the route of a body, and its fields."""
    try:
        fields: Any = msgspec.json.decode(body, type=_Fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise BadRequest("the body must be a JSON object") from None
    for field, path in ROUTES.items():
        if field in fields:
            return path, fields
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


# /v1/receipts/verify: the life of a request that checks a receipt.
#
# It is treated like other requests: it waits in the queue, has a priority and a deadline, and is in the access log.

NAME = "receipts"


async def verify(app: AppState, request: Request) -> Response:
    body, begun = await app.body(request), time.perf_counter()
    record: RequestRecord = request.scope[RECORD]
    record.api_format = NAME
    asked = await app.decode(request, body, VerifyRequest)
    name = asked.receipt.model
    model = await app.models.usable(app.models.by_default(app.models.find(name)), name)
    context = model.context
    check_task(request.scope["path"], ("generate",), context)

    async def decode_for(sent: bytes, kind: type[RequestModel], path: str) -> Any:
        return await app.decode(request, sent, kind, path)

    reading = read_claim(asked, context, model.pool.membership.fingerprints, API_FORMATS, decode_for)
    claim = await while_connected(request, reading)
    if claim.generation is None:
        return json_response(await claim.verdict(None, model.fingerprint, app.signer))
    asking = record.generation_request = claim.generation.admitted(**record.admission)
    generation = await while_connected(request, model.service.start(asking, begun))
    record.generation = generation
    try:
        fingerprint = app.sign(request, model, generation.fingerprint)
        verdict = claim.verdict(generation.deltas(), fingerprint, app.signer)
        return json_response(await while_connected(request, verdict))
    finally:
        generation.close()
