"""Turns stored numbers of few bits into the codes, scales and minimums of a QuantizedWeight, and checks them.

Formats with unsigned codes q and zero points z mean scale * (q - z). With signed codes q - h, where h is half the
number of codes, this is scale * (q - h) + minimum with minimum = scale * (h - z).
"""

import torch
from torch import Tensor

from worker.kernels.quantized_weight import INT4, INT8, QuantizedWeight
from worker.model.checkpoint import CheckpointError
from worker.model.stored_weight import StoredTensors

CODE_MAPS = {4: INT4, 8: INT8}


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpacks words [.., W] of integers to unsigned codes [.., W * word size / bits] uint8, lowest bits first."""
    bytes_ = words.contiguous().view(torch.uint8)
    return bytes_ if bits == 8 else torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)


def signed(
    codes: Tensor, bits: int, scale: Tensor, zero: Tensor | None, group_size: int, order: Tensor | None = None
) -> QuantizedWeight:
    """Returns the weight scale * (codes - zero), from unsigned codes [N, K] uint8 whose groups are consecutive.

    scale [N, groups] float32; zero [N, groups], or None if every zero point is half the number of codes.
    """
    half = 1 << (bits - 1)
    minimum = None if zero is None or bool((zero == half).all()) else scale * (half - zero.float())
    return QuantizedWeight(codes ^ half, CODE_MAPS[bits], scale, minimum, group_size, order)


def input_order(g_idx: Tensor, group_size: int, name: str, tensors: StoredTensors) -> Tensor | None:
    """Returns the order of inputs in which groups are consecutive; None if they are already.

    g_idx: [K], the group of each input. Raises CheckpointError unless every group has `group_size` inputs; only the
    last may have fewer.
    """
    index, k = g_idx.long(), len(g_idx)
    expected = torch.arange(k, device=index.device) // group_size
    if torch.equal(index, expected):
        return None
    ordered = index.sort(stable=True)
    if not torch.equal(ordered.values, expected):
        raise CheckpointError(f"{tensors.where(name)}: tensor {name} does not give every group {group_size} inputs")
    return ordered.indices


def check_group_size(size: object, method: str) -> int:
    """Returns a group size from a config, 0 for all inputs (-1 there). Raises CheckpointError if it is impossible."""
    if size is None or size == -1:
        return 0
    if isinstance(size, int) and size > 0 and size % 16 == 0:
        return size
    raise CheckpointError(
        f"quant_method {method!r}: group_size {size!r} is not supported; supported are multiples of 16"
    )


def check_finite(numbers: Tensor, name: str, tensors: StoredTensors) -> Tensor:
    """Returns the numbers. Raises CheckpointError if one is NaN or infinite."""
    if not bool(numbers.isfinite().all()):
        raise CheckpointError(f"{tensors.where(name)}: tensor {name} contains a number that is not finite")
    return numbers
