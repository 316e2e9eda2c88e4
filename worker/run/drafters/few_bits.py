"""The head over the vocabulary in four bits, for drafts alone: it is most of what a head that drafts must read.

A draft that rounding makes another token is a wrong guess, and no answer changes. The served model keeps its own head.
"""

import torch
from torch import Tensor

from worker.kernels.cpu import bindings
from worker.kernels.linear import PackedLinear, pack_stacked
from worker.kernels.weights.quantized_weight import INT4, QuantizedWeight
from worker.model.checkpoint.stored_weight import Layout, Shape

LAYOUT = Layout(INT4, 128)
SMALL = 16 << 20  # a head of so many bytes may stay in the processors' caches, and is read fast as it is


def pays(shape: Shape, layout: Layout | None, dtype: torch.dtype) -> bool:
    """Whether a head [vocab, H] is worth a copy: it is large, and kept in more bits. layout: None in full precision."""
    bits = 8 * dtype.itemsize if layout is None else layout.code_map.bits
    large = torch.Size(shape).numel() * bits // 8 > SMALL
    return large and bits > LAYOUT.code_map.bits and bindings.available(dtype)


def pack(head: Tensor | QuantizedWeight, dtype: torch.dtype) -> PackedLinear:
    """Packs a copy of a head [vocab, H] in four bits."""
    plain = head.dequantize(dtype) if isinstance(head, QuantizedWeight) else head
    return pack_stacked([LAYOUT.quantize(plain)], dtype=dtype, invariant=True)
