"""Drafts from texts: the tokens that followed when the last few tokens occurred before.

They are taken from the text of the sequence, and from texts of earlier requests of its scope
(worker/kv_cache/recent_texts.py). A text that is copied is followed where the copy differs from it (copies.py). How
often each kind of guess is right decides how many drafts are worth their rows.
"""

from array import array
from collections.abc import Callable, Iterator
from functools import partial

from worker.kv_cache.recent_texts import LONGEST, RecentTexts
from worker.scheduler.copies import Copy
from worker.scheduler.sequence import Ids

NGRAM_LENGTHS = (3, 1)  # how many last tokens must match, tried in this order
LONG_MATCH = 8  # a text that repeats so many tokens is probably a copy, which goes on
INDEXED_PER_STEP = 1024  # at most this many tokens are indexed at once: a long prompt takes several steps
INITIAL_ACCEPTANCE = 0.2  # the acceptance rate that is assumed before the first draft
INITIAL_LONG_ACCEPTANCE = 0.7  # the same after LONG_MATCH equal tokens
LEARNING_RATE = 1 / 8  # how far one accepted or rejected draft moves the acceptance rate
RECOVERY_RATE = 1 / 2048  # how far a step without a worthwhile draft moves this rate back, to try drafts again


class Acceptance:
    """Tracks how often drafts of one kind are accepted.

    usual: the acceptance rate that steps without drafts slowly return to. first: the initial rate; None: `usual`.
    """

    def __init__(self, usual: float = INITIAL_ACCEPTANCE, first: float | None = None) -> None:
        self.acceptance = usual if first is None else first
        self._usual = usual

    def draft_length(self, limit: int, cost: float, repeats: int = 0) -> int:
        """Returns how many tokens to draft. A draft is worth it if the step then yields more tokens per second.

        The cost of a draft is the cost of its row. Where a rejection repeats rows, it also includes the cost of the
        repeated rows (the drafts before it, too), times the probability that this draft is the first rejected one.
        """
        count, probability = 0, self.acceptance
        tokens = time = 1.0  # tokens and time of a step with the drafts so far, relative to a step without drafts
        while count < limit:
            first_rejected = probability * (1 / self.acceptance - 1) if repeats else 0.0
            longer = cost * (1 + first_rejected * (repeats + count))
            if (tokens + probability) / (time + longer) <= tokens / time:
                break
            count, tokens, time = count + 1, tokens + probability, time + longer
            probability *= self.acceptance  # a draft is accepted only if all drafts before it are
        if not count:
            self.acceptance += (self._usual - self.acceptance) * RECOVERY_RATE
        return count

    def gain(self, count: int, cost: float) -> float:
        """Returns how many tokens `count` drafts are expected to add to a step, less their cost."""
        return sum([self.acceptance**at - cost for at in range(1, count + 1)])

    def record(self, accepted: int, *, rejected: bool, rate: float = LEARNING_RATE) -> None:
        for _ in range(accepted):
            self.acceptance += (1 - self.acceptance) * rate
        if rejected:
            self.acceptance -= self.acceptance * rate


# How probable the tokens after a match are, and a function that returns at most as many of them as its argument says.
Guess = tuple[Acceptance, Callable[[int], Ids]]


class NgramIndex:
    """Maps each n-gram of `length` tokens to the position after its last occurrence.

    short, long: the acceptance of drafts after a match of fewer than LONG_MATCH tokens, and of at least as many
    """

    def __init__(self, length: int) -> None:
        self.short, self.long = Acceptance(), Acceptance(INITIAL_LONG_ACCEPTANCE)
        self._length = length
        self.begins_copies = length > 1  # whether a match may be the beginning of a copy
        self._next = length  # the next position to be indexed
        self._after: dict[Ids, int] = {}  # n-gram → the position after it

    def find(self, tokens: list[int], ahead: Ids = ()) -> int | None:
        """Returns the position after the previous occurrence of the last n-gram of `tokens` and `ahead`, or None.

        Between calls, `tokens` may only grow.
        """
        length = self._length
        for position in range(self._next, min(len(tokens), self._next + INDEXED_PER_STEP)):
            self._after[tuple(tokens[position - length : position])] = position
            self._next = position + 1
        return self._after.get((*tokens[-length:], *ahead)[-length:])

    def matches(self, tokens: list[int], position: int, ahead: Ids = ()) -> Acceptance:
        """Returns the acceptance of drafts after a match like this one. position: what find() returned"""
        begin = position - LONG_MATCH
        is_long = begin >= 0 and (*tokens[-LONG_MATCH:], *ahead)[-LONG_MATCH:] == tuple(tokens[begin:position])
        return self.long if is_long else self.short


