"""Reads a picture from the URL that a request gives: data in the URL, the web, or a folder of the server."""

import base64
import binascii
from pathlib import Path
from urllib.parse import unquote, urlsplit

from frontend.errors import BadRequest
from frontend.pictures.decoding import refused
from frontend.text.picture_marks import Source
from frontend.turns import FairThreads
from shared.config import FrontendConfig, words

MAX_BYTES = 20 << 20  # limit for the file of a picture
# Slow hosts delay only requests with pictures from the web, and those of one tenant no other tenant's.
FETCHES = FairThreads("fetch", 8, each=4, most_waiting=64, doing="images wait to be fetched")
FILES = FairThreads("picture-file", 3, each=2, most_waiting=64, doing="images wait to be read")


async def read(source: Source, config: FrontendConfig) -> bytes:
    """Returns the file of a picture. Raises BadRequest, which says what is wrong."""
    path, scheme = source.path, source.url.split(":", 1)[0].lower()
    match scheme:
        case "data":
            return _checked(path, _own(path, source.url))
        case "http" | "https":
            from frontend.pictures.fetch import fetched

            allowed = words(config.allowed_media_domains)
            return await FETCHES.run(fetched, path, source.url, allowed, MAX_BYTES)
        case "file":
            return _checked(path, await FILES.run(_from_folder, path, source.url, config.allowed_media_path))
    raise refused(path, "must be a data:, http:, https: or file: URL")


def _own(path: str, url: str) -> bytes:
    head, comma, data = url.partition(",")
    kind, *also = head.partition(":")[2].lower().split(";")
    if not comma or "base64" not in (one.strip() for one in also):
        raise refused(path, "must be a data: URL in base64")
    if not kind.strip().startswith("image/"):
        raise refused(path, f"has the media type {kind.strip()[:80]!r}, not one of an image")
    if 3 * len(data) // 4 > MAX_BYTES + 3:
        raise _too_large(path)
    try:
        return base64.b64decode(data.strip(), validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused(path, f"is not base64: {error}") from error


def _from_folder(path: str, url: str, allowed: str) -> bytes:
    if not allowed:
        raise refused(path, "is a file, and the server reads none (--allowed-media-path)")
    root = Path(allowed).resolve()
    try:
        file = _named(url, root)
    except (OSError, RuntimeError, ValueError) as error:  # too long a path, a loop of links, a zero byte
        raise refused(path, "has a URL that names no file") from error
    if not file.is_relative_to(root):
        raise refused(path, "is not below the folder that the server reads images from")
    try:
        if not file.is_file():
            raise refused(path, "is not there")
        with file.open("rb") as opened:
            return opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise refused(path, f"cannot be read: {error.strerror}") from error


def _named(url: str, root: Path) -> Path:
    """Returns the file that a URL names by its whole path or, as llama.cpp's clients do, by its path below `root`."""
    parts = urlsplit(url)
    host = parts.netloc if parts.netloc != "localhost" else ""
    whole = Path(unquote(parts.path)).resolve()
    below = (root / unquote(f"{host}{parts.path}").lstrip("/")).resolve()
    return below if host or (below.is_file() and not whole.is_relative_to(root)) else whole


def _checked(path: str, data: bytes) -> bytes:
    if not data:
        raise refused(path, "is empty")
    if len(data) > MAX_BYTES:
        raise _too_large(path)
    return data


def _too_large(path: str) -> BadRequest:
    return refused(path, f"has more than {MAX_BYTES >> 20} MiB")
