"""Checks the values of a chain of samplers, so that a faulty frontend cannot make a step of the worker fail."""

import math

from shared.messages import SamplerChain
from shared.messages.samplers import LongBreaker
from shared.wire.codec import unpack_u32

SAMPLERS = {"penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"}
MOST = (1 << 31) - 1
MAX_ENTRIES, MAX_TAILS, MAX_TAIL, MAX_HEADS = 16, 512, 64, 1 << 16  # as many as a frontend sends, or more


def check_chain(chain: SamplerChain, vocab_size: int) -> str:
    """Returns the first problem of a chain, or "" if no step will raise because of its values."""
    if len(chain.order) > MAX_ENTRIES or not {*chain.order} <= SAMPLERS:
        return "`samplers` has an unknown sampler, or too many"
    numbers: list[float] = [
        chain.temperature, chain.dynatemp_range, chain.dynatemp_exponent, chain.top_k, chain.top_p, chain.min_p,
        chain.typical_p, chain.top_n_sigma, chain.xtc_probability, chain.xtc_threshold, chain.min_keep,
        chain.mirostat_tau, chain.mirostat_eta,
    ]  # fmt: skip
    if (penalties := chain.penalties) is not None:
        numbers += [penalties.last_n + 1, abs(penalties.presence), abs(penalties.frequency)]
        numbers += [penalties.repetition, 1 / penalties.repetition if penalties.repetition else -1]
    if (dry := chain.dry) is not None:
        numbers += [dry.multiplier, dry.base - 1, dry.allowed_length, dry.last_n + 1]
        if problem := _check_breakers(dry.breakers, dry.long_breakers, vocab_size):
            return problem
    fine = all(math.isfinite(number) and number >= 0 for number in numbers)
    whole = max(chain.top_k, chain.min_keep) <= MOST and chain.mirostat in (0, 1, 2)
    return "" if fine and whole else "`samplers`: a value of a sampler is out of range"


def _check_breakers(packed: bytes, long: tuple[LongBreaker, ...], vocab_size: int) -> str:
    if len(packed) % 4 or len(packed) > 4 * vocab_size or max(unpack_u32(packed), default=0) >= vocab_size:
        return "`dry_sequence_breakers`: a breaker is no token, or there are too many"
    if len(long) > MAX_TAILS or not all(0 < len(one.tail) <= MAX_TAIL for one in long):
        return "`dry_sequence_breakers`: a breaker has too few ids or too many, or there are too many breakers"
    if any(len(one.heads) % 4 for one in long) or sum(len(one.heads) for one in long) > 4 * MAX_HEADS:
        return "`dry_sequence_breakers` begin with too many ids"
    return ""
