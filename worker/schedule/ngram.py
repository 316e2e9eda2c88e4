"""Guesses at the next tokens of a sequence: what followed in its own text when it last had come to the same words.

Text repeats itself: names, quotations, code, answers about a document. A guess is never more than a proposal; which of
them are kept, and what they cost a step, is the business of drafting.py. Knows token ids and counts.
"""

CONTEXTS = (3, 1)  # how many tokens must have been the same, tried in this order
READ = 1024  # most tokens that are read at once: a long prompt is read in several steps

START = 0.5  # how likely a guess is thought to come true before any was made
LEARN = 1 / 4  # how far one that did, or did not, moves that
FORGET = 1 / 2048  # how far a step in which none was worth it moves it back, so that another is tried one day


class Context:
    """Of every `length` tokens in a row, what came after them last; and how likely that is what comes next."""

    def __init__(self, length: int) -> None:
        self.chance = START
        self._length = length
        self._read = length  # the next place to be read
        self._after: dict[tuple[int, ...], int] = {}  # the place behind them

    def find(self, tokens: list[int]) -> int | None:
        """Where in `tokens` that is which came after its last few; `tokens` only ever grow."""
        length = self._length
        for place in range(self._read, min(len(tokens), self._read + READ)):
            self._after[tuple(tokens[place - length : place])] = place
            self._read = place + 1
        return self._after.get(tuple(tokens[-length:]))

    def worth(self, most: int, price: float) -> int:
        """How many tokens to guess, if one is worth it whose chance to be kept is above `price`."""
        count, chance = 0, self.chance
        while count < most and chance > price:
            count += 1
            chance *= self.chance  # it is kept only if all before it are
        if not count:
            self.chance += (START - self.chance) * FORGET
        return count

    def learn(self, kept: int, *, missed: bool) -> None:
        for _ in range(kept):
            self.chance += (1 - self.chance) * LEARN
        if missed:
            self.chance -= self.chance * LEARN


class NgramDrafter:
    """One sequence's. What a step costs does not grow with the sequence, and is next to nothing while it is wrong."""

    def __init__(self) -> None:
        self._contexts = [Context(length) for length in CONTEXTS]
        self._last = self._contexts[0]  # where the last guesses came from

    def propose(self, tokens: list[int], most: int, price: float) -> tuple[int, ...]:
        """At most `most` tokens that may follow `tokens`, which is what it was the last time and perhaps more.

        Each costs `price`, as a share of what a token is worth that comes true.
        """
        for context in self._contexts:
            count = context.worth(most, price)
            place = context.find(tokens) if count else None
            if place is not None:
                self._last = context
                followed = tokens[place : place + count]
                return tuple((followed * count)[:count])  # where that is less, it goes round and round
        return ()

    def learn(self, drafts: int, kept: int) -> None:
        """So many of the last proposal's came true, from the first on."""
        self._last.learn(kept, missed=kept < drafts)

    def stop(self) -> None:
        """It proposes nothing any more."""
        self._contexts = []
