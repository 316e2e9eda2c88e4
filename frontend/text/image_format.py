"""Reads from a checkpoint how images are resized and cut into tiles, and which tokens a prompt has for them.

FORMATS has a row for each model family, which does the same as the family's Pillow-based processor in transformers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shared.images import MAX_PATCHES

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's numbers, also used in preprocessor_config.json
MOST_SIDE, MOST_TILES = 1 << 14, 64
Kind = Literal["square", "tiles", "any", "within", "grid", "fit"]
Config = Mapping[str, Any]


class Grid(NamedTuple):
    """How images of the kind `grid` are cut."""

    tile: int  # height and width of a tile in pixels
    least: int  # the least number of tiles
    most: int  # the largest number of tiles
    above: int  # images with more pixels than this, rounded to whole squares, are cut
    whole: bool  # whether one more tile with the whole image follows


@dataclass(frozen=True, slots=True)
class ImageFormat:
    """How a model sees images.

    kind: how an image becomes tiles.
        square: one tile of `side` x `side` pixels
        tiles: several tiles of `side` x `side` pixels, and one more with the whole image
        any: one tile with about the image's aspect ratio; its height and width are multiples of `side`
        within: like `any`, but of the image's own size unless a side is longer than `longest`
        fit: like `any`, but with as many pixels as `area` allows
        grid: a small image becomes one tile as in `any`; a large image becomes several tiles, and perhaps one
            more with the whole image
    tokens: how many tokens the prompt has for each tile; for the kinds `any`, `within`, `fit` and `grid`: for each
        square of `side` x `side` pixels
    longest: for `tiles` and `within`: the longest side in pixels that an image is resized to; otherwise 0
    cuts: for `tiles` and `grid`: whether images are cut; if not, each image becomes one tile
    placeholder: the text that the chat template writes for an image
    token: the text of the token that is repeated for each tile
    before, after: texts before and after the tokens of a tile
    """

    kind: Kind
    side: int
    tokens: int
    longest: int
    cuts: bool
    resample: int
    placeholder: str
    token: str
    before: str = ""
    after: str = ""
    area: tuple[int, int] = (0, 0)  # for `any`, `grid` and `fit`: the least and the most pixels
    row_end: str = ""  # the text of the token between two rows of squares
    grid: Grid | None = None  # for the kind `grid`

    def tokens_of(self, height: int, width: int) -> int:
        """Returns how many tokens the prompt has for a tile of this size in pixels, including `row_end` tokens."""
        rows = height // self.side
        return self.tokens * rows * (width // self.side) + (rows - 1 if self.row_end else 0)

    def shown(self, rows: int, columns: int, sizes: Sequence[tuple[int, int]]) -> str:
        """Returns the text that the prompt has for an image.

        rows, columns: how many rows and columns of tiles the image is cut into; 0 if it is not cut
        sizes: height and width in pixels of each tile, row by row, and of the whole image last
        """
        if self.kind == "grid":
            return f"{self.before}{self._in_grid(rows, columns, sizes)}{self.after}"
        height, width = sizes[0]
        down = height // self.side if self.row_end else 1
        ends = down - 1 if self.row_end else 0
        tokens = self.row_end.join([self.token * ((self.tokens_of(height, width) - ends) // down)] * down)
        if self.kind != "tiles":
            return f"{self.before}{tokens}{self.after}"
        lines = "".join(
            "".join(f"{self.before}<row_{row}_col_{column}>{tokens}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        return lines + "\n" * bool(rows) + f"{self.before}<global-img>{tokens}{self.after}"

    def _in_grid(self, rows: int, columns: int, sizes: Sequence[tuple[int, int]]) -> str:
        names = [f"<|img_row_{row}_col_{column}|>" for row in range(1, rows + 1) for column in range(1, columns + 1)]
        names += ["<|img_thumbnail|>" if rows else ""] * (len(sizes) - len(names))
        return "".join(name + self.token * self.tokens_of(*size) for name, size in zip(names, sizes, strict=True))


def read_image_format(folder: Path, config: Config, named_tokens: Mapping[str, str]) -> ImageFormat | None:
    """Returns the image format of a checkpoint; None if the model takes no images or is not supported.

    config: config.json. named_tokens: special tokens by their names in tokenizer_config.json
    """
    make, vision = FORMATS.get(str(config.get("model_type"))), config.get("vision_config")
    if make is None or not isinstance(vision, dict):
        return None
    try:
        found = make(config, vision, _processor(folder), named_tokens)
    except (TypeError, ValueError, KeyError, ZeroDivisionError, AttributeError):  # the worker reports the problem
        return None
    if found is None:
        return None
    fits = 0 < found.side <= MOST_SIDE and found.longest <= MOST_SIDE and found.tokens > 0
    bounds = found.kind not in ("any", "grid", "fit") or 0 < found.area[0] <= found.area[1]
    return found if fits and bounds and (found.grid is None or _is_possible(found.grid, found.side)) else None


def _is_possible(grid: Grid, side: int) -> bool:
    return side <= grid.tile <= MOST_SIDE and grid.tile % side == 0 and 1 <= grid.least <= grid.most <= MOST_TILES


def _idefics3(config: Config, vision: Config, processor: Config, named: Mapping[str, str]) -> ImageFormat:
    side = vision.get("image_size", 224)
    tokens = (side // vision.get("patch_size", 32) // config.get("scale_factor", 2)) ** 2
    splits = processor.get("do_image_splitting", True)
    longest = (processor.get("size") or {}).get("longest_edge", 4 * side)
    return ImageFormat(
        "tiles", side, tokens, longest, splits, processor.get("resample", LANCZOS), "<image>", "<image>",
        "<fake_token_around_image>", "<fake_token_around_image>",
    )  # fmt: skip


def _gemma3(config: Config, vision: Config, processor: Config, named: Mapping[str, str]) -> ImageFormat:
    side, tokens = vision.get("image_size", 224), config.get("mm_tokens_per_image", 256)
    begin, end = named.get("boi_token", "<start_of_image>"), named.get("eoi_token", "<end_of_image>")
    return ImageFormat(
        "square", side, isqrt(tokens) ** 2, 0, False, processor.get("resample", BILINEAR), begin,
        named.get("image_token", "<image_soft_token>"), f"\n\n{begin}", f"{end}\n\n",
    )  # fmt: skip


def _qwen(config: Config, vision: Config, processor: Config, named: Mapping[str, str]) -> ImageFormat:
    """Reads the settings of Qwen2VLImageProcessor. Older checkpoints have `min_pixels` and `max_pixels`, not `size`."""
    patch, merge = vision.get("patch_size", 16), vision.get("spatial_merge_size", 2)
    size = processor.get("size") or {}
    least = processor.get("min_pixels") or size.get("shortest_edge", 56 * 56)
    most = processor.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280)
    token = named.get("image_token", "<|image_pad|>")
    return ImageFormat(
        "any", patch * merge, 1, 0, False, processor.get("resample", BICUBIC), token, token,
        area=(least, min(most, MAX_PATCHES * patch * patch)),
    )  # fmt: skip


def _qwen2_5(config: Config, vision: Config, processor: Config, named: Mapping[str, str]) -> ImageFormat:
    return _qwen(config, {"patch_size": 14, **vision}, processor, named)


def _pixtral(config: Config, vision: Config, processor: Config, named: Mapping[str, str]) -> ImageFormat | None:
    """Reads the settings of Pixtral and Mistral 3. The worker encodes at most MAX_PATCHES patches of an image."""
    if vision.get("model_type") != "pixtral":  # a LLaVA model with another vision encoder
        return None
    merge = config.get("spatial_merge_size", 2) if config.get("model_type") == "mistral3" else 1
    patch, size = vision.get("patch_size", 16), processor.get("size") or {}
    longest = size.get("longest_edge") or size.get("height", 1024)
    return ImageFormat(
        "within", patch * merge, 1, min(longest, isqrt(MAX_PATCHES) * patch), False,
        processor.get("resample", BICUBIC), "[IMG]", "[IMG]", after="[IMG_END]", row_end="[IMG_BREAK]",
    )  # fmt: skip


def _gemma4(config: Config, vision: Config, processor: Config, named: Mapping[str, str]) -> ImageFormat | None:
    sizes = {"patch_size": 16, "pooling_kernel_size": 3}
    patch, pool = (vision.get(name, default) for name, default in sizes.items())
    if any(processor.get(name, default) != vision.get(name, default) for name, default in sizes.items()):
        return None  # the worker would expect other numbers of tokens
    side, most = patch * pool, min(processor.get("max_soft_tokens", 280), MAX_PATCHES // pool**2)
    token = named.get("image_token", "<|image|>")
    return ImageFormat(
        "fit", side, 1, 0, False, processor.get("resample", BICUBIC), token, token,
        named.get("boi_token", "<|image>"), named.get("eoi_token", "<image|>"), area=(1, most * side**2),
    )  # fmt: skip


def _lfm2(config: Config, vision: Config, processor: Config, named: Mapping[str, str]) -> ImageFormat | None:
    """Reads the settings of Lfm2VlImageProcessor. Its `size` has no effect."""
    if not processor.get("use_image_special_tokens", config.get("use_image_special_tokens", True)):
        return None
    patch, join = vision.get("patch_size", 16), config.get("downsample_factor", 2)
    if (processor.get("encoder_patch_size", patch), processor.get("downsample_factor", join)) != (patch, join):
        return None  # the worker would expect other numbers of tokens
    square = (patch * join) ** 2
    least, most = (processor.get(f"{name}_image_tokens", count) for name, count in (("min", 64), ("max", 256)))
    tiles, least_tiles = processor.get("max_tiles", 10), processor.get("min_tiles", 2)
    cuts = processor.get("do_image_splitting", True) and not least_tiles == tiles == 1
    above = int(most * square * processor.get("max_pixels_tolerance", 2.0))
    return ImageFormat(
        "grid", patch * join, 1, 0, cuts, processor.get("resample", BILINEAR), "<image>",
        named.get("image_token", "<image>"), named.get("image_start_token", "<|image_start|>"),
        named.get("image_end_token", "<|image_end|>"),
        area=(least * square, min(most * square, MAX_PATCHES * patch**2)),
        grid=Grid(processor.get("tile_size", 512), least_tiles, tiles, above, processor.get("use_thumbnail", True)),
    )  # fmt: skip


FORMATS: Mapping[str, Callable[[Config, Config, Config, Mapping[str, str]], ImageFormat | None]] = {
    "gemma3": _gemma3, "gemma4": _gemma4, "gemma4_unified": _gemma4, "idefics3": _idefics3, "lfm2_vl": _lfm2,
    "llava": _pixtral, "mistral3": _pixtral, "qwen2_5_vl": _qwen2_5, "qwen3_5": _qwen, "qwen3_5_moe": _qwen,
    "qwen3_vl": _qwen, "qwen3_vl_moe": _qwen, "smolvlm": _idefics3,
}  # fmt: skip


def _processor(folder: Path) -> Config:
    """Returns the settings of the image processor; empty if the checkpoint has none."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (file := folder / name).exists():
            settings = json.loads(file.read_bytes())
            found: Config = settings.get("image_processor", settings)
            return found
    return {}


# Chooses how many tiles an image is cut into, as the image processor of LFM2-VL does in transformers.


def is_cut(width: int, height: int, step: int, above: int) -> bool:
    """Says whether an image, rounded to multiples of `step`, has more than `above` pixels."""
    across, down = (max(step // 2, round(side / step) * step) for side in (width, height))
    return across * down > above


def best_grid(width: int, height: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """Returns the columns and rows of the grid whose shape is nearest to the image's, with `least` to `most` tiles.

    If several grids have this shape, a larger grid is taken as long as the image, in its own size, would fill more
    than half of the grid.
    """
    grids = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    grids = sorted((one for one in grids if one[0] * one[1] >= least), key=lambda one: one[0] * one[1])
    best, nearest = (1, 1), float("inf")
    for columns, rows in grids:
        away = abs(width / height - columns / rows)
        if away < nearest or (away == nearest and 2 * width * height > tile * tile * columns * rows):
            best, nearest = (columns, rows), away
    return best
