"""Decodes and resizes images in child processes, which a hostile file may crash (shared/sandbox.py), and keeps recent
ones.

Pixels are those of the Pillow-based image processors of transformers before normalization, which the worker does.
"""

import io
import math
import re
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import cache
from hashlib import sha256
from time import monotonic
from typing import Any, NamedTuple

from frontend.errors import BadRequest, Overloaded
from frontend.observability.metrics import image_counts
from frontend.text.image_format import ImageFormat, best_grid, is_cut
from frontend.turns import FairChildren, tenant
from shared.images import image_digest
from shared.sandbox import Killed, Lost, NotStarted, Raised

DECODE = f"{__name__}:decode"
SECONDS, MEGABYTES = 10.0, 1024  # limits for one image
KINDS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_TILES = 64
# A JPEG file may send each pixel in many scans, and each scan costs a pass over the image, even an empty one.
# Encoders make about ten.
MOST_SCANS = 100
FULL_SCANS = 16  # of an image of the largest size; smaller images may have more, up to MOST_SCANS
MOST_SEGMENTS = 10_000  # of a JPEG file
SCAN_END = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # the next marker after the data of a scan
MOST_RATIO = 200  # limit on longer side / shorter side, if an image keeps its shape; as in transformers
Tile = tuple[int, int, bytes]  # height, width, uint8 RGB row by row


