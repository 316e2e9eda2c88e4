"""Requests whose answers are kept: generating ones, and the streams that are asked for again.

An answer is kept if it is a response that asks for nothing else (`store`), or if its stream has an id
(`X-Conversation-Id`).
routes/generate.py hands such requests over when the server has a store; all others take its own path.

A response that follows another one is made into a request that contains the whole conversation, before it is read. So
the rest of the server, and the store, know only whole requests.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from frontend.api.answer import ResponseContext
from frontend.api.formats import ApiFormat, api_format
from frontend.api.openai import responses
from frontend.api.openai.responses_request import STATEFUL, ConversationId, ResponseCountRequest, ResponseRequest
from frontend.app_state import DECODING, AppState, json_response
from frontend.chat.large_chats import body_bytes
from frontend.chat.reasoning import without_effect
from frontend.errors import BadRequest, Forbidden, Internal, NotFound, NotSupported, TooLarge
from frontend.generation.generation import Generation
from frontend.generation.service import Earlier
from frontend.kept import answers, conversations
from frontend.kept.answers import Arrival, KeptAnswer, Piece, Recipe
from frontend.kept.database import Connection, Damaged, StoreError
from frontend.kept.kept import Kept
from frontend.kept.run import Cut, Manner, Run, offset_after, with_fields
from frontend.kept.stream_log import StreamLog
from frontend.model_context import check_task
from frontend.request import GenerationRequest
from frontend.routes.generate import WhileConnected, while_connected
from frontend.schema.base import RequestModel, to_json
from frontend.schema.decoding import check_values
from frontend.server.middleware import DIRECT, RECORD, SEND, DirectWriter, client_error

STREAM_ID = "x-conversation-id"
LAST_EVENT = "last-event-id"
MAX_ID_CHARS = 256
NOTHING = (b"", b"null", b'""', b"[]")  # as which JSON says that nothing was asked
LISTED, MAX_QUESTION = 50, 4000  # streams of a list, and characters of a question in it
RECOMPUTE_S = 600.0  # time limit for computing again the part of an answer that another process had generated


@dataclass(frozen=True, slots=True)
class Wish:
    """How a request wants its answer to be kept.

    listed: whether it is a response that can be asked for by its id
    conversation: the conversation that gets the items of input and output; "": none
    """

    tenant: str
    listed: bool = False
    background: bool = False
    stream_id: str | None = None
    previous: str | None = None
    conversation: str = ""


def store_of(app: AppState) -> Kept:
    """Returns the server's kept answers. Raises NotFound if it keeps none."""
    if app.kept is None:
        raise NotFound("this server keeps no answers (--store)", code="no_store")
    return app.kept


def tenant_of(request: Request) -> str:
    """Returns whose answers a request may see: those of its API key's name, or of a gateway's fairness id."""
    return str(request.scope[RECORD].admission.get("tenant", ""))


def keeping(request: Request, decoded: RequestModel) -> Wish | None:
    """Returns how the answer to a request is to be kept; None: not at all. Raises BadRequest."""
    stream_id = request.headers.get(STREAM_ID)
    if stream_id is not None and not 0 < len(stream_id) <= MAX_ID_CHARS:
        raise BadRequest(f"`X-Conversation-Id` must have 1 to {MAX_ID_CHARS} characters", code="out_of_range")
    wish = Wish(tenant_of(request), stream_id=stream_id if getattr(decoded, "stream", False) else None)
    if isinstance(decoded, ResponseRequest):
        listed = decoded.store is not False
        if decoded.background and not listed:
            raise BadRequest("`background` needs `store`", param="background", code="out_of_range")
        wish = replace(following(wish, decoded), listed=listed, background=bool(decoded.background))
    wanted = wish.listed or wish.stream_id or wish.previous or wish.conversation
    return wish if wanted else None


def following(wish: Wish, decoded: ResponseRequest | ResponseCountRequest) -> Wish:
    """Returns the wish with the response or the conversation that a request follows. Raises BadRequest."""
    if decoded.conversation and decoded.previous_response_id:
        raise BadRequest(
            "`conversation` and `previous_response_id` exclude each other", param="conversation", code="out_of_range"
        )
    conversation = decoded.conversation
    id = conversation.id if isinstance(conversation, ConversationId) else conversation or ""
    return replace(wish, previous=decoded.previous_response_id, conversation=id)


