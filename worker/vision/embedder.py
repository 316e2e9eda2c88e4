"""A model without a tower (Gemma 4 12B): a linear turns the pixels of each square of a picture into a token."""

from collections.abc import Generator
from ctypes import c_uint64
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.messages import Picture
from worker.kernels.linear import PackedLinear
from worker.kernels.operations import Operations
from worker.vision.positions import by_axes
from worker.vision.preprocess import level_table, patches_of
from worker.vision.spec import VisionSpec

LAYER_NORM_EPS = 1e-5  # the default of torch's layer norm; configs do not state it


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderWeights:
    """W: the number of values in a square's pixels; H: hidden size. Norms [2, n] are layer norms: weight, bias."""

    pixel_norm: Tensor  # [2, W]
    pixels: PackedLinear  # W → H
    norm: Tensor  # [2, H]
    positions: Tensor  # [2, P, H]: embeddings of columns, and of rows
    last_norm: Tensor  # [2, H]
    projection: PackedLinear  # H → text_size
    ones: Tensor  # [H]: the weight of the RMS norm before the projection

    def encoder(self, spec: VisionSpec, operations: Operations, started: c_uint64) -> "Embedder":
        """Does what EncoderWeights.encoder does (encoder.py)."""
        return Embedder(spec, self, operations, started)


class Embedder:
    """Has the interface of Encoder."""

    def __init__(self, spec: VisionSpec, weights: EmbedderWeights, operations: Operations, started: c_uint64) -> None:
        self.spec, self.weights, self._do, self._started = spec, weights, operations, started
        self._squares = replace(spec, patch_size=spec.patch_size * spec.side, side=1)
        self._table = level_table(spec).to(weights.norm.device).to(weights.norm.dtype)

    @torch.inference_mode()
    def encode(self, picture: Picture) -> Tensor:
        """Returns the vectors of a picture, [tokens, text_size]."""
        weights, do = self.weights, self._do
        self._started.value += 1
        x = do.rms_norm(patches_of(picture, self._squares, self._table), weights.pixel_norm, LAYER_NORM_EPS)
        x = do.rms_norm(do.linear(x, weights.pixels), weights.norm, LAYER_NORM_EPS)
        rows, columns = self._squares.grid_of(picture.height, picture.width)
        x = do.rms_norm(x + by_axes(weights.positions, rows, columns), weights.last_norm, LAYER_NORM_EPS)
        return do.linear(do.rms_norm(x, weights.ones, self.spec.norm_eps), weights.projection)

    def pieces(self, picture: Picture) -> Generator[int, None, Tensor]:
        """Encodes a picture in one piece, whose cost is about that of its tokens in the text model."""
        found = self.encode(picture)
        yield found.numel() * self._squares.patch_width
        return found
