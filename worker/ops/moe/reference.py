"""A mixture of experts in PyTorch, which defines it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from worker.ops.activation.reference import act_and_mul_torch, activate_torch
from worker.ops.linear import native as linear_native
from worker.ops.linear.packed import PackedLinear
from worker.ops.linear.reference import linear_torch
from worker.ops.moe.packed import LEAST_SUM, Experts, Gather, PackedExperts
from worker.spec import Activation, ExpertGroups


def choose_experts(
    logits: Tensor,
    chosen: int,
    *,
    normalized: bool,
    scales: Tensor | None = None,
    sigmoid: bool = False,
    choice_bias: Tensor | None = None,
    groups: ExpertGroups | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the experts of each row, from the most to the least likely, [T, chosen] int64, and their weights.

    logits [T, E] float32: an expert's weight is the softmax of the logits or, with `sigmoid`, the sigmoid of its logit
    normalized: if true, the weights of a row's experts are divided by their sum
    scales [E] float32: factors by which the weights are multiplied in the end
    choice_bias [E] float32: experts are chosen by weight plus bias instead of by logit; the weight is the softmax over
        all experts or, with `sigmoid`, the sigmoid
    groups: if given, first groups of experts are chosen, and then experts of these groups only

    Equally likely experts are in the order of their numbers, and so are equally likely groups.
    """
    keys = choice_keys(logits, choice_bias, sigmoid=sigmoid)
    if groups is not None:
        keys = keys.masked_fill(~in_chosen_groups(logits, keys, groups, sigmoid=sigmoid), -torch.inf)
    order = keys.sort(dim=1, descending=True, stable=True).indices
    ordered, numbers = logits.gather(1, order), order[:, :chosen]
    if sigmoid:
        weights = ordered[:, :chosen].sigmoid()
        weights = weights / (weights.sum(dim=1, keepdim=True) + LEAST_SUM) if normalized else weights
    else:
        weights = (ordered[:, :chosen] if normalized else ordered).softmax(dim=1)[:, :chosen]
    return numbers, weights if scales is None else weights * scales[numbers]


