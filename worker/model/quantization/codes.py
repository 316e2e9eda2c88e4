"""Turns stored codes into the codes, scales and minimums of a QuantizedWeight, and checks settings.

An unsigned code q with a zero point z means the number scale * (q - z). A QuantizedWeight has the signed code q - h,
where h is half the number of codes. The number is then scale * (q - h) + minimum, with minimum = scale * (h - z).
"""

import re

import torch
from torch import Tensor

from worker.kernels.weights.quantized_weight import INT4, INT8, QuantizedWeight
from worker.model.checkpoint.checkpoint import CheckpointError
from worker.model.checkpoint.stored_weight import StoredTensors

CODE_MAPS = {4: INT4, 8: INT8}


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpacks integers [.., W] to unsigned codes [.., W * bits of an integer / bits] uint8, lowest bits first."""
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
    """Returns the weight scale * (codes - zero).

    codes: unsigned codes [N, K] uint8; they are changed in place
    scale: [N, groups] float32
    zero: zero points [N, groups]; None: every zero point is half the number of codes
    order: indices of the inputs, sorted by group; None: they are sorted already
    """
    half = 1 << (bits - 1)
    minimum = None if zero is None or bool((zero == half).all()) else scale * (half - zero.float())
    if order is not None:
        codes = codes.index_select(1, order)
    return QuantizedWeight(codes.bitwise_xor_(half), CODE_MAPS[bits], scale, minimum, group_size, order)


def input_order(g_idx: Tensor, group_size: int, name: str, tensors: StoredTensors) -> Tensor | None:
    """Returns the indices of the inputs, sorted by group; None if they are sorted already.

    g_idx: the group of each input, [K]

    Raises CheckpointError unless every group has `group_size` inputs. The last group may have fewer.
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
    """Returns a config's group size; 0: all inputs, which a config states as -1 or null.

    Raises CheckpointError if the group size is not supported.
    """
    if size is None or size == -1:
        return 0
    if isinstance(size, int) and size > 0 and size % 16 == 0:
        return size
    raise CheckpointError(
        f"quant_method {method!r}: group_size {size!r} is not supported; supported are multiples of 16"
    )


def check_pattern(pattern: str, method: str) -> str:
    """Returns a config's pattern. Raises CheckpointError if the pattern is not a regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"quant_method {method!r}: {pattern!r} is not a regular expression ({error})") from error
    return pattern
