"""Finds spellings of added tokens in untrusted texts. Puts before each spelling a mark that chat templates keep."""

import re
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any

Trie = dict[str, Any]


def new_mark() -> str:
    """Returns a random text that clients cannot guess. It has only digits, which JSON, URLs and case changes keep."""
    return f"{secrets.randbits(128):039}"


class Spellings:
    """A set of spellings, each of at least two characters."""

    def __init__(self, spellings: Iterable[str]) -> None:
        self.texts = frozenset(spellings)
        self._firsts = sorted({one[0] for one in self.texts})
        self._longest = max(map(len, self.texts), default=0)

    def occur_in(self, text: str) -> bool:
        """Whether the text has a spelling, or ends with part of a spelling, which the text after it could complete."""
        for first in self._firsts:
            if first in text:
                return self._pattern.search(text) is not None or self._open_end(text) is not None
        return False

    def marked(self, text: str, mark: str) -> str:
        """Returns the text with `mark` before each spelling, and before part of a spelling at the end of the text."""
        places = {found.start() for found in self._starts.finditer(text)}
        end = self._open_end(text)
        bounds = [0, *sorted(places if end is None else places | {end}), len(text)]
        return mark.join(text[begin:end] for begin, end in pairwise(bounds))

    def replaced(self, text: str, by: Mapping[str, str], mark: str) -> str:
        """Returns the text without marks, and with each spelling that has no mark replaced by `by[spelling]`.

        mark: the text that `marked` inserted
        """
        pieces = text.split(mark) if mark else [text]
        text, marked, length = "".join(pieces), [], 0
        for piece in pieces[:-1]:
            length += len(piece)
            marked.append(length)
        shown, begin, position = [], 0, 0
        while found := self._pattern.search(text, position):
            next_mark = bisect_left(marked, found.start())
            if next_mark < len(marked) and marked[next_mark] < found.end():
                position = found.start() + 1
                continue
            shown += [text[begin : found.start()], by[found[0]]]
            begin = position = found.end()
        return "".join([*shown, text[begin:]])

    def _open_end(self, text: str) -> int | None:
        """Returns where an incomplete spelling at the text's end (before blanks) begins; None if there is none."""
        length = len(text.rstrip())
        start = max(length - self._longest, 0)
        for first in self._firsts:
            place = text.find(first, start, length)
            while place >= 0:
                if text[place:length] in self._beginnings:
                    return place
                place = text.find(first, place + 1, length)
        return None

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(one[:length] for one in self.texts for length in range(1, len(one)))

    @cached_property
    def _source(self) -> str:
        trie: Trie = {}
        for one in self.texts:
            node = trie
            for char in one:
                node = node.setdefault(char, {})
            node[""] = {}
        return _pattern_of(trie)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        """Matches the leftmost spelling, and the longest one there, as tokenizers do."""
        return re.compile(self._source)

    @cached_property
    def _starts(self) -> re.Pattern[str]:
        return re.compile(f"(?={self._source})")


def _pattern_of(node: Trie) -> str:
    rows = [re.escape(char) + _pattern_of(rest) for char, rest in sorted(node.items()) if char]
    if not rows:
        return ""
    if len(rows) == 1 and "" not in node:
        return rows[0]
    return f"(?:{'|'.join(rows)}){'?' * ('' in node)}"
