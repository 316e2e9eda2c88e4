"""The life of a request that generates text: read, parse, start the generation, write the response.

This module handles the HTTP side. The route's API format (ApiFormat) reads the request and builds the response.
"""

import asyncio
import time
from collections.abc import Awaitable
from contextlib import closing
from functools import partial
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from frontend.api.answer import ResponseContext
from frontend.api.formats import ApiFormat, api_format
from frontend.app_state import AppState
from frontend.chat.reasoning import without_effect
from frontend.generation.generation import Generation
from frontend.model_context import check_task
from frontend.server.middleware import (
    API_FORMAT,
    CLOSED,
    DIRECT,
    RECORD,
    REQUEST_ID,
    SEND,
    STREAMS,
    RequestRecord,
    client_error,
)
from frontend.server.sse import EventStream, RecordedWriter

T = TypeVar("T")


async def generate(app: AppState, request: Request) -> Response:
    body, begun = await app.body(request), time.perf_counter()
    record: RequestRecord = request.scope[RECORD]
    chosen = request.scope[API_FORMAT] = await api_format(request.scope["path"], body, app.config)
    record.api_format = chosen.NAME
    if app.config.record_text:
        record.body, record.release = body, partial(app.bodies.release, request)
    decoded = await app.decode(request, body, chosen.REQUEST)
    request.scope[STREAMS] = getattr(decoded, "stream", False)
    if app.kept is not None:
        from frontend.routes.kept import generate_kept, keeping

        if (wish := keeping(request, decoded)) is not None:
            return await generate_kept(app, request, wish, chosen, body, begun)
    model = await app.usable_model(request, decoded)
    context = model.context.at(created := int(time.time()))
    check_task(request.scope["path"], ("generate",), context)
    app.note_ignored(request, without_effect(decoded, context))
    with WhileConnected(request):
        generation_request = await chosen.parse(decoded, context)
        del body, decoded  # they may take many MiB, and the answer may take long
        if not app.config.record_text:  # else the record keeps the body until the request has ended
            app.bodies.release(request)
        if isinstance(generation_request, bytes):  # the whole response, if no generation is needed
            return Response(generation_request, media_type="application/json")
        if record.admission:
            generation_request = generation_request.admitted(**record.admission)
        record.generation_request = generation_request
        generation = await model.service.start(generation_request, begun)
    record.generation = generation
    fingerprint = app.sign(request, model, generation.fingerprint)
    response_context = ResponseContext(
        generation_request, context.tokenizer, chosen.PREFIX, fingerprint, request.scope["path"], app.signer,
        created=created,
    )  # fmt: skip
    if generation_request.stream:
        return _stream(app, request, chosen, response_context, generation)
    with closing(generation):
        answer = await while_connected(request, chosen.complete(response_context, generation.deltas()))
    if app.config.record_text:
        record.answer.append(answer)
    return Response(answer, media_type="application/json")


def _stream(
    app: AppState, request: Request, chosen: ApiFormat, context: ResponseContext, generation: Generation
) -> Response:
    request_id = request.scope[REQUEST_ID]
    writer = chosen.stream_writer(context)
    if app.config.record_text:
        writer = RecordedWriter(writer, request.scope[RECORD].answer)
    return EventStream(
        generation,
        writer,
        stream_error=lambda exc: chosen.stream_error(client_error(exc, request_id), request_id, context),
        close=lambda: generation.close(request.scope.get(CLOSED, "client")),
        keepalive_s=app.config.keepalive_s,
        framing=chosen.FRAMING,
        send=request.scope[SEND],
        direct=request.scope.get(DIRECT),
    )


class WhileConnected:
    """A `with` block that ends when the client disconnects: its work is cancelled, and ClientDisconnect is raised.

    The body of the request must have been read.
    """

    def __init__(self, request: Request) -> None:
        self._request, self._disconnected = request, False

    def __enter__(self) -> None:
        self._here = asyncio.current_task()
        self._watching = asyncio.create_task(self._watch())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._watching.cancel()
        if kind is asyncio.CancelledError and self._disconnected and self._here and not self._here.uncancel():
            raise ClientDisconnect from None

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        if self._here is not None:
            self._here.cancel()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Returns the result of `work`. If the client disconnects first, cancels `work` and raises ClientDisconnect."""
    with WhileConnected(request):
        return await work
