"""Which tokens break the sequences that DRY compares: those in which a text occurs, alone or with the ones after them.

A token that has the whole text breaks a sequence. A token that ends with the beginning of the text does so if the
tokens of the rest follow it, as the tokenizer encodes the rest.
"""

import asyncio
from collections import defaultdict
from functools import lru_cache

from frontend.text.tokenizer import Tokenizer

Sequences = dict[int, tuple[tuple[int, ...], ...]]
MAX_TAIL = 20  # tokens of the rest that are looked at


async def breaker_sequences(tokenizer: Tokenizer, texts: tuple[str, ...], vocab_size: int) -> Sequences:
    """Returns by the id of a token the sequences of ids after it with which it breaks, for any of the texts."""
    return await asyncio.to_thread(_sequences, tokenizer, tuple(dict.fromkeys(texts)), vocab_size)


@lru_cache(maxsize=32)
def _sequences(tokenizer: Tokenizer, texts: tuple[str, ...], vocab_size: int) -> Sequences:
    found: defaultdict[int, set[tuple[int, ...]]] = defaultdict(set)
    for text in texts:
        for id, tail in _of_text(tokenizer, text, vocab_size):
            found[id].add(tail)
    return {id: tuple(sorted(tails)) for id, tails in found.items()}


def _of_text(tokenizer: Tokenizer, text: str, vocab_size: int) -> list[tuple[int, tuple[int, ...]]]:
    whole, tokens = text.encode(errors="replace"), _token_bytes(tokenizer, vocab_size)
    found: list[tuple[int, tuple[int, ...]]] = [(id, ()) for id, token in enumerate(tokens) if whole in token]
    # the rest of a text has to be text, too, so it is cut between characters
    cuts = {text[:at].encode(errors="replace"): text[at:] for at in range(1, len(text))}
    begun = tuple(cuts)
    ends = [(id, token) for id, token in enumerate(tokens) if begun and token.endswith(begun) and whole not in token]
    if ends:
        rests = dict(zip(cuts, tokenizer.encode_now(list(cuts.values()), False), strict=True))
        found += [
            (id, tuple(rest[:MAX_TAIL]))
            for id, token in ends
            for begin, rest in rests.items()
            if token.endswith(begin) and all(one < vocab_size for one in rest)
        ]
    return found


@lru_cache(maxsize=2)
def _token_bytes(tokenizer: Tokenizer, vocab_size: int) -> tuple[bytes, ...]:
    return tuple(tokenizer.token_bytes(id) for id in range(min(vocab_size, tokenizer.vocab_size)))