def in_chosen_groups(logits: Tensor, keys: Tensor, groups: ExpertGroups, *, sigmoid: bool) -> Tensor:
    """Returns which experts are in the groups that a row's experts are chosen from, [T, E] bool.

    keys: as choice_keys returns them. A group's score is the sum of the greatest scores of its experts: of their
    softmax or, with `sigmoid`, of their sigmoids plus the bias. If only the greatest counts, keys have the same order.
    """
    scores = group_scores(logits, keys, groups, sigmoid=sigmoid)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, : groups.chosen]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, best, True)
    return chosen.repeat_interleave(keys.shape[1] // groups.count, dim=1)


def group_scores(logits: Tensor, keys: Tensor, groups: ExpertGroups, *, sigmoid: bool) -> Tensor:
    """Returns the numbers [T, groups] by which groups are chosen. The arguments are those of in_chosen_groups."""
    if groups.best > 1 and not sigmoid:
        keys = (logits - logits.amax(dim=1, keepdim=True)).exp()  # softmax but for a factor that all scores share
    elif groups.best > 1 and keys is logits:
        keys = logits.sigmoid()
    return keys.unflatten(1, (groups.count, -1)).topk(groups.best, dim=2).values.sum(dim=2)


def choice_keys(logits: Tensor, choice_bias: Tensor | None, *, sigmoid: bool) -> Tensor:
    """Returns the numbers [T, E] by which experts are chosen. Without a bias, these are the logits, because their
    sigmoids and their softmax have the same order.
    """
    if choice_bias is None:
        return logits
    return (logits.sigmoid() if sigmoid else logits.softmax(dim=1)) + choice_bias


def experts_torch(
    h: Tensor,
    layer: Experts,
    chosen: int,
    activation: Activation,
    *,
    normalized: bool,
    sigmoid: bool = False,
    gated: bool = True,
    router_input: Tensor | None = None,
    add: Tensor | None = None,
    add_gate: Tensor | None = None,
    gather: Gather | None = None,
    groups: ExpertGroups | None = None,
) -> Tensor:
    """Returns the sum over each row's experts of weight * down(act_and_mul(gate_up(h))), plus `add`, in h's dtype.
    If not `gated`, it is weight * down(activate(gate_up(h))).

    h, `add` (the output of the shared expert) and the result are [T, H].
    router_input [T, H]: the input of the router, by default h
    add_gate [T, 1] float32: `add` is multiplied by the sigmoid of add_gate
    groups: as for choose_experts
    gather: given on a rank, which has some rows of each expert's weights. It is called once, with the inputs of `down`
        [T * chosen, I / ranks]. `add` and the result then have only the columns of this rank.

    The router's logits, the weights, the outputs of `down` and the sum are float32.
    """
    logits = router_logits(h if router_input is None else router_input, layer.router)
    numbers, weights = choose_experts(
        logits, chosen, normalized=normalized, scales=layer.scales, sigmoid=sigmoid, choice_bias=layer.choice_bias,
        groups=groups,
    )  # fmt: skip
    if layer.loads is not None:
        layer.loads.add_(numbers.flatten().bincount(minlength=len(layer.loads)))
    places = {expert: (numbers == expert).nonzero(as_tuple=True) for expert in numbers.unique().tolist()}
    activate = act_and_mul_torch if gated else activate_torch
    inner = torch.cat([
        activate(expert_linear(h[rows], layer.gate_up, expert), activation) for expert, (rows, _) in places.items()
    ])  # fmt: skip
    parts = (inner if gather is None else gather(inner)).split([len(rows) for rows, _ in places.values()])
    results = [
        expert_linear(part, layer.down, expert, fp32_out=True) for expert, part in zip(places, parts, strict=True)
    ]
    out = torch.empty(*numbers.shape, results[0].shape[1], device=h.device)  # [T, chosen, H]
    for place, result in zip(places.values(), results, strict=True):
        out[place] = result
    return combine_torch(out, weights, add, add_gate, h.dtype)


def combine_torch(
    results: Tensor, weights: Tensor, add: Tensor | None, add_gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Returns `add` [T, H] times the sigmoid of its gate [T, 1], plus results [T, chosen, H] times weights [T, chosen].

    The sum is computed in float32, in the order of the chosen experts, and rounded once to `dtype`.
    """
    total = results.new_zeros(results.shape[::2]) if add is None else add.float()
    if add_gate is not None:
        total = total * add_gate.sigmoid()
    for slot in range(results.shape[1]):
        total = total + weights[:, slot, None] * results[:, slot]
    return total.to(dtype)


def router_logits(h: Tensor, router: PackedLinear) -> Tensor:
    """Returns the router's logits [T, E] in float32. Library GEMMs would round them to h's dtype."""
    if router.cpu is not None or router.codes or router.scale is not None:
        return linear_torch(h, router, fp32_out=True)
    return F.linear(h.float(), router.weight.float(), None if router.bias is None else router.bias.float())


def expert_linear(x: Tensor, packed: PackedExperts, expert: int, *, fp32_out: bool = False) -> Tensor:
    """Returns the product of x [T, K] with the weight of one expert, [T, N] in x's dtype, or in float32 if fp32_out."""
    if packed.cpu is not None:
        return linear_native.linear(x, packed.cpu.weight(expert), out_dtype=torch.float32 if fp32_out else None)
    if packed.codes is not None or packed.scale is not None:
        return linear_torch(x, packed.expert(expert), fp32_out=fp32_out)
    kind = torch.float32 if fp32_out else x.dtype  # the product of float32 copies is not rounded to x's dtype
    bias = None if packed.bias is None else packed.bias[expert].to(kind)
    return F.linear(x.to(kind), packed.weight[expert].to(kind), bias)


# Products in which every head has a weight of its own. Latent attention has such weights (worker/models/latent.py).
#
# The weights of all heads are packed like one linear of a layer's experts: head h is expert h, and every row uses all.


def linear_per_head_torch(x: Tensor, packed: PackedExperts) -> Tensor:
    """Returns for each head h the product x[:, h] @ weight[h].T: [T, H, N] in x's dtype, contiguous.

    x: [T, H, K]
    """
    return torch.stack([expert_linear(x[:, h].contiguous(), packed, h) for h in range(x.shape[1])], dim=1)
