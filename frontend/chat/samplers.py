"""Makes the chain of samplers of a request that asks for one (docs/samplers.md).

Most requests do not ask for a chain: `wants_chain` checks a few fields, and this module is imported only for a chain.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from frontend.errors import Unprocessable
from frontend.model_context import ModelContext
from frontend.schema.request_fields import GenerationFields, SamplerFields, order_of
from frontend.text.tokenizer import END, Tokenizer, VocabularyTexts
from frontend.turns import FairThreads
from shared.messages import Dry, SamplerChain, Sampling, WindowPenalties
from shared.messages.requests import LongBreaker
from shared.wire import pack_u32

BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's default
THREADS = FairThreads("breakers", 3, each=2)
WINDOW = 64  # llama.cpp's default of `repeat_last_n`
PLAIN = ("penalties", "temperature", "top_k", "top_p", "min_p")  # the samplers of a request without a chain, in order
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
ALSO_PLAIN = ("penalties", "top_k", "temperature", "top_p", "min_p")  # another order with the same result as PLAIN


async def with_chain(chosen: Sampling, fields: GenerationFields, context: ModelContext) -> Sampling:
    """Returns the sampling with the chain that the fields ask for; without a chain if that gives the same result.

    chosen: the sampling without a chain; the chain takes its values
    """
    assert isinstance(fields, SamplerFields)
    chain = _chain(chosen, fields)
    active = [name for name in chain.order if _is_active(name, chain, fields)]
    if not _needs_chain(active, fields):
        return _plain(chosen, active)
    dry = None
    if "dry" in active:
        texts = fields.dry_sequence_breakers or BREAKERS
        single, several = await THREADS.run(breaker_ids, texts, context.tokenizer)
        dry = Dry(
            fields.dry_multiplier or 0.0, fields.dry_base or 1.75,
            2 if fields.dry_allowed_length is None else fields.dry_allowed_length,
            -1 if fields.dry_penalty_last_n is None else fields.dry_penalty_last_n, single, several,
        )  # fmt: skip
    kept = chain.penalties if "penalties" in active else None
    return msgspec.structs.replace(
        _neutral(chosen), chain=msgspec.structs.replace(chain, order=tuple(active), penalties=kept, dry=dry)
    )


def _chain(chosen: Sampling, fields: SamplerFields) -> SamplerChain:
    last_n = WINDOW if fields.repeat_last_n is None else fields.repeat_last_n
    order = ("temperature",) if fields.mirostat else order_of(fields.samplers)
    return SamplerChain(
        order, chosen.temperature, fields.dynatemp_range or 0.0,
        1.0 if fields.dynatemp_exponent is None else fields.dynatemp_exponent, chosen.top_k, chosen.top_p, chosen.min_p,
        min(1.0, fields.typical_p or 1.0), max(0.0, fields.top_n_sigma or 0.0), fields.xtc_probability or 0.0,
        0.1 if fields.xtc_threshold is None else fields.xtc_threshold, fields.min_keep or 0,
        WindowPenalties(
            last_n, chosen.repetition_penalty, chosen.presence_penalty, chosen.frequency_penalty
        ) if chosen.penalized and last_n else None,
        mirostat=fields.mirostat or 0, mirostat_tau=5.0 if fields.mirostat_tau is None else fields.mirostat_tau,
        mirostat_eta=0.1 if fields.mirostat_eta is None else fields.mirostat_eta,
    )  # fmt: skip


def _is_active(name: str, chain: SamplerChain, fields: SamplerFields) -> bool:
    """Whether a sampler has any effect."""
    return {
        "penalties": chain.penalties is not None, "dry": bool(fields.dry_multiplier),
        "top_n_sigma": chain.top_n_sigma > 0, "top_k": chain.top_k > 0, "typ_p": chain.typical_p < 1,
        "top_p": chain.top_p < 1, "min_p": chain.min_p > 0, "xtc": chain.xtc_probability > 0,
        "temperature": chain.temperature != 1 or chain.dynatemp_range > 0,
    }[name]  # fmt: skip


def _needs_chain(active: Sequence[str], fields: SamplerFields) -> bool:
    """Whether these samplers, in this order, give another result than PLAIN."""
    if fields.mirostat:
        return True
    window = "penalties" in active and fields.repeat_last_n is not None
    if window or fields.dynatemp_range or not set(active) <= set(PLAIN):
        return True
    return fields.samplers is not None and not (_in_order(active, PLAIN) or _in_order(active, ALSO_PLAIN))


def _in_order(names: Sequence[str], order: Sequence[str]) -> bool:
    """Whether `names` are in the order of `order`, and contain nothing else."""
    return list(names) == [name for name in order if name in names]


def _plain(chosen: Sampling, active: Sequence[str]) -> Sampling:
    """Returns the sampling with the values of active samplers only, and without a chain."""
    names = [field for name in active for field in (PENALTIES if name == "penalties" else (name,))]
    return msgspec.structs.replace(_neutral(chosen), **{name: getattr(chosen, name) for name in names})


def _neutral(chosen: Sampling) -> Sampling:
    return msgspec.structs.replace(
        chosen, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
        frequency_penalty=0.0,
    )  # fmt: skip


# Finds the tokens that end a repetition for the sampler DRY.
#
# These are the tokens that contain a breaker, and the tokens that end with the beginning of a breaker.

MAX_TAIL = 20  # how many ids of a breaker are kept after its first id, as in llama.cpp; the rest is cut off
MAX_HEADS = 1 << 15  # limit on the ids whose text ends with the beginning of a breaker: they cost time in each step


def breaker_ids(texts: Iterable[str], tokenizer: Tokenizer) -> tuple[bytes, tuple[LongBreaker, ...]]:
    """Returns the packed ids of tokens that contain one of the texts, and the sequences of ids that spell out a text.

    The first id of such a sequence ends with the beginning of a breaker, and the rest of the breaker follows. Raises
    Unprocessable if too many ids end with the beginning of a breaker.
    """
    vocabulary = tokenizer.vocabulary_texts
    single: set[int] = set()
    several: list[LongBreaker] = []
    heads_left = MAX_HEADS
    for text in dict.fromkeys(texts):
        whole = {*ids_with(text, vocabulary)}
        single |= whole
        for at in range(1, len(text)):
            heads = [id for id in ids_with(text[:at] + END, vocabulary) if id not in whole]
            heads_left -= len(heads)
            if heads_left < 0:
                raise Unprocessable(
                    f"`dry_sequence_breakers`: more than {MAX_HEADS} tokens end with the beginning of a breaker; "
                    "give fewer or shorter ones", param="dry_sequence_breakers", code="out_of_range",
                )  # fmt: skip
            if heads:
                tail = tokenizer.encode_now([text[at:]], False)[0][:MAX_TAIL]
                several.append(LongBreaker(pack_u32(heads), tuple(tail)))
    return pack_u32(sorted(single)), tuple(several)


def ids_with(text: str, vocabulary: VocabularyTexts) -> Iterator[int]:
    """Yields the ids whose text, followed by END, contains `text`. Searches all texts in one, because this takes
    milliseconds, and a look at each text a tenth of a second."""
    joined, ends = vocabulary
    at = joined.find(text)
    while at >= 0:
        id = bisect_right(ends, at)
        yield id
        at = joined.find(text, ends[id])
