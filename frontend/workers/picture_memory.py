"""Bounds the pixels that a frontend keeps. A stream keeps its pictures until its end, as its worker may be lost."""

from collections.abc import Iterable, Sequence

from frontend.errors import Overloaded
from shared.messages import Picture

MAX_BYTES = 1 << 30  # limit for the pixels of all running requests together


def check_memory(pictures: Sequence[Picture], running: Iterable[Sequence[Picture] | None]) -> None:
    """Raises Overloaded if the pictures of a request do not fit beside the pictures of the running streams."""
    if _nbytes(pictures) + sum(_nbytes(each) for each in running if each is not None) > MAX_BYTES:
        raise Overloaded(
            f"the pictures of all requests have more than {MAX_BYTES >> 20} MiB of pixels",
            code="queue_full", retry_after=1.0,
        )  # fmt: skip


def _nbytes(pictures: Sequence[Picture]) -> int:
    return sum(len(picture.pixels) for picture in pictures)
