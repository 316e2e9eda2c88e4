"""Turns pixels into the encoder's input: normalizes them and cuts them into patches."""

import numpy as np
import torch
from torch import Tensor

from shared.messages import Picture
from worker.vision.spec import VisionSpec


def level_table(spec: VisionSpec) -> Tensor:
    """Returns the normalized value of each of a colour's 256 levels, [3, 256] float32, rounded as in transformers.

    Its image processors rescale in float64 and round to float32, then subtract and divide in float32. A tower that is
    `centred` then maps 0 .. 1 to -1 .. 1.
    """
    levels = (np.arange(256, dtype=np.uint8).astype(np.float64) * spec.rescale).astype(np.float32)
    mean, std = np.array(spec.mean, np.float32), np.array(spec.std, np.float32)
    normalized = torch.from_numpy((levels[None, :] - mean[:, None]) / std[:, None])
    return 2 * (normalized - 0.5) if spec.centred else normalized


def patches_of(picture: Picture, spec: VisionSpec, table: Tensor) -> Tensor:
    """Returns the patches [rows * columns, patch_width] of a picture, in the order of rows, on the table's device.

    table: the result of level_table in the dtype of the encoder. A patch has one colour after another, each row by row
    and repeated for all frames, in the order of a convolution's weights.
    """
    patch, (rows, columns) = spec.patch_size, spec.grid_of(picture.height, picture.width)
    whole = torch.frombuffer(bytearray(picture.pixels), dtype=torch.uint8).view(picture.height, picture.width, 3)
    whole = whole[: rows * patch, : columns * patch]
    cut = whole.reshape(rows, patch, columns, patch, 3).permute(0, 2, 4, 1, 3)  # [rows, columns, 3, patch, patch]
    levels = cut.reshape(rows * columns, 3, patch * patch).to(table.device).long()
    colours = torch.arange(3, device=table.device)[None, :, None]
    return table[colours, levels].repeat(1, 1, spec.frames).flatten(1)
