"""Reads the bodies of requests, and limits the size of each body and the size of all bodies in memory together.

Knows HTTP's requests, but no route, API format or model.
"""

from starlette.requests import Request

from frontend.errors import Overloaded, TooLarge

TEXT_BYTES = 8 << 20  # limit for a body without pictures
PICTURE_BYTES = 8 << 20  # size of an ordinary picture in base64: a photograph of 6 MiB
FILE_BYTES = 27 << 20  # size of the largest accepted picture in base64, see frontend/pictures/sources.py
LARGEST_BYTES = 128 << 20  # limit for a body with any number of pictures
UNCOUNTED_BYTES = 1 << 20  # bodies up to this size are not counted, because --max-connections bounds them
MAX_HELD_BYTES = 256 << 20  # limit for all counted bodies together
HELD = "sluice.body_bytes"  # key in a request's scope: how many bytes of its body are counted


def largest_body(pictures: int) -> int:
    """Returns the limit on a body in bytes. pictures: how many pictures it may have; 0: the model accepts none"""
    return TEXT_BYTES + min(max(FILE_BYTES, pictures * PICTURE_BYTES), LARGEST_BYTES - TEXT_BYTES) * (pictures > 0)


class Bodies:
    """Counts the bytes of all large bodies in memory."""

    def __init__(self) -> None:
        self.held = 0

    async def read(self, request: Request, most: int) -> bytes:
        """Returns the body of a request. Its bytes stay counted until `release`.

        Raises TooLarge as soon as its announced or received length exceeds `most` bytes, and Overloaded as soon as all
        large bodies together would exceed MAX_HELD_BYTES.
        """
        announced = request.headers.get("content-length", "0")
        if announced.isdigit():  # checked before `Expect: 100-continue` is answered
            self._check(request, int(announced), most)
        data = bytearray()
        async for piece in request.stream():
            data += piece
            self._check(request, len(data), most)
            self._count(request, len(data))
        return bytes(data)

    def release(self, request: Request) -> None:
        """Stops counting the body of this request, when it is no longer in memory."""
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
