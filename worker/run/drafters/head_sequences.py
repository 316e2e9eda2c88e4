"""The data of a draft head for each sequence: hidden states that it has not read yet, and K/V pages of its own layer.

The head computes a row for each token: the row reads the token's hidden state and the id of the next token. The rows of
a sequence have no gaps, but may begin after its first token, for example at the end of a cached prefix. The head counts
rows from 0, because rotary embeddings depend only on distances. After a gap, the head starts again with no rows. Then
fewer of its drafts are accepted, but no answer changes.
"""

from array import array
from dataclasses import dataclass, field

import torch
from torch import Tensor

from worker.kv_cache.pages import PagePool
from worker.run.drafters.drafter_base import grow
from worker.run.drafters.hidden_rows import CONTEXT
from worker.schedule.records.adjustment import with_biases_of
from worker.schedule.sequence import Sequence


@dataclass(slots=True, eq=False)
class HeadSequence:
    """The head's data for a sequence of the served model, the target.

    `own.tokens` are the tokens of the target after its first row, followed by drafts. The K/V of the first
    `own.computed_tokens` rows was computed from hidden states of the target.
    """

    target: Sequence
    own: Sequence
    first: int = 0  # the position in the target of row 0
    unread: list[Tensor] = field(default_factory=list)  # hidden states [N, H] of the rows that are not computed yet
    unread_rows: int = 0
    last: Tensor | None = None  # the hidden state [1, H] of the last computed row
    known: int = 0  # how many of own.tokens are not drafts

    @classmethod
    def of(cls, target: Sequence, first: int) -> "HeadSequence":
        own = Sequence(target.key, [], 0, target.sampling, target.seed, pages=[array("i")])
        own.adjustment = with_biases_of(target.adjustment, own.adjustment)
        return cls(target, own, first)

    @property
    def end(self) -> int:
        """The position in the target after its last known hidden state."""
        return self.first + self.own.computed_tokens + self.unread_rows

    def read(self, start: int, hidden: Tensor) -> None:
        """Adds the hidden states of the tokens from position `start` on. Forgets hidden states of wrong drafts."""
        self._cut(len(self.target.tokens) - 1)
        if not self.first <= start <= self.end:
            self._begin_at(start, [])
        new = hidden[self.end - start :]
        if len(new):
            self.unread.append(new)
            self.unread_rows += len(new)
        if self.unread_rows > 2 * CONTEXT:  # no drafts were wanted for a long time: keep only the last states
            self._begin_at(self.end - CONTEXT, [torch.cat(self.unread)[-CONTEXT:].clone()])

    def follow(self) -> bool:
        """Takes over the tokens of the target. Returns whether the row of the first draft can be computed."""
        target, own = self.target.tokens, self.own
        self._cut(len(target) - 1)
        if self.end < len(target) - 1 or self.end == self.first:
            return False
        del own.tokens[self.known :]
        own.tokens.extend(target[self.first + 1 + self.known :])
        self.known = len(own.tokens)
        if self.last is not None and not self.unread:  # the last row is computed again for its output
            own.computed_tokens -= 1
            self.unread, self.unread_rows = [self.last], 1
        return True

    def take(self, count: int) -> Tensor:
        """Returns the next `count` unread hidden states [N, H], and counts their rows as computed."""
        rows = torch.cat(self.unread) if len(self.unread) > 1 else self.unread[0]
        self.unread = [rows[count:]] if count < len(rows) else []
        self.unread_rows = len(rows) - count
        self.last = rows[count - 1 : count]
        self.own.computed_tokens += count
        return rows[:count]

    def _cut(self, end: int) -> None:
        """Forgets the unread hidden states of the target's tokens from position `end` on."""
        while self.unread and (extra := self.end - end) > 0:
            rows = self.unread.pop()
            kept = rows[: max(0, len(rows) - extra)]
            self.unread_rows += len(kept) - len(rows)
            if len(kept):
                self.unread.append(kept)

    def _begin_at(self, first: int, unread: list[Tensor]) -> None:
        self.first, self.unread, self.unread_rows = first, unread, sum(map(len, unread))
        self.last, self.known, self.own.computed_tokens = None, 0, 0
        self.own.tokens.clear()


class HeadSequences:
    """All sequences of the head, and the pool of their pages. A sequence gets pages only when drafts are wanted."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._held: dict[Sequence, HeadSequence] = {}  # target → the head's data for it

    def __len__(self) -> int:
        return len(self._held)

    def read(self, target: Sequence, start: int, hidden: Tensor) -> None:
        held = self._held.get(target)
        if held is None:
            held = self._held[target] = HeadSequence.of(target, start)
        held.read(start, hidden)

    def of(self, target: Sequence) -> HeadSequence:
        """Returns the head's data for a target. Raises KeyError if read() was never called for it."""
        return self._held[target]

    def get(self, target: Sequence, drafts: int, longest: int) -> HeadSequence | None:
        """Returns the head's data for a target, with pages for its rows and `drafts` drafts.

        Returns None if hidden states are missing, there are more than `longest` rows, or the memory does not suffice.
        """
        held = self._held.get(target)
        if held is None or not held.follow():
            return None
        rows = len(held.own.tokens) + drafts
        return held if rows <= longest and grow(held.own.pages[0], self._pool, rows) else None

    def forget(self, target: Sequence) -> None:
        """Frees the hidden states and pages of a target, if it has any."""
        held = self._held.pop(target, None)
        if held is not None:
            self._pool.release(held.own.pages[0])
