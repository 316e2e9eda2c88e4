"""Turns token ids into text as they arrive, and finds stop strings in it. Pure: no I/O, no tokenizer.

A detokenizer belongs to one stream and returns one text per id. The texts joined equal the decoding of all ids at once.
`OutputText` adds stop strings: it never takes back text that it released, and releases no part of a stop string.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Mapping
from typing import Protocol

from frontend.text.stop_strings import IndentedLines, Search, Stops

PARTIAL = "\udc80"  # stands for the text of a token that must be decoded from its bytes; a lone surrogate is no text
REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns one stream's ids into text."""

    def push(self, ids: list[int]) -> list[str]:
        """Returns one text per id. The text is empty if a character is still incomplete or the id is not shown."""

    def flush(self) -> str:
        """Returns the text that was held back, with U+FFFD for bytes that did not complete a character."""


class ByteLevelText:
    """Detokenizes byte-level tokens, each a sequence of UTF-8 bytes, as in GPT-2, Llama 3 and Qwen.

    texts: maps an id to its text, or to PARTIAL if its bytes are not complete characters
    raw: maps an id to its bytes
    """

    __slots__ = ("_pending", "_raw", "_text")

    def __init__(self, texts: Mapping[int, str], raw: Mapping[int, bytes]) -> None:
        self._text = texts.__getitem__
        self._raw = raw
        self._pending = b""  # the bytes of an incomplete character

    def push(self, ids: list[int]) -> list[str]:
        if not self._pending:
            texts = list(map(self._text, ids))
            if PARTIAL not in texts:
                return texts
        return [self._one(token) for token in ids]

    def _one(self, token: int) -> str:
        if not self._pending:
            text = self._text(token)
            if text is not PARTIAL:
                return text
        data = self._pending + self._raw[token]
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class ByteFallbackText:
    """Detokenizes tokens that are text, with byte tokens for characters that have no token, as in Gemma and Llama 2.

    Consecutive byte tokens are decoded together. If they are not valid UTF-8, each byte becomes U+FFFD. They are
    therefore held back until a token follows that is not a byte token.

    texts: maps an id to its text, or to PARTIAL for a byte token
    raw: maps an id to its bytes
    strip: how many leading spaces are dropped at most
    """

    __slots__ = ("_raw", "_run", "_strip", "_text")

    def __init__(self, texts: Mapping[int, str], raw: Mapping[int, bytes], strip: int = 0) -> None:
        self._text = texts.__getitem__
        self._raw = raw
        self._strip = strip
        self._run = b""

    def push(self, ids: list[int]) -> list[str]:
        if not self._run and not self._strip:
            texts = list(map(self._text, ids))
            if PARTIAL not in texts:
                return texts
        return [self._one(token) for token in ids]

    def _one(self, token: int) -> str:
        text = self._text(token)
        if text is PARTIAL:
            self._run += self._raw[token]
            return ""
        return self._stripped(self._settle() + text) if text else ""

    def flush(self) -> str:
        return self._stripped(self._settle())

    def _settle(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text


class WindowText:
    """Detokenizes with any tokenizer: decodes a window of ids with and without the new ids, returns the difference.

    The window begins with ids whose text was returned, because decoders treat the first token specially. Text that ends
    in U+FFFD may be an incomplete character, so it is held back for at most `MAX_WAITING` ids.
    """

    MAX_WAITING = 16

    __slots__ = ("_decode", "_hidden", "_returned", "_window")

    def __init__(self, decode: Callable[[list[int]], str], hidden: Callable[[int], bool]) -> None:
        self._decode = decode
        self._hidden = hidden  # special and unknown ids: a window must not begin with such an id
        self._window: list[int] = []
        self._returned = 0  # how many ids of the window have had their text returned

    def push(self, ids: list[int]) -> list[str]:
        return [self._one(token) for token in ids]

    def _one(self, token: int) -> str:
        if self._hidden(token):
            return ""
        self._window.append(token)
        text = self._new_text()
        waiting = len(self._window) - self._returned
        if not text or (text.endswith(REPLACEMENT) and waiting < self.MAX_WAITING):
            return ""
        del self._window[: self._returned]
        self._returned = waiting
        return text

    def flush(self) -> str:
        text = self._new_text()
        if len(self._window) > self._returned:
            del self._window[: self._returned]
            self._returned = len(self._window)
        return text

    def _new_text(self) -> str:
        return self._decode(self._window)[len(self._decode(self._window[: self._returned])) :]


class MarkedText:
    """Shows some special tokens that `detokenizer` hides. A character that such a token interrupts becomes U+FFFD.

    marks: maps the id of each of these tokens to the text to show
    """

    __slots__ = ("_detokenizer", "_marks")

    def __init__(self, detokenizer: Detokenizer, marks: Mapping[int, str]) -> None:
        self._detokenizer = detokenizer
        self._marks = marks

    def push(self, ids: list[int]) -> list[str]:
        if self._marks.keys().isdisjoint(ids):
            return self._detokenizer.push(ids)
        return [self._one(token) for token in ids]

    def _one(self, token: int) -> str:
        mark = self._marks.get(token)
        return self._detokenizer.push([token])[0] if mark is None else self._detokenizer.flush() + mark

    def flush(self) -> str:
        return self._detokenizer.flush()


# Ids, the text of each id, and the stop string that ended the stream. A plain tuple is fast; each token makes one.
# Only `OutputText.finish` may return one more text than ids: bytes left over from ids that were released before.
Released = tuple[list[int], list[str], str | None]


class OutputText:
    """Detokenizes the output of one choice, and ends it before the first stop string.

    An id is released when no stop string can include its text any more. When a stop string is complete, all ids up to
    its end are released, but their text is cut before the stop string. Later ids are ignored: each later call returns
    only the stop string.
    """

    __slots__ = (
        "_detokenizer", "_ids", "_include_stop", "_position", "_search", "_searched", "_texts", "consumed", "stop",
    )  # fmt: skip

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Stops | None = None,
        searched: Callable[[str], str] = str,
        *,
        include_stop: bool = False,
    ) -> None:
        """
        searched: gets each piece of text in order, and returns a text of the same length to search, in which
            characters that must not match a stop string are replaced
        include_stop: whether the text includes the stop string
        """
        self._include_stop = include_stop
        self._detokenizer = detokenizer
        self._search: Search | IndentedLines | None = None if stops is None else Search(stops)
        self._searched = searched
        self._ids: list[int] = []  # the ids that are held back; `_texts` has their texts
        self._texts: list[str] = []
        self._position = 0  # how many characters were released
        self.consumed = 0  # how many ids were released; usage counts these
        self.stop: str | None = None  # the stop string that ended the stream

    def watch_lines(self, least: int) -> IndentedLines:
        """Also ends the text before a line with fewer than `least` blanks at its beginning. Returns the search."""
        inner = self._search
        assert not isinstance(inner, IndentedLines)
        self._search = lines = IndentedLines(least, inner)
        return lines

    def push(self, ids: list[int]) -> Released:
        """Adds ids, and returns what can be released now. Without stop strings, releases all `ids` at once."""
        texts = self._detokenizer.push(ids)
        if self._search is None:
            self.consumed += len(ids)
            return ids, texts, None
        searched = self._searched(texts[0] if len(texts) == 1 else "".join(texts))
        if not self._texts and self._search.passes(searched):
            self._position = self._search.at
            self.consumed += len(ids)
            return ids, texts, None
        return self._watch(self._search, searched, ids, texts)

    def finish(self, ids: list[int] | None = None) -> Released:
        """Adds the last ids, and returns all that was held back. Incomplete bytes become part of the last text."""
        if self.stop is not None:
            return [], [], self.stop
        texts = self._detokenizer.push(ids or [])
        tail = self._detokenizer.flush()
        self._ids += ids or []
        self._texts += texts
        if self._texts:
            self._texts[-1] += tail
        elif tail:
            self._texts.append(tail)
        if self._search is not None:
            self._search.feed(self._searched("".join(texts) + tail))
            if self._search.stop:
                return self._cut(self._search)
        return self._release(len(self._texts))

    def _watch(self, search: Search | IndentedLines, searched: str, ids: list[int], texts: list[str]) -> Released:
        if self.stop is not None:
            return [], [], self.stop
        search.feed(searched)
        self._ids += ids
        self._texts += texts
        return self._cut(search) if search.decided else self._release(self._safe_count(search.safe))

    def _safe_count(self, safe: int) -> int:
        position = self._position
        for count, text in enumerate(self._texts):
            position += len(text)
            if position > safe:
                return count
        return len(self._texts)

    def _release(self, count: int) -> Released:
        ids, texts = self._ids[:count], self._texts[:count]
        del self._ids[:count], self._texts[:count]
        self._position += sum(map(len, texts))
        self.consumed += len(ids)
        return ids, texts, None

    def _cut(self, search: Search | IndentedLines) -> Released:
        end = search.end if self._include_stop else search.start  # where the text ends
        left = end - self._position
        count = self._safe_count(search.end - 1) + 1  # the ids up to the one that completed the stop string
        ids, texts, _ = self._release(count)
        for index, text in enumerate(texts):
            texts[index] = text[: max(0, left)]
            left -= len(text)
        self._ids, self._texts = [], []
        self.stop = search.stop
        return ids, texts, self.stop
