"""Finds stop strings, or a line indented too little, in a text that arrives in pieces. Knows characters, not tokens.

The automaton (Aho and Corasick, 1975, https://doi.org/10.1145/360825.360855) is built once per request. Each choice
has its own `Search`, which keeps the current state and a few positions. A state's depth is the length of the longest
suffix of the text that can still become a stop string, so this many characters have to be held back.
"""

import re
from collections import deque
from collections.abc import Sequence

BREAK, BLANKS = "\n", " \t"


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


class IndentedLines:
    """The search for the first line with fewer than `least` blanks at its beginning (llama.cpp's `n_indent`), used in
    place of a `Search` for stop strings, which it includes.

    The output's first line does not count, because it continues a line. An empty line has no indentation, so it ends an
    output, too, as in llama.cpp. The text ends before the line break in front of such a line. Positions count
    characters from the text's beginning; the attributes without an underscore mean the same as those of `Search`.
    """

    __slots__ = ("_blanks", "_break", "_found", "_inner", "_least", "at", "decided", "end", "safe", "start", "stop")

    def __init__(self, least: int, inner: Search | None = None) -> None:
        self._least, self._inner = least, inner
        self._break: int | None = None  # the line break in front of a line whose indentation is not complete
        self._blanks = 0  # the indentation of that line so far
        self._found: tuple[int, int] | None = None  # the line break in front of the line, and the end of what decided
        self.at = self.safe = self.start = self.end = 0
        self.stop = ""
        self.decided = False

    @property
    def is_line(self) -> bool:
        """Whether the text ends before a line, and not before a stop string."""
        return self._found is not None and (self.start, self.end) == self._found

    def passes(self, text: str) -> bool:
        """Whether `text` surely ends no output. If True, the text counts as searched. If False, call `feed`."""
        if self._break is not None or self.stop or BREAK in text:
            return False
        if self._inner is not None and not self._inner.passes(text):
            return False
        self.at = self.safe = self.at + len(text)
        return True

    def feed(self, text: str) -> None:
        """Searches the next `text` and updates `safe`, `stop` and `decided`. Takes O(len(text))."""
        base, self.at = self.at, self.at + len(text)
        if self._found is None:
            self._scan(text, base)
        self.safe = self.at if self._break is None else self._break
        if self._found is not None:
            (self.start, self.end), self.stop, self.decided = self._found, BREAK, True
        if self._inner is not None:
            self._inner.feed(text)
            self._judge(self._inner)

    def _scan(self, text: str, base: int) -> None:
        index = 0
        while index < len(text):
            if self._break is None:
                index = text.find(BREAK, index)
                if index < 0:
                    return
                self._break, self._blanks = base + index, 0
            elif text[index] in BLANKS:
                self._blanks += 1
            elif self._blanks < self._least:
                self._found = self._break, base + index + 1
                return
            else:
                self._break = None
                continue  # this character may be a line break itself
            index += 1

    def _judge(self, inner: Search) -> None:
        """Lets what begins first end the text, once nothing else can begin before it."""
        if inner.stop and (self._found is None or inner.start <= self._found[0]):
            self.start, self.end, self.stop = inner.start, inner.end, inner.stop
            self.decided = inner.decided and (self._break is None or inner.start <= self._break)
        elif self._found is not None:
            self.decided = inner.safe >= self.start
        self.safe = min(self.safe, inner.safe)
