"""OpenAI's Files API on a server with a store: files are uploaded for batches, listed, read and deleted."""

import secrets
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from frontend.api.openai.batches import MAX_EXPIRY_S, MIN_EXPIRY_S
from frontend.app_state import AppState, json_response
from frontend.errors import BadRequest, TooLarge
from frontend.kept import conversations, files, usage
from frontend.kept.files import PART_BYTES, KeptFile
from frontend.kept.kept import Kept
from frontend.kept.store import Store, Work
from frontend.kept.usage import STORAGE_LIMIT, limit_text
from frontend.routes.kept import store_of, tenant_of
from frontend.server import multipart
from frontend.server.bodies import coding_of, unpacked
from frontend.server.middleware import RECORD
from frontend.server.multipart import Part
from frontend.turns import FairThreads

PURPOSES = ("batch",)
FORM_BYTES = 1 << 16  # limit on a form without its file
MAX_LISTED, LISTED = 10_000, 10_000  # files of a page: at most, and without `limit`
SECONDS, ANCHOR = "expires_after[seconds]", "expires_after[anchor]"
COUNTED_BYTES = 8 << 20  # of a file whose length is not announced are counted at a time
PACKING = FairThreads("packing", 2)  # compress; any number may wait: uploads and bodies are bounded
T = TypeVar("T")
Upload = tuple[dict[str, str], int]  # the other fields of a form, and the bytes of its file


async def upload(app: AppState, request: Request) -> Response:
    kept, tenant = store_of(app), tenant_of(request)
    boundary = multipart.boundary_of(request.headers.get("content-type", ""))
    coding = coding_of(request.headers.get("content-encoding", ""))
    announced = request.headers.get("content-length", "0")
    least = max(0, int(announced) - FORM_BYTES) if announced.isdigit() and coding is None else 0
    _check_size(kept, least)
    file = KeptFile(f"file-{secrets.token_hex(12)}", tenant, int(time.time()), None, "", "", least, False)
    await add_stored(app, request, least, partial(files.insert, one=file))
    try:
        parts = multipart.parts(unpacked(request.stream(), coding), boundary)
        with _counted(app, request):
            fields, size = await _received(kept, parts, file)
        purpose, name = fields.get("purpose", ""), fields["file"]
        if purpose not in PURPOSES:
            given = f", not {purpose!r:.80}" if purpose else ""
            raise BadRequest(f"`purpose` must be batch{given}", param="purpose", code="out_of_range")
        done = replace(file, bytes=size, filename=name, purpose=purpose, expires=_expiry(fields), whole=True)
        await kept.store.write(partial(files.complete, one=done))
    except BaseException:
        kept.store.post(partial(files.delete, id=file.id), lambda value, error: None)
        raise
    return json_response(done.shown())


async def add_stored(app: AppState, request: Request, size: int, work: Work[T]) -> T:
    """Runs `work`, which adds `size` bytes to the store, and returns its result.

    Raises TooLarge if the key of the request may not have so many, and counts that.
    """
    kept = store_of(app)
    with _counted(app, request):
        return await _add(kept, tenant_of(request), size, work)


async def _add(kept: Kept, tenant: str, size: int, work: Work[T]) -> T:
    """Checks and writes in one transaction, so that what comes at the same time passes no limit together."""
    most = kept.usage.most
    fits, made = await kept.store.write(partial(usage.within, tenant=tenant, size=size, most=most, work=work))
    if not fits:
        raise TooLarge(f"{limit_text(most)}: delete some", code=STORAGE_LIMIT)
    return cast(T, made)


@contextmanager
def _counted(app: AppState, request: Request) -> Iterator[None]:
    try:
        yield
    except TooLarge as exc:
        if exc.code == STORAGE_LIMIT:
            app.metrics.storage_refused(request.scope[RECORD].tenant)
        raise


def _check_size(kept: Kept, size: int) -> None:
    most = kept.config.max_file_bytes
    if size > most:
        raise TooLarge(f"the file is larger than {most} bytes (--max-file-bytes)", param="file", code="file_too_large")


