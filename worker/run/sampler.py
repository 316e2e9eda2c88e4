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

from worker.kernels.params import Bias, History, PlainParams, SampleParams, Stages
from worker.kernels.sample import sample, sample_plain
from worker.run.inputs import to_device
from worker.schedule.sequence import Row, Sequence

COLUMN = 32  # entries, 128 bytes or more: kernels are compiled for what an address is a multiple of


def choose(
    logits: Tensor,
    rows: list[Row],
    eos_ids: tuple[int, ...],
    choose_plain: Callable[..., Tensor] = sample_plain,
) -> Tensor:
    """The id that each row samples: logits [R, V] float32 -> [R] int64 on their device, without waiting for it."""
    if all(not sequence.sampling.temperature and is_plain(sequence) for sequence, _ in rows):
        return logits.argmax(-1)
    return sample(logits, columns(rows, eos_ids, logits.device), choose_plain)


def is_plain(sequence: Sequence) -> bool:
    """Whether its logits are sampled as they are: no penalty, bias, grammar or min_tokens adjusts them.

    So its next token depends on no text and can be sampled before the last one is known. Once it is so, it stays so.
    """
    sequence.plain = sequence.plain or not (
        sequence.constraint is not None
        or sequence.sampling.logit_bias
        or sequence.sampling.penalized
        or _held_back(sequence, sequence.output_len)
    )
    return sequence.plain


def columns(rows: list[Row], eos_ids: tuple[int, ...], device: torch.device) -> SampleParams:
    """The sampling parameters of rows, an entry a row."""
    params = [sequence.sampling for sequence, _ in rows]
    wanted = [
        (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params
    ]
    counts = [(sequence.sampling.top_k, signed(sequence.seed), output) for sequence, output in rows]
    temperature, top_p, min_p, repetition, presence, frequency = _columns(np.array(wanted, np.float32), device)
    top_k, seeds, positions = _columns(np.array(counts, np.int64), device)
    hot = [p for p in params if p.temperature > 0]
    return SampleParams(
        PlainParams(temperature, top_k, top_p, min_p, seeds, positions),
        repetition,
        presence,
        frequency,
        _history([sequence for sequence, _ in rows], device),
        _bias(rows, eos_ids, device),
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
    entries = [(at, id, value) for at, row in enumerate(rows) for id, value in _biases(row, eos_ids).items()]
    if not entries:
        return None
    places, ids, values = zip(*entries, strict=True)
    at_rows, at_ids = to_device(np.array([places, ids], np.int64), device)
    return Bias(at_rows, at_ids, to_device(np.array(values, np.float32), device))


def _biases(row: Row, eos_ids: tuple[int, ...]) -> dict[int, float]:
    """The request's own, and while it may not end yet, what would end it is forbidden."""
    sequence, output = row
    biases = dict(sequence.sampling.logit_bias)
    if _held_back(sequence, output):
        biases.update(dict.fromkeys(stop_ids(sequence, eos_ids), -math.inf))
    return biases


def _held_back(sequence: Sequence, output: int) -> bool:
    """Whether that token may not end it; where there is a grammar, `constrain` sees to it, who knows what is left."""
    return output < sequence.sampling.min_tokens and sequence.constraint is None


def stop_ids(sequence: Sequence, eos_ids: tuple[int, ...]) -> Iterator[int]:
    """Tokens that end it."""
    yield from sequence.sampling.stop_token_ids
    if not sequence.sampling.ignore_eos:
        yield from eos_ids
