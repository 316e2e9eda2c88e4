"""The pictures of a prompt: where their tokens are, and what they add to the digests of pages."""

from bisect import bisect_left, bisect_right
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, NamedTuple

from shared.messages import Picture


class PicturePlace(NamedTuple):
    """The place of a picture: tokens start .. start + tokens - 1 of a prompt stand for the picture with this digest."""

    start: int
    tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PicturePlaces:
    """The places of all pictures of a prompt, in order."""

    places: tuple[PicturePlace, ...]

    def mark(self, begin: int, end: int) -> bytes:
        """Returns the bytes that are hashed, besides the ids, for the page with the tokens begin .. end - 1.

        They name only the pictures that begin in this page, because the hash of every later page covers this hash.
        """
        first = bisect_left(self.places, (begin,))
        last = bisect_left(self.places, (end,))
        return b"".join(
            (place.start - begin).to_bytes(4, "little") + place.tokens.to_bytes(4, "little") + place.digest
            for place in self.places[first:last]
        )


class PromptPictures:
    """The pictures of a sequence, in the order of their tokens, which do not overlap."""

    def __init__(
        self,
        pictures: list[Picture],
        *,
        whole: bool = False,
        rotary: Any = None,
        encoded: Container[bytes] | None = None,
    ) -> None:
        """whole: whether no step may cut a picture in two, because its tokens attend to each other in both directions.

        rotary: the RotaryPositions of a model with M-RoPE (worker/vision/rotary.py); None: positions are those of text
        encoded: the digests of the pictures that are encoded already; None: steps encode pictures themselves
        """
        self.pictures, self.whole, self.rotary, self._encoded = pictures, whole, rotary, encoded
        self.end = pictures[-1].start + pictures[-1].tokens  # the index after the last token of the last picture
        self.nbytes = sum(len(picture.pixels) for picture in pictures)
        self.places = PicturePlaces(tuple(PicturePlace(one.start, one.tokens, one.digest) for one in pictures))
        self._starts = [picture.start for picture in pictures]

    def uncut(self, start: int, length: int, most: float) -> int:
        """Returns the length of a chunk that begins at `start`: `length`, unless a picture changes it.

        The chunk ends before a picture that is not encoded yet. With `whole`, it also ends before a picture that it
        would cut. If it begins in such a picture, it has the rest of it, or no token if the rest is above `most`.
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

    def at(self, place: int) -> Picture | None:
        """Returns the picture that the token at index `place` belongs to; None if the token is text."""
        return next(iter(self.within(place, place + 1)), None)

    def within(self, begin: int, end: int) -> list[Picture]:
        """Returns the pictures that have at least one token among begin .. end - 1."""
        first = max(0, bisect_right(self._starts, begin) - 1)
        found = self.pictures[first : bisect_left(self._starts, end)]
        return [picture for picture in found if picture.start + picture.tokens > begin]