async def generate_kept(
    app: AppState, request: Request, wish: Wish, chosen: ApiFormat, body: bytes, begun: float
) -> Response:
    kept = store_of(app)
    if wish.stream_id is not None and LAST_EVENT in request.headers:
        return await _stream_again(kept, request, await kept.find_stream(wish.stream_id, wish.tenant))
    if wish.background and kept.store.problem:
        raise StoreError(kept.store.problem)
    if full := await kept.usage.problem(wish.tenant, len(body)):
        app.metrics.storage_refused(request.scope[RECORD].tenant)
        if wish.background:
            raise TooLarge(full, code="storage_limit")
    whole, earlier = await whole_request(app, wish, body)
    decoded = await app.decode(request, whole, chosen.REQUEST)
    model = await app.usable_model(request, decoded)
    context = model.context.at(created := int(time.time()))
    check_task(request.scope["path"], ("generate",), context)
    app.note_ignored(request, without_effect(decoded, context))
    record = request.scope[RECORD]
    with WhileConnected(request):
        parsed = await chosen.parse(decoded, context)
        if isinstance(parsed, bytes):  # the whole response, if no generation is needed
            return Response(parsed, media_type="application/json")
        parsed = parsed.admitted(**record.admission)
        generation = await model.service.start(parsed, begun)
    echoed = _echoed(wish)
    if isinstance(parsed.format_data, dict):
        parsed = replace(parsed, format_data=parsed.format_data | echoed)
    record.generation_request, record.generation = parsed, generation
    response_context = ResponseContext(
        parsed, context.tokenizer, chosen.PREFIX, app.sign(request, model, generation.fingerprint),
        request.scope["path"], app.signer, created=created,
    )  # fmt: skip
    recipe = _recipe(response_context, generation, dict(record.admission), echoed, earlier)
    run = _run(kept, wish, chosen, response_context, generation, recipe, whole, request.scope["path"])
    run.also = _conversation_of(run.answer)
    run.problem = full
    await kept.begin(run)
    if run.problem and wish.background:
        run.cancel()
        raise StoreError(run.problem)
    if parsed.stream:
        return _run_stream(request, run, 0)
    if wish.background:
        return Response(run.answer.response, media_type="application/json")
    return Response(await _finished(request, run, generation), media_type="application/json")


async def _finished(request: Request, run: Run, generation: Generation) -> bytes:
    """Returns the response, or raises the error that ended it, as for any request."""
    response = await while_connected(request, run.finished())
    if generation.error is not None:
        raise generation.error
    if not response:
        raise Internal("the response has no end")
    return response


def _echoed(wish: Wish) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "store": wish.listed, "background": wish.background, "previous_response_id": wish.previous,
    }  # fmt: skip
    return fields | ({"conversation": {"id": wish.conversation}} if wish.conversation else {})


def _recipe(
    context: ResponseContext,
    generation: Generation,
    admission: dict[str, Any],
    echoed: dict[str, Any],
    earlier: int,
) -> Recipe:
    return Recipe(
        prompts=list(context.request.prompts), seeds=[choice.stream.seed for choice in generation.choices],
        fingerprint=generation.fingerprint, nonce=context.nonce, created=context.created, admission=admission,
        echoed=echoed, earlier=earlier,
    )  # fmt: skip


def _run(
    kept: Kept, wish: Wish, chosen: ApiFormat, context: ResponseContext, generation: Generation, recipe: Recipe,
    body: bytes, path: str,
) -> Run:  # fmt: skip
    named = wish.listed or wish.stream_id is None
    first = to_json(responses.started(context, "queued")) if chosen.NAME == responses.NAME else b""
    answer = KeptAnswer(
        f"{chosen.PREFIX}_{context.nonce}", wish.tenant, wish.stream_id, path, context.created, answers.QUEUED, None,
        wish.background, named and wish.listed, body, recipe, first, kept.store.owner, 1, False,
    )  # fmt: skip
    return _made(kept, kept.logs.current(), answer, chosen, context, generation)


