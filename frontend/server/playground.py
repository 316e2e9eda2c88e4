"""Serves the playground: the page at `/` and its files at `/web/{name}`."""

import os
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parents[1] / "web"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address may contain a prompt
    "Cache-Control": "no-cache",
}


async def page(request: Request) -> Response:
    """Serves a file of the page. Its name cannot contain a slash, so it cannot leave the folder."""
    file = FOLDER / request.path_params.get("name", "index.html")
    if file.suffix not in TYPES or file.name not in os.listdir(FOLDER):
        raise HTTPException(404)
    return Response(file.read_bytes(), headers=HEADERS, media_type=TYPES[file.suffix])
