"""Puts images into a prompt: writes their tokens into its text, and finds the places of these tokens in its ids.

Further below, reads them: from data URLs, the web, or a folder.
"""

import base64
import binascii
import http.client
import io
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlsplit

from frontend.chat.image_decoding import Decoded, decoded, key_of, recent_images, refused
from frontend.chat.prompt import Prompt, Rendered, checked_ids
from frontend.errors import BadRequest, Unprocessable
from frontend.model_context import ModelContext
from frontend.text.chat_template import Source
from frontend.text.image_format import ImageFormat
from frontend.text.tokenizer import Tokenizer
from frontend.turns import FairThreads
from shared.config.declaration import words
from shared.config.frontend import FrontendConfig
from shared.images import MAX_PIXEL_BYTES
from shared.messages import PromptImage

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


async def decoded_images(
    sources: Sequence[Source], seen: ImageFormat, config: FrontendConfig, found: dict[str, Decoded] | None = None
) -> list[Decoded]:
    """Reads and decodes all images of a request. Raises BadRequest for the first one that cannot be used.

    found: images of this request that were read before, by their marks; gets those that are read now
    """
    most = config.max_images_per_request
    if len(sources) > most:
        raise BadRequest(
            f"`{sources[most].path}`: the request has {len(sources)} images; at most {most} are accepted "
            "(--max-images-per-request)", param=sources[most].path, code="too_many_images",
        )  # fmt: skip
    found = {} if found is None else found
    recent, total = recent_images(), 0
    for source in sources:
        path, mark = source.path, source.mark
        if mark not in found:
            cut = replace(seen, cuts=False) if source.detail == "low" else seen
            data, pixels = await read(source, config), config.max_image_pixels
            key = key_of(data, cut, pixels)
            found[mark] = recent.get(key) or await decoded(path, data, cut, pixels)
            recent.add(key, found[mark])
        total += found[mark].nbytes
        if total > MAX_PIXEL_BYTES:
            raise BadRequest(
                f"`{path}`: with this image, the images have more than {MAX_PIXEL_BYTES >> 20} MiB of pixels",
                param=path, code="too_many_images",
            )  # fmt: skip
    return [found[source.mark] for source in sources]


def shown_text(text: str, mark: str, images: Sequence[Decoded], seen: ImageFormat, param: str) -> str:
    """Returns the rendered conversation, with the tokens of an image in place of each placeholder.

    mark: stands before placeholders that a client has written (frontend/chat/prompt.py); these are not replaced.
    param: the request field that holds the conversation
    Raises Unprocessable unless the template shows each image once.
    """
    own = re.compile((f"(?<!{re.escape(mark)})" if mark else "") + re.escape(seen.placeholder))
    if (count := len(own.findall(text))) != len(images):
        raise Unprocessable(
            f"`{param}` has {len(images)} images, but the model's chat template shows {count} of them",
            param=param, code="unsupported_content",
        )  # fmt: skip
    following = iter(images)

    def shown(_: re.Match[str]) -> str:
        one = next(following)
        return seen.shown(one.rows, one.columns, [(height, width) for height, width, _ in one.tiles])

    return own.sub(shown, text)


def placed(
    ids: Sequence[int], images: Sequence[Decoded], seen: ImageFormat, tokenizer: Tokenizer, param: str
) -> tuple[PromptImage, ...]:
    """Returns the tiles of all images, each with the place of its tokens in the prompt.

    Raises Unprocessable if the tokenizer does not encode these tokens as one id each.
    """
    placeholder = tokenizer.ids_of({seen.token: ""})
    tiles = [tile for one in images for tile in one.tiles]
    digests = [digest for one in images for digest in one.digests]
    row_end = tokenizer.ids_of({seen.row_end: ""}) if seen.row_end else ()
    places = [place for place, id in enumerate(ids) if id in placeholder or id in row_end]
    counts = [seen.tokens_of(height, width) for height, width, _ in tiles]
    starts = [places[before] for before in accumulate(counts, initial=0) if before < len(places)]
    if len(places) != sum(counts) or any(
        places[before + count - 1] != start + count - 1
        for before, start, count in zip(accumulate(counts, initial=0), starts, counts, strict=False)
    ):
        raise Unprocessable(
            f"`{param}`: the tokenizer does not make a token of each {seen.token}, so the model cannot see images",
            param=param, code="unsupported_content",
        )  # fmt: skip
    return tuple(
        PromptImage(start, count, height, width, pixels, digest)
        for start, count, (height, width, pixels), digest in zip(starts, counts, tiles, digests, strict=True)
    )


