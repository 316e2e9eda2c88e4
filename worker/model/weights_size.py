"""Predicts how many bytes weights take in memory."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from worker.kernels.cpu import bindings
from worker.model.checkpoint.stored_weight import Layout, Shape, StoredWeight


@dataclass(frozen=True, slots=True)
class Keeper:
    """Knows how weights are kept on a device by a model that computes in `dtype`."""

    dtype: torch.dtype
    device: torch.device

    def nbytes(self, kept: Iterable[tuple[StoredWeight, Layout | None]]) -> int:
        """Returns the size of weights in bytes, without padding. A weight whose layout is None is in full precision."""
        return sum(self.nbytes_as(weight.shape, layout) for weight, layout in kept)

    def copies_head(self, layout: Layout | None) -> bool:
        """Returns whether a tied head with this layout is kept in memory in addition to the embedding."""
        return layout is not None or self._in_c

    def nbytes_as(self, shape: Shape, layout: Layout | None) -> int:
        """Returns the size in bytes of a weight with this shape. layout: None if the weight is in full precision"""
        plain = torch.Size(shape).numel() * self.dtype.itemsize
        # On a CPU without the C library, weights are dequantized: plain PyTorch has no products of quantized codes.
        if layout is None or (self.device.type == "cpu" and not self._in_c):
            return plain
        return layout.nbytes(shape, scale_bytes=2 if self._in_c and self.dtype == torch.bfloat16 else 4)

    @property
    def _in_c(self) -> bool:
        return self.device.type == "cpu" and bindings.available(self.dtype)
