"""Requests whose images cannot be encoded are refused with a message, and enter no step."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared import messages as m
from shared.images import MAX_PIXEL_BYTES, image_digest
from shared.messages import PromptImage
from shared.prefix_identity import PrefixIdentity
from shared.wire import MAX_MESSAGE_BYTES, pack_u32
from tests.worker.vision.harness import PLACEHOLDER, Asked, prompt_with, sequence_of, served
from worker.engine.requests import sequence_of as made
from worker.scheduler.queue import QueueFull, Refused
from worker.scheduler.sequence import Sequence
from worker.vision import vision
from worker.vision.vision import ImageAdmission, Tower


@pytest.fixture
def tower(towers: dict[str, Path]) -> Tower:
    return Tower(served(towers["smolvlm"]).vision.spec)


def admit(tower: Tower, message: m.Submit, live: Iterable[Sequence] = ()) -> Sequence:
    sequence = made((b"f", 1), message, 0, 0.0, 0)
    ImageAdmission(tower, lambda: live)(sequence, message)
    return sequence


def submit(prompt: list[int], images: list[PromptImage], **more: Any) -> m.Submit:
    return m.Submit(1, pack_u32(prompt), m.Sampling(4), images=images, **more)


def changed(image: PromptImage, **fields: Any) -> PromptImage:
    return msgspec.structs.replace(image, **fields)


def test_honest_images_are_admitted(tower: Tower) -> None:
    assert tower.spec is not None
    for count in (1, 3):
        prompt, images = prompt_with(count, tower.spec)
        sequence = admit(tower, submit(prompt, images))
        assert sequence.images is not None and sequence.images.images == images


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"height": 65}, "65 x 66 pixels; this model sees 66 x 66"),
        ({"height": -1, "width": 1 << 40}, "this model sees 66 x 66"),
        ({"pixels": b"123"}, "3 bytes of pixels"),
        ({"tokens": 15}, "15 tokens; this model makes 16"),
        ({"tokens": 0}, "0 tokens"),
        ({"start": -1}, "not in the prompt"),
        ({"start": 1 << 50}, "not in the prompt"),
        ({"start": 2}, f"not all the placeholder {PLACEHOLDER}"),
        ({"digest": b""}, "digest is not that of its pixels"),
        ({"digest": image_digest(66, 66, b"x")}, "digest is not that of its pixels"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_image_that_lies_is_refused_by_its_index(fields: dict[str, Any], words: str, tower: Tower) -> None:
    assert tower.spec is not None
    prompt, images = prompt_with(2, tower.spec)
    for index in (0, 1):
        lying = [changed(each, **fields) if at == index else each for at, each in enumerate(images)]
        with pytest.raises(Refused, match=words) as refused:
            admit(tower, submit(prompt, lying))
        assert str(refused.value).startswith(f"`prompt`: image {index}: ")


def test_images_out_of_order_or_on_the_same_tokens_are_refused(tower: Tower) -> None:
    assert tower.spec is not None
    prompt, (first, second) = prompt_with(2, tower.spec)
    for images in ([second, first], [first, first]):
        with pytest.raises(Refused, match="order"):
            admit(tower, submit(prompt, images))


def test_model_that_sees_none_says_why() -> None:
    with pytest.raises(Refused, match="'pixtral' are not served"):
        admit(Tower(missing="the images of 'pixtral' are not served"), submit([1], []))


def test_pixels_of_a_request_and_of_all_are_bounded(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tower.spec is not None and MAX_PIXEL_BYTES < MAX_MESSAGE_BYTES
    prompt, images = prompt_with(2, tower.spec)
    size = sum(len(each.pixels) for each in images)
    others = [changed(each, digest=each.digest[::-1]) for each in images]
    live = [sequence_of(index, one, tower.spec) for index, one in enumerate((Asked(prompt, others), Asked(prompt)))]
    monkeypatch.setattr(vision, "MAX_HELD_BYTES", 2 * size)
    admit(tower, submit(prompt, images), live)
    monkeypatch.setattr(vision, "MAX_HELD_BYTES", 2 * size - 1)
    with pytest.raises(QueueFull, match="all requests"):
        admit(tower, submit(prompt, images), live)
    admit(tower, submit(prompt, images, crashes=1), live)
    monkeypatch.setattr(vision, "MAX_PIXEL_BYTES", size - 1)
    with pytest.raises(Refused, match="MiB of pixels"):
        admit(tower, submit(prompt, images))


def test_equal_images_of_several_requests_are_in_memory_once(tower: Tower) -> None:
    assert tower.spec is not None
    prompt, images = prompt_with(2, tower.spec)
    first = admit(tower, submit(prompt, images))
    copies = [changed(each, pixels=bytes(bytearray(each.pixels))) for each in images]
    second = admit(tower, submit(prompt, copies), [first])
    assert first.images is not None and second.images is not None
    pairs = zip(first.images.images, second.images.images, strict=True)
    assert all(one.pixels is other.pixels for one, other in pairs)


def test_token_between_two_rows_is_no_placeholder(towers: dict[str, Path]) -> None:
    spec = served(towers["mistral3"]).vision.spec
    prompt, images = prompt_with(2, spec)
    admit(Tower(spec), submit(prompt, images))
    between = images[1].start + spec.squares_of(images[1].height, images[1].width)[1]
    prompt[between] = PLACEHOLDER
    with pytest.raises(Refused, match=f"image 1: the token between two of its rows is the placeholder {PLACEHOLDER}"):
        admit(Tower(spec), submit(prompt, images))


def test_sizes_of_a_model_that_sees_any(towers: dict[str, Path]) -> None:
    spec = served(towers["qwen3_5"]).vision.spec
    prompt, images = prompt_with(3, spec)
    admit(Tower(spec), submit(prompt, images))
    step = spec.patch_size * spec.side
    for height, width in ((step, step + 1), (0, step), (-step, -step), (step, 1 << 40)):
        with pytest.raises(Refused, match=r"multiples of 8|at most 16384 patches"):
            admit(Tower(spec), submit(prompt, [changed(images[0], height=height, width=width), *images[1:]]))
    rows = images[0].height // step, images[0].width // step
    with pytest.raises(Refused, match="6 tokens; this model makes 12"):
        taller = changed(images[0], height=2 * images[0].height, pixels=images[0].pixels * 2)
        admit(Tower(spec), submit(prompt, [taller, *images[1:]]))
    assert rows == (3, 2)


def test_tenants_that_share_no_prefixes_share_no_encoded_images(tower: Tower) -> None:
    """Equal digests are what makes an image a hit in the encoder's cache, and lets requests share pixels."""
    assert tower.spec is not None
    prompt, images = prompt_with(1, tower.spec)

    def digest(salt: str) -> bytes:
        admitted = admit(tower, submit(prompt, images, cache_salt=salt)).images
        assert admitted is not None
        return admitted.images[0].digest

    adapter = m.Adapter("a", "/a", "ab" * 32)
    alice, bob, salted, adapted = (
        PrefixIdentity(salt, tenant, one).text
        for salt, tenant, one in [("", "alice", None), ("", "bob", None), ("s", "", None), ("", "alice", adapter)]
    )
    assert digest("") == images[0].digest, "all share by default"
    assert len({digest(text) for text in ("", alice, bob, salted)}) == 4
    assert digest(alice) == digest(adapted), "a tower is the same with every adapter"
