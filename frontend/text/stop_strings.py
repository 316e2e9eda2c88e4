"""Finds stop strings in a text that arrives in pieces. Knows characters and positions, not tokens.

The automaton (Aho and Corasick, 1975, https://doi.org/10.1145/360825.360855) is built once per request. Each choice
has its own `Search`, which keeps the current state and a few positions. A state's depth is the length of the longest
suffix of the text that can still become a stop string, so this many characters have to be held back.
"""

import re
from collections import deque
from collections.abc import Sequence


class Stops:
    """The compiled stop strings of a request, shared by its streams. Memory grows with their total length.

    Raises ValueError for an empty stop string, which would end every output before it begins.
    """

    __slots__ = ("depth", "fail", "first", "next", "stop")

    def __init__(self, strings: Sequence[str]) -> None:
        if not strings or "" in strings:
            raise ValueError("stop strings must not be empty")
        self.next: list[dict[str, int]] = [{}]  # state -> character -> state; state 0 is the root
        self.fail = [0]  # state -> the state of its longest proper suffix
        self.depth = [0]  # state -> the length of the text that leads to it
        self.stop = [""]  # state -> the longest stop string that ends here
        self.first = re.compile("[" + "".join({re.escape(string[0]) for string in strings}) + "]")
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self.next[state]:
                self.next[state][char] = len(self.next)
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.stop.append("")
            state = self.next[state][char]
        self.stop[state] = string

    def _link(self) -> None:
        queue = deque(self.next[0].values())  # breadth first, because a failure link leads to a shallower state
        while queue:
            state = queue.popleft()
            self.stop[state] = self.stop[state] or self.stop[self.fail[state]]
            for char, child in self.next[state].items():
                self.fail[child] = self.step(self.fail[state], char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """Returns the state after `char`: the longest suffix of the text that is a prefix of a stop string."""
        while char not in self.next[state]:
            if not state:
                return 0
            state = self.fail[state]
        return self.next[state][char]


class Search:
    """The search for stop strings in one text. Positions count characters from the text's beginning.

    The stop string that begins earliest wins. If two begin at the same place, the shorter one wins. The result does not
    depend on how the text was cut into pieces. If one stop string lies inside another ("bc" in "abcd"), the inner one
    wins only when the text can no longer become the outer one.
    """

    __slots__ = ("_automaton", "_first", "_state", "at", "decided", "end", "safe", "start", "stop")

    def __init__(self, automaton: Stops) -> None:
        self._automaton = automaton
        self._first = automaton.first.search
        self._state = 0
        self.at = 0  # how many characters were searched
        self.safe = 0  # how many characters from the beginning no stop string can include any more
        self.stop = ""  # the winning stop string so far, at text[start:end]
        self.start = 0
        self.end = 0
        self.decided = False  # whether `stop` has won; then the rest of the text is not searched

    def passes(self, text: str) -> bool:
        """Whether `text` surely has no part of a stop string. If True, the text counts as searched. If False, call
        `feed`."""
        if self._state or self.stop or self._first(text):
            return False
        self.at = self.safe = self.at + len(text)
        return True

    def feed(self, text: str) -> None:
        """Searches the next `text` and updates `safe`, `stop` and `decided`. Takes O(len(text))."""
        automaton, state, base = self._automaton, self._state, self.at
        first, follow, stops = automaton.first, automaton.next, automaton.stop
        index, size = 0, len(text)
        while index < size:
            if not state:
                match = first.search(text, index)
                if match is None:
                    break
                index = match.start()
            char = text[index]
            state = follow[state].get(char) or automaton.step(state, char)
            index += 1
            if (stops[state] or self.stop) and self._judge(state, base + index):
                return
        self._state = state
        self.at = base + size
        self.safe = self.at - automaton.depth[state]
        if self.stop:
            self.safe = min(self.safe, self.start)

    def _judge(self, state: int, at: int) -> bool:
        stop = self._automaton.stop[state]
        if stop and (not self.stop or at - len(stop) < self.start):
            self.stop, self.start, self.end = stop, at - len(stop), at
        self.decided = at - self._automaton.depth[state] >= self.start
        return self.decided
