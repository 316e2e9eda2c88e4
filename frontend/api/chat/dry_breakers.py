"""Finds the tokens that end a repetition for the sampler DRY.

These are the tokens that contain a breaker, and the tokens that end with the beginning of a breaker.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from frontend.errors import Unprocessable
from frontend.text.tokenizer import END, Tokenizer, VocabularyTexts
from shared.messages.samplers import LongBreaker
from shared.wire.codec import pack_u32

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
