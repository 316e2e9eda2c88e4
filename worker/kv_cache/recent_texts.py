"""The texts of requests that have ended, by scope, in an index from which later requests of the same scope take drafts.

An agent sends a file that an earlier request has edited, or asks a question that was answered before. What follows the
same tokens there is a good guess, also where the sequence's own text has no such tokens.

A scope is the tenant of a request, and the identity under which requests share cached prefixes (`cache_salt`, adapter;
shared/prefix_identity.py). Tenants may share cached prefixes, which tell of a text only to those who have its whole
beginning. They never share texts here, where few tokens find what follows, and the speed of an answer shows it. Each
scope has arrays of its own, which its own texts alone fill and overwrite. What scopes do share is the bound on the
memory: the scope that was used longest ago is forgotten first.

A session repeats its prefix in every request. Only what the index does not have yet is added.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

GRAM_LENGTHS = (5, 16)  # how many last tokens are looked up
LONGEST = GRAM_LENGTHS[-1]
SCOPE_TOKENS = 1 << 17  # most tokens of a scope; new ones then overwrite its oldest
ALL_TOKENS = 1 << 20  # most tokens of all scopes together
BYTES_PER_TOKEN = 4 * (1 + 2 * len(GRAM_LENGTHS))  # its id, and two slots of each table
MOST_SCOPES = 256
SMALLEST = 1 << 10  # tokens of a scope's first array
MOST_PIECES = 64  # a text's known beginning is looked for in at most so many pieces of earlier texts
TRIES = 4  # n-grams of a piece to look up: another one may have taken the first one's slot

_FACTOR = 0x9E3779B97F4A7C15  # of the hash of n-grams: 2^64 / golden ratio, which is odd
_MASK = (1 << 64) - 1

Ids = tuple[int, ...]
Scope = tuple[str, str]  # the tenant, and the text of the PrefixIdentity


class ScopedTexts:
    """The texts of all scopes: at most ALL_TOKENS tokens, with BYTES_PER_TOKEN each."""

    def __init__(self) -> None:
        self._scopes: OrderedDict[Scope, RecentTexts] = OrderedDict()  # the scope used longest ago is first

    def of(self, scope: Scope) -> "RecentTexts":
        """Returns the texts of a scope. The object stays the scope's until the scope is forgotten; then it is empty."""
        texts = self._scopes.get(scope)
        if texts is None:
            texts = self._scopes[scope] = RecentTexts()
        self._scopes.move_to_end(scope)
        while len(self._scopes) > MOST_SCOPES:
            self._forget_oldest()
        return texts

    def add(self, scope: Scope, tokens: list[int]) -> None:
        """Adds the text of a sequence that has ended."""
        self.of(scope).add(tokens)
        while len(self._scopes) > 1 and sum([texts.capacity for texts in self._scopes.values()]) > ALL_TOKENS:
            self._forget_oldest()

    def clear(self) -> None:
        while self._scopes:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        self._scopes.popitem(last=False)[1].clear()


