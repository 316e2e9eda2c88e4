"""A mixture of experts: chooses which form runs."""

import torch
from torch import Tensor

from worker.ops.moe import native as experts_c
from worker.ops.moe.packed import CLEAR, Experts, Gather, in_c
from worker.ops.moe.reference import choice_keys, experts_torch, router_logits
from worker.spec import Activation


def experts(
    h: Tensor,
    layer: Experts,
    chosen: int,
    activation: Activation,
    *,
    normalized: bool,
    sigmoid: bool = False,
    gather: Gather | None = None,
    **rows: Tensor | None,
) -> Tensor:
    """Computes the same as experts_torch: in C if all weights are packed for the C library, or in Triton on a GPU.

    gather: as for experts_torch. With it, PyTorch computes on the CPU, because the C library exchanges columns only in
        its own loop over the layers.
    rows: the arguments router_input, add and add_gate of experts_torch
    """
    packed = None if gather else in_c(layer, chosen, activation, normalized=normalized, sigmoid=sigmoid)
    if packed is not None:
        return experts_c.experts(h, packed, **rows)
    if h.is_cuda:
        from worker.ops.moe.triton import experts_triton

        return experts_triton(
            h, layer, chosen, activation, normalized=normalized, sigmoid=sigmoid, gather=gather, **rows
        )
    return experts_torch(h, layer, chosen, activation, normalized=normalized, sigmoid=sigmoid, gather=gather, **rows)


def clear_choices(h: Tensor, layer: Experts, chosen: int) -> Tensor:
    """Returns the rows of h [T, H] whose chosen experts do not depend on how logits are rounded, as [T] bool.

    Only these rows can be compared with the results of another kernel.
    """
    keys = choice_keys(router_logits(h, layer.router), layer.choice_bias)
    if chosen == keys.shape[1]:
        return torch.ones(len(h), dtype=torch.bool, device=h.device)
    last, next_one = keys.topk(chosen + 1, dim=1).values[:, -2:].unbind(1)
    return last - next_one > CLEAR * keys.abs().amax(dim=1)