# The prompt of a conversation with images (frontend/chat). Imported only for such a conversation.


async def prompt_with_images(
    rendered: Rendered, context: ModelContext, param: str, found: dict[str, Decoded] | None = None
) -> Prompt:
    """Reads and decodes the images, and puts them into the prompt. Raises BadRequest or Unprocessable.

    found: see `decoded_images`
    """
    seen = context.tokenizer.image_format
    assert seen is not None
    images = await decoded_images(rendered.image_sources, seen, context.config, found)
    text = shown_text(rendered.marked, rendered.mark, images, seen, param)
    (ids,) = await checked_ids([text], rendered.mark, context, param)
    return Prompt(ids, rendered.begins, placed(ids, images, seen, context.tokenizer, param))


def check_supports_vision(context: ModelContext, param: str) -> ImageFormat:
    """Raises BadRequest for a model that accepts no images, or whose chat template shows none.

    param: where the request has its first image
    """
    if (seen := context.tokenizer.image_format) is None:
        raise BadRequest(
            f"`{param}`: the model `{context.model}` sees no images, only text", param=param,
            code="unsupported_content",
        )  # fmt: skip
    if not context.template.takes_parts:
        raise BadRequest(
            f"`{param}`: the model's chat template shows no images", param=param, code="unsupported_content"
        )
    return seen


# Reads the images of a request: from data URLs, the web, or a folder.
#
# From the web, only from the hosts that the server allows. The address of a host is looked up once, checked, and
# connected to, so that a name cannot change to an address of the local network in between. Redirects are not followed,
# because they lead to other hosts. Only the ports of the web are used, unless the server allows another with the host,
# because others lead to other services.

SECONDS = 10.0  # time limit for connecting, and for each wait for more of the answer
ALL_SECONDS = 30.0  # time limit for the whole answer, including its head
PIECE = 1 << 16
WEB_PORTS = (80, 443)
TRANSLATED = [  # networks whose addresses stand for IPv4 addresses, RFC 4291, 6052, 8215, 3056, 4380
    ipaddress.ip_network(text)
    for text in (
        "::/96",
        "::ffff:0:0/96",
        "::ffff:0:0:0/96",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "2002::/16",
        "2001::/32",
    )
]


def fetched(path: str, url: str, allowed: Sequence[str], most: int) -> bytes:
    """Returns the file that a host sends, of at most `most` bytes. Blocks. Raises BadRequest, which says what is wrong.

    allowed: names and addresses of hosts, each for the ports 80 and 443, or NAME:PORT. A host in a private network must
        be listed by its address, not by its name.
    """
    if not allowed:
        raise refused(path, "is on the web, and the server fetches none (--allowed-media-domains); send it as data")
    parts = _split(path, url)
    host, listed = parts.hostname or "", {one.lower() for one in allowed}
    written, port = f"[{host}]" if ":" in host else host, _port(parts)
    if f"{written}:{port}" not in listed and not (port in WEB_PORTS and {host, written} & listed):
        where = f"{host[:100]!r}" if port in WEB_PORTS else f"{host[:100]!r} with the port {port}"
        raise refused(path, f"is on {where}, which is none of the hosts that the server fetches images from")
    try:
        connection = _Connection(host, _address(path, host), parts)
        try:
            return _answer(path, connection, parts, most)
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ssl.SSLError, UnicodeError) as error:
        raise refused(path, f"cannot be fetched from {host[:100]}: {error}") from error