def decode(
    data: bytes, most_pixels: int, kind: str, side: int, longest: int, cuts: bool, resample: int,
    area: Sequence[int] = (0, 0), grid: Sequence[int] = (),
) -> list[Any]:  # fmt: skip
    """Returns [rows, columns, tiles] of an image, or [problem], a text that says what is wrong with the image.

    The arguments from `kind` on are the fields of an ImageFormat.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.MAX_IMAGE_PIXELS = None  # the size is checked here, before anything is decoded
    try:
        image: Any = Image.open(io.BytesIO(data), formats=KINDS)
        width, height = image.size
        if width * height > most_pixels:
            return [f"has {width} x {height} pixels; at most {most_pixels} are accepted (--max-image-pixels)"]
        if image.format == "JPEG" and (most := _most_scans(width * height, most_pixels)) < _scans(data, most):
            return [f"is a JPEG file of more than {most} scans, which is too many for {width} x {height} pixels"]
        image = ImageOps.exif_transpose(image).convert("RGB")
    except MemoryError:
        raise
    except UnidentifiedImageError:
        return ["is no PNG, JPEG, WebP or GIF"]
    except Exception as error:  # Pillow may raise any exception for a broken file
        return [f"is broken: {error}"]
    if kind == "square":
        return [0, 0, [_bytes(image.resize((side, side), resample))]]
    if kind in ("any", "within", "fit", "grid"):
        if max(width, height) > MOST_RATIO * min(width, height):
            return [f"has {width} x {height} pixels; one side may be {MOST_RATIO} times as long as the other at most"]
        if kind == "grid":
            return _grid(image, side, cuts, resample, area, grid)
        if kind == "fit":
            size = _fitted(image.width, image.height, side, area[1])
        elif kind == "any":
            size = _of_area(image.width, image.height, side, *area)
        else:
            size = _within(image.width, image.height, side, longest)
        return [0, 0, [_bytes(image.resize(size, resample))]]
    image = image.resize(_scaled(image.width, image.height, longest), resample)
    return _tiles(image, side, resample) if cuts else [0, 0, [_bytes(image.resize((side, side), resample))]]


def _most_scans(pixels: int, most_pixels: int) -> int:
    return min(MOST_SCANS, FULL_SCANS * most_pixels // pixels)


def _scans(data: bytes, enough: int) -> int:
    """Returns the number of scans of a JPEG file, or a number above `enough` if the file has more or is endless.

    Walks from segment to segment, because files embed others: a thumbnail, or a film behind the image's end.
    """
    found, at = 0, 2
    for _ in range(MOST_SEGMENTS):
        if found > enough or data[at : at + 1] != b"\xff" or data[at + 1 : at + 2] in (b"", b"\xd9"):
            return found
        if data[at + 1] == 0xFF:  # a byte that fills the space before a marker
            at += 1
            continue
        found += data[at + 1] == 0xDA
        after = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at + 1] == 0xDA:
            end = SCAN_END.search(data, after)
            after = end.start() if end else len(data)
        at = after
    return enough + 1


def _tiles(image: Any, side: int, resample: int) -> list[Any]:
    image = image.resize(_whole_tiles(image.width, image.height, side), resample)
    columns, rows = image.width // side, image.height // side
    if rows * columns > MOST_TILES:
        return [f"is cut into {rows} x {columns} tiles; at most {MOST_TILES} are accepted"]
    if rows * columns == 1:
        return [0, 0, [_bytes(image)]]
    tiles = _cut(image, side, rows, columns)
    return [rows, columns, [*tiles, _bytes(image.resize((side, side), resample))]]


def _cut(image: Any, side: int, rows: int, columns: int) -> list[Tile]:
    boxes = [(x * side, y * side, (x + 1) * side, (y + 1) * side) for y in range(rows) for x in range(columns)]
    return [_bytes(image.crop(box)) for box in boxes]


def _grid(image: Any, side: int, cuts: bool, resample: int, area: Sequence[int], grid: Sequence[int]) -> list[Any]:
    """Returns the result of `decode` for the kind `grid`. grid: the fields of a Grid"""
    tile, least, most, above, whole = grid
    size = _of_area(image.width, image.height, side, *area, fewest=1)
    if not cuts or not is_cut(image.width, image.height, side, above):
        return [0, 0, [_bytes(image.resize(size, resample))]]
    columns, rows = best_grid(image.width, image.height, tile, least, most)
    tiles = _cut(image.resize((columns * tile, rows * tile), resample), tile, rows, columns)
    if whole and len(tiles) > 1:
        tiles.append(_bytes(image.resize(size, resample)))
    return [rows, columns, tiles] if len(tiles) > 1 else [0, 0, tiles]


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """Returns the width and height: the longer side is `longest`, the shorter side is an even number or 1."""
    ratio = width / height
    if width >= height:
        other = int(longest / ratio)
        return longest, max(1, other + other % 2)
    other = int(longest * ratio)
    return max(1, other + other % 2), longest


def _of_area(width: int, height: int, step: int, least: int, most: int, *, fewest: int = 0) -> tuple[int, int]:
    """Returns a width and a height in multiples of `step`, of about the image's shape and `least` to `most` pixels.

    fewest: when the size is compared with these bounds, each side counts as at least so many steps
    """
    across, down = max(fewest, round(width / step)), max(fewest, round(height / step))
    if across * down * step * step > most:
        shrink = math.sqrt(height * width / most)
        across, down = (max(1, math.floor(side / shrink / step)) for side in (width, height))
    elif across * down * step * step < least:
        grow = math.sqrt(least / (height * width))
        across, down = (math.ceil(side * grow / step) for side in (width, height))
    return across * step, down * step


def _fitted(width: int, height: int, step: int, most: int) -> tuple[int, int]:
    """Returns the largest width and height in multiples of `step`, of the image's shape and at most `most` pixels."""
    factor = math.sqrt(most / (height * width))
    across, down = (math.floor(factor * side / step) for side in (width, height))
    longest = most // step**2
    if not down:
        across, down = min(width // height, longest), 1
    elif not across:
        across, down = 1, min(height // width, longest)
    return across * step, down * step


def _within(width: int, height: int, step: int, longest: int) -> tuple[int, int]:
    """Shrinks the size until no side is longer than `longest`, then rounds both sides up to multiples of `step`."""
    ratio = max(height / longest, width / longest)
    if ratio > 1:
        width, height = (max(1, math.floor(side / ratio)) for side in (width, height))
    return math.ceil(width / step) * step, math.ceil(height / step) * step


def _whole_tiles(width: int, height: int, side: int) -> tuple[int, int]:
    """Returns the size, rounded up to whole tiles and with about the same shape."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        return width, math.ceil(int(width / ratio) / side) * side
    height = math.ceil(height / side) * side
    return math.ceil(int(height * ratio) / side) * side, height


def _bytes(image: Any) -> Tile:
    return image.height, image.width, image.tobytes()


# Has child processes decode images. A file that crashes a child, or takes too long, ends only its own request.
#
# A tenant uses all children but one, and a child whose client has left is ended.

CHILDREN = FairChildren(
    "image", DECODE, 3, each=2, megabytes=MEGABYTES, most_waiting=64, doing="images wait to be decoded"
)


class Decoded(NamedTuple):
    """An image as the model sees it: tiles of a grid, followed by a tile with the whole image if the format has one.

    rows, columns: the size of the grid; 0 if the image is not cut
    digests: the digest of each tile
    """

    rows: int
    columns: int
    tiles: list[Tile]
    digests: list[bytes]

    @property
    def nbytes(self) -> int:
        return sum(len(pixels) for _, _, pixels in self.tiles)


async def decoded(path: str, data: bytes, seen: ImageFormat, most_pixels: int) -> Decoded:
    """Decodes, resizes and cuts an image. path: where the request has it: "messages[0].content[1]"

    Raises BadRequest for a file that is no image, or that cannot be decoded; Overloaded if too many wait.
    """
    counts, since = image_counts(), monotonic()
    try:
        found = await CHILDREN.call(
            data, most_pixels, seen.kind, seen.side, seen.longest, seen.cuts, seen.resample, seen.area, seen.grid or (),
            seconds=SECONDS,
        )  # fmt: skip
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
        counts.seconds += monotonic() - since
    if len(found) == 1:
        counts.refused += 1
        raise refused(path, str(found[0]))
    counts.decoded += 1
    rows, columns, tiles = found
    return Decoded(
        rows, columns, [(height, width, pixels) for height, width, pixels in tiles],
        [image_digest(*tile) for tile in tiles],
    )  # fmt: skip


def refused(path: str, problem: str) -> BadRequest:
    """Returns the error for an image of a request. path: where the request has it"""
    return BadRequest(f"`{path}`: the image {problem}", param=path, code="invalid_image")


# Keeps decoded images for a while: each turn of a chat sends the images of the earlier turns again.

MAX_BYTES = 64 << 20  # limit for the pixels of all kept images


class RecentImages:
    """An LRU cache of images. Keys contain the tenant, so response times do not tell what other tenants sent."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, Decoded] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable) -> Decoded | None:
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def add(self, key: Hashable, image: Decoded) -> None:
        if key in self._kept:
            return
        self._kept[key] = image
        self._bytes += image.nbytes
        while self._bytes > MAX_BYTES:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes


def key_of(data: bytes, *how: Hashable) -> Hashable:
    """Returns the key of a file that the present tenant sent. how: what else the decoded image depends on"""
    return tenant.get(), sha256(data).digest(), *how


@cache
def recent_images() -> RecentImages:
    """Returns the cache of this process."""
    return RecentImages()