def _made(
    kept: Kept, log: StreamLog, answer: KeptAnswer, chosen: ApiFormat, context: ResponseContext, generation: Generation
) -> Run:
    logged = answer.background or answer.stream_id is not None
    window = None if answer.background else kept.window_s if answer.stream_id is not None else 0.0
    request_id = answer.id
    return Run(
        kept.store, kept.logs, log, answer, generation,
        # the stream's writer also makes the response of a request that does not stream: its last event has it
        chosen.stream_writer(context),
        lambda exc: chosen.stream_error(client_error(exc, request_id), request_id, context),
        Manner(logged, answer.listed or logged, window, kept.keepalive_s, chosen.FRAMING),
        kept.held, kept.gone,
    )  # fmt: skip


# requests that follow a kept response


def _conversation_of(answer: KeptAnswer) -> Callable[[Connection, bytes], None] | None:
    """Returns what adds the items of an answer to its conversation; None: it has none."""
    conversation = answer.recipe.echoed.get("conversation")
    if conversation is None:
        return None
    given = as_items(msgspec.json.decode(answer.body)["input"])[answer.recipe.earlier :]

    def add(db: Connection, response: bytes) -> None:
        items = given + msgspec.json.decode(response)["output"]
        conversations.add(db, conversation["id"], items, answer.recipe.nonce)

    return add


async def whole_request(app: AppState, wish: Wish, body: bytes) -> tuple[bytes, int]:
    """Returns the body with the items of the earlier responses in front of its own, and without the fields for them;
    and the number of these items.

    Raises NotFound if there are none of this tenant, and what `AppState.body` raises for a body that is so large.
    """
    if not (wish.previous or wish.conversation or wish.background):
        return body, 0
    items: list[Any] = []
    kept, most = store_of(app), app.most_body_bytes
    if wish.previous:
        items = await items_until(kept, wish.previous, wish.tenant)
    elif wish.conversation:
        items = [*await conversations.items_of(kept.store, wish.conversation, wish.tenant, most)]
    whole = await DECODING.run(_joined, body, items, most)
    body_bytes.set(len(whole))
    return whole, len(items)


def _joined(body: bytes, items: list[Any], most: int) -> bytes:
    raw: dict[str, Any] = msgspec.json.decode(body)
    if items:
        raw["input"] = items + as_items(raw["input"])
    for name in STATEFUL:
        raw.pop(name, None)
    whole = msgspec.json.encode(raw)
    if len(whole) > most:
        raise TooLarge(
            f"the request and what it follows have {len(whole)} bytes, and a body may have {most} (--max-body-bytes)",
            code="request_too_large",
        )  # fmt: skip
    check_values(whole)
    return whole


async def items_until(kept: Kept, id: str, tenant: str) -> list[Any]:
    """Returns all items up to the end of a kept response. Raises BadRequest and NotFound, which name the field."""
    try:
        found = await kept.find(id, tenant)
    except NotFound as exc:
        raise NotFound(exc.message, param="previous_response_id", code="previous_response_not_found") from None
    if found.status not in ("completed", "incomplete"):
        raise BadRequest(
            f"`previous_response_id`: the response {id} is {found.status}", param="previous_response_id",
            code="previous_response_not_ended",
        )  # fmt: skip
    return await DECODING.run(_items_of, found)


def _items_of(found: KeptAnswer) -> list[Any]:
    return [*as_items(msgspec.json.decode(found.body)["input"]), *msgspec.json.decode(found.response)["output"]]


