"""Runs chains of samplers. Each sampler drops candidate tokens of a row, or changes their logits.

The sampling kernel (kernels/sample.py) then draws from the tokens that are left, with the row's own random number.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.messages.samplers import SamplerChain
from worker.kernels.sample import signed_seed, uniform
from worker.run.samplers import repetition, truncation
from worker.run.samplers.truncation import Candidates
from worker.schedule.sequence import Row

XTC_STREAM = 0x58_54_43  # mixed into the seed, so that XTC's random number is independent of the draw's
NOT_CANDIDATE = -np.inf


def chained(logits: Tensor, rows: list[Row], progress: Callable[[], None] = lambda: None) -> Tensor:
    """Returns the logits [R, V] float32 after the chain of each row that has one. Dropped tokens get -inf.

    Waits for the device. Notes in each sequence how long its row took. progress: called after each row
    """
    result = logits.clone()
    for place, row in enumerate(rows):
        if (chain := row[0].sampling.chain) is not None:
            began = time.perf_counter()
            values = logits[place].float().cpu().numpy()
            run = run_chain if row[0].mirostat is None else partial(_run_mirostat, row)
            result[place] = torch.from_numpy(run(values, chain, _tokens_before(row), _chance(row)))
            if (host := row[0].host) is not None:
                host.chain, host.chained = time.perf_counter() - began, True
            progress()
    return result


def run_chain(
    logits: NDArray[np.float32], chain: SamplerChain, tokens: NDArray[np.int64], chance: float
) -> NDArray[np.float32]:
    """Returns the logits [V] of one row after its chain. A row without finite logits is returned as it is.

    tokens: prompt and output before this row; chance: a random number in (0, 1), for XTC.
    """
    finite = np.flatnonzero(np.isfinite(logits))
    if not len(finite):
        return logits
    left = Candidates(finite, logits[finite].astype(np.float64))
    for name in chain.order:
        left = _step(name, left, chain, tokens, chance)
    result = np.full_like(logits, NOT_CANDIDATE)
    result[left.ids] = left.logits
    return result


def _run_mirostat(
    row: Row, logits: NDArray[np.float32], chain: SamplerChain, tokens: NDArray[np.int64], chance: float
) -> NDArray[np.float32]:
    """Does the same as run_chain, and then Mirostat. While known output is replayed, only the known id is left."""
    from worker.run.samplers import mirostat

    sequence, output = row
    record, before = sequence.mirostat, tokens[sequence.prompt_len :].tolist()
    assert record is not None
    mu, result = mirostat.bound(record, chain, before), run_chain(logits, chain, tokens, chance)
    finite = np.flatnonzero(np.isfinite(result))
    if len(finite):
        left = Candidates(finite, result[finite].astype(np.float64))
        left = mirostat.bounded(left, chain.mirostat, mu, len(logits))
        mirostat.keep_shares(record, left)
        result = np.full_like(logits, NOT_CANDIDATE)
        result[left.ids] = left.logits
    if output < len(record.forced):
        result = np.full_like(logits, NOT_CANDIDATE)
        result[record.forced[output]] = 0.0
    return result


def _step(name: str, left: Candidates, chain: SamplerChain, tokens: NDArray[np.int64], chance: float) -> Candidates:
    match name:
        case "penalties":
            return left if chain.penalties is None else repetition.penalize(left, tokens, chain.penalties)
        case "dry":
            return left if chain.dry is None else repetition.dry(left, tokens, chain.dry)
        case "top_n_sigma":
            return truncation.top_n_sigma(left, chain.top_n_sigma)
        case "top_k":
            return truncation.top_k(left, chain.top_k)
        case "typ_p":
            return truncation.typical(left, chain.typical_p, chain.min_keep)
        case "top_p":
            return truncation.top_p(left, chain.top_p, chain.min_keep)
        case "min_p":
            return truncation.min_p(left, chain.min_p, chain.min_keep)
        case "xtc":
            return truncation.xtc(left, chain.xtc_threshold, chain.min_keep) if chance < chain.xtc_probability else left
        case "temperature":
            return _temper(left, chain)
    return left


def _temper(left: Candidates, chain: SamplerChain) -> Candidates:
    """Divides the logits by the temperature, which may depend on the entropy (llama.cpp's dynamic temperature)."""
    temperature = chain.temperature
    if chain.dynatemp_range > 0 and len(left.ids) > 1:
        low, high = max(0.0, temperature - chain.dynatemp_range), temperature + chain.dynatemp_range
        temperature = low + (high - low) * truncation.entropy_share(left) ** chain.dynatemp_exponent
    if temperature <= 0:
        return truncation.top_k(left, 1)
    return Candidates(left.ids, (left.logits - left.logits.max()) / temperature)


def _tokens_before(row: Row) -> NDArray[np.int64]:
    """Returns the tokens before a row: prompt and output. If an answer is checked, the answer replaces the output."""
    sequence, output = row
    if sequence.check is None:
        return np.array(sequence.tokens[: sequence.prompt_len + output], np.int64)
    return np.array(sequence.tokens[: sequence.prompt_len] + sequence.check.answer[:output], np.int64)


def _chance(row: Row) -> float:
    sequence, output = row
    seeds, positions = torch.tensor([signed_seed(sequence.seed ^ XTC_STREAM)]), torch.tensor([output])
    return float(uniform(seeds, positions)[0])
