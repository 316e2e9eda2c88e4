"""The objects that all routes share (settings, table of models, metrics), and how a route reads a body.

Knows Starlette's requests and responses, but no route.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.chat.large_chats import body_bytes
from frontend.errors import UnsupportedMediaType
from frontend.model_table import ModelTable, ServedModel
from frontend.observability.metrics import PrometheusMetrics
from frontend.schema.base import RequestModel, to_json
from frontend.schema.decoding import OnUnknown, UnknownFields, check_values, decode, decode_valid
from frontend.server.access import administers
from frontend.server.bodies import Bodies, Remembered, coding_of, largest_body
from frontend.server.middleware import FINGERPRINT, IGNORED_FIELDS, RECORD, RequestRecord, header_value
from frontend.turns import FairThreads
from shared.config.frontend import FrontendConfig
from shared.signing import Signer

if TYPE_CHECKING:
    from frontend.kept.kept import Kept

R = TypeVar("R", bound=RequestModel)

# The accepted content types of a JSON body: the correct one, the one that `curl -d` sends by default, and the one that
# a browser's `fetch` sends by default.
JSON_TYPES = frozenset({"", "application/json", "application/x-www-form-urlencoded", "text/plain"})


@dataclass(frozen=True)
class AppState:
    """The state that all routes share, as long as the app lives. A route handler gets this state and the request."""

    config: FrontendConfig
    models: ModelTable
    metrics: PrometheusMetrics
    signer: Signer | None = None  # signs receipts
    kept: "Kept | None" = None  # only with --store
    bodies: Bodies = field(default_factory=Bodies)
    remembered: Remembered = field(default_factory=Remembered)
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970

    def model_of(self, decoded: RequestModel) -> ServedModel:
        """Returns the model that a decoded body selects by `model` (see ModelTable.find) or by llama.cpp's `lora`."""
        found, scales = self.models.find(getattr(decoded, "model", None)), getattr(decoded, "lora", None)
        if scales is None:
            return self.models.by_default(found)
        return self.models.scaled({one.id: one.scale for one in scales}) if scales else found

    async def usable_model(self, request: Request, decoded: RequestModel, *, computing: bool = True) -> ServedModel:
        """Returns the model that a decoded body selects, as soon as it can serve (see ModelTable.usable).

        Only an administrator's `keep_alive` has an effect, because it unloads models that others use.
        """
        found, name = self.model_of(decoded), getattr(decoded, "model", None)
        keep_alive = getattr(decoded, "keep_alive", None)
        if keep_alive is not None and not administers(request):
            keep_alive = None
            self.note_ignored(request, ["keep_alive"])
        return await self.models.usable(found, name, computing=computing, keep_alive=keep_alive)

    def sign(self, request: Request, model: ServedModel, worker: str) -> str:
        """Returns the fingerprint of a response, and adds it to the headers. worker: the worker's fingerprint"""
        record: RequestRecord = request.scope[RECORD]
        found = record.fingerprint = model.fingerprint_with(worker)
        if found:
            request.scope[FINGERPRINT] = found
        return found

    async def body(self, request: Request) -> bytes:
        """Reads the body, and unpacks it. Raises what `Bodies.read`, `coding_of` and `check_media_type` raise."""
        check_media_type(request)
        coding = coding_of(request.headers.get("content-encoding", ""))
        body = await self.bodies.read(request, self.most_body_bytes, coding)
        body_bytes.set(len(body))
        check_values(body)
        return body

    @property
    def most_body_bytes(self) -> int:
        """The limit on a body."""
        return self.config.max_body_bytes or largest_body(self._most_images())

    def _most_images(self) -> int:
        """Returns how many images a request may have: 0 only if all models are loaded and none accepts images."""
        accepted = any(not one.service.has_tokenizer or one.service.tokenizer.image_format for one in self.models)
        return self.config.max_images_per_request if accepted else 0

    async def decode(self, request: Request, body: bytes, kind: type[R], path: str = "") -> R:
        """Returns the body as `kind`, and notes ignored fields for a response header. Raises what `decode` raises.

        path: the route whose fields the body has; empty: the path of the request
        """
        ignored: dict[str, None] = {}
        unknown = self._unknown_fields.reader(path or request.scope["path"], ignored)
        decoded = decode(body, kind, unknown) if len(body) <= FEW_BYTES else await _large(body, kind, unknown)
        if ignored:
            request.scope[IGNORED_FIELDS] = header_value(ignored)
        return decoded

    def read(self, body: bytes, kind: type[R], path: str, ignored: dict[str, None]) -> R:
        """Returns the body as `kind`, and adds to `ignored` the fields that the route `path` does not have."""
        return decode(body, kind, self._unknown_fields.reader(path, ignored))

    def note_ignored(self, request: Request, names: Iterable[str]) -> None:
        """Names fields without an effect on this model in the response header, after those that are unknown."""
        noted = request.scope.get(IGNORED_FIELDS)
        ignored = dict.fromkeys(quote(name, safe="[]") for name in names)
        if ignored:
            request.scope[IGNORED_FIELDS] = header_value(({noted: None} if noted else {}) | ignored)

    @cached_property
    def _unknown_fields(self) -> UnknownFields:
        return UnknownFields(self.config.unknown_fields)


FEW_BYTES = 1 << 16
# Makes values of a large body, which takes up to 0.1 s: one body after another, and between two of them the event loop
# has a turn. On the loop itself, all that have arrived together would hold it.
DECODING = FairThreads("bodies", 1)
# Looks for what is wrong in a large body, value by value, which takes ten times as long as decoding it.
SEARCHES = FairThreads("body-errors", 3, each=2, most_waiting=64, doing="wrong bodies wait to be read")


async def _large(body: bytes, kind: type[R], on_unknown: OnUnknown) -> R:
    try:
        return await DECODING.run(decode_valid, body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return await SEARCHES.run(decode, body, kind, on_unknown)


def check_media_type(request: Request) -> None:
    """Raises UnsupportedMediaType for a body whose content type is not JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in JSON_TYPES and not kind.endswith("+json"):
        raise UnsupportedMediaType(
            f"`Content-Type` must be application/json, not {kind!r:.80}", code="unsupported_media_type"
        )


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")