def as_items(given: Any) -> list[Any]:
    """Returns the items of an `input`."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return list(given)


# streams


def _run_stream(request: Request, run: Run, offset: int) -> Response:
    return _RunStream(
        run, offset, request.scope[SEND], request.scope.get(DIRECT),
        headers=_headers(run.problem) | _kept_as(request, run),
        media_type=run.manner.framing.media_type,
    )  # fmt: skip


def _event_stream(data: AsyncIterator[bytes], media_type: str) -> Response:
    return _KeptStream(data, headers=_headers(""), media_type=media_type)


def _headers(problem: str) -> dict[str, str]:
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if problem:
        headers["X-Sluice-Not-Kept"] = problem.encode("ascii", "replace").decode()[:256]
    return headers


def _kept_as(request: Request, run: Run) -> dict[str, str]:
    """Returns the header that tells a client, before the first event, that it can ask for the stream by its id."""
    stream_id = request.headers.get(STREAM_ID)
    return {"X-Conversation-Id": stream_id} if stream_id is not None and not run.problem else {}


class _RunStream(Response):
    """A stream that this process generates. The run itself writes to the client while that keeps up (server/sse.py)."""

    def __init__(self, run: Run, offset: int, direct_send: Send, direct: DirectWriter | None, **head: Any) -> None:
        super().__init__(**head)
        del self.headers["content-length"]
        self._run, self._offset, self._send, self._direct = run, offset, direct_send, direct
        self._more = asyncio.Event()  # wakes the task that writes
        self._sending = True  # whether the task writes
        self._left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnect = asyncio.create_task(self._watch_client(receive))
        try:
            with self._run.reading(self._on_more):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._write()
            if self._run.cut and not self._left:
                if self._direct is None:
                    raise Cut
                self._direct.cut()
                await disconnect
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            disconnect.cancel()

    async def _write(self) -> None:
        while not self._left:
            self._sending = True
            while data := self._new():
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._sending = False
            if self._run.over or self._run.cut:
                return
            await self._more.wait()
            self._more.clear()

    def _on_more(self) -> None:
        """Writes what there is, or wakes the task to write it if writing would have to wait."""
        if self._sending or self._direct is None or not self._direct.ready():
            self._more.set()
            return
        if data := self._new():
            self._direct.write(data)
        if self._run.over or self._offset < self._run.shown:
            self._more.set()

    def _new(self) -> bytes:
        data = self._run.since(self._offset)
        self._offset += len(data)
        return data

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self._more.set()


class _KeptStream(StreamingResponse):
    """A stream of another process, or one that has ended. It is cut when another process goes on with it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except Cut:
            scope[DIRECT].cut()
            while (await receive())["type"] != "http.disconnect":
                pass


async def _stream_again(kept: Kept, request: Request, answer: KeptAnswer) -> Response:
    """Streams a kept answer from where the request says: after an event, or from a byte (`from`)."""
    last, start = request.headers.get(LAST_EVENT), request.query_params.get("from", "0")
    offset = _number("from", start)
    if last is not None:
        offset = await offset_after(kept.written(answer), _number("Last-Event-ID", last), name="Last-Event-ID")
    elif offset > (most := sum([len(data) async for data in kept.written(answer)])):
        raise BadRequest(f"`from` is {offset}, but the stream has {most} bytes", param="from", code="out_of_range")
    chosen = await api_format(answer.path, b"", kept.config)
    if (run := await kept.take_up(answer)) is not None:
        return _run_stream(request, run, offset)
    return _event_stream(kept.follow(answer, offset), chosen.FRAMING.media_type)


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise BadRequest(f"`{name}` must be a number from 0, not {text!r:.40}", param=name, code="out_of_range")
    return int(text)


async def get_stream(app: AppState, request: Request) -> Response:
    kept = store_of(app)
    return await _stream_again(kept, request, await _asked_stream(kept, request))


async def list_streams(app: AppState, request: Request) -> Response:
    """Lists the newest streams of the key. Raises Forbidden where there are no keys: every client would see all."""
    kept = store_of(app)
    if not app.config.keyed:
        raise Forbidden(
            "streams are listed by the API key that asked for them, and this server has no keys (--api-keys)"
        )
    ids = await kept.store.read(partial(answers.streams_of, tenant=tenant_of(request), most=LISTED))
    # one after another, so that the store reads for others, too: each may have a large request
    found = [await kept.store.read(partial(answers.shown, id=id, show=_listed_stream)) for id in ids]
    return json_response({"object": "list", "data": [one for one in found if one is not None]})


