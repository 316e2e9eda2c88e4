"""Checks the pictures of a request when it arrives, so that no frontend can harm the worker. Encodes nothing."""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from itertools import pairwise

from msgspec.structs import replace

from shared.messages import Picture, Submit
from shared.pictures.digest import digest_among, picture_digest
from shared.pictures.limits import MAX_PIXEL_BYTES
from shared.prefix_identity import without_adapter
from worker.schedule.admission import QueueFull, Refused
from worker.schedule.records.pictures import PromptPictures
from worker.schedule.sequence import Sequence
from worker.vision.rotary import RotaryPositions
from worker.vision.spec import VisionSpec
from worker.vision.vision import Tower

MAX_HELD_BYTES = 2 << 30  # limit on the pixels of all live sequences; a sequence keeps its pixels until it ends


@dataclass(frozen=True, slots=True)
class PictureAdmission:
    """Gives sequences their pictures, or refuses them.

    live: returns the sequences that hold pixels
    encoded: if pictures are encoded between steps, the digests of the pictures that are encoded already
    """

    tower: Tower
    live: Callable[[], Iterable[Sequence]]
    encoded: Container[bytes] | None = None

    def __call__(self, sequence: Sequence, submit: Submit) -> None:
        """Gives a sequence the pictures of its request. Raises Refused with the reason if they cannot be encoded.

        Equal pictures of requests that may share prefixes share their pixels and what is encoded of them; without this
        limit, the time of a request would tell whether another tenant has sent its picture. Raises QueueFull if all
        requests together would hold too many pixels. A request that comes from a worker that was lost had been admitted
        there, and is always admitted again.
        """
        pictures = submit.pictures or []
        if problem := check_pictures(pictures, sequence.tokens[: sequence.prompt_len], self.tower):
            raise Refused(f"`prompt`: {problem}")
        pictures = [_among(one, without_adapter(submit.cache_salt)) for one in pictures]
        others = (other.pictures.pictures for other in self.live() if other.pictures is not None)
        held = {one.digest: one.pixels for each in others for one in each}
        pictures = [replace(one, pixels=held.setdefault(one.digest, one.pixels)) for one in pictures]
        if sum(map(len, held.values())) > MAX_HELD_BYTES and not submit.crashes:
            raise QueueFull(f"the images of all requests have more than {MAX_HELD_BYTES >> 30} GiB of pixels")
        assert self.tower.spec is not None
        give(sequence, pictures, self.tower.spec, self.encoded)


def give(
    sequence: Sequence, pictures: list[Picture], spec: VisionSpec, encoded: Container[bytes] | None = None
) -> None:
    """Gives a sequence pictures that were checked. encoded: see PictureAdmission"""
    rotary = None
    if spec.sections is not None:
        squares = [spec.squares_of(picture.height, picture.width) for picture in pictures]
        rotary = RotaryPositions([picture.start for picture in pictures], squares)
    sequence.pictures = PromptPictures(pictures, whole=spec.bidirectional, rotary=rotary, encoded=encoded)
    sequence.prefix.mark = sequence.pictures.places.mark


def _among(picture: Picture, sharers: str) -> Picture:
    """Returns the picture as the caches know it for those who share it."""
    return replace(picture, digest=digest_among(picture.digest, sharers)) if sharers else picture


def check_pictures(pictures: list[Picture], prompt: list[int], tower: Tower) -> str:
    """Returns the first problem of the pictures of a prompt, or ""."""
    spec = tower.spec
    if spec is None:
        return tower.missing
    if sum(len(picture.pixels) for picture in pictures) > MAX_PIXEL_BYTES:
        return f"the images of the request have more than {MAX_PIXEL_BYTES >> 20} MiB of pixels"
    for index, picture in enumerate(pictures):
        if problem := _problem(picture, prompt, spec):
            return f"image {index}: {problem}"
    if any(before.start + before.tokens > after.start for before, after in pairwise(pictures)):
        return "the images are not in the order of their tokens"
    return ""


def _problem(picture: Picture, prompt: list[int], spec: VisionSpec) -> str:
    if problem := spec.size_problem(picture.height, picture.width):
        return f"it has {picture.height} x {picture.width} pixels; {problem}"
    if len(picture.pixels) != 3 * picture.height * picture.width:
        return f"it has {len(picture.pixels)} bytes of pixels, not {3 * picture.height * picture.width}"
    if picture.tokens != (tokens := spec.tokens_of(picture.height, picture.width)):
        return f"it has {picture.tokens} tokens; this model makes {tokens} of it"
    end = picture.start + picture.tokens
    if picture.start < 0 or end > len(prompt):
        return "its tokens are not in the prompt"
    places = spec.places_of(picture.height, picture.width) + picture.start
    if any(prompt[place] != spec.placeholder for place in places):
        return f"its tokens are not all the placeholder {spec.placeholder}"
    if len(places) + prompt[picture.start : end].count(spec.placeholder) != 2 * len(places):
        return f"the token between two of its rows is the placeholder {spec.placeholder}"
    if picture.digest != picture_digest(picture.height, picture.width, picture.pixels):
        return "its digest is not that of its pixels"
    return ""