def _split(path: str, url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise refused(path, f"has a URL that cannot be read: {error}") from error
    if any(letter <= " " or letter >= "\x7f" for letter in url):
        raise refused(path, "has a URL with letters that must be escaped")
    return parts


def _address(path: str, host: str) -> str:
    """Returns an address of the host. Raises BadRequest if its name leads to an address in a private network."""
    found = [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    for address in found:
        if address != host and not is_public(address):
            raise refused(path, f"is on {host[:100]!r}, whose address is one of a private network")
    return found[0]


def is_public(address: str) -> bool:
    """Whether an address belongs to one host of the public internet.

    Addresses that stand for IPv4 addresses (mapped, NAT64, 6to4, Teredo) do not, whatever they stand for: a gateway may
    lead them into the local network.
    """
    found = ipaddress.ip_address(address.split("%")[0])
    if not found.is_global or found.is_multicast or found.is_reserved or found.is_link_local:
        return False
    return not any(found.version == network.version and found in network for network in TRANSLATED)


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme.lower() == "https" else 80)


class _UntilDeadline(io.RawIOBase):
    """Reads from a socket for at most `ALL_SECONDS`. The socket's own timeout would begin again with every byte."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._end = sock, time.monotonic() + ALL_SECONDS
        self._file = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int | None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"it takes longer than {ALL_SECONDS:g} s")
        self._sock.settimeout(min(SECONDS, left))
        return self._file.readinto(buffer)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response whose head has a time limit, too: a host may send it byte by byte, or endless `100 Continue`."""

    def __init__(self, sock: socket.socket, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp.close()
        self.fp = io.BufferedReader(_UntilDeadline(sock))


class _Connection(http.client.HTTPConnection):
    """Connects to a given address, but uses the host name of the URL in TLS and in the request."""

    response_class = _Response

    def __init__(self, host: str, address: str, parts: SplitResult) -> None:
        self._tls = parts.scheme.lower() == "https"
        super().__init__(host, _port(parts), timeout=SECONDS)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.create_connection((self._address, self.port), self.timeout)
        if self._tls:
            self.sock = ssl.create_default_context().wrap_socket(self.sock, server_hostname=self.host)


def _answer(path: str, connection: _Connection, parts: SplitResult, most: int) -> bytes:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    connection.request("GET", target, headers={"Accept": "image/*", "User-Agent": "sluice", "Connection": "close"})
    response = connection.getresponse()
    if response.status != 200:
        moved = ", and redirects are not followed" if 300 <= response.status < 400 else ""
        raise refused(path, f"cannot be fetched: the host answers {response.status}{moved}")
    size = response.length  # None: the body ends with the connection or with the last chunk
    data = bytearray()
    while size is None or len(data) < size:
        if not (piece := response.read1(PIECE)):
            break
        data += piece
        if len(data) > most:
            raise refused(path, f"has more than {most >> 20} MiB")
    if size is not None and len(data) < size:
        raise refused(path, f"cannot be fetched: its host sends {len(data)} of {size} bytes")
    return bytes(data)


# Reads an image from the URL that a request gives: data in the URL, the web, or a folder of the server.

MAX_BYTES = 20 << 20  # limit for the file of an image
# Slow hosts delay only requests with images from the web, and those of one tenant no other tenant's.
FETCHES = FairThreads("fetch", 8, each=4, most_waiting=64, doing="images wait to be fetched")
FILES = FairThreads("image-file", 3, each=2, most_waiting=64, doing="images wait to be read")


async def read(source: Source, config: FrontendConfig) -> bytes:
    """Returns the file of an image. Raises BadRequest, which says what is wrong."""
    path, scheme = source.path, source.url.split(":", 1)[0].lower()
    match scheme:
        case "data":
            return _checked(path, _own(path, source.url))
        case "http" | "https":
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
