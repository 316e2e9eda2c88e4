"""Connectors: each turns the squares of patches of an encoded image into vectors of the text model's width."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from torch import Tensor

from shared.messages import PromptImage
from worker.operations import Operations
from worker.ops.linear.packed import PackedLinear
from worker.vision.activations import exact_gelu
from worker.vision.spec import Connector, VisionSpec


@dataclass(frozen=True, slots=True)
class ConnectorWeights:
    """The weights of a connector. A part that the connector lacks is None.

    projection: a linear to the text model's width
    norm [H]: a norm of the average, or of each patch
    before: a linear before `projection`
    joined: a linear before `before`, whose input is all patches of a square
    joined_norm [2, side * side * H]: a layer norm of all patches of a square
    """

    projection: PackedLinear
    norm: Tensor | None = None
    before: PackedLinear | None = None
    joined_norm: Tensor | None = None
    joined: PackedLinear | None = None
    standard: Tensor | None = None  # [2, H] float32: row 0 is subtracted from averages, row 1 is then their factor


def _joined(squares: Tensor) -> Tensor:
    """Concatenates the patches of each square: [tokens, side * side * H].

    squares: [squares down, side, squares across, side, H]; all functions here take this shape
    """
    down, side, across, _, hidden = squares.shape
    return squares.transpose(1, 2).reshape(down * across, side * side * hidden)


def shuffle(squares: Tensor, weights: ConnectorWeights, spec: VisionSpec, do: Operations) -> Tensor:
    """Projects the concatenated patches of a square ("pixel shuffle"). For Idefics3."""
    return do.linear(_joined(squares), weights.projection)


def merge(squares: Tensor, weights: ConnectorWeights, spec: VisionSpec, do: Operations) -> Tensor:
    """Passes the concatenated patches of a square through an MLP with the exact GELU. For Qwen, Mistral 3, LFM2."""
    assert weights.before is not None
    if weights.norm is not None:
        squares = do.rms_norm(squares.flatten(0, 3), weights.norm, spec.connector_eps).view_as(squares)
    x = _joined(squares)
    if weights.joined_norm is not None:
        x = do.rms_norm(x, weights.joined_norm, spec.joined_eps or spec.norm_eps)
    if weights.joined is not None:
        x = do.linear(x, weights.joined)
    return do.linear(exact_gelu(do.linear(x, weights.before)), weights.projection)


def pool(squares: Tensor, weights: ConnectorWeights, spec: VisionSpec, do: Operations) -> Tensor:
    """Averages the patches of a square, norms the average, and projects it. For Gemma 3."""
    assert weights.norm is not None
    average = _averages(squares, spec)
    return do.linear(do.rms_norm(average, weights.norm, spec.norm_eps, offset=True), weights.projection)


def scaled_pool(squares: Tensor, weights: ConnectorWeights, spec: VisionSpec, do: Operations) -> Tensor:
    """Averages the patches of a square, scales, standardizes and norms the average, and projects it. For Gemma 4."""
    assert weights.norm is not None
    scaled = _averages(squares, spec).float() * sqrt(spec.hidden_size)
    if weights.standard is not None:
        scaled = (scaled - weights.standard[0]) * weights.standard[1]
    return do.linear(do.rms_norm(scaled.to(squares.dtype), weights.norm, spec.norm_eps), weights.projection)


def _averages(squares: Tensor, spec: VisionSpec) -> Tensor:
    """Returns the average of the patches of each square, [tokens, H]."""
    x, total = squares.float(), None
    for down in range(spec.side):  # one addition after another, so that the order is always the same
        for across in range(spec.side):
            part = x[:, down, :, across]
            total = part if total is None else total + part
    assert total is not None
    return (total / spec.side**2).flatten(0, 1).to(squares.dtype)


CONNECTORS: Mapping[Connector, Callable[[Tensor, ConnectorWeights, VisionSpec, Operations], Tensor]] = {
    "shuffle": shuffle, "pool": pool, "merge": merge, "scaled_pool": scaled_pool,
}  # fmt: skip


# Turns pixels into the encoder's input: normalizes them and cuts them into patches.


def level_table(spec: VisionSpec) -> Tensor:
    """Returns the normalized value of each of a colour's 256 levels, [3, 256] float32, rounded as in transformers.

    Its image processors rescale in float64 and round to float32, then subtract and divide in float32. A tower that is
    `centred` then maps 0 .. 1 to -1 .. 1.
    """
    levels = (np.arange(256, dtype=np.uint8).astype(np.float64) * spec.rescale).astype(np.float32)
    mean, std = np.array(spec.mean, np.float32), np.array(spec.std, np.float32)
    normalized = torch.from_numpy((levels[None, :] - mean[:, None]) / std[:, None])
    return 2 * (normalized - 0.5) if spec.centred else normalized


def patches_of(image: PromptImage, spec: VisionSpec, table: Tensor) -> Tensor:
    """Returns the patches [rows * columns, patch_width] of an image, in the order of rows, on the table's device.

    table: the result of level_table in the dtype of the encoder. A patch has one colour after another, each row by row
    and repeated for all frames, in the order of a convolution's weights.
    """
    patch, (rows, columns) = spec.patch_size, spec.grid_of(image.height, image.width)
    whole = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(image.height, image.width, 3)
    whole = whole[: rows * patch, : columns * patch]
    cut = whole.reshape(rows, patch, columns, patch, 3).permute(0, 2, 4, 1, 3)  # [rows, columns, 3, patch, patch]
    levels = cut.reshape(rows * columns, 3, patch * patch).to(table.device).long()
    colours = torch.arange(3, device=table.device)[None, :, None]
    return table[colours, levels].repeat(1, 1, spec.frames).flatten(1)
