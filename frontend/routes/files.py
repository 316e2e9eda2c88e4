"""OpenAI's Files API on a server with a store: files are uploaded for batches, listed, read and deleted."""

import asyncio
import secrets
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from frontend.api.openai.batches import MAX_EXPIRY_S, MIN_EXPIRY_S
from frontend.app_state import AppState, json_response
from frontend.errors import BadRequest, TooLarge
from frontend.kept import conversations, files, usage
from frontend.kept.files import PART_BYTES, KeptFile
from frontend.kept.kept import Kept
from frontend.kept.store import Store
from frontend.kept.usage import STORAGE_LIMIT, limit_text
from frontend.routes.kept import store_of, tenant_of
from frontend.server import multipart
from frontend.server.content_coding import coding_of, unpacked
from frontend.server.middleware import RECORD
from frontend.server.multipart import Part

PURPOSES = ("batch",)
FORM_BYTES = 1 << 16  # what a form may have beside its file
MAX_LISTED, LISTED = 10_000, 10_000  # files of a page: at most, and without `limit`
SECONDS, ANCHOR = "expires_after[seconds]", "expires_after[anchor]"
Upload = tuple[dict[str, str], int]  # the fields of a form beside its file, and the bytes of the file


async def upload(app: AppState, request: Request) -> Response:
    kept, tenant = store_of(app), tenant_of(request)
    boundary = multipart.boundary_of(request.headers.get("content-type", ""))
    coding = coding_of(request.headers.get("content-encoding", ""))
    announced = request.headers.get("content-length", "0")
    free = await _free_space(kept, tenant)
    with _counted(app, request):
        _check_size(kept, int(announced) - FORM_BYTES if announced.isdigit() else 0, free)
    file = KeptFile(f"file-{secrets.token_hex(12)}", tenant, int(time.time()), None, "", "", 0, False)
    await kept.store.write(partial(files.insert, one=file))
    try:
        parts = multipart.parts(unpacked(request.stream(), coding), boundary)
        with _counted(app, request):
            fields, size = await _received(kept, parts, file.id, free)
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


async def check_stored(app: AppState, request: Request, size: int) -> None:
    """Raises TooLarge if the key of a request may not add so many bytes to the store, and counts that."""
    kept = store_of(app)
    with _counted(app, request):
        _check_free_space(kept, size, await _free_space(kept, tenant_of(request)))


@contextmanager
def _counted(app: AppState, request: Request) -> Iterator[None]:
    try:
        yield
    except TooLarge as exc:
        if exc.code == STORAGE_LIMIT:
            app.metrics.storage_refused(request.scope[RECORD].tenant)
        raise


async def _free_space(kept: Kept, tenant: str) -> int | None:
    """Returns how many bytes of files, batches and conversations a tenant may add; None: there is no limit."""
    most = kept.usage.most
    return most - await kept.store.read(partial(usage.of_tenant, tenant=tenant)) if most else None


def _check_free_space(kept: Kept, size: int, free: int | None) -> None:
    """Raises TooLarge if a tenant may not add so many bytes."""
    if free is not None and size > free:
        raise TooLarge(f"{limit_text(kept.usage.most)}: delete some", code="storage_limit")


def _check_size(kept: Kept, size: int, free: int | None) -> None:
    most = kept.config.max_file_bytes
    if size > most:
        raise TooLarge(f"the file is larger than {most} bytes (--max-file-bytes)", param="file", code="file_too_large")
    _check_free_space(kept, size, free)


async def _received(kept: Kept, parts: AsyncIterator[Part | bytes], id: str, free: int | None) -> Upload:
    """Writes the form's file to the store as it arrives. Raises BadRequest and TooLarge."""
    fields: dict[str, str] = {}
    name, written, size, others = "", 0, 0, 0
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
            _check_size(kept, size, free)
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
    packed = await asyncio.to_thread(zlib.compress, data, 1)
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
