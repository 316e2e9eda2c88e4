"""What an MTP head holds of each sequence: hidden states that it has not read yet, and the K/V of its own layer.

The head has a row for a token of the sequence: the row reads the token's hidden state and the id of the next token. The
rows of a sequence have no gaps, but may begin behind its first token, such as at the end of a cached prefix. The head
counts them from 0, because rotary embeddings depend on distances only. After a gap the head begins anew. Fewer of its
drafts are then accepted, but no answer changes.
"""

from array import array
from dataclasses import dataclass, field

import torch
from torch import Tensor

from worker.kv_cache.pages import PagePool
from worker.run.drafters.drafter_base import grow
from worker.run.drafters.hidden_rows import CONTEXT
from worker.schedule.sequence import Sequence


@dataclass(slots=True, eq=False)
class HeadSequence:
    """A sequence of the head. `own.tokens` are the tokens of the target behind its first row, and then drafts.

    The first `own.computed_tokens` rows have K/V that was made of hidden states of the target.
    """

    target: Sequence
    own: Sequence
    first: int = 0  # the position of the target's token that is row 0
    unread: list[Tensor] = field(default_factory=list)  # the hidden states [N, H] behind the computed rows
    unread_rows: int = 0
    last: Tensor | None = None  # the hidden state of the last computed row [1, H]
    known: int = 0  # so many of own.tokens are no drafts

    @classmethod
    def of(cls, target: Sequence, first: int) -> "HeadSequence":
        return cls(target, Sequence(target.key, [], 0, target.sampling, target.seed, pages=[array("i")]), first)

    @property
    def end(self) -> int:
        """The position behind the last hidden state."""
        return self.first + self.own.computed_tokens + self.unread_rows

    def read(self, start: int, hidden: Tensor) -> None:
        """Adds the hidden states of the tokens at `start` and behind. Forgets those of wrong drafts."""
        self._cut(len(self.target.tokens) - 1)
        if not self.first <= start <= self.end:
            self._begin_at(start, [])
        new = hidden[self.end - start :]
        if len(new):
            self.unread.append(new)
            self.unread_rows += len(new)
        if self.unread_rows > 2 * CONTEXT:  # drafts have not paid for long
            self._begin_at(self.end - CONTEXT, [torch.cat(self.unread)[-CONTEXT:].clone()])

    def follow(self) -> bool:
        """Makes the target's tokens its own. Returns whether the row of the first draft can be computed."""
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
        """Returns the next `count` hidden states [N, H], whose rows then count as computed."""
        rows = torch.cat(self.unread) if len(self.unread) > 1 else self.unread[0]
        self.unread = [rows[count:]] if count < len(rows) else []
        self.unread_rows = len(rows) - count
        self.last = rows[count - 1 : count]
        self.own.computed_tokens += count
        return rows[:count]

    def _cut(self, end: int) -> None:
        """Forgets the hidden states of the target's tokens at `end` and behind. They have no K/V yet."""
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
    """All sequences of the head, and the pool of their pages. A sequence gets pages when drafts are wanted."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._held: dict[Sequence, HeadSequence] = {}  # by the target

    def __len__(self) -> int:
        return len(self._held)

    def read(self, target: Sequence, start: int, hidden: Tensor) -> None:
        held = self._held.get(target)
        if held is None:
            held = self._held[target] = HeadSequence.of(target, start)
        held.read(start, hidden)

    def of(self, target: Sequence) -> HeadSequence:
        """Returns what is held of a sequence that has been read. Raises KeyError."""
        return self._held[target]

    def get(self, target: Sequence, drafts: int, longest: int) -> HeadSequence | None:
        """Returns what is held of a sequence, with pages for its rows and so many drafts.

        None if hidden states are missing, the rows are more than `longest`, or the memory does not suffice.
        """
        held = self._held.get(target)
        if held is None or not held.follow():
            return None
        rows = len(held.own.tokens) + drafts
        return held if rows <= longest and grow(held.own.pages[0], self._pool, rows) else None

    def forget(self, target: Sequence) -> None:
        """Takes back what is held of a sequence, if anything."""
        held = self._held.pop(target, None)
        if held is not None:
            self._pool.release(held.own.pages[0])
