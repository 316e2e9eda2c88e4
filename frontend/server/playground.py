"""Serves the playground: the page at `/` and its files at `/web/{name}`."""

import hashlib
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

FOLDER = Path(__file__).parents[1] / "web"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".woff2": "font/woff2",
}
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "font-src": "'self'",
    "connect-src": "'self'",
    "img-src": "data:",  # the empty icon, and images in conversations
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",  # keeps the page from turning text into HTML
    "trusted-types": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-DNS-Prefetch-Control": "off",  # keeps browsers from resolving the hosts of links in answers
    "Referrer-Policy": "no-referrer",  # the page's address may contain a prompt
    "Cache-Control": "no-cache",
}


# `?prompt=…&send=1` sends a question. A link in another site's page must not, so the page gets such an address only
# from browsers that say that it was typed, is a bookmark, or comes from the page itself. Browsers say it over https
# and to this machine.
FROM_THE_USER = ("none", "same-origin")


def _files() -> frozenset[str]:
    files = (path for path in FOLDER.rglob("*") if path.suffix in TYPES)
    return frozenset(path.relative_to(FOLDER).as_posix() for path in files)


async def page(request: Request) -> Response:
    """Serves a file of the page, or 304 if the browser has it already. Opens only names of existing files."""
    name = request.path_params.get("name", "index.html")
    if name not in _files():
        raise HTTPException(404)
    if "send" in request.query_params and request.headers.get("sec-fetch-site") not in FROM_THE_USER:
        return RedirectResponse(request.url.remove_query_params("send"), 303)
    content = (FOLDER / name).read_bytes()
    headers = HEADERS | {"ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
    if headers["ETag"] in request.headers.get("If-None-Match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=TYPES[Path(name).suffix])
