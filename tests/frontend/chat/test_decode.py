"""Decoded images equal those of transformers' image processors before normalization; bad files are refused."""

import io
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from transformers.image_utils import load_image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from frontend.chat.image_decoding import decode
from frontend.text.image_format import best_grid, is_cut

SIDE = 28
MOST = 1 << 22
Tile = tuple[int, int, bytes]


def drawn(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Draws an image with edges and noise, so that a wrong size, filter or position shows."""
    draw = np.random.default_rng(seed)
    noise = draw.integers(0, 256, (height, width, 3), np.uint8)
    noise[: height // 2, : width // 3] = (250, 10, 60)
    return Image.fromarray(noise).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(tile: Tile) -> NDArray[np.uint8]:
    height, width, data = tile
    return np.frombuffer(data, np.uint8).reshape(height, width, 3)


SIZES = [(1, 1), (28, 28), (29, 28), (100, 40), (33, 120), (300, 3), (2, 250), (64, 64), (113, 57)]
BARE: dict[str, Any] = {"do_rescale": False, "do_normalize": False}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
@pytest.mark.parametrize(("longest", "cuts"), [(2 * SIDE, True), (4 * SIDE, True), (4 * SIDE, False)])
def test_tiles_are_those_of_the_processor(
    make: Callable[..., Any], longest: int, cuts: bool, size: tuple[int, int]
) -> None:
    image = drawn(*size)
    processor = make(
        size={"longest_edge": longest}, max_image_size={"longest_edge": SIDE},
        do_image_splitting=cuts, **BARE,
    )  # fmt: skip
    expected = processor([[image]], return_row_col_info=True)
    rows, columns, tiles = decode(encoded(image), MOST, "tiles", SIDE, longest, cuts, processor.resample)
    assert [[rows]] == expected["rows"] and [[columns]] == expected["cols"]
    values = np.asarray(expected["pixel_values"])[0]
    assert len(tiles) == len(values) == (rows * columns + 1 if rows else 1)
    for tile, value in zip(tiles, values, strict=True):
        assert np.abs(pixels(tile).astype(float) - np.moveaxis(value, 0, -1)).max() <= 1


@pytest.mark.parametrize("size", SIZES)
def test_square_is_that_of_the_processor(size: tuple[int, int]) -> None:
    image = drawn(*size)
    processor = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_pan_and_scan=False, **BARE)
    (value,) = np.asarray(processor(image)["pixel_values"])
    rows, columns, (tile,) = decode(encoded(image), MOST, "square", SIDE, 0, False, processor.resample)
    assert (rows, columns) == (0, 0)
    assert np.abs(pixels(tile).astype(float) - np.moveaxis(value, 0, -1)).max() <= 1


@pytest.mark.parametrize("size", [*SIZES, (2, 400), (1200, 6)])
def test_fitted_image_is_that_of_the_processor(size: tuple[int, int]) -> None:
    image = drawn(*size)
    processor = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70, **BARE)
    found = processor(image)
    _, _, (tile,) = decode(encoded(image), MOST, "fit", 8, 0, False, processor.resample, (1, 70 * 64))
    columns, rows = np.asarray(found["image_position_ids"])[0].max(0) + 1
    assert tile[:2] == (4 * rows, 4 * columns) and rows * columns // 4 == found["num_soft_tokens_per_image"][0]
    patches = pixels(tile).reshape(rows, 4, columns, 4, 3).swapaxes(1, 2).reshape(rows * columns, -1)
    assert np.abs(patches.astype(float) - found["pixel_values"][0][: rows * columns]).max() <= 1


@pytest.mark.parametrize("area", [(1, 1 << 20), (4096, 1 << 14), (64, 2048), (1 << 14, 1 << 14)])
@pytest.mark.parametrize("size", SIZES)
def test_image_of_any_size_is_that_of_the_processor(size: tuple[int, int], area: tuple[int, int]) -> None:
    image, (least, most) = drawn(*size), area
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": least, "longest_edge": most}, patch_size=4, merge_size=2, temporal_patch_size=1, **BARE
    )
    found = processor(image)
    _, rows, columns = found["image_grid_thw"][0]
    _, _, (tile,) = decode(encoded(image), MOST, "any", 8, 0, False, processor.resample, area)
    assert tile[:2] == (4 * rows, 4 * columns)
    patches = pixels(tile).reshape(rows // 2, 2, 4, columns // 2, 2, 4, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    assert np.abs(patches.reshape(rows * columns, -1).astype(float) - found["pixel_values"]).max() <= 1


# What Lfm2VlImageProcessor makes of images with small settings, by width and height: rows and columns of tiles, and
# height and width of the whole image.
LFM2_GRIDS = {(90, 40): (1, 2, (16, 48)), (30, 200): (4, 1, (80, 8)), (64, 64): (2, 2, (32, 32)),
              (40, 40): (1, 1, (32, 32)), (5, 5): (1, 1, (16, 16)), (20, 300): (4, 1, (120, 8))}  # fmt: skip


@pytest.mark.parametrize("size", LFM2_GRIDS)
@pytest.mark.parametrize(("cuts", "whole"), [(True, True), (True, False), (False, True)])
def test_tiles_and_sizes_are_those_of_the_processor_of_lfm2(size: tuple[int, int], cuts: bool, whole: bool) -> None:
    grid = (16, 2, 4, 2048, whole)
    rows, columns, tiles = decode(encoded(drawn(*size)), MOST, "grid", 8, 0, cuts, 2, (128, 1024), grid)
    down, across, shape = LFM2_GRIDS[size]
    if not cuts or down * across == 1:
        assert (rows, columns) == (0, 0) and [tile[:2] for tile in tiles] == [shape]
    else:
        assert (rows, columns) == (down, across)
        assert [tile[:2] for tile in tiles] == [(16, 16)] * (rows * columns) + [shape] * whole


# (width, height) of an image → (rows, columns) of tiles by Lfm2VlImageProcessor's default settings; None: not cut
PUBLISHED = {
    (640, 480): None, (200, 2000): None, (10, 1900): None, (3000, 30): None, (724, 724): (2, 2), (1500, 750): (2, 4),
    (3000, 1400): (2, 4), (1440, 1152): (3, 3), (1170, 2532): (4, 2),
}  # fmt: skip


@pytest.mark.parametrize("size", PUBLISHED)
def test_large_images_are_cut_as_the_processor_of_lfm2_cuts_them(size: tuple[int, int]) -> None:
    cut = is_cut(*size, 32, 2 * 256 * 32 * 32)
    assert (best_grid(*size, 512, 2, 10)[::-1] if cut else None) == PUBLISHED[size]


@pytest.mark.parametrize("size", [(201, 1), (1, 201), (3, 1), (1, 1), (200, 1)])
def test_image_of_any_size_has_a_row_and_a_column(size: tuple[int, int]) -> None:
    found = decode(encoded(drawn(*size)), MOST, "any", 8, 0, False, 3, (1, 4096))
    if 201 in size:
        assert "one side may be 200 times as long" in found[0]
    else:
        (height, width, _) = found[2][0]
        assert height >= 8 <= width and height % 8 == width % 8 == 0 and height * width <= 4096


def rotated(image: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, "JPEG", exif=exif)


HONEST: dict[str, bytes] = {
    "jpeg": encoded(drawn(40, 30), "JPEG"),
    "webp": encoded(drawn(40, 30), "WEBP", lossless=True),
    "gif": encoded(drawn(40, 30, "P"), "GIF"),
    "animated": encoded(drawn(40, 30), "GIF", save_all=True, append_images=[drawn(40, 30, seed=1)]),
    "palette": encoded(drawn(40, 30, "P")),
    "gray": encoded(drawn(40, 30, "L")),
    "16 bits": encoded(drawn(40, 30, "L").convert("I;16")),
    "alpha": encoded(drawn(40, 30, "RGBA")),
    "one bit": encoded(drawn(40, 30, "1")),
    "cmyk": encoded(drawn(40, 30, "CMYK"), "JPEG"),
    **{f"orientation {number}": rotated(drawn(40, 30), number) for number in range(1, 9)},
}


@pytest.mark.parametrize("name", HONEST)
def test_every_kind_of_image_has_the_pixels_that_transformers_reads(name: str) -> None:
    read = load_image(Image.open(io.BytesIO(HONEST[name])))
    _, _, (tile,) = decode(HONEST[name], MOST, "square", SIDE, 0, False, Image.Resampling.BILINEAR)
    assert np.array_equal(pixels(tile), np.asarray(read.resize((SIDE, SIDE), Image.Resampling.BILINEAR)))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes) -> bytes:
    """Returns a PNG file whose header states this size, whatever its data."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is no PNG"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no PNG"),
    "another format": (encoded(drawn(9, 9), "BMP"), "is no PNG"),
    "bomb": (png(60_000, 60_000, zlib.compress(b"\0" * 9000)), "60000 x 60000 pixels; at most"),
    "thin bomb": (png(2_000_000_000, 1, b""), "pixels; at most"),
    "truncated": (encoded(drawn(200, 200))[:3000], "is broken"),
    "no data": (png(30, 30, b""), "is broken"),
    "cut JPEG": (encoded(drawn(200, 200), "JPEG")[:900], "is broken"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused_in_words(name: str) -> None:
    data, words = HOSTILE[name]
    (problem,) = decode(data, MOST, "tiles", SIDE, 4 * SIDE, True, 1)
    assert words in problem


def test_random_damage_is_an_image_or_a_refusal() -> None:
    draw, whole = random.Random(5), [*HONEST.values()]
    for _ in range(200):
        data = bytearray(draw.choice(whole))
        for _ in range(draw.randrange(1, 9)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        found = decode(bytes(data), MOST, "square", SIDE, 0, False, 2)
        assert len(found) == 3 or isinstance(found[0], str)


def test_tiles_have_a_bound() -> None:
    (problem,) = decode(encoded(drawn(64, 64)), MOST, "tiles", 8, 8 * 9, True, 1)
    assert problem == "is cut into 9 x 9 tiles; at most 64 are accepted"
    assert len(decode(encoded(drawn(64, 64)), MOST, "tiles", 8, 8 * 8, True, 1)) == 3


def progressive(side: int, more: int) -> bytes:
    """Returns a progressive JPEG file whose last scan, with its Huffman table, comes `more` times again."""
    data = encoded(drawn(side, side), "JPEG", progressive=True, quality=40)
    table, end = data.rindex(b"\xff\xc4"), len(data) - 2
    assert data[end:] == b"\xff\xd9"
    return data[:end] + data[table:end] * more + data[end:]


def decode_square(data: bytes, most: int = MOST) -> list[Any]:
    return decode(data, most, "square", SIDE, 0, False, 2)


@pytest.mark.parametrize(("side", "more", "scans"), [(64, 140, 100), (2000, 8, 16)])
def test_jpeg_of_many_scans_is_refused_before_it_is_decoded(side: int, more: int, scans: int) -> None:
    (problem,) = decode_square(progressive(side, more))
    assert problem == f"is a JPEG file of more than {scans} scans, which is too many for {side} x {side} pixels"


def test_jpeg_with_the_scans_of_an_ordinary_encoder_is_decoded() -> None:
    for data in (progressive(64, 0), progressive(2000, 0), progressive(64, 50), encoded(drawn(64, 64), "JPEG")):
        assert len(decode_square(data)) == 3


def test_scans_of_embedded_images_and_of_bytes_behind_the_end_do_not_count() -> None:
    data = progressive(64, 0)
    thumbnail = b"\xff\xe2" + (2 + 4 * 5000).to_bytes(2, "big") + b"\xff\xda\x00\x01" * 5000
    assert len(decode_square(data[:2] + thumbnail + data[2:] + b"\xff\xda\x00\x01" * 5000)) == 3


def test_jpeg_of_endless_segments_is_refused() -> None:
    data = progressive(64, 0)
    (problem,) = decode_square(data[:2] + b"\xff\xe2\x00\x02" * 20_000 + data[2:])
    assert "scans" in problem
