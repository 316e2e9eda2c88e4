"""Bounds the pixels that a frontend keeps: a stream keeps those of its prompt, to go on after its worker is lost."""

from collections.abc import Iterable, Sequence

from frontend.errors import Overloaded
from shared.messages import Picture

MAX_BYTES = 1 << 30  # of all requests that run


def check_memory(pictures: Sequence[Picture], running: Iterable[Sequence[Picture] | None]) -> None:
    """Raises Overloaded if the pictures of a request do not fit beside those of the streams that run."""
    if _nbytes(pictures) + sum(_nbytes(each) for each in running if each is not None) > MAX_BYTES:
        raise Overloaded(
            f"the pictures of all requests have more than {MAX_BYTES >> 20} MiB of pixels",
            code="queue_full", retry_after=1.0,
        )  # fmt: skip


def _nbytes(pictures: Sequence[Picture]) -> int:
    return sum(len(picture.pixels) for picture in pictures)
