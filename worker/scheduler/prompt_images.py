"""The images of a prompt: where their tokens are, and what they add to the digests of pages."""

from bisect import bisect_left, bisect_right
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, NamedTuple

from shared.messages import PromptImage


class ImagePlace(NamedTuple):
    """The place of an image: tokens start .. start + tokens - 1 of a prompt stand for the image with this digest."""

    start: int
    tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ImagePlaces:
    """The places of all images of a prompt, in order."""

    places: tuple[ImagePlace, ...]

    def mark(self, begin: int, end: int) -> bytes:
        """Returns the bytes that are hashed, besides the ids, for the page with the tokens begin .. end - 1.

        They name only the images that begin in this page, because the hash of every later page covers this hash.
        """
        first = bisect_left(self.places, (begin,))
        last = bisect_left(self.places, (end,))
        return b"".join(
            (place.start - begin).to_bytes(4, "little") + place.tokens.to_bytes(4, "little") + place.digest
            for place in self.places[first:last]
        )


class PromptImages:
    """The images of a sequence, in the order of their tokens, which do not overlap."""

    def __init__(
        self,
        images: list[PromptImage],
        *,
        whole: bool = False,
        rotary: Any = None,
        encoded: Container[bytes] | None = None,
    ) -> None:
        """whole: whether no step may cut an image in two, because its tokens attend to each other in both directions.

        rotary: the RotaryPositions of a model with M-RoPE (worker/vision/attention.py); None: positions are those of
        text
        encoded: the digests of the images that are encoded already; None: steps encode images themselves
        """
        self.images, self.whole, self.rotary, self._encoded = images, whole, rotary, encoded
        self.end = images[-1].start + images[-1].tokens  # the index after the last token of the last image
        self.nbytes = sum(len(image.pixels) for image in images)
        self.places = ImagePlaces(tuple(ImagePlace(one.start, one.tokens, one.digest) for one in images))
        self._starts = [image.start for image in images]

    def uncut(self, start: int, length: int, most: float) -> int:
        """Returns the length of a chunk that begins at `start`: `length`, unless an image changes it.

        The chunk ends before an image that is not encoded yet. With `whole`, it also ends before an image that it
        would cut. If it begins in such an image, it has the rest of it, or no token if the rest is above `most`.
        """
        if self._encoded is not None:
            length = self._up_to_unencoded(start, length, self._encoded)
        end = start + length
        cut = self.within(end - 1, end + 1) if self.whole and length > 0 else []
        if len(cut) != 1 or not cut[0].start < end < cut[0].start + cut[0].tokens:
            return length
        if cut[0].start > start:
            return cut[0].start - start
        rest = cut[0].start + cut[0].tokens - start
        return rest if rest <= most else 0

    def _up_to_unencoded(self, start: int, length: int, encoded: Container[bytes]) -> int:
        missing = (one.start for one in self.within(start, start + length) if one.digest not in encoded)
        return max(0, next(missing, start + length) - start)

    def at(self, place: int) -> PromptImage | None:
        """Returns the image that the token at index `place` belongs to; None if the token is text."""
        return next(iter(self.within(place, place + 1)), None)

    def within(self, begin: int, end: int) -> list[PromptImage]:
        """Returns the images that have at least one token among begin .. end - 1."""
        first = max(0, bisect_right(self._starts, begin) - 1)
        found = self.images[first : bisect_left(self._starts, end)]
        return [image for image in found if image.start + image.tokens > begin]
