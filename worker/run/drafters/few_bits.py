"""Quantizes the output head over the vocabulary to four bits, for drafts only.

The output head is most of the memory that a draft head reads. If the rounding changes a draft, only the guess is wrong,
and no answer changes. The served model keeps its own output head.
"""

import torch
from torch import Tensor

from worker.kernels.cpu import bindings
from worker.kernels.linear import PackedLinear, pack_stacked
from worker.kernels.weights.quantized_weight import INT4, QuantizedWeight
from worker.model.checkpoint.stored_weight import Layout, Shape

LAYOUT = Layout(INT4, 128)
SMALL = 16 << 20  # bytes; a head up to this size may stay in the processors' caches, so a copy would not help


def pays(shape: Shape, layout: Layout | None, dtype: torch.dtype) -> bool:
    """Whether a 4-bit copy of an output head [vocab, H] speeds drafts up. layout: the head's own format, or None."""
    bits = 8 * dtype.itemsize if layout is None else layout.code_map.bits
    large = torch.Size(shape).numel() * bits // 8 > SMALL
    return large and bits > LAYOUT.code_map.bits and bindings.available(dtype)


def pack(head: Tensor | QuantizedWeight, dtype: torch.dtype) -> PackedLinear:
    """Packs a 4-bit copy of an output head [vocab, H]."""
    plain = head.dequantize(dtype) if isinstance(head, QuantizedWeight) else head
    return pack_stacked([LAYOUT.quantize(plain)], dtype=dtype, invariant=True)
