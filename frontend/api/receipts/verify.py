"""Reads the request of a receipt as its original route does, so that the receipt can be checked. Runs nothing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from frontend.api.model_context import ModelContext
from frontend.api.receipts.claim import Claim, VerifyRequest, checking_worker
from frontend.api.requests.decoding import decode
from frontend.api.requests.encoding import to_json
from frontend.api.requests.request_model import RequestModel
from frontend.api.requests.unknown_fields import UnknownFields
from frontend.errors import BadRequest, SluiceError
from frontend.request import GenerationRequest


class Format(Protocol):
    """The part of an API format that reads a request; see frontend/api/api_formats.py."""

    @property
    def REQUEST(self) -> type[RequestModel]: ...

    async def parse(self, request: Any, context: ModelContext, /) -> GenerationRequest | bytes: ...


Decode = Callable[[bytes, type[RequestModel], str], Any]  # decodes a body into a type; the last argument is the route


def _decode(body: bytes, kind: type[RequestModel], path: str) -> Any:
    return decode(body, kind, UnknownFields("auto").reader(path, {}))


async def read_claim(
    asked: VerifyRequest,
    context: ModelContext,
    workers: Sequence[str],
    formats: Mapping[str, Format],
    decode_for: Decode = _decode,
) -> Claim:
    """Reads the request of a receipt. Raises BadRequest or Unprocessable, which name the field.

    workers: the fingerprints of the ready workers
    formats: by route, the API formats whose answers can have receipts
    """
    worker = checking_worker(asked, context, workers)
    route = asked.receipt.route
    if route not in formats:
        known = ", ".join(formats)
        raise BadRequest(f"`receipt.route` must be one of {known}, got {route!r:.80}", param="receipt.route")
    chosen = formats[route]
    context = context.at(asked.receipt.created)
    try:
        parsed = await chosen.parse(decode_for(to_json(asked.request), chosen.REQUEST, route), context)
    except SluiceError as error:
        error.message = f"the `request` of the receipt cannot be read: {error.message}"
        error.param = f"request.{error.param}" if error.param else "request"
        raise
    if not isinstance(parsed, GenerationRequest):
        raise BadRequest("`request` asks for no tokens, so it has no receipt", param="request")
    return Claim.of(asked, parsed, context.vocab_size, worker)