class _Asked(msgspec.Struct):
    """What a list shows of a request. All else is skipped, and not made into objects."""

    model: str | None = None
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()


class _Said(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw()


class _Text(msgspec.Struct):
    text: str | None = None


def _listed_stream(answer: KeptAnswer) -> dict[str, Any]:
    asked = msgspec.json.decode(answer.body, type=_Asked)
    return {
        "id": answer.stream_id, "object": "stream", "created_at": answer.created, "path": answer.path,
        "model": asked.model, "status": answer.status if answer.ended is not None else answers.RUNNING,
        "question": _question(asked)[:MAX_QUESTION],
    }  # fmt: skip


def _question(asked: _Asked) -> str:
    """Returns the text that was asked last; empty if it has another form."""
    given = next((raw for raw in (asked.messages, asked.input, asked.prompt) if bytes(raw) not in NOTHING), None)
    with suppress(msgspec.ValidationError):
        if given is not None and bytes(given)[:1] == b"[":
            given = msgspec.json.decode(msgspec.json.decode(given, type=list[msgspec.Raw])[-1], type=_Said).content
        if given is not None and bytes(given)[:1] == b"[":
            return "\n".join([part.text for part in msgspec.json.decode(given, type=list[_Text]) if part.text])
        return msgspec.json.decode(given, type=str) if given else ""
    return ""


async def delete_stream(app: AppState, request: Request) -> Response:
    kept = store_of(app)
    try:
        answer = await _asked_stream(kept, request)
    except NotFound:
        return Response(status_code=204)
    await (kept.cancel(answer) if answer.listed else kept.delete(answer))
    return Response(status_code=204)


async def _asked_stream(kept: Kept, request: Request) -> KeptAnswer:
    stream_id = request.path_params.get("id") or request.query_params.get("conv_id")
    if not stream_id:
        raise BadRequest("`conv_id` is missing", param="conv_id", code="missing_field")
    return await kept.find_stream(stream_id, tenant_of(request))


# responses by id


async def get_response(app: AppState, request: Request) -> Response:
    kept, query = store_of(app), request.query_params
    answer = await kept.find(request.path_params["id"], tenant_of(request))
    if query.get("stream", "").lower() in ("true", "1"):
        if (run := await kept.take_up(answer)) is not None:
            answer = run.answer  # which may have begun anew
        after = query.get("starting_after")
        number = -1 if after is None else _number("starting_after", after)
        if answer.ended is not None and await anext(kept.written(answer), None) is None:
            raise BadRequest(
                "`stream`: this response was not generated in the background, so its events are not kept",
                param="stream", code="not_streamable",
            )  # fmt: skip
        if after is not None and answer.recipe.restarted:
            raise Damaged("its first events were lost in a power cut: ask for the stream without `starting_after`")
        offset = await offset_after(kept.written(answer), number, name="starting_after")
        if run is not None:
            return _run_stream(request, run, offset)
        return _event_stream(kept.follow(answer, offset), responses.FRAMING.media_type)
    return Response(_shown(answer), media_type="application/json")


def _shown(answer: KeptAnswer) -> bytes:
    return answer.response if answer.ended is not None else with_fields(answer.response, status=answer.status)


async def delete_response(app: AppState, request: Request) -> Response:
    kept = store_of(app)
    answer = await kept.find(request.path_params["id"], tenant_of(request))
    await kept.delete(answer)
    return json_response({"id": answer.id, "object": "response", "deleted": True})


async def cancel_response(app: AppState, request: Request) -> Response:
    kept, tenant = store_of(app), tenant_of(request)
    answer = await kept.find(request.path_params["id"], tenant)
    if not answer.background:
        raise BadRequest("only a response with `background` can be cancelled", code="not_cancellable")
    await kept.cancel(answer)
    return Response(_shown(await kept.find(answer.id, tenant)), media_type="application/json")


async def compact(app: AppState, request: Request) -> Response:
    """Raises NotSupported: this server sends the model no prompt that its clients did not write."""
    raise NotSupported(
        "conversations are not compacted here: a summary needs a prompt, which you should choose. Ask the model for a "
        "summary in a request to /v1/responses, and send it in place of the items that it stands for",
        code="unsupported_route",
    )


async def input_items(app: AppState, request: Request) -> Response:
    kept = store_of(app)
    answer = await kept.find(request.path_params["id"], tenant_of(request))
    return json_response(await DECODING.run(_page_of_items, answer, request.query_params))


def _page_of_items(answer: KeptAnswer, query: Mapping[str, str]) -> dict[str, Any]:
    items = [
        {"id": f"{conversations.prefix(item)}_{answer.recipe.nonce}{place:08x}"} | conversations.shown(item)
        for place, item in enumerate(as_items(msgspec.json.decode(answer.body)["input"]))
    ]
    return conversations.page(items, query)


# going on with an answer of another process


async def resume(app: AppState, answer: KeptAnswer, log: StreamLog) -> Run:
    """Goes on with an answer that this process has claimed: from its body, its prompt's ids and its seeds.

    log: where its stream is written
    Raises SluiceError if this is not possible now: no worker is ready, or none computes the same bits.
    """
    kept, recipe = store_of(app), answer.recipe
    chosen = await api_format(answer.path, answer.body, app.config)
    decoded = app.read(answer.body, chosen.REQUEST, answer.path, {})
    found = app.model_of(decoded)
    model = await app.models.usable(found, getattr(decoded, "model", None), computing=True, keep_alive=None)
    context = model.context.at(recipe.created)
    parsed = await chosen.parse(decoded, context)
    if isinstance(parsed, bytes):
        raise Internal("the kept request needs no generation")
    parsed = replace(parsed, prompts=tuple(recipe.prompts)).admitted(
        **recipe.admission | {"fingerprint": recipe.fingerprint}
    )
    pieces = await kept.store.read(partial(answers.pieces_of, id=answer.id))
    generation = await model.service.start(parsed, None, _earlier(parsed, recipe, pieces))
    if isinstance(parsed.format_data, dict):
        parsed = replace(parsed, format_data=parsed.format_data | recipe.echoed)
    response_context = ResponseContext(
        parsed, context.tokenizer, chosen.PREFIX, model.fingerprint_with(generation.fingerprint), answer.path,
        app.signer, nonce=recipe.nonce, created=recipe.created,
    )  # fmt: skip
    run = _made(kept, log, answer, chosen, response_context, generation)
    run.also = _conversation_of(answer)
    run.restore(pieces)
    try:
        await asyncio.wait_for(_received(generation, pieces), RECOMPUTE_S)
        run.replay(pieces)
    except (ValueError, TimeoutError) as exc:
        run.refuse(Internal(str(exc) or "the answer could not be computed again in time"))
    except BaseException:
        generation.close("error")
        raise
    else:
        run.begin()
    return run


def _earlier(request: GenerationRequest, recipe: Recipe, pieces: list[Piece]) -> list[Earlier]:
    """Returns what each choice begins with. One choice without log-probabilities continues after its kept tokens.

    All others are computed anew with their seeds: the log-probabilities and ends of their tokens are not kept.
    """
    alone = len(recipe.seeds) == 1 and request.sampling.logprobs is None and request.features.prompt_logprobs is None
    tokens = [id for _, ids, _ in _arrivals(pieces) for id in ids] if alone else []
    return [Earlier(seed, tokens) for seed in recipe.seeds]


def _arrivals(pieces: list[Piece]) -> Iterator[Arrival]:
    return (arrival for piece in pieces for arrivals in piece.writes for arrival in arrivals)


async def _received(generation: Generation, pieces: list[Piece]) -> None:
    """Waits until everything has been received that the pieces have."""
    counts, ended = [0] * len(generation.choices), set[int]()
    for index, ids, end in _arrivals(pieces):
        counts[index] += len(ids)
        if end:
            ended.add(index)
    ready = asyncio.Event()
    for index, choice in enumerate(generation.choices):
        stream, start = choice.stream, choice.stream.gathered
        stream.on_fresh = ready.set
        while stream.end is None and (index in ended or len(stream.output) < start + counts[index]):
            ready.clear()
            await ready.wait()