class NgramDrafter:
    """Proposes drafts from the text of a sequence, and from earlier texts of its scope.

    The cost per step does not grow with the length of the sequence.
    """

    def __init__(self, texts: RecentTexts | None = None) -> None:
        """texts: the texts of the sequence's scope; None: drafts are taken from the sequence alone."""
        self._indexes = [NgramIndex(length) for length in NGRAM_LENGTHS]
        self._texts = texts
        self._copy = Copy(None if texts is None else texts.replacements)
        self._copied, self._parted = self._indexes[0].long, Acceptance()
        self._of_texts = {LONGEST: Acceptance(INITIAL_LONG_ACCEPTANCE)}  # by the length of the match; others: `_short`
        self._short = Acceptance()
        self._last: Acceptance = self._indexes[0].short  # of the matches like that of the last proposal
        self._watched: list[tuple[int, int, Acceptance]] = []  # guesses that were not drafted: (place, id, matches)

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0, ahead: Ids = ()) -> Ids:
        return self.propose_above(0.0, tokens, limit, cost, repeats, ahead)

    def propose_above(
        self, least: float, tokens: list[int], limit: int, cost: float, repeats: int, ahead: Ids = ()
    ) -> Ids:
        """Returns the drafts that gain more than `least` tokens in a step (see Acceptance.gain), or () if none do."""
        self._compare_watched(tokens)
        for matches, take in self._guesses(tokens, ahead):
            count = matches.draft_length(limit, cost, repeats)
            if count and matches.gain(count, cost) > least:
                drafts = take(count)
                if drafts:
                    self._last = matches
                    return drafts
            elif first := take(1):
                self._watched.append((len(tokens) + len(ahead), first[0], matches))
        return ()

    def record(self, drafted: int, accepted: int) -> None:
        self._last.record(accepted, rejected=accepted < drafted)

    def stop(self) -> None:
        self._indexes, self._texts = [], None
        self._copy.end()

    def _compare_watched(self, tokens: list[int]) -> None:
        """Compares the guesses that were not drafted with the tokens, which costs nothing. Drafts begin once enough
        such guesses were right."""
        for place, id, matches in self._watched:
            if place < len(tokens):
                matches.record(int(tokens[place] == id), rejected=tokens[place] != id)
        self._watched = []

    def _guesses(self, tokens: list[int], ahead: Ids) -> Iterator[Guess]:
        """Yields what may follow `tokens` and `ahead`, the most probable first: its acceptance, and a function that
        returns at most as many tokens as its argument says."""
        copy = self._copy
        copy.follow(tokens)
        if copy.run >= LONG_MATCH:
            yield self._parted if copy.parted else self._copied, partial(self._of_copy, tokens, ahead)
        later = list[Guess]()
        for index in self._indexes:
            position = index.find(tokens, ahead)
            if position is not None:
                matches = index.matches(tokens, position, ahead)
                guess = matches, partial(_repeated, tokens, position)
                if not ahead and index.begins_copies:
                    self._follow(tokens, position, LONG_MATCH if matches is index.long else NGRAM_LENGTHS[0])
                if matches is index.long:
                    yield guess
                else:
                    later.append(guess)
            if index.begins_copies and self._texts is not None:
                yield from self._from_texts(self._texts, tokens, ahead, later)
            yield from later
            later.clear()

    def _from_texts(
        self,
        texts: RecentTexts,
        tokens: list[int],
        ahead: Ids,
        later: list[Guess],
    ) -> Iterator[Guess]:
        """Yields what followed the last tokens in an earlier text. A short match is added to `later`."""
        found = texts.find(tokens, ahead)
        if found is None:
            return
        length, place = found
        if not ahead:
            self._follow(tokens, place, length, texts.ids)
        guess = self._of_texts.get(length, self._short), partial(_taken, texts.ids, place)
        if length == LONGEST:
            yield guess
        else:
            later.append(guess)

    def _follow(self, tokens: list[int], place: int, run: int, source: "array[int] | None" = None) -> None:
        """Follows a text that was found, unless one is followed that has as many equal tokens."""
        if run > self._copy.run or (self._copy.parted and run >= LONG_MATCH):
            self._copy.begin(tokens, place, run, source)

    def _of_copy(self, tokens: list[int], ahead: Ids, count: int) -> Ids:
        drafts = self._copy.ahead(tokens, len(ahead) + count)
        return drafts[len(ahead) :] if drafts[: len(ahead)] == ahead else ()


def _repeated(tokens: list[int], position: int, count: int) -> Ids:
    """Returns `count` tokens from a position of a sequence on. If too few follow, they are repeated."""
    following = tokens[position : position + count]
    return tuple((following * count)[:count])


def _taken(ids: "array[int]", place: int, count: int) -> Ids:
    return tuple(ids[place : place + count])
