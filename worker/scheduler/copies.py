"""Follows a text that the output copies, through the places where the copy writes something else.

A call of a tool copies a file into a JSON string: `"` becomes `\\"`, a line's end `\\n`. An edit renames a variable
wherever it occurs. Between two such places there are often too few equal tokens to find the copied text again. So the
place in the copied text is kept: where the copy departs from it, the next tokens that are equal show what was replaced
by what, and from then on the same tokens are expected to be replaced in the same way.

Only tokens are compared, so no escape is known beforehand, and each can be learned, with any tokenizer. What one copy
has learned is kept for later ones of the same scope (worker/kv_cache/recent_texts.py). They use it once they have
replaced something in the same way, for which the end of the first line is usually enough.
"""

from collections.abc import Sequence as Seq

Ids = tuple[int, ...]

SURE = 2  # after a replacement, so many equal tokens show where the copy goes on
MOST_REPLACED = 8  # most tokens that are replaced, and that replace them
LONGEST_KEY = 4  # most replaced tokens whose replacement is expected again
MOST_LEARNED = 512  # replacements that a scope keeps


class Copy:
    """A copied text, and the place in it that the output has reached.

    run: how many tokens of the output have followed the text; 0: no text is followed.
    """

    def __init__(self, learned: dict[Ids, Ids] | None = None) -> None:
        """learned: the replacements of earlier copies of the scope, to which this copy adds its own"""
        self.run = 0
        self._learned: dict[Ids, Ids] = {} if learned is None else learned
        self._alike = False  # whether this copy has replaced something as an earlier copy has
        self._source: Seq[int] | None = None  # the copied text; None: the tokens of the sequence itself
        self._place = 0  # the index in the copied text of what the next token should be
        self._read = 0  # the tokens of the sequence before this index were followed
        self._left: tuple[int, int] | None = None  # where they parted: the place in the text, and in the sequence
        self._replaced: dict[Ids, Ids] = {}  # tokens of the text → what this copy had in their place last
        self._pending: Ids = ()  # the rest of a replacement whose first tokens the output has
        self._begun: tuple[int, int, Ids] = (0, 0, ())  # where this replacement began, as in `_left`, and its key

    @property
    def parted(self) -> bool:
        """Whether the last tokens of the output are not those of the text."""
        return self._left is not None

    def begin(self, tokens: list[int], place: int, run: int, source: Seq[int] | None = None) -> None:
        """Follows a text from now on.

        place: the index of the next token in `source`; in `tokens` itself if `source` is None. run: how many
        tokens before `place` equal the last tokens of `tokens`.
        """
        if self.run and self._source is source and self._place == place and self._left is None:
            return
        self.run, self._source, self._place, self._read = run, source, place, len(tokens)
        self._left, self._pending = None, ()

    def end(self) -> None:
        self.run, self._source, self._left, self._pending = 0, None, None, ()

    def follow(self, tokens: list[int]) -> None:
        """Follows the tokens that are new since the last call, or since begin(). `tokens` may only have grown."""
        for at in range(self._read, len(tokens)) if self.run else ():
            if self._left is None:
                self._advance(tokens, at)
            if self._left is not None:
                self._find_again(tokens, at)
            if not self.run:
                break
        self._read = len(tokens)

    def ahead(self, tokens: list[int], count: int) -> Ids:
        """Returns at most `count` tokens that should follow `tokens`.

        Where the copy has parted from the text, one token is assumed to have replaced one.
        """
        source, place = self._text(tokens), self._place
        if self._left is not None:
            place = self._left[0] + len(tokens) - self._left[1]
        expected = list(self._pending)
        while len(expected) < count:
            key = self._key(source, place)
            beyond = place - len(source)
            if key:
                expected += self._replacement(key)
            elif beyond < 0:
                expected.append(source[place])
            elif self._source is None and beyond < len(expected):
                expected.append(expected[beyond])  # the output has reached itself: it repeats what is expected
            else:
                break
            place += len(key) or 1
        return tuple(expected[:count])

    def _text(self, tokens: list[int]) -> Seq[int]:
        return tokens if self._source is None else self._source

    def _key(self, source: Seq[int], place: int) -> Ids:
        """Returns the longest run of tokens at a place whose replacement is known; () if there is none."""
        if self._replaced:
            for length in range(LONGEST_KEY, 0, -1):
                key = tuple(source[place : place + length])
                if len(key) == length and self._replacement(key) != key:
                    return key
        return ()

    def _replacement(self, key: Ids) -> Ids:
        """Returns what is expected in the place of these tokens: the tokens themselves if nothing is known."""
        return self._replaced.get(key) or (self._learned.get(key, key) if self._alike else key)

    def _learn(self, key: Ids, replacement: Ids) -> None:
        self._alike = self._alike or self._learned.get(key) == replacement
        self._replaced[key] = self._learned[key] = replacement
        if len(self._learned) > MOST_LEARNED:
            del self._learned[next(iter(self._learned))]

    def _unlearn(self, key: Ids) -> None:
        self._replaced[key] = key
        self._learned.pop(key, None)

    def _advance(self, tokens: list[int], at: int) -> None:
        """Follows the token at index `at`."""
        token, source, place = tokens[at], self._text(tokens), self._place
        if self._pending:
            if self._pending[0] == token:
                self._pending, self.run = self._pending[1:], self.run + 1
                return
            began, begun_at, key = self._begun
            self._unlearn(key)
            self._left, self._pending = (began, begun_at), ()
            return
        key = self._key(source, place)
        replacement = self._replacement(key) if key else ()
        if replacement and replacement[0] == token:
            self._begun, self._pending = (place, at, key), replacement[1:]
            self._place, self.run = place + len(key), self.run + 1
        elif place < len(source) and source[place] == token:
            if key:
                self._unlearn(key)
            self._place, self.run = place + 1, self.run + 1
        else:
            self._left = (place, at)

    def _find_again(self, tokens: list[int], at: int) -> None:
        """Looks for the place where the copy goes on, after it has parted from the text. Gives up if it is too far."""
        assert self._left is not None
        place, begun = self._left
        count = at + 1 - begun - SURE  # how many tokens have replaced some, if the last ones are of the text again
        if count > MOST_REPLACED:
            self.end()
        elif count >= 0:
            source, last = self._text(tokens), tokens[at + 1 - SURE : at + 1]
            most = min(MOST_REPLACED, (begun if self._source is None else len(source)) - SURE - place)
            for skipped in sorted(range(most + 1), key=lambda skipped: abs(skipped - count)):
                if list(source[place + skipped : place + skipped + SURE]) == last:
                    if count and 0 < skipped <= LONGEST_KEY:
                        self._learn(tuple(source[place : place + skipped]), tuple(tokens[begun : begun + count]))
                    self._place, self._left = place + skipped + SURE, None
                    return
