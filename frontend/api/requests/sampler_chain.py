"""What a request's samplers are on the wire: nothing where the plain order of samplers gives the same, else a chain."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from frontend.api.requests.sampler_fields import BREAKERS, FIELDS, PLAIN, ordered
from frontend.text.dry_breakers import breaker_sequences
from frontend.text.tokenizer import Tokenizer
from shared.messages import SAMPLERS, SamplerChain, Sampling

OFF: Mapping[str, Mapping[str, Any]] = {  # what turns off a sampler that `samplers` leaves out
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
}


async def with_samplers(sampling: Sampling, fields: Any, tokenizer: Tokenizer, vocab_size: int) -> Sampling:
    """Returns the sampling with the samplers that a request asks for in `fields`, by the names of FIELDS."""
    given = {name: value for name in FIELDS if (value := getattr(fields, name, None)) is not None}
    samplers, breakers = given.pop("samplers", None), given.pop("dry_sequence_breakers", BREAKERS)
    chain = SamplerChain((), **given)
    order: Sequence[str] = SAMPLERS if samplers is None else [name for name in ordered(samplers) if name in SAMPLERS]
    if chain.mirostat:
        order = ("temperature",)
    off = [name for name in OFF if name not in order or (name == "penalties" and not chain.repeat_last_n)]
    sampling = msgspec.structs.replace(sampling, **{key: value for name in off for key, value in OFF[name].items()})
    active = [name for name in order if _is_on(name, sampling, chain)]
    if not chain.mirostat and _is_plain(active, chain, in_order=samplers is not None):
        return sampling
    found = await breaker_sequences(tokenizer, tuple(breakers), vocab_size) if "dry" in active else {}
    return msgspec.structs.replace(
        sampling, chain=msgspec.structs.replace(chain, order=tuple(active), dry_breakers=found)
    )


def _is_on(name: str, sampling: Sampling, chain: SamplerChain) -> bool:
    if name in OFF:
        return any(getattr(sampling, key) != value for key, value in OFF[name].items()) or (
            name == "temperature" and chain.dynatemp_range > 0
        )
    return {
        "dry": chain.dry_multiplier > 0 and chain.dry_penalty_last_n != 0,
        "top_n_sigma": chain.top_n_sigma > 0,
        "typ_p": chain.typical_p < 1,
        "xtc": chain.xtc_probability > 0 and chain.xtc_threshold <= 0.5,
    }[name]


def _is_plain(active: Sequence[str], chain: SamplerChain, *, in_order: bool) -> bool:
    """Whether the samplers give the same without a chain. in_order: the request says in which order they work"""
    if not {*active} <= {*PLAIN}:
        return False
    if "temperature" in active and chain.dynatemp_range:
        return False
    if "penalties" in active and chain.repeat_last_n > 0:
        return False
    if chain.min_keep > 1 and ("top_p" in active or "min_p" in active):
        return False
    return not in_order or _commutes(active)


def _commutes(active: Sequence[str]) -> bool:
    """Whether the samplers give the same in the plain order. Top-k keeps the same tokens at every temperature."""
    places = [PLAIN.index(name) for name in active]
    return all(
        one < other or {active[first], active[first + 1 + more]} == {"top_k", "temperature"}
        for first, one in enumerate(places)
        for more, other in enumerate(places[first + 1 :])
    )
