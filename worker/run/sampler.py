"""What a batch of sequences asks of the sampling kernel, gathered into columns. Knows sequences; decides no token.

A row's columns come from its own sequence alone, and its randomness from (seed, output position): who shares the
batch, and how often the sequence was preempted or resumed, changes nothing.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.messages import Sampling
from worker.kernels.params import Bias, History, PlainParams, SampleParams, Stages
from worker.kernels.sample import sample as sample_rows
from worker.kernels.sample import sample_plain
from worker.run.pack import to_device
from worker.schedule.sequence import Sequence

COLUMN = 32  # entries, 128 bytes or more: kernels are compiled for what an address is a multiple of


def sample(logits: Tensor, sequences: list[Sequence], eos_ids: tuple[int, ...]) -> list[int]:
    """The next id of each sequence; logits [R, V] float32, a row a sequence."""
    ids: list[int] = choose(logits, sequences, eos_ids).tolist()
    return ids


def choose(
    logits: Tensor,
    sequences: list[Sequence],
    eos_ids: tuple[int, ...],
    choose_plain: Callable[..., Tensor] = sample_plain,
) -> Tensor:
    """The same on the logits' device, [R] int64, without waiting for it."""
    if all(not sequence.sampling.temperature and is_plain(sequence) for sequence in sequences):
        return logits.argmax(-1)
    return sample_rows(logits, columns(sequences, eos_ids, logits.device), choose_plain)


def is_plain(sequence: Sequence) -> bool:
    """Whether its next token can be chosen by one who does not know the last: nothing is adjusted but by temperature,
    top-k, top-p and min-p. Once it is so, it stays so."""
    sequence.plain = sequence.plain or not (
        sequence.constraint is not None
        or sequence.sampling.logit_bias
        or _is_penalized(sequence.sampling)
        or _held_back(sequence)
    )
    return sequence.plain


def _is_penalized(p: Sampling) -> bool:
    return p.repetition_penalty != 1 or bool(p.presence_penalty or p.frequency_penalty)


def columns(sequences: list[Sequence], eos_ids: tuple[int, ...], device: torch.device) -> SampleParams:
    params = [sequence.sampling for sequence in sequences]
    wanted = [
        (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params
    ]
    counts = [(p.top_k, signed(s.seed), s.next_output) for p, s in zip(params, sequences, strict=True)]
    temperature, top_p, min_p, repetition, presence, frequency = _columns(np.array(wanted, np.float32), device)
    top_k, seeds, positions = _columns(np.array(counts, np.int64), device)
    hot = [p for p in params if p.temperature > 0]
    return SampleParams(
        PlainParams(temperature, top_k, top_p, min_p, seeds, positions),
        repetition,
        presence,
        frequency,
        _history(sequences, device),
        _bias(sequences, eos_ids, device),
        Stages(
            all_greedy=not hot,
            any_greedy=len(hot) < len(params),
            any_top_k=any(p.top_k for p in hot),
            any_top_p=any(p.top_p < 1 for p in hot),
            any_min_p=any(p.min_p for p in hot),
        ),
    )


def _columns(rows: NDArray[np.generic], device: torch.device) -> tuple[Tensor, ...]:
    """The columns of [R, C], in one copy. Each begins at a multiple of COLUMN entries, as kernels like it."""
    count, width = rows.shape
    columns = np.zeros((width, -(-count // COLUMN) * COLUMN), rows.dtype)
    columns[:, :count] = rows.T
    return to_device(columns, device)[:, :count].unbind(0)


def signed(seed: int) -> int:
    """An unsigned 64-bit seed with the same bits as int64."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _history(sequences: list[Sequence], device: torch.device) -> History | None:
    rows, ids, counts = [], [], []
    for row, sequence in enumerate(sequences):
        if not _is_penalized(sequence.sampling):
            continue
        seen, inverse = np.unique(np.asarray(sequence.tokens, np.int64), return_inverse=True)
        ids.append(seen)
        counts.append(np.bincount(inverse[sequence.prompt_len :], minlength=len(seen)))
        rows.append(np.full(len(seen), row))
    if not rows:
        return None
    return History(*to_device(np.stack([np.concatenate(column) for column in (rows, ids, counts)]), device))


def _bias(sequences: list[Sequence], eos_ids: tuple[int, ...], device: torch.device) -> Bias | None:
    entries = [
        (row, id, value) for row, sequence in enumerate(sequences) for id, value in _biases(sequence, eos_ids).items()
    ]
    if not entries:
        return None
    rows, ids, values = zip(*entries, strict=True)
    at_rows, at_ids = to_device(np.array([rows, ids], np.int64), device)
    return Bias(at_rows, at_ids, to_device(np.array(values, np.float32), device))


def _biases(sequence: Sequence, eos_ids: tuple[int, ...]) -> dict[int, float]:
    """The request's own, and while it may not end yet, what would end it is forbidden."""
    p = sequence.sampling
    biases = dict(p.logit_bias)
    if _held_back(sequence):
        biases.update(dict.fromkeys(enders(sequence, eos_ids), -math.inf))
    return biases


def _held_back(sequence: Sequence) -> bool:
    """Whether it may not end yet; where there is a grammar, `constrain` sees to it, who knows what else is allowed."""
    return sequence.output_len < sequence.sampling.min_tokens and sequence.constraint is None


def enders(sequence: Sequence, eos_ids: tuple[int, ...]) -> Iterator[int]:
    """Tokens that end it."""
    yield from sequence.sampling.stop_token_ids
    if not sequence.sampling.ignore_eos:
        yield from eos_ids
