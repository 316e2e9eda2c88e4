"""Checks the values of a chain of samplers in a Submit, so that no frontend can harm the worker."""

import math

from shared.messages import SAMPLERS, SamplerChain

MAX_BREAKERS, MAX_BREAKER_IDS = 1 << 20, 64  # sequences of tokens, and the tokens of one
MOST = (1 << 31) - 1


def check_chain(chain: SamplerChain, vocab_size: int) -> str:
    """Returns the first problem of a chain, or "" if no step will raise because of its values."""
    if len(set(chain.order)) < len(chain.order) or not {*chain.order} <= {*SAMPLERS}:
        return "samplers are unknown, or there twice"
    numbers = (
        chain.typical_p, chain.xtc_probability, chain.xtc_threshold, chain.dynatemp_range, chain.dynatemp_exponent,
        chain.mirostat_tau, chain.mirostat_eta, chain.dry_multiplier, chain.dry_base, chain.min_keep,
        chain.dry_allowed_length, chain.dry_penalty_last_n + 1, chain.repeat_last_n + 1,
    )  # fmt: skip
    if not all(math.isfinite(number) and 0 <= number <= MOST for number in numbers) or chain.dry_base < 1:
        return "a value of a sampler is out of range"
    if not math.isfinite(chain.top_n_sigma) or chain.mirostat not in (0, 1, 2):
        return "top_n_sigma or mirostat is out of range"
    tails = [tail for tails in chain.dry_breakers.values() for tail in tails]
    if len(tails) > MAX_BREAKERS or any(len(tail) > MAX_BREAKER_IDS for tail in tails):
        return "there are too many sequence breakers of DRY, or one is too long"
    return "" if all(0 <= id < vocab_size for id in chain.dry_breakers) else "a breaker of DRY is no token"
