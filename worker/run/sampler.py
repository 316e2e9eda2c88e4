"""The parameters of the sampling kernel for a batch of sequences, an entry a row. Chooses no token itself.

The parameters of a row come from its own sequence alone, and its randomness from (seed, output position). The other
sequences of the batch, preemptions and resumptions change nothing.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.params import Bias, History, PlainParams, SampleParams, Stages
from worker.kernels.sample import sample, sample_plain
from worker.run.inputs import to_device
from worker.schedule.sequence import Row, Sequence

COLUMN_ALIGN = 32  # entries, 128 bytes or more: kernels are specialized for the alignment of addresses


def sample_rows(
    logits: Tensor,
    rows: list[Row],
    eos_ids: tuple[int, ...],
    plain_kernel: Callable[..., Tensor] = sample_plain,
) -> Tensor:
    """Samples an id for each row: logits [R, V] float32 -> [R] int64 on the same device, without waiting for it."""
    if all(not sequence.sampling.temperature and is_plain(sequence) for sequence, _ in rows):
        return logits.argmax(-1)
    return sample(logits, sampling_params(rows, eos_ids, logits.device), plain_kernel)


def is_plain(sequence: Sequence) -> bool:
    """Whether the sequence's logits are sampled unadjusted: by no penalty, bias, grammar or min_tokens.

    The next token then depends on no text, so that it can be sampled before the last one is known on the host. A
    sequence that is plain remains plain.
    """
    return len(sequence.tokens) >= sequence.plain_from and sequence.constraint is None


def sampling_params(rows: list[Row], eos_ids: tuple[int, ...], device: torch.device) -> SampleParams:
    """The sampling parameters of rows, an entry a row."""
    params = [sequence.sampling for sequence, _ in rows]
    floats = [
        (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params
    ]
    integers = [(sequence.sampling.top_k, signed_seed(sequence.seed), output) for sequence, output in rows]
    temperature, top_p, min_p, repetition, presence, frequency = _columns(np.array(floats, np.float32), device)
    top_k, seeds, positions = _columns(np.array(integers, np.int64), device)
    random = [p for p in params if p.temperature > 0]
    return SampleParams(
        PlainParams(temperature, top_k, top_p, min_p, seeds, positions),
        repetition,
        presence,
        frequency,
        _history([sequence for sequence, _ in rows], device),
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
    """The columns of [R, C] on the device, in one copy. Each begins at a multiple of COLUMN_ALIGN entries."""
    count, width = rows.shape
    columns = np.zeros((width, -(-count // COLUMN_ALIGN) * COLUMN_ALIGN), rows.dtype)
    columns[:, :count] = rows.T
    return to_device(columns, device)[:, :count].unbind(0)


def signed_seed(seed: int) -> int:
    """An unsigned 64-bit seed with the same bits as int64."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _history(sequences: list[Sequence], device: torch.device) -> History | None:
    rows, ids, counts = [], [], []
    for row, sequence in enumerate(sequences):
        if not sequence.sampling.penalized:
            continue
        seen, inverse = np.unique(np.asarray(sequence.tokens, np.int64), return_inverse=True)
        ids.append(seen)
        counts.append(np.bincount(inverse[sequence.prompt_len :], minlength=len(seen)))
        rows.append(np.full(len(seen), row))
    if not rows:
        return None
    return History(*to_device(np.stack([np.concatenate(column) for column in (rows, ids, counts)]), device))


def _bias(rows: list[Row], eos_ids: tuple[int, ...], device: torch.device) -> Bias | None:
    entries = [(at, id, value) for at, row in enumerate(rows) for id, value in _row_biases(row, eos_ids).items()]
    if not entries:
        return None
    places, ids, values = zip(*entries, strict=True)
    bias_rows, bias_ids = to_device(np.array([places, ids], np.int64), device)
    return Bias(bias_rows, bias_ids, to_device(np.array(values, np.float32), device))


def _row_biases(row: Row, eos_ids: tuple[int, ...]) -> dict[int, float]:
    """The request's own biases, and before min_tokens -inf for every token that would end the sequence.

    Where there is a grammar, GrammarMask applies min_tokens, because it knows which other tokens are allowed.
    """
    sequence, output = row
    biases = dict(sequence.sampling.logit_bias)
    if output < sequence.sampling.min_tokens and sequence.constraint is None:
        biases.update(dict.fromkeys(stop_ids(sequence, eos_ids), -math.inf))
    return biases


def stop_ids(sequence: Sequence, eos_ids: tuple[int, ...]) -> Iterator[int]:
    """The tokens that end the sequence."""
    yield from sequence.sampling.stop_token_ids
    if not sequence.sampling.ignore_eos:
        yield from eos_ids
