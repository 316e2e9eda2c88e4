"""Has child processes decode pictures. A file that crashes a child, or takes too long, ends only its own request.

A tenant uses all children but one, and a child whose client has left is ended.
"""

from time import monotonic
from typing import NamedTuple

from frontend.errors import BadRequest, Overloaded
from frontend.observability.picture_metrics import picture_counts
from frontend.pictures.decode import DECODE, MEGABYTES, SECONDS, Tile
from frontend.text.picture_format import PictureFormat
from frontend.turns import FairChildren
from shared.pictures.digest import picture_digest
from shared.processes.expendable import Killed, Lost, NotStarted, Raised

CHILDREN = FairChildren(
    "picture", DECODE, 3, each=2, megabytes=MEGABYTES, most_waiting=64, doing="images wait to be decoded"
)


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
    counts, since = picture_counts(), monotonic()
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
        [picture_digest(*tile) for tile in tiles],
    )  # fmt: skip


def refused(path: str, problem: str) -> BadRequest:
    """Returns the error for a picture of a request. path: where the request has it"""
    return BadRequest(f"`{path}`: the image {problem}", param=path, code="invalid_image")
