"""/v1/receipts/verify: reads the request of a receipt as its own route does, and checks the receipt.

A check is a request like others: it waits in the queue, has a priority and a deadline, and is in the access log.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from frontend.api.api_formats import API_FORMATS
from frontend.api.app_state import AppState, json_response
from frontend.api.common import ModelContext, check_task, to_json
from frontend.api.decoding import decode
from frontend.api.generate import while_connected
from frontend.api.receipts.claim import Claim, VerifyRequest, checking_worker
from frontend.api.request_model import RequestModel
from frontend.api.unknown_fields import UnknownFields
from frontend.errors import BadRequest, SluiceError
from frontend.observability.access_log import RequestRecord
from frontend.request import GenerationRequest
from frontend.server.middleware import RECORD
from frontend.workers.status import WorkerStatus

NAME = "receipts"


class Workers(Protocol):
    """The workers that may check a receipt; see frontend/workers/membership.py."""

    def statuses(self) -> Sequence[WorkerStatus]: ...


Decode = Callable[[bytes, type[RequestModel], str], Any]  # decodes a body into a type, for a route


async def verify(app: AppState, request: Request) -> Response:
    body, begun = await app.body(request), time.perf_counter()
    record: RequestRecord = request.scope[RECORD]
    record.api_format = NAME
    asked = app.decode(request, body, VerifyRequest)
    await app.service.wait_for_handshake()
    context = app.context
    check_task(request.scope["path"], ("generate",), context)

    def decode_for(sent: bytes, kind: type[RequestModel], path: str) -> Any:
        return app.decode(request, sent, kind, path)

    claim = await read_claim(asked, context, app.pool.membership, decode_for)
    if claim.generation is None:
        return json_response(await claim.verdict(None, app.fingerprint, app.signer))
    record.generation_request = claim.generation
    generation = await while_connected(request, app.service.start(claim.generation, begun))
    record.generation = generation
    try:
        fingerprint = app.sign(request, generation.fingerprint)
        verdict = claim.verdict(generation.deltas(), fingerprint, app.signer)
        return json_response(await while_connected(request, verdict))
    finally:
        generation.close()


def _decode(body: bytes, kind: type[RequestModel], path: str) -> Any:
    return decode(body, kind, UnknownFields("auto").reader(path, {}))


async def read_claim(
    asked: VerifyRequest, context: ModelContext, workers: Workers, decode_for: Decode = _decode
) -> Claim:
    """Reads the request of a receipt. Raises BadRequest or Unprocessable, which name the field."""
    worker = checking_worker(asked, context, [one.fingerprint for one in workers.statuses() if one.ready])
    route = asked.receipt.route
    if route not in API_FORMATS:
        known = ", ".join(API_FORMATS)
        raise BadRequest(f"`receipt.route` must be one of {known}, got {route!r:.80}", param="receipt.route")
    chosen = API_FORMATS[route]
    context = replace(context, template=context.template.at(asked.receipt.created))
    try:
        parsed = await chosen.parse(decode_for(to_json(asked.request), chosen.REQUEST, route), context)
    except SluiceError as error:
        error.message = f"the `request` of the receipt cannot be read: {error.message}"
        error.param = f"request.{error.param}" if error.param else "request"
        raise
    if not isinstance(parsed, GenerationRequest):
        raise BadRequest("`request` asks for no tokens, so it has no receipt", param="request")
    return Claim.of(asked, parsed, context.vocab_size, worker)
