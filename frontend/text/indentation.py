"""Finds the first line of an output that is indented less than wanted (llama.cpp's `n_indent`).

`IndentedLines` is used in place of a `Search` for stop strings, and includes one. Knows characters, not tokens.
"""

from frontend.text.stop_strings import Search

BREAK, BLANKS = "\n", " \t"


class IndentedLines:
    """The search for a line with fewer than `least` blanks at its beginning, and for stop strings.

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
