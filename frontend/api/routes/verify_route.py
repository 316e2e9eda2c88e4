"""/v1/receipts/verify: the life of a request that checks a receipt.

It is treated like other requests: it waits in the queue, has a priority and a deadline, and is in the access log.
"""

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from frontend.api.api_formats import API_FORMATS
from frontend.api.app_state import AppState, json_response
from frontend.api.model_context import check_task
from frontend.api.receipts.claim import VerifyRequest
from frontend.api.receipts.verify import read_claim
from frontend.api.requests.request_model import RequestModel
from frontend.api.routes.generate import while_connected
from frontend.observability.access_log import RequestRecord
from frontend.server.middleware import RECORD

NAME = "receipts"


async def verify(app: AppState, request: Request) -> Response:
    body, begun = await app.body(request), time.perf_counter()
    record: RequestRecord = request.scope[RECORD]
    record.api_format = NAME
    asked = app.decode(request, body, VerifyRequest)
    name = asked.receipt.model
    model = await app.models.usable(app.models.by_default(app.models.find(name)), name)
    context = model.context
    check_task(request.scope["path"], ("generate",), context)

    def decode_for(sent: bytes, kind: type[RequestModel], path: str) -> Any:
        return app.decode(request, sent, kind, path)

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
