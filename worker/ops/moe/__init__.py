"""A mixture of experts: chooses which form runs."""

from typing import Any

import torch
from torch import Tensor

from worker.ops.moe import native as experts_c
from worker.ops.moe.packed import CLEAR, Experts, Gather, PackedExperts, in_c
from worker.ops.moe.reference import (
    choice_keys,
    experts_torch,
    group_scores,
    in_chosen_groups,
    linear_per_head_torch,
    router_logits,
)
from worker.spec import Activation, ExpertGroups


def experts(
    h: Tensor,
    layer: Experts,
    chosen: int,
    activation: Activation,
    *,
    normalized: bool,
    sigmoid: bool = False,
    gated: bool = True,
    gather: Gather | None = None,
    groups: ExpertGroups | None = None,
    **rows: Any,
) -> Tensor:
    """Computes the same as experts_torch: in C if all weights are packed for the C library, or in Triton on a GPU.

    gather: as for experts_torch. With it, PyTorch computes on the CPU, because the C library exchanges columns only in
        its own loop over the layers.
    gated: as for experts_torch; in C, the shapes of the weights say it
    groups: as for experts_torch
    rows: the arguments router_input, add and add_gate of experts_torch
    """
    how: dict[str, Any] = {"normalized": normalized, "sigmoid": sigmoid, "groups": groups}
    packed = None if gather else in_c(layer, chosen, activation, **how)
    if packed is not None:
        return experts_c.experts(h, packed, **rows)
    how |= {"gated": gated, "gather": gather, **rows}
    if h.is_cuda:
        from worker.ops.moe.triton import experts_triton

        return experts_triton(h, layer, chosen, activation, **how)
    return experts_torch(h, layer, chosen, activation, **how)


def clear_choices(
    h: Tensor, layer: Experts, chosen: int, *, groups: ExpertGroups | None = None, sigmoid: bool = False
) -> Tensor:
    """Returns the rows of h [T, H] whose chosen experts do not depend on how logits are rounded, as [T] bool.

    Only these rows can be compared with the results of another kernel. groups, sigmoid: as for experts_torch
    """
    logits = router_logits(h, layer.router)
    keys = choice_keys(logits, layer.choice_bias, sigmoid=sigmoid)
    if groups is None:
        return _is_clear(keys, keys.abs().amax(dim=1), chosen)
    scores = group_scores(logits, keys, groups, sigmoid=sigmoid)
    clear = _is_clear(scores, scores.abs().amax(dim=1), groups.chosen)
    allowed = in_chosen_groups(logits, keys, groups, sigmoid=sigmoid)
    return clear & _is_clear(keys.masked_fill(~allowed, -torch.inf), keys.abs().amax(dim=1), chosen)


def _is_clear(keys: Tensor, largest: Tensor, chosen: int) -> Tensor:
    """Returns whether a row's `chosen` greatest keys stay the same if rounding changes them. largest: a row's"""
    if chosen == keys.shape[1]:
        return torch.ones(len(keys), dtype=torch.bool, device=keys.device)
    last, next_one = keys.topk(chosen + 1, dim=1).values[:, -2:].unbind(1)
    return last - next_one > CLEAR * largest


def linear_per_head(x: Tensor, packed: PackedExperts) -> Tensor:
    """Computes the same as linear_per_head_torch: in C if the weights are packed for it, or in Triton on a GPU."""
    if packed.cpu is not None:
        return experts_c.linear_per_head(x, packed.cpu)
    if x.is_cuda:
        from worker.ops.moe.triton import linear_per_head_triton

        return linear_per_head_triton(x, packed)
    return linear_per_head_torch(x, packed)
