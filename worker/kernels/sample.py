"""Chooses the next token of every row: penalties, bias, temperature, top-k, top-p, min-p, draw. Knows no requests.

A row's result depends on nothing but the row: probabilities become 40-bit integers as soon as they exist, so every
sum, threshold and cumulative sum after that is exact, whatever the row count, thread count or device. Randomness is a
hash of (request seed, output position). On a GPU no step reads a value back to the host.

Devices differ in the last bit of exp: then a weight differs in its last bit of 24, and now and then a draw with it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from worker.kernels.params import EVERY, PlainParams, SampleParams, Stages

ONE = 1 << 40  # the integer weight of the most likely token; 2**18 tokens of it still fit 63 bits
KEY_LEVELS = (20, 10, 0)  # a 31-bit key is narrowed down by its top 11, next 10 and last 10 bits
BINS = 2048
FARTHEST = 0x7FFFFFFF
SLAB = 1 << 24  # logits whose log-probabilities are computed at once
SHORT = 256  # tokens looked at first on the CPU


def sample_plain(logits: Tensor, params: PlainParams, stages: Stages = EVERY) -> Tensor:
    """The chosen token of each row by its logits as they are, adjusted or not: [R, V] float32 -> ids [R] int64.

    Temperature 0 takes the highest logit, the lowest id of equals. A token less than 2**-40 times as likely as
    the row's most likely one is never drawn; a row without a finite highest logit draws token 0.
    """
    if logits.is_cuda:
        from worker.kernels.gpu.sample import sample_triton

        return sample_triton(logits, params, stages)
    return sample_torch(logits, params, stages)


def sample(logits: Tensor, params: SampleParams, choose_plain: Callable[..., Tensor] = sample_plain) -> Tensor:
    """The chosen token of each row: logits [R, V] float32 -> ids [R] int64. Leaves logits as they are.

    choose_plain: sample_plain, or sample_torch.
    """
    return choose_plain(_adjust(logits, params), params.plain, params.stages)


def sample_torch(logits: Tensor, params: PlainParams, stages: Stages = EVERY) -> Tensor:
    if stages.all_greedy:
        return _first_highest(logits)
    peak = logits.amax(-1, keepdim=True) + 0.0  # not -0.0
    drawn = _draw(_weights(peak, logits, params, stages), uniform(params.seeds, params.positions))
    drawn.masked_fill_(~peak[:, 0].isfinite(), 0)
    if stages.any_greedy:
        return torch.where(params.temperature == 0, _first_highest(logits), drawn)
    return drawn


def logprobs(logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities by the model itself, before penalties and temperature.

    logits [R, V] float32, ids [R] int64 -> (log p of ids [R], the `top` most likely ids [R, top], theirs [R, top]);
    float32, most likely first, the lowest id of equals first.
    """
    count = max(1, SLAB // logits.shape[1])
    slabs = [_logprobs(*slab, top) for slab in zip(logits.split(count), ids.split(count), strict=True)]
    chosen, best, values = (torch.cat(column) for column in zip(*slabs, strict=True))
    return chosen, best, values


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """A float64 in (0, 1) for each (seed, position): splitmix64's stream of the hashed seed, read at that position.

    Sebastiano Vigna's splitmix64, https://prng.di.unimi.it/splitmix64.c; all integer, alike on every device.
    """
    state = _mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN
    return ((_mix(state) >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return x >> bits & (1 << 64 - bits) - 1


def _adjust(logits: Tensor, params: SampleParams) -> Tensor:
    """Penalties, then bias. Repetition as in CTRL (arXiv:1909.05858), the others as in OpenAI's API."""
    if params.history is None and params.bias is None:
        return logits
    logits = logits.clone()
    if (seen := params.history) is not None:
        value, factor = logits[seen.rows, seen.ids], params.repetition[seen.rows]
        value = torch.where(value > 0, value / factor, value * factor)
        value -= params.frequency[seen.rows] * seen.counts + params.presence[seen.rows] * (seen.counts > 0)
        logits[seen.rows, seen.ids] = value
    if (bias := params.bias) is not None:
        logits[bias.rows, bias.ids] += bias.values
    return logits


def _first_highest(logits: Tensor) -> Tensor:
    """argmax with the lowest id of equals; max() promises it, and is four times as fast on the CPU."""
    return logits.max(-1).indices


def _weights(peak: Tensor, logits: Tensor, params: PlainParams, stages: Stages) -> Tensor:
    """Integer weights [R, V] after temperature, top-k, top-p and min-p: zero for tokens that may not be drawn."""
    temperature = params.temperature.masked_fill(params.temperature == 0, 1.0)[:, None]
    gap = (peak - logits) / temperature  # >= 0, 0 at the most likely
    weights = _integer_weights(gap)
    if stages.any_top_k or stages.any_top_p:
        _cut(gap, weights, params.top_k, params.top_p, stages)
    if stages.any_min_p:
        weights.masked_fill_(weights < (params.min_p[:, None].double() * ONE).long(), 0)
    return weights


def _cut(gap: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, stages: Stages) -> None:
    """Top-k, then top-p: zeroes the weights [R, V] of the tokens left out."""
    if gap.device.type != "cpu" or gap.shape[1] <= SHORT:
        return _cut_all(gap, weights, top_k, top_p, stages)
    rows = _cut_short(gap, weights, top_k, top_p)
    if len(rows):
        some = weights[rows]
        _cut_all(gap[rows], some, top_k[rows], top_p[rows], stages)
        weights[rows] = some


def _cut_all(gap: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, stages: Stages) -> None:
    keys = gap.view(torch.int32)  # non-negative floats order like their bits
    if stages.any_top_k:
        need = _count(top_k, gap.shape[1])
        dropped = _beyond(keys, torch.ones_like(need).expand_as(keys), need)
        weights.masked_fill_(dropped, 0)
        keys = keys.masked_fill(dropped, FARTHEST)
    if stages.any_top_p:
        need = _share(top_p, weights.sum(-1, keepdim=True))
        weights.masked_fill_(_beyond(keys, weights, need), 0)


def _cut_short(gap: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """_cut_all by way of each row's SHORT nearest tokens, several times as fast; returns the rows this does not settle.

    It reads back to the host, so it is for the CPU. A row is settled when nothing as far as the list's end is kept:
    then neither the order of equals at that end nor what follows matters.
    """
    limit, width = _count(top_k, gap.shape[1]), gap.shape[1]
    near, ids = gap.topk(SHORT, largest=False)
    ids, by_id = ids.sort()
    near, by_gap = near.gather(1, by_id).sort(stable=True)
    ids = ids.gather(1, by_gap)
    mass = weights.gather(1, ids) * (torch.arange(SHORT) < limit)
    total = torch.where(limit < width, mass.sum(-1, keepdim=True), weights.sum(-1, keepdim=True))
    kept = (mass.cumsum(1) - mass < _share(top_p, total)) & (mass > 0)
    known = (limit <= SHORT) | (limit == width)
    settled = known[:, 0] & ~(kept & (near == near[:, -1:])).any(1)
    wanted = (limit[:, 0] < width) | (top_p < 1)
    done = (settled & wanted).nonzero()[:, 0]
    weights.index_fill_(0, done, 0)
    weights[done[:, None], ids[done]] = (mass * kept)[done]
    return (wanted & ~settled).nonzero()[:, 0]


def _count(top_k: Tensor, width: int) -> Tensor:
    """How many tokens top-k lets through, [R, 1]."""
    return top_k.masked_fill(top_k == 0, width).clamp(max=width)[:, None]


def _share(top_p: Tensor, total: Tensor) -> Tensor:
    """The integer weight that top-p asks for, [R, 1]: at least one, at most `total`, and that where it is off."""
    need = (top_p[:, None].double() * total.double()).ceil().long().clamp(min=1).minimum(total)
    return torch.where(top_p[:, None] < 1, need, total)


def _integer_weights(gap: Tensor) -> Tensor:
    """exp(-gap) in units of 1 / ONE."""
    return gap.neg().exp_().mul_(float(ONE)).long()


def _beyond(keys: Tensor, masses: Tensor, need: Tensor) -> Tensor:
    """Mask of the tokens beyond the fewest, by lowest key and then lowest index, whose masses reach `need`.

    A radix selection: no sort. keys [R, V] int32 >= 0; masses [R, V] int64, equal where keys are; need
    [R, 1] int64, at most the row's sum and not zero.
    """
    prefix = torch.zeros_like(need)
    for shift in KEY_LEVELS:
        # bin 0 collects every key under the prefix's range, so that a cumulative sum counts from the row's first key
        digit = (keys >> shift).sub_((prefix << 10).int() - 1).clamp_(0, BINS + 1).long()
        reached = masses.new_zeros(len(keys), BINS + 2).scatter_add_(1, digit, masses).cumsum_(1)
        at = (reached < need).sum(1, keepdim=True).clamp_(1, BINS)
        prefix = (prefix << 10) + at - 1
    below, through = reached.gather(1, at - 1), reached.gather(1, at)
    tied = keys == prefix
    rank = tied.cumsum(1, dtype=torch.int32)  # seven times as fast as the default from bool
    share = ((through - below) // rank[:, -1:].clamp(min=1)).clamp(min=1)
    allowed = (need - below + share - 1) // share
    return (keys > prefix) | (tied & (rank > allowed))


def _draw(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse of the cumulative weights, in the order of token ids, at u [R] in (0, 1)."""
    reached = weights.cumsum(-1)
    total = reached[:, -1]
    target = (u * total.double()).long().minimum(total - 1)
    return torch.searchsorted(reached, target[:, None], right=True)[:, 0].clamp_(max=weights.shape[1] - 1)


def _logprobs(logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    peak = logits.amax(-1, keepdim=True)
    total = _integer_weights(peak - logits).sum(-1, keepdim=True)
    norm = peak + (total.double() / ONE).log().float()
    chosen = logits.gather(1, ids[:, None]) - norm
    best = _best(logits, top)
    return chosen[:, 0], best, logits.gather(1, best) - norm


def _best(logits: Tensor, count: int) -> Tensor:
    """Ids [R, count] of the highest logits; id and value share one integer, so that equals have an order."""
    bits = logits.view(torch.int32)
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()  # ascending like the floats
    rank = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return logits.shape[1] - 1 - (ordered << 32 | rank).topk(count).values.bitwise_and_((1 << 32) - 1)
