"""Sampling in PyTorch, which defines it: the parameters of a batch, and the draw of each row."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class History:
    """The tokens in each row's prompt and output, for penalties. Entry e says that row rows[e] has the token ids[e].

    There is one entry for each distinct pair (row, token). Only rows with a penalty need entries.
    """

    rows: Tensor  # [E] int64
    ids: Tensor  # [E] int64
    counts: Tensor  # [E] int64: how often the token occurs in the output; 0 if it is only in the prompt


@dataclass(frozen=True, slots=True)
class Bias:
    """The logit bias: values[e] is added to the logit of token ids[e] in row rows[e]. -inf forbids a token.

    There is at most one entry for each pair (row, token).
    """

    rows: Tensor  # [E] int64
    ids: Tensor  # [E] int64
    values: Tensor  # [E] float32


@dataclass(frozen=True, slots=True)
class PlainParams:
    """How to sample each of R rows whose logits penalties and bias have already adjusted."""

    temperature: Tensor  # [R] float32, 0: greedy
    top_k: Tensor  # [R] int64, 0: off
    top_p: Tensor  # [R] float32, 1: off
    min_p: Tensor  # [R] float32, 0: off
    seeds: Tensor  # [R] int64, the request's 64-bit seed reinterpreted as signed
    positions: Tensor  # [R] int64: how many tokens the request's output already has


@dataclass(frozen=True, slots=True)
class Stages:
    """Which sampling stages at least one row may need, as far as the host knows.

    All other stages can be skipped, which saves work and changes no result.
    """

    all_greedy: bool = False
    any_greedy: bool = True
    any_top_k: bool = True
    any_top_p: bool = True
    any_min_p: bool = True


EVERY = Stages()


@dataclass(frozen=True, slots=True)
class SampleParams:
    """How to sample each of R rows, including adjustments of logits."""

    plain: PlainParams
    repetition: Tensor  # [R] float32, 1: off
    presence: Tensor  # [R] float32, 0: off
    frequency: Tensor  # [R] float32, 0: off
    history: History | None = None  # None if no row has a penalty
    bias: Bias | None = None
    stages: Stages = EVERY


# Chooses the next token of every row, by penalties, bias, temperature, top-k, top-p and min-p, and draws it. The
# module knows no requests.
#
# The result of a row depends on this row only: probabilities become 40-bit integers as soon as they are computed, so
# all later sums, thresholds and cumulative sums are exact for any number of rows or threads and on any device.
# Randomness is a hash of (request seed, output position). On a GPU, no value is read back to the host.
#
# Devices differ in the last bit of exp. So the last of the 24 bits of a weight may differ between devices, and then
# occasionally the sampled token differs, too.

ONE = 1 << 40  # integer weight of the most likely token; the sum of 2**18 of them fits in 63 bits
KEY_LEVELS = (20, 10, 0)  # a 31-bit key is selected in three steps: by its top 11, next 10 and last 10 bits
BINS = 2048
LARGEST_KEY = 0x7FFFFFFF
LOGPROB_CHUNK = 1 << 24  # the most logits whose log-probabilities are computed at once
ROUNDING = 2.0**-19  # largest rounding error, as a share of a row's total weight: a few last bits of every exp


def sample_torch(logits: Tensor, params: PlainParams, stages: Stages = EVERY) -> Tensor:
    if stages.all_greedy:
        return first_highest(logits)
    peak = logits.amax(-1, keepdim=True) + 0.0  # the sum turns -0.0 into 0.0
    drawn = _draw(_weights(peak, logits, params, stages), uniform(params.seeds, params.positions))
    drawn.masked_fill_(~peak[:, 0].isfinite(), 0)
    if stages.any_greedy:
        return torch.where(params.temperature == 0, first_highest(logits), drawn)
    return drawn


def wrong_draws(logits: Tensor, params: PlainParams, stages: Stages, ids: Tensor, expected: Tensor) -> Tensor:
    """Returns which ids [R] differ from `expected` by more than rounding can explain, as [R] bool.

    ids, expected: the choices of two forms of this operation. The forms may differ in the last bit of exp. So a sampled
        id is wrong only if its interval of the cumulative weights is farther than ROUNDING from the drawn point, even
        with top-p and min-p changed by this much. A greedy id involves no rounding and must be equal.
    """
    wrong = ids != expected
    rows = (wrong & (params.temperature != 0)).nonzero()[:, 0]
    if not len(rows):
        return wrong
    own = replace(params, **{one.name: getattr(params, one.name)[rows] for one in fields(params)})
    chosen, u, near = ids[rows, None], uniform(own.seeds, own.positions)[:, None], torch.zeros_like(rows[:, None] > 0)
    peak = logits[rows].amax(-1, keepdim=True) + 0.0
    for change in (1.0 - ROUNDING, 1.0, 1.0 + ROUNDING):
        top_p = torch.where(own.top_p < 1, own.top_p * change, own.top_p)
        weights = _weights(peak, logits[rows], replace(own, top_p=top_p, min_p=own.min_p * change), stages)
        reached, weight = weights.cumsum(-1), weights.gather(1, chosen)
        total, end = reached[:, -1:].double(), reached.gather(1, chosen).double()
        below, above = u * total - (end - weight), end - u * total
        near |= (weight > 0) & (below.minimum(above) >= -ROUNDING * total)
    wrong[rows] &= ~(near & peak.isfinite())[:, 0]
    return wrong


def logprobs_torch(logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes `logprobs`, some rows at a time."""
    rows = max(1, LOGPROB_CHUNK // logits.shape[1])
    chunks = [_logprobs(*chunk, top) for chunk in zip(logits.split(rows), ids.split(rows), strict=True)]
    chosen, best, values = (torch.cat(column) for column in zip(*chunks, strict=True))
    return chosen, best, values


def ranks(logits: Tensor, ids: Tensor) -> Tensor:
    """Returns how many tokens of each row are at least as likely as its id: [R, V], ids [R] int64 -> [R] int64."""
    return (logits >= logits.gather(1, ids[:, None])).sum(-1)


def first_highest(logits: Tensor) -> Tensor:
    """Returns the argmax of logits [R, V] as [R] int64. Among equal logits, it is the lowest id, as max() guarantees.

    On a CPU, NumPy finds the argmax in a tenth of PyTorch's time.
    """
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.max(-1).indices


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns a float64 in (0, 1) for each (seed, position): number `position` of the generator with this seed's hash.

    It is Sebastiano Vigna's splitmix64 (https://prng.di.unimi.it/splitmix64.c). It uses integers, so all devices agree.
    """
    state = _mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN
    return ((_mix(state) >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52


def signed_seed(seed: int) -> int:
    """Returns the int64 that has the same bits as an unsigned 64-bit seed."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shifts int64 right logically: zeros are shifted in, not the sign bit."""
    return x >> bits & (1 << 64 - bits) - 1


def adjust(logits: Tensor, params: SampleParams) -> Tensor:
    """Applies penalties, then bias. CTRL (arXiv:1909.05858) defines the repetition penalty, OpenAI the others."""
    if params.history is None and params.bias is None:
        return logits
    logits = logits.clone()
    if (history := params.history) is not None:
        value, factor = logits[history.rows, history.ids], params.repetition[history.rows]
        value = torch.where(value > 0, value / factor, value * factor)
        value -= params.frequency[history.rows] * history.counts + params.presence[history.rows] * (history.counts > 0)
        logits[history.rows, history.ids] = value
    if (bias := params.bias) is not None:
        logits[bias.rows, bias.ids] += bias.values
    return logits


def _weights(peak: Tensor, logits: Tensor, params: PlainParams, stages: Stages) -> Tensor:
    """Returns integer weights [R, V] after temperature, top-k, top-p and min-p. Weight 0: the token is never drawn."""
    temperature = params.temperature.masked_fill(params.temperature == 0, 1.0)[:, None]
    gap = (peak - logits) / temperature  # >= 0; 0 for the most likely token
    weights = _integer_weights(gap)
    if stages.any_top_k or stages.any_top_p:
        _apply_top_k_top_p(gap, weights, params.top_k, params.top_p, stages)
    if stages.any_min_p:
        weights.masked_fill_(weights < (params.min_p[:, None].double() * ONE).long(), 0)
    return weights


def _apply_top_k_top_p(gap: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, stages: Stages) -> None:
    """Applies top-k, then top-p: sets the weights [R, V] of dropped tokens to zero."""
    keys = gap.view(torch.int32)  # the bits of non-negative floats have the same order as the floats
    if stages.any_top_k:
        need = _count_for_top_k(top_k, gap.shape[1])
        dropped = _beyond(keys, torch.ones_like(need).expand_as(keys), need)
        weights.masked_fill_(dropped, 0)
        keys = keys.masked_fill(dropped, LARGEST_KEY)
    if stages.any_top_p:
        need = _weight_for_top_p(top_p, weights.sum(-1, keepdim=True))
        weights.masked_fill_(_beyond(keys, weights, need), 0)


def _count_for_top_k(top_k: Tensor, width: int) -> Tensor:
    """Returns the number of tokens that top-k keeps, [R, 1]."""
    return top_k.masked_fill(top_k == 0, width).clamp(max=width)[:, None]


def _weight_for_top_p(top_p: Tensor, total: Tensor) -> Tensor:
    """Returns the integer weight that tokens kept by top-p must reach, [R, 1]: 1 .. total; `total` without top-p."""
    need = (top_p[:, None].double() * total.double()).ceil().long().clamp(min=1).minimum(total)
    return torch.where(top_p[:, None] < 1, need, total)


def _integer_weights(gap: Tensor) -> Tensor:
    """Returns exp(-gap) in units of 1 / ONE."""
    return gap.neg().exp_().mul_(float(ONE)).long()


def _beyond(keys: Tensor, weights: Tensor, need: Tensor) -> Tensor:
    """Returns the mask of tokens to drop. Tokens are kept in the order of key, then index, until weights reach `need`.

    This is a radix selection, which needs no sort. keys [R, V] int32 >= 0; weights [R, V] int64, equal for equal keys;
    need [R, 1] int64, positive and at most the row's sum of weights.
    """
    prefix = torch.zeros_like(need)
    for shift in KEY_LEVELS:
        # Bin 0 has all keys below the range of the prefix, so cumulative sums start at the row's lowest key.
        digit = (keys >> shift).sub_((prefix << 10).int() - 1).clamp_(0, BINS + 1).long()
        reached = weights.new_zeros(len(keys), BINS + 2).scatter_add_(1, digit, weights).cumsum_(1)
        at = (reached < need).sum(1, keepdim=True).clamp_(1, BINS)
        prefix = (prefix << 10) + at - 1
    below, through = reached.gather(1, at - 1), reached.gather(1, at)
    tied = keys == prefix
    rank = tied.cumsum(1, dtype=torch.int32)  # seven times as fast as without a dtype
    weight_of_one = ((through - below) // rank[:, -1:].clamp(min=1)).clamp(min=1)
    allowed = (need - below + weight_of_one - 1) // weight_of_one
    return (keys > prefix) | (tied & (rank > allowed))


def _draw(weights: Tensor, u: Tensor) -> Tensor:
    """Draws a token for each row: the first id whose cumulative weight exceeds u times the total. u [R]: in (0, 1)"""
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
    """Returns the ids [R, count] of the highest logits. Value and id are one integer, so equal values order by id."""
    bits = logits.view(torch.int32)
    sortable = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()  # integers in the same order as the floats
    rank = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return logits.shape[1] - 1 - (sortable << 32 | rank).topk(count).values.bitwise_and_((1 << 32) - 1)
