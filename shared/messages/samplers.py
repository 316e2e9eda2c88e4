"""A chain of samplers, with llama.cpp's names; it replaces `Sampling`'s temperature, top-k, top-p and min-p."""

from typing import Annotated

import msgspec

from shared.messages.base import MAX_FEW_IDS, FewIds


class WindowPenalties(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Penalties on the tokens that occur among the last `last_n` tokens of prompt and output."""

    last_n: int  # -1: all tokens
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


class LongBreaker(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A sequence of ids that ends a repetition: one of `heads`, followed by all ids of `tail`."""

    heads: bytes  # packed uint32 ids
    tail: FewIds


class Dry(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The penalty on tokens that would extend a repetition ("Don't Repeat Yourself")."""

    multiplier: float
    base: float
    allowed_length: int
    last_n: int  # DRY looks for repetitions in the last `last_n` tokens of prompt and output; -1: all
    breakers: bytes = b""  # packed ids in ascending order, each of which ends a repetition
    long_breakers: Annotated[tuple[LongBreaker, ...], msgspec.Meta(max_length=MAX_FEW_IDS)] = ()


class SamplerChain(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Applies the samplers of `order`, one after another. An option has no effect at its default.

    The token is drawn from what the chain leaves; `Sampling`'s temperature is then 1, its top-k, top-p, min-p are off.
    """

    order: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_FEW_IDS)]  # names from worker/run/samplers/chain.py
    temperature: float = 1.0  # 0 leaves only the most likely token
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    min_keep: int = 0  # top_p, min_p, typical_p and xtc leave at least this many tokens
    penalties: WindowPenalties | None = None
    dry: Dry | None = None
    mirostat: int = 0  # version of Mirostat, 1 or 2, applied after the samplers of `order`; 0: off
    mirostat_tau: float = 5.0  # Mirostat's target surprise, in bits
    mirostat_eta: float = 0.1  # Mirostat's learning rate: how fast its bound on the surprise moves
    reports: bool = False  # whether the log-probabilities of the output are those after the chain

    @property
    def reads_tokens(self) -> bool:
        """Whether the result depends on earlier tokens, not only on the logits."""
        return self.penalties is not None or self.dry is not None or self.mirostat > 0
