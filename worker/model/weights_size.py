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
        """Returns the size of weights with their layouts, None in full precision, without padding."""
        return sum(self.nbytes_as(weight.shape, layout) for weight, layout in kept)

    def copies_head(self, layout: Layout | None) -> bool:
        """Whether a head with this layout that is tied is kept besides the embedding."""
        return layout is not None or self._in_c

    def nbytes_as(self, shape: Shape, layout: Layout | None) -> int:
        """Returns the size of a weight of this shape with a layout, None in full precision."""
        plain = torch.Size(shape).numel() * self.dtype.itemsize
        if layout is None or (self.device.type == "cpu" and not self._in_c):  # plain PyTorch has no products of codes
            return plain
        return layout.nbytes(shape, scale_bytes=2 if self._in_c and self.dtype == torch.bfloat16 else 4)

    @property
    def _in_c(self) -> bool:
        return self.device.type == "cpu" and bindings.available(self.dtype)