async def _count_more(kept: Kept, file: KeptFile, size: int, counted: int) -> int:
    """Counts that a file which arrives has `size` bytes, and some more. Returns how many are counted now.

    counted: bytes that are counted already. Raises TooLarge.
    """
    for wanted in (size + COUNTED_BYTES, size):
        try:
            await _add(kept, file.tenant, wanted - counted, partial(files.count, id=file.id, size=wanted))
            return wanted
        except TooLarge:
            if wanted == size:
                raise
    return counted


async def _received(kept: Kept, parts: AsyncIterator[Part | bytes], file: KeptFile) -> Upload:
    """Writes the form's file to the store as it arrives. Raises BadRequest and TooLarge."""
    fields: dict[str, str] = {}
    name, written, size, others, id, counted = "", 0, 0, 0, file.id, file.bytes
    held = bytearray()
    async for one in parts:
        if isinstance(one, Part):
            name = one.name
            if name in fields:
                raise BadRequest(f"`{name:.80}` is in the form more than once", param=name[:80], code="malformed_form")
            fields[name] = (one.filename or "file")[:256] if name == "file" else ""
        elif name != "file":
            others += len(one)
            if others > FORM_BYTES:
                raise TooLarge(f"the form has more than {FORM_BYTES} bytes beside its file", code="request_too_large")
            fields[name] += one.decode("utf-8", "replace")
        else:
            held += one
            size += len(one)
            _check_size(kept, size)
            if size > counted:
                counted = await _count_more(kept, file, size, counted)
            while len(held) >= PART_BYTES:
                await _write_part(kept.store, id, written, bytes(held[:PART_BYTES]))
                written += 1
                del held[:PART_BYTES]
    if "file" not in fields:
        raise BadRequest("`file` is missing in the form", param="file", code="missing_field")
    if held:
        await _write_part(kept.store, id, written, bytes(held))
    return fields, size


async def _write_part(store: Store, id: str, number: int, data: bytes) -> None:
    packed = await PACKING.run(zlib.compress, data, 1)
    await store.write(partial(files.add_part, id=id, number=number, packed=packed))


def _expiry(fields: dict[str, str]) -> float | None:
    """Returns when a new file is to be deleted, in seconds since 1970. Raises BadRequest."""
    if (text := fields.get(SECONDS)) is None:
        return None
    if fields.get(ANCHOR, "created_at") != "created_at":
        raise BadRequest(f"`{ANCHOR}` must be created_at", param=ANCHOR, code="out_of_range")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and MIN_EXPIRY_S <= int(text) <= MAX_EXPIRY_S):
        raise BadRequest(
            f"`{SECONDS}` must be a number from {MIN_EXPIRY_S} to {MAX_EXPIRY_S}", param=SECONDS, code="out_of_range"
        )
    return time.time() + int(text)


async def list_files(app: AppState, request: Request) -> Response:
    kept, query = store_of(app), request.query_params
    work = partial(files.listed, tenant=tenant_of(request), purpose=query.get("purpose", ""), most=MAX_LISTED)
    found = [one.shown() for one in await kept.store.read(work)]
    return json_response(conversations.page(found[::-1], query, most=MAX_LISTED, usual=LISTED))


async def get(app: AppState, request: Request) -> Response:
    return json_response((await _asked(app, request)).shown())


async def content(app: AppState, request: Request) -> Response:
    file = await _asked(app, request)
    return StreamingResponse(files.content(store_of(app).store, file), media_type="application/octet-stream")


async def delete(app: AppState, request: Request) -> Response:
    file = await _asked(app, request)
    await store_of(app).store.write(partial(files.delete, id=file.id))
    return json_response({"id": file.id, "object": "file", "deleted": True})


async def _asked(app: AppState, request: Request) -> KeptFile:
    return await files.existing(store_of(app).store, request.path_params["id"], tenant_of(request))
