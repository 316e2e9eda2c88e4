"""The pictures of a prompt: where their tokens are, and what they add to the identity of pages."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from shared.messages import Picture


class PicturePlace(NamedTuple):
    """Tokens start .. start + tokens - 1 of a prompt are the picture with this digest."""

    start: int
    tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class PicturePlaces:
    """The places of all pictures of a prompt, in order."""

    places: tuple[PicturePlace, ...]

    def mark(self, begin: int, end: int) -> bytes:
        """Returns what the hash of the page with the tokens begin .. end - 1 covers besides their ids.

        It names the pictures that begin there: all pages after it have hashes that cover this page's.
        """
        first = bisect_left(self.places, (begin,))
        last = bisect_left(self.places, (end,))
        return b"".join(
            (place.start - begin).to_bytes(4, "little") + place.tokens.to_bytes(4, "little") + place.digest
            for place in self.places[first:last]
        )


class PromptPictures:
    """The pictures of a sequence, in the order of their tokens, which do not overlap."""

    def __init__(self, pictures: list[Picture]) -> None:
        self.pictures = pictures
        self.end = pictures[-1].start + pictures[-1].tokens  # the place behind the last one's tokens
        self.nbytes = sum(len(picture.pixels) for picture in pictures)
        self.places = PicturePlaces(tuple(PicturePlace(one.start, one.tokens, one.digest) for one in pictures))
        self._starts = [picture.start for picture in pictures]

    def within(self, begin: int, end: int) -> list[Picture]:
        """Returns the pictures of which a token is among begin .. end - 1."""
        first = max(0, bisect_right(self._starts, begin) - 1)
        found = self.pictures[first : bisect_left(self._starts, end)]
        return [picture for picture in found if picture.start + picture.tokens > begin]
