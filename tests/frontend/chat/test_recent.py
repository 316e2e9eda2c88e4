"""The cache of decoded images: only for the tenant that sent them, only for the same use, and of limited size."""

from dataclasses import replace

import pytest

from frontend.chat import image_decoding
from frontend.chat.image_decoding import Decoded, RecentImages, key_of
from frontend.model_context import ModelContext
from frontend.observability.metrics import image_counts
from frontend.turns import tenant
from tests.frontend.chat.test_prompt import asked, context_of, openai_part
from tests.images import drawn, seeing_checkpoint


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> ModelContext:
    return context_of(seeing_checkpoint("idefics3", tmp_path_factory.mktemp("seeing") / "model"))


def kept(nbytes: int) -> Decoded:
    return Decoded(0, 0, [(1, 1, b"\0" * nbytes)], [b""])


async def test_next_turn_of_a_chat_decodes_nothing_again(context: ModelContext) -> None:
    part, low = (openai_part(drawn(90, 40, seed=72), detail=detail) for detail in ("high", "low"))

    async def decodings(*parts: object, asks: ModelContext = context) -> int:
        before = image_counts().decoded
        found.append((await asked(list(parts), asks)).features.images)
        return image_counts().decoded - before

    found: list[object] = []
    assert [await decodings(part) for _ in range(2)] == [1, 0] and found[0] == found[1]
    assert await decodings(part, openai_part(drawn(90, 40, seed=73))) == 1
    assert await decodings(low) == 1, "one tile is not what many tiles are"
    fewer = replace(context, config=replace(context.config, max_image_pixels=90 * 40))
    assert await decodings(part, asks=fewer) == 1
    for name, expected in (("other", 1), ("other", 0), ("", 0)):
        token = tenant.set(name)
        assert await decodings(part) == expected
        tenant.reset(token)


def test_oldest_images_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_decoding, "MAX_BYTES", 300)
    images = RecentImages()
    for name in (b"a", b"b", b"c"):
        images.add(key_of(name), kept(100))
        images.add(key_of(name), kept(100))
    assert images.get(key_of(b"a")) is not None
    images.add(key_of(b"d"), kept(100))
    assert [images.get(key_of(name)) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    images.add(key_of(b"e"), kept(301))
    assert not any(images.get(key_of(name)) for name in (b"a", b"c", b"d", b"e"))
    images.add(key_of(b"f"), kept(300))
    assert images.get(key_of(b"f")) is not None
