"""Applies the samplers that some rows ask for: replaces the logits of these rows by what is left to draw from.

A row depends only on its own sequence: on the tokens before it, on its logits, and on a random number of its own for
XTC, which is a hash of (seed, output position) as the one that draws the token is, from another stream. On a GPU the
rows come to the host and go back. Other rows keep their bits.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.kernels.sample import uniform
from worker.run.inputs import to_device
from worker.run.sampler import row_biases, signed_seed
from worker.run.sampler_formulas import FAR, Row, apply_chain, next_mu
from worker.schedule.records.sampler_chain import ChainRecord
from worker.schedule.sequence import Row as SampledRow

XTC_STREAM = 0xD1B54A32D192ED03  # any odd number: makes another seed of a request's


def apply_chains(logits: Tensor, rows: list[SampledRow], eos_ids: tuple[int, ...]) -> Tensor:
    """Returns the logits [R, V] float32, in a copy in which rows with a chain have what their samplers leave.

    Tokens that these drop are -inf. The rows of a sequence must be in the order of its output.
    """
    at = [place for place, (sequence, _) in enumerate(rows) if sequence.chain is not None]
    chosen = to_device(np.array(at, np.int64), logits.device)
    host = logits[chosen].cpu().numpy()
    for values, place in zip(host, at, strict=True):
        _apply(values, rows[place], eos_ids)
    return logits.index_copy(0, chosen, torch.from_numpy(host).to(logits.device))


def _apply(values: NDArray[np.float32], row: SampledRow, eos_ids: tuple[int, ...]) -> None:
    """Changes the logits [V] of one row."""
    sequence, output = row
    record = sequence.chain
    assert record is not None
    for id, bias in [*record.sampling.logit_bias, *row_biases(row, eos_ids).items()]:
        values[id] += bias
    known = sequence.tokens[sequence.prompt_len :] if sequence.check is None else sequence.check.answer
    before = known[:output]
    drawn = apply_chain(
        values,
        Row(
            record.sampling, record.chain, sequence.tokens[: sequence.prompt_len], before, len(values),
            draw=_uniform(sequence.seed ^ XTC_STREAM, output) if record.chain.xtc_probability else 0.5,
            mu=_mu(record, output, before),
        ),
    )  # fmt: skip
    if record.chain.mirostat:
        record.last = dict(zip(drawn.ids.tolist(), drawn.probabilities.tolist(), strict=True))
    if len(drawn.ids):
        values[:] = -np.inf
        values[drawn.ids] = np.maximum(drawn.logits - drawn.logits.max(), FAR)
    if output < len(record.forced):
        values[:] = -np.inf
        values[record.forced[output]] = 0.0


def _mu(record: ChainRecord, output: int, before: list[int]) -> float:
    """Returns Mirostat's bound for an output token. A token that could not have been drawn does not move it."""
    if not record.chain.mirostat:
        return 0.0
    del record.mus[output + 1 :]  # a failed step is repeated
    if output == len(record.mus):
        probability = record.last.get(before[-1])
        mu = record.mus[-1]
        record.mus.append(mu if probability is None else next_mu(mu, probability, record.chain))
    return record.mus[output]


def _uniform(seed: int, position: int) -> float:
    """Returns a number in (0, 1)."""
    return float(uniform(torch.tensor([signed_seed(seed)]), torch.tensor([position]))[0])
