"""Sampling parameters of a batch, as columns on the device that samples: an entry for each row of logits."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class History:
    """Which tokens each row has seen, for the penalties: entry e says row rows[e] has seen token ids[e].

    One entry for each distinct (row, token) of prompt and output; only rows with a penalty need entries.
    """

    rows: Tensor  # [E] int64
    ids: Tensor  # [E] int64
    counts: Tensor  # [E] int64: how often in the output; 0 when only the prompt has it


@dataclass(frozen=True, slots=True)
class Bias:
    """values[e] is added to the logit of token ids[e] of row rows[e]; distinct (row, token); -inf forbids a token."""

    rows: Tensor  # [E] int64
    ids: Tensor  # [E] int64
    values: Tensor  # [E] float32


@dataclass(frozen=True, slots=True)
class PlainParams:
    """How each of R rows is sampled once its logits are adjusted; all there is for rows without penalties and bias."""

    temperature: Tensor  # [R] float32, 0: greedy
    top_k: Tensor  # [R] int64, 0: off
    top_p: Tensor  # [R] float32, 1: off
    min_p: Tensor  # [R] float32, 0: off
    seeds: Tensor  # [R] int64, the request's 64-bit seed reinterpreted as signed
    positions: Tensor  # [R] int64: how many output tokens the request has so far


@dataclass(frozen=True, slots=True)
class Stages:
    """Which stages some row needs, as far as the host knows; skipping the others saves work and changes nothing."""

    all_greedy: bool = False
    any_greedy: bool = True
    any_top_k: bool = True
    any_top_p: bool = True
    any_min_p: bool = True


EVERY = Stages()


@dataclass(frozen=True, slots=True)
class SampleParams:
    """How each of R rows is sampled, adjustments included."""

    plain: PlainParams
    repetition: Tensor  # [R] float32, 1: off
    presence: Tensor  # [R] float32, 0: off
    frequency: Tensor  # [R] float32, 0: off
    history: History | None = None  # None: no row has a penalty
    bias: Bias | None = None
    stages: Stages = EVERY
