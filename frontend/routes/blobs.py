"""Ollama's routes by which clients upload a GGUF file (`ollama create`), on a server with --allow-pull."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from frontend.app_state import AppState
from frontend.errors import BadRequest, NotFound, TooLarge
from frontend.routes.library import library_of
from frontend.server.middleware import RECEIVED
from frontend.turns import tenant
from frontend.uploads import Upload, is_here
from shared.model_library import LibraryError, uploaded_file

log = logging.getLogger("sluice.frontend")
PIECE_BYTES = 4 << 20  # are written at once
STEP_BYTES = 1 << 20  # an upload that takes --request-timeout for so much stands still


async def look(app: AppState, request: Request) -> Response:
    """Says whether a file was uploaded. Raises Forbidden as `pull` does, BadRequest and NotFound."""
    library_of(app, request)
    if not await asyncio.to_thread(is_here, _file(request)):
        raise NotFound("no file with this digest was uploaded", code="blob_not_found")
    return Response()


async def upload(app: AppState, request: Request) -> Response:
    """Takes a file. Raises Forbidden as `pull` does, BadRequest for another digest or format, TooLarge, Overloaded."""
    library_of(app, request)
    file, most = _file(request), int(app.config.upload_gb * 2**30)
    with app.arriving.one_more(tenant.get()):
        if await asyncio.to_thread(is_here, file):
            await _skip(request, await asyncio.to_thread(_size, file))
            return Response()
        announced = request.headers.get("content-length", "0")
        try:
            size = await _received(request, file, most, int(announced) if announced.isdigit() else 0)
        except OSError as error:
            raise TooLarge(f"the file cannot be written: {error.strerror or error}", code="disk_full") from None
    log.info("%s was uploaded by %s: %d bytes", file.stem, tenant.get(), size)
    return Response(status_code=201)


def _file(request: Request) -> Path:
    try:
        return uploaded_file(request.path_params["digest"])
    except LibraryError as error:
        raise BadRequest(str(error), param="digest", code=error.code) from None


def _size(file: Path) -> int:
    return file.stat().st_size


async def _received(request: Request, file: Path, most: int, announced: int) -> int:
    arriving = await asyncio.to_thread(Upload, file, most, announced)
    try:
        async for piece in _pieces(request):
            await asyncio.to_thread(arriving.write, piece)
        return await asyncio.to_thread(arriving.finish)
    finally:
        await asyncio.shield(asyncio.to_thread(arriving.close))


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    held, since = bytearray(), 0
    async for data in request.stream():
        held += data
        since += len(data)
        if since >= STEP_BYTES:
            request.scope[RECEIVED], since = object(), 0
        if len(held) >= PIECE_BYTES:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


async def _skip(request: Request, most: int) -> None:
    """Reads a body that is not needed, because clients send all of it before they read the answer."""
    async for piece in _pieces(request):
        most -= len(piece)
        if most < 0:
            raise BadRequest("the body is longer than the file with this digest", code="digest_mismatch")
