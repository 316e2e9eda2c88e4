"""Sampling: chooses which form runs."""

from collections.abc import Callable

import torch
from torch import Tensor

from worker.ops.native import available
from worker.ops.sampling.native import logprobs_native, sample_native
from worker.ops.sampling.reference import (
    EVERY,
    PlainParams,
    SampleParams,
    Stages,
    adjust,
    logprobs_torch,
    sample_torch,
)


def sample_plain(logits: Tensor, params: PlainParams, stages: Stages = EVERY) -> Tensor:
    """Chooses a token for each row from its unadjusted logits: [R, V] float32 -> ids [R] int64.

    Temperature 0 chooses the highest logit; among equal logits, the lowest id. A token that is less than 2**-40 times
    as likely as the row's most likely token is never drawn. If a row's highest logit is not finite, token 0 is drawn.
    """
    if logits.is_cuda:
        from worker.ops.sampling.triton import sample_triton

        return sample_triton(logits, params, stages)
    return (sample_native if _in_c(logits) else sample_torch)(logits, params, stages)


def sample(logits: Tensor, params: SampleParams, choose_plain: Callable[..., Tensor] = sample_plain) -> Tensor:
    """Applies penalties and bias, then chooses a token for each row: logits [R, V] float32 -> ids [R] int64.

    Does not change `logits`.

    choose_plain: sample_plain, or sample_torch.
    """
    return choose_plain(adjust(logits, params), params.plain, params.stages)


def logprobs(logits: Tensor, ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities of the model, before penalties and temperature.

    logits [R, V] float32, ids [R] int64 -> (log p of ids [R], the `top` most likely ids [R, top], their log p
    [R, top]). Log-probabilities are float32. The most likely token is first; of equally likely tokens, the lowest id.
    """
    return (logprobs_native if _in_c(logits) else logprobs_torch)(logits, ids, top)


def _in_c(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and available(torch.float32)
