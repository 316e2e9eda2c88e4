"""Reads the bodies of requests: how large one may be, and how large those are together that a frontend holds.

Knows HTTP's requests; no route, no API format, no model.
"""

from starlette.requests import Request

from frontend.errors import Overloaded, TooLarge

TEXT_BYTES = 8 << 20  # of a body without pictures
PICTURE_BYTES = 8 << 20  # of a usual picture in base64: a photograph of 6 MiB
FILE_BYTES = 27 << 20  # of the largest file of a picture in base64, see frontend/pictures/sources.py
LARGEST_BYTES = 128 << 20  # of a body with any number of pictures
UNCOUNTED_BYTES = 1 << 20  # of a body that --max-connections alone bounds
MAX_HELD_BYTES = 256 << 20  # of all larger bodies together
HELD = "sluice.body_bytes"  # in a request's scope: how many bytes of its body are counted


def largest_body(pictures: int) -> int:
    """Returns how many bytes a body may have, with at most so many pictures; 0: the model sees none."""
    return TEXT_BYTES + min(max(FILE_BYTES, pictures * PICTURE_BYTES), LARGEST_BYTES - TEXT_BYTES) * (pictures > 0)


class Bodies:
    """Counts the bytes of large bodies that are being received or read."""

    def __init__(self) -> None:
        self.held = 0

    async def read(self, request: Request, most: int) -> bytes:
        """Returns the body of a request; `release` takes it out of the count.

        Raises TooLarge as soon as its announced or received length exceeds `most` bytes, and Overloaded as soon as
        it does not fit beside the large bodies of other requests.
        """
        announced = request.headers.get("content-length", "0")
        if announced.isdigit():  # before `Expect: 100-continue` is answered
            self._check(request, int(announced), most)
        data = bytearray()
        async for piece in request.stream():
            data += piece
            self._check(request, len(data), most)
            self._count(request, len(data))
        return bytes(data)

    def release(self, request: Request) -> None:
        """The body of this request is no longer in memory."""
        self.held -= request.scope.pop(HELD, 0)

    def _count(self, request: Request, size: int) -> None:
        if size > UNCOUNTED_BYTES:
            self.held += size - request.scope.get(HELD, 0)
            request.scope[HELD] = size

    def _check(self, request: Request, size: int, most: int) -> None:
        if size > most:
            raise TooLarge(f"the body is larger than {most} bytes (--max-body-bytes)", code="request_too_large")
        others = self.held - request.scope.get(HELD, 0)
        if size > UNCOUNTED_BYTES and others + size > MAX_HELD_BYTES:
            raise Overloaded(
                f"the bodies of all requests have more than {MAX_HELD_BYTES >> 20} MiB",
                code="queue_full", retry_after=1.0,
            )  # fmt: skip
