"""Sampling parameters of a batch: tensors on the device that samples, with an entry for each row of logits."""

from dataclasses import dataclass

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
