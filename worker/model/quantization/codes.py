"""Turns stored numbers of few bits into the codes, scales and minimums of a QuantizedWeight, and checks them.

Formats with unsigned codes q and zero points z mean scale * (q - z). With signed codes q - h, where h is half the
number of codes, this is scale * (q - h) + minimum with minimum = scale * (h - z).
"""

import re

import torch
from torch import Tensor

from worker.kernels.weights.quantized_weight import INT4, INT8, QuantizedWeight
from worker.model.checkpoint.checkpoint import CheckpointError
from worker.model.checkpoint.stored_weight import StoredTensors

CODE_MAPS = {4: INT4, 8: INT8}


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpacks words [.., W] of integers to unsigned codes [.., W * word size / bits] uint8, lowest bits first."""
    bytes_ = words.flatten().view(torch.uint8).view(*words.shape[:-1], -1)
    if bits == 8:
        return bytes_
    codes = torch.empty(*bytes_.shape, 2, dtype=torch.uint8, device=words.device)
    torch.bitwise_and(bytes_, 15, out=codes[..., 0])
    torch.bitwise_right_shift(bytes_, 4, out=codes[..., 1])
    return codes.flatten(-2)


def signed(
    codes: Tensor, bits: int, scale: Tensor, zero: Tensor | None, group_size: int, order: Tensor | None = None
) -> QuantizedWeight:
    """Returns the weight scale * (codes - zero), from unsigned codes [N, K] uint8, which are changed in place.

    order: the inputs in the order of the groups, if that is another one. scale [N, groups] float32; zero [N, groups],
    or None if every zero point is half the number of codes.
    """
    half = 1 << (bits - 1)
    minimum = None if zero is None or bool((zero == half).all()) else scale * (half - zero.float())
    if order is not None:
        codes = codes.index_select(1, order)
    return QuantizedWeight(codes.bitwise_xor_(half), CODE_MAPS[bits], scale, minimum, group_size, order)


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


def check_pattern(pattern: str, method: str) -> str:
    """Returns a regular expression from a config. Raises CheckpointError if it is none."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"quant_method {method!r}: {pattern!r} is not a regular expression ({error})") from error
    return pattern
