"""The samplers that look at earlier tokens: penalties in a window, and DRY."""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shared.messages.samplers import Dry, LongBreaker, WindowPenalties
from shared.wire.codec import unpack_u32
from worker.run.samplers.truncation import Candidates

MAX_MATCH = 512  # longer repetitions count as this long, to bound the time of a step
MAX_TAIL = 64  # the maximum number of ids of a breaker after its first id
MAX_LOG = 88.7  # the logarithm of the largest float32: larger penalties are capped

Tokens = NDArray[np.int64]


def window(tokens: Tokens, last_n: int) -> Tokens:
    return tokens if last_n < 0 else tokens[max(0, len(tokens) - last_n) :]


def penalize(left: Candidates, tokens: Tokens, by: WindowPenalties) -> Candidates:
    """Applies CTRL's repetition penalty (arXiv:1909.05858), and OpenAI's frequency and presence penalties.

    The penalties apply to all tokens in the window of the last `by.last_n` tokens.
    """
    ids, counts = np.unique(window(tokens, by.last_n), return_counts=True)
    places, logits = _places(left, ids), left.logits.copy()
    found = places >= 0
    at, value = places[found], logits[places[found]]
    value = np.where(value > 0, value / by.repetition, value * by.repetition)
    logits[at] = value - by.frequency * counts[found] - by.presence
    return Candidates(left.ids, logits)


def dry(left: Candidates, tokens: Tokens, by: Dry) -> Candidates:
    """Subtracts multiplier * base^(n - allowed_length) from the logit of a token that extends a repetition of n tokens.

    A repetition is the longest end of the text that occurs earlier in the window, followed there by the token. It does
    not go back beyond the last breaker.
    """
    seen = window(tokens, by.last_n)
    longest = min(_since_breaker(seen, by), MAX_MATCH)
    if longest < by.allowed_length or longest < 1:
        return left
    repeated = _repetitions(seen, longest)
    found = {token: length for token, length in repeated.items() if length >= by.allowed_length}
    ids = np.array(sorted(found), np.int64)
    places, logits = _places(left, ids), left.logits.copy()
    for id, place in zip(ids.tolist(), places.tolist(), strict=True):
        if place >= 0:
            logits[place] -= by.multiplier * _power(by.base, found[id] - by.allowed_length)
    return Candidates(left.ids, logits)


def _power(base: float, exponent: int) -> float:
    most = MAX_LOG / np.log(base) if base > 1.000001 else exponent
    return float(base ** min(exponent, most))


def _repetitions(seen: Tokens, longest: int) -> dict[int, int]:
    """Returns a map from each token that would extend a repetition to the repetition's length, at most `longest`.

    For each earlier occurrence of the last token, it compares the tokens before that place with the end of the text.
    """
    last, found = len(seen) - 1, dict[int, int]()
    places = np.flatnonzero(seen[:last] == seen[last])
    length = 1
    while len(places):
        found.update(dict.fromkeys(seen[places + 1].tolist(), length))
        if length == longest:
            break
        places = places[places >= length]
        places = places[seen[places - length] == seen[last - length]]
        length += 1
    return found


def _since_breaker(seen: Tokens, by: Dry) -> int:
    """Returns how many tokens follow the last breaker in the text; the length of the text if there is no breaker.

    It looks only at the last MAX_MATCH + MAX_TAIL tokens, because a repetition is not longer.
    """
    recent = seen[::-1][: MAX_MATCH + MAX_TAIL]
    single = np.flatnonzero(_among(recent, np.frombuffer(by.breakers, "<u4")))
    end = int(single[0]) if len(single) else len(recent)
    tails_after, reverse = _tails_by_head(by.long_breakers), recent.tolist()
    for behind, token in enumerate(reverse[: end + 1]) if tails_after else ():
        tails = [tail for tail in tails_after.get(token, ()) if _follows(tail, reverse, behind)]
        if tails:
            return behind - max(map(len, tails))
    return end if len(single) else len(seen)


@lru_cache(maxsize=8)
def _tails_by_head(breakers: tuple[LongBreaker, ...]) -> Mapping[int, Sequence[Sequence[int]]]:
    """Returns a map: first id of a breaker → the ids that must follow it. Cached, because each step needs it."""
    after: dict[int, list[Sequence[int]]] = {}
    for one in breakers:
        for head in unpack_u32(one.heads):
            after.setdefault(head, []).append(one.tail)
    return after


def _follows(tail: Sequence[int], reverse: Sequence[int], behind: int) -> bool:
    return len(tail) <= behind and all(id == reverse[behind - 1 - at] for at, id in enumerate(tail))


def _among(tokens: Tokens, ids: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """Returns for each of the tokens [N] whether it is in ids [K], which are sorted in ascending order."""
    if not len(ids):
        return np.zeros(len(tokens), np.bool_)
    at = np.searchsorted(ids, tokens)
    found: NDArray[np.bool_] = ids[np.minimum(at, len(ids) - 1)] == tokens
    return found


def _places(left: Candidates, ids: Tokens) -> NDArray[np.int64]:
    """Returns [K]: the index of each of the K ids among the candidates; -1 for an id that is not a candidate."""
    if not len(ids):
        return np.zeros(0, np.int64)
    at = np.searchsorted(left.ids, ids)
    known = left.ids[np.minimum(at, len(left.ids) - 1)] == ids
    return np.where(known, at, -1)
