"""Has child processes decode pictures. A file that crashes a child, or takes too long, ends only its own request."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from queue import LifoQueue
from time import monotonic
from typing import Any, NamedTuple

from frontend.errors import BadRequest, Overloaded
from frontend.observability.picture_metrics import picture_counts
from frontend.pictures.decode import DECODE, MEGABYTES, SECONDS, Tile
from frontend.text.picture_format import PictureFormat
from shared.pictures.digest import picture_digest
from shared.processes.expendable import Expendable, Killed, Lost, NotStarted, Raised

CHILDREN = 2
MAX_WAITING = 64  # limit on the pictures that wait for a child process


class Decoded(NamedTuple):
    """A picture as the model sees it: tiles of a grid, followed by a tile with the whole picture if the format has one.

    rows, columns: the size of the grid; 0 if the picture is not cut
    digests: the digest of each tile
    """

    rows: int
    columns: int
    tiles: list[Tile]
    digests: list[bytes]

    @property
    def nbytes(self) -> int:
        return sum(len(pixels) for _, _, pixels in self.tiles)


async def decoded(path: str, data: bytes, seen: PictureFormat, most_pixels: int) -> Decoded:
    """Decodes, resizes and cuts a picture. path: where the request has it: "messages[0].content[1]"

    Raises BadRequest for a file that is no picture, or that cannot be decoded; Overloaded if too many wait.
    """
    children = _children()
    if children.waiting >= MAX_WAITING:
        raise Overloaded(f"{MAX_WAITING} images wait to be decoded", code="queue_full", retry_after=1.0)
    children.waiting += 1
    counts, since = picture_counts(), monotonic()
    try:
        running = asyncio.get_running_loop().run_in_executor(children.threads, children.decode, data, seen, most_pixels)
        found = await running
    except NotStarted as error:
        counts.not_decoded += 1
        raise Overloaded(f"images cannot be decoded: {error}", code="not_ready", retry_after=1.0) from error
    except Killed as error:
        counts.not_decoded += 1
        raise Overloaded(f"`{path}`: the image was not decoded: {error}", code="not_ready", retry_after=1.0) from error
    except (Lost, Raised) as error:
        counts.refused += 1
        raise refused(path, f"cannot be decoded: {error}") from error
    finally:
        children.waiting -= 1
        counts.seconds += monotonic() - since
    if len(found) == 1:
        counts.refused += 1
        raise refused(path, str(found[0]))
    counts.decoded += 1
    rows, columns, tiles = found
    return Decoded(
        rows, columns, [(height, width, pixels) for height, width, pixels in tiles],
        [picture_digest(*tile) for tile in tiles],
    )  # fmt: skip


def refused(path: str, problem: str) -> BadRequest:
    """Returns the error for a picture of a request. path: where the request has it"""
    return BadRequest(f"`{path}`: the image {problem}", param=path, code="invalid_image")


class _Children:
    """Child processes, and threads that wait for them. Other work has other threads, so pictures do not delay it."""

    def __init__(self) -> None:
        self.waiting = 0
        self.threads = ThreadPoolExecutor(CHILDREN, thread_name_prefix="picture")
        self._idle: LifoQueue[Expendable] = LifoQueue()
        for _ in range(CHILDREN):
            self._idle.put(Expendable(DECODE, megabytes=MEGABYTES))

    def decode(self, data: bytes, seen: PictureFormat, most_pixels: int) -> list[Any]:
        child = self._idle.get()
        try:
            found: list[Any] = child.call(
                data,
                most_pixels,
                seen.kind,
                seen.side,
                seen.longest,
                seen.cuts,
                seen.resample,
                seen.area,
                seen.grid or (),
                seconds=SECONDS,
            )
            return found
        finally:
            self._idle.put(child)


@cache
def _children() -> _Children:
    return _Children()
