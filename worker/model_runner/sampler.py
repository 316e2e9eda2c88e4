"""Makes the parameters of the sampling kernel for a batch of rows, one entry per row. The kernel chooses the tokens.

The parameters of a row depend only on its own sequence, and its random numbers only on (seed, output position). Other
sequences in the batch, preemptions and resumptions therefore do not change a token.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.model_runner.inputs import to_device
from worker.ops.sampling import sample, sample_plain
from worker.ops.sampling.reference import (
    Bias,
    History,
    PlainParams,
    SampleParams,
    Stages,
    adjust,
    first_highest,
    signed_seed,
)
from worker.scheduler.sequence import LogitsProcessing, Row, Sequence

COLUMN_ALIGN = 32  # columns begin at multiples of 32 entries: Triton compiles kernels for aligned pointers


def sample_rows(
    logits: Tensor,
    rows: list[Row],
    eos_ids: tuple[int, ...],
    plain_kernel: Callable[..., Tensor] = sample_plain,
    progress: Callable[[], None] = lambda: None,
) -> Tensor:
    """Samples an id for each row and returns [R] int64 on the device of the logits, without waiting for the device.

    logits: [R, V] float32. A row whose chain of samplers reports its result (`SamplerChain.reports`) is replaced by
    what the chain leaves, from which the log-probabilities are computed afterwards.
    progress: called after each row with a chain of samplers
    """
    if all(not sequence.sampling.temperature and is_plain(sequence) for sequence, *_ in rows):
        return first_highest(logits)
    params = sampling_params(rows, eos_ids, logits.device)
    if any([sequence.sampling.chain is not None for sequence, *_ in rows]):
        from worker.model_runner.sampler_chain import chained

        left = chained(adjust(logits, params), rows, progress)
        for place, (sequence, *_) in enumerate(rows):
            if (chain := sequence.sampling.chain) is not None and chain.reports:
                logits[place] = left[place]
        return plain_kernel(left, params.plain, params.stages)
    return sample(logits, params, plain_kernel)


def check_drawn(logits: Tensor, ids: Tensor) -> None:
    """Raises FloatingPointError if the logits of a row are not finite, so that its id means nothing.

    Weights whose products overflow make them so, for example those of an adapter.

    logits: [R, V] float32 before any adjustment, ids: [R] int64, both on the CPU, where the check takes a few
    microseconds. An id is a highest logit or, where the highest is not finite, 0 (worker/ops/sampling).
    """
    values, chosen = logits.numpy(), ids.numpy()
    picked, doubtful = values[np.arange(len(chosen)), chosen], chosen == 0
    if not np.isfinite(picked).all() or (doubtful.any() and not np.isfinite(values[doubtful].max(-1)).all()):
        raise FloatingPointError("the logits are not finite: the weights of the model or of its adapter overflow")


def is_plain(sequence: Sequence) -> bool:
    """Whether no penalty, bias, chain of samplers, grammar or min_tokens adjusts the logits before sampling.

    The host can then launch the sampling of the next token before it knows the id of the last token. A plain sequence
    remains plain.
    """
    logits_processing = sequence.logits_processing
    return (
        logits_processing is None or len(sequence.tokens) >= logits_processing.until
    ) and sequence.constraint is None


def sampling_params(rows: list[Row], eos_ids: tuple[int, ...], device: torch.device) -> SampleParams:
    """Makes the sampling parameters of the rows, one entry per row."""
    params = [sequence.sampling for sequence, *_ in rows]
    floats = [
        (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params
    ]
    integers = [(sequence.sampling.top_k, signed_seed(sequence.seed), output) for sequence, output, _ in rows]
    temperature, top_p, min_p, repetition, presence, frequency = _columns(np.array(floats, np.float32), device)
    top_k, seeds, positions = _columns(np.array(integers, np.int64), device)
    random = [p for p in params if p.temperature > 0]
    return SampleParams(
        PlainParams(temperature, top_k, top_p, min_p, seeds, positions),
        repetition,
        presence,
        frequency,
        _history(rows, device),
        _bias(rows, eos_ids, device),
        Stages(
            all_greedy=not random,
            any_greedy=len(random) < len(params),
            any_top_k=any(p.top_k for p in random),
            any_top_p=any(p.top_p < 1 for p in random),
            any_min_p=any(p.min_p for p in random),
        ),
    )


def _columns(rows: NDArray[np.generic], device: torch.device) -> tuple[Tensor, ...]:
    """Copies the columns of an array [R, C] to the device in one copy. Each column is aligned to COLUMN_ALIGN."""
    count, width = rows.shape
    columns = np.zeros((width, -(-count // COLUMN_ALIGN) * COLUMN_ALIGN), rows.dtype)
    columns[:, :count] = rows.T
    return to_device(columns, device)[:, :count].unbind(0)


def _history(rows: list[Row], device: torch.device) -> History | None:
    places, ids, counts = [], [], []
    for at, (sequence, _, ahead) in enumerate(rows):
        if sequence.logits_processing is None or not sequence.sampling.penalized:
            continue
        # the counts are copied below, because the next row of this sequence changes them
        history = sequence.logits_processing.counts_before(sequence.tokens, sequence.prompt_len, ahead)
        ids.append(np.array(history.ids))
        counts.append(np.array(history.counts))
        places.append(np.full(len(history.ids), at))
    if not places:
        return None
    return History(*to_device(np.stack([np.concatenate(column) for column in (places, ids, counts)]), device))


def _bias(rows: list[Row], eos_ids: tuple[int, ...], device: torch.device) -> Bias | None:
    places, ids, values = [], [], []
    for at, row in enumerate(rows):
        logits_processing = row[0].logits_processing
        if logits_processing is None:
            continue
        biased, biases = _row_biases(row, logits_processing, eos_ids)
        if len(biased):
            places.append(np.full(len(biased), at))
            ids.append(biased)
            values.append(biases)
    if not places:
        return None
    bias_rows, bias_ids = to_device(np.stack([np.concatenate(places), np.concatenate(ids)]), device)
    return Bias(bias_rows, bias_ids, to_device(np.concatenate(values), device))


def _row_biases(
    row: Row, logits_processing: LogitsProcessing, eos_ids: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Returns the ids [B] and biases [B] of a row: those of the request and, before min_tokens, -inf for every token
    that would end the sequence.

    If a constraint masks the row, GrammarMask applies min_tokens instead, because it knows which tokens are allowed. It
    masks every row after a draft.
    """
    sequence, output, ahead = row
    biased, biases = (
        np.frombuffer(logits_processing.biased, np.int64),
        np.frombuffer(logits_processing.biases, np.float32),
    )
    constraint = sequence.constraint
    masked = constraint is not None and (constraint.masks or len(ahead) > 0)
    if output >= sequence.sampling.min_tokens or masked:
        return biased, biases
    ending = np.unique(np.fromiter(stop_ids(sequence, eos_ids), np.int64))
    others = np.isin(biased, ending, invert=True)
    forbidden = np.full(len(ending), -math.inf, np.float32)
    return np.concatenate([biased[others], ending]), np.concatenate([biases[others], forbidden])


def stop_ids(sequence: Sequence, eos_ids: tuple[int, ...]) -> Iterator[int]:
    """Yields the tokens that end the sequence."""
    yield from sequence.sampling.stop_token_ids
    if not sequence.sampling.ignore_eos:
        yield from eos_ids
