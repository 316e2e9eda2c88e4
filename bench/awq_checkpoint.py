"""Stores linear weights in AWQ's layout: four bits with zero points, rounded to nearest, not calibrated.

`gptq_checkpoint.write` writes the checkpoint.
"""

from typing import Any

import torch
from torch import Tensor

from bench.gptq_checkpoint import BITS, CODES, packed

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the order in which an int32 holds the codes of 8 columns, from its lowest bits
MOST = 2**BITS - 1


def awq_config(group: int) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": BITS, "group_size": group, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip


def awq(weight: Tensor, group: int) -> dict[str, Tensor]:
    """Returns the tensors for weight [N, K]: qweight [K, N / 8], qzeros [groups, N / 8], scales [groups, N]."""
    n, k = weight.shape
    x = weight.float().view(n, k // group, group)
    low, high = x.amin(2, keepdim=True).clamp(max=0), x.amax(2, keepdim=True).clamp(min=0)
    scale = ((high - low) / MOST).clamp(min=2.0**-24).half().float()
    zero = (-low / scale).round().clamp(0, MOST)
    codes = ((x / scale).round() + zero).clamp(0, MOST).long().view(n, k)
    return {
        "qweight": _by_output(codes.T),
        "qzeros": _by_output(zero.squeeze(2).long().T),
        "scales": scale.squeeze(2).T.half().contiguous(),
    }


def _by_output(codes: Tensor) -> Tensor:
    return packed(codes.reshape(len(codes), -1, CODES)[:, :, ORDER], 2)


def unpacked(words: Tensor) -> Tensor:
    """Unpacks int32 words [R, N / 8] into codes [R, N]."""
    in_order = torch.stack([words.long() >> BITS * i & MOST for i in range(CODES)], 2)
    return in_order[:, :, torch.tensor(ORDER).argsort()].flatten(1)