class RecentTexts:
    """The latest texts of one scope, and the place after the last occurrence of each of their n-grams.

    ids: the tokens of the texts, one after another, C int32; beyond the last text, zeros or the oldest texts. Growth
        replaces the array, so a reader may keep it.
    replacements: what copies had in place of some tokens (worker/scheduler/copies.py), at most MOST_LEARNED
    """

    def __init__(self) -> None:
        self.replacements: dict[Ids, Ids] = {}
        self._end = 0  # the place after the text that was added last
        self._allocate(0)

    def clear(self) -> None:
        self._allocate(0)
        self.replacements.clear()

    @property
    def capacity(self) -> int:
        """How many tokens the arrays have memory for."""
        return len(self.ids)

    def find(self, tokens: list[int], ahead: Ids = ()) -> tuple[int, int] | None:
        """Looks up the last tokens of `tokens` and `ahead`. Returns how many of them match, one of GRAM_LENGTHS, and
        the place in `ids` of what followed them; None if no text has them, or in 5 % of cases where one has.
        """
        if not self.ids:
            return None
        last = (*tokens[-LONGEST - 1 :], *ahead)[-LONGEST - 1 :]
        found = None
        for length in GRAM_LENGTHS:  # from the shortest: usually it does not match, and longer ones need not be hashed
            place = self._after_last(last, length)
            if not place:
                break
            found = length, place
        return found

    def _after_last(self, last: Ids, length: int) -> int:
        """Returns the place after the n-gram at the end of `last`; 0 if the index has none.

        Another n-gram may have taken its slot, so the one before it, which has another slot, is looked up as well.
        """
        end = len(last)
        place = self._after(last[end - length :]) if end >= length else 0
        if not place and end > length and (before := self._after(last[end - length - 1 : -1])):
            place = before + 1 if self._at(before) == last[-1] else 0
        return place

    def add(self, tokens: list[int]) -> None:
        """Adds a text, without the beginning that earlier texts have. A long text loses all but its last tokens."""
        new = np.array(tokens[-SCOPE_TOKENS // 2 :], np.int32)
        begin = max(0, self._known(new) - LONGEST) if self.ids else 0
        if begin + LONGEST >= len(new):
            return
        self._append(new[begin:])

    def _append(self, text: NDArray[np.int32]) -> None:
        if self._end + len(text) > self.capacity:
            self._grow(len(text))
        begin, self._end = self._end, self._end + len(text)
        self._view[begin : self._end] = text
        self._index(begin, self._end)

    def _grow(self, count: int) -> None:
        """Grows the arrays for `count` more tokens. If they would be too large, the oldest tokens are overwritten."""
        wanted = 1 << max(SMALLEST.bit_length(), (self._end + count - 1).bit_length() + 1) - 1
        if wanted > SCOPE_TOKENS and self.capacity == SCOPE_TOKENS:
            self._end = 0
            return
        kept = self._view[: self._end].copy()
        self._allocate(min(wanted, SCOPE_TOKENS))
        kept = kept[-(self.capacity - count) :] if self.capacity > count else kept[:0]
        self._end = len(kept)
        self._view[: self._end] = kept
        self._index(0, self._end)

    def _allocate(self, capacity: int) -> None:
        """Replaces the arrays by empty ones. capacity: a power of two, or 0"""
        self.ids = array("i", bytes(4 * capacity))
        self._view = np.frombuffer(self.ids, np.int32) if capacity else np.zeros(0, np.int32)
        self._tables = {length: np.zeros(2 * capacity, np.int32) for length in GRAM_LENGTHS}  # slot → place after it
        self._shift = 64 - (2 * capacity).bit_length() + 1
        self._end = 0

    def _index(self, begin: int, end: int) -> None:
        """Notes the n-grams within ids[begin:end]. Where several have the same slot, the last one keeps it."""
        ids = self._view[begin:end].astype(np.uint64)
        for length, table in self._tables.items():
            count = len(ids) - length + 1
            if count <= 0:
                continue
            hashes = np.zeros(count, np.uint64)
            for at in range(length):
                hashes = hashes * np.uint64(_FACTOR) + ids[at : at + count] + np.uint64(1)
            slots = (hashes * np.uint64(_FACTOR)) >> np.uint64(self._shift)
            table[slots] = np.arange(begin + length, end + 1, dtype=np.int32)

    def _after(self, gram: Seq[int]) -> int:
        """Returns the place after the last occurrence of an n-gram; 0 if the index has none."""
        hashed = 0
        for id in gram:
            hashed = hashed * _FACTOR + id + 1 & _MASK
        length = len(gram)
        place = int(self._tables[length][(hashed * _FACTOR & _MASK) >> self._shift])
        return place if place and tuple(self.ids[place - length : place]) == tuple(gram) else 0

    def _at(self, place: int) -> int | None:
        return self.ids[place] if place < len(self.ids) else None

    def _known(self, new: NDArray[np.int32]) -> int:
        """Returns how many of the first tokens of a text the index has, in pieces that follow each other."""
        known = 0
        for _ in range(MOST_PIECES):
            first = max(LONGEST, known + 1)
            for end in range(first, min(first + TRIES, len(new) + 1)):
                if place := self._after(new[end - LONGEST : end].tolist()):
                    break
            else:
                break
            count = min(len(new) - end, self.capacity - place)
            differ = self._view[place : place + count] != new[end : end + count]
            known = end + (int(differ.argmax()) if differ.any() else count)
        return known
