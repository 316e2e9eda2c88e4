"""`LLM.chat` accepts images as Pillow's images and as paths."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from frontend.errors import BadRequest
from frontend.text.tokenizer import Tokenizer
from shared.images import MAX_BYTES
from tests.fakes import FakePool
from tests.frontend.offline.harness import echoing, llm_over
from tests.images import drawn, seeing_checkpoint

WORDS = {"type": "text", "text": "What?"}


@pytest.fixture(scope="module")
def sight(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(seeing_checkpoint("gemma3", tmp_path_factory.mktemp("seeing") / "model"))


def asked(part: Any, sight: Tokenizer) -> Any:
    """Returns the pixels that the worker gets."""
    pool = FakePool(play=echoing())
    with llm_over(pool, sight) as llm:
        llm.chat([{"role": "user", "content": [part, WORDS]}], max_tokens=2)
    (one,) = pool.submitted
    (image,) = one.stream.submit.images or ()
    return image.pixels


def test_images_and_paths_are_seen_as_over_http(sight: Tokenizer, tmp_path: Path) -> None:
    image, file = drawn(50, 30), io.BytesIO()
    image.save(file, "PNG")
    (tmp_path / "a.png").write_bytes(file.getvalue())
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    expected = asked({"type": "image_url", "image_url": {"url": url}}, sight)
    for given in (image, tmp_path / "a.png", str(tmp_path / "a.png")):
        assert asked({"type": "image", "image": given}, sight) == expected
    assert asked({"type": "image_pil", "image_pil": image}, sight) == expected


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "HSV"])
def test_image_of_any_mode_is_seen_as_pillow_converts_it(sight: Tokenizer, mode: str) -> None:
    image = drawn(50, 30).convert("RGBA" if mode == "LA" else "RGB").convert(mode)
    found = asked({"type": "image", "image": image}, sight)
    assert found == asked({"type": "image", "image": image.convert("RGB")}, sight)


def test_orientation_of_an_image_counts(sight: Tokenizer) -> None:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    drawn(50, 30).save(file, "PNG", exif=exif)
    turned = asked({"type": "image", "image": Image.open(file)}, sight)
    assert turned == asked({"type": "image", "image": drawn(50, 30).transpose(Image.Transpose.ROTATE_270)}, sight)


def test_what_is_no_image_is_refused_in_words(sight: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hi")
    with (tmp_path / "big.png").open("wb") as big:
        big.write(b"\x89PNG")
        big.truncate(MAX_BYTES + 1)
    cases: list[tuple[Any, str]] = [
        (tmp_path / "none.png", "none.png cannot be read: No such file"),
        (tmp_path / "a.txt", "a.txt is no PNG, JPEG, WebP or GIF"),
        (tmp_path / "big.png", "big.png has more than 20 MiB"),
        (3, "is a int, neither an image of Pillow nor a path"),
    ]
    for image, words in cases:
        with pytest.raises(BadRequest, match=words):
            asked({"type": "image", "image": image}, sight)
