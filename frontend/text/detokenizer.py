"""Turns token ids into text as they arrive, and finds stop strings in it. Pure: no I/O, no tokenizer.

A detokenizer belongs to one stream and returns one text per id; joined, they equal what decoding all ids at once gives.
`OutputText` adds stop strings: text that it releases is never taken back, and no part of a stop string is released.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Mapping
from typing import Protocol

from frontend.text.stop_strings import Search, Stops

PARTIAL = "\udc80"  # a lone surrogate, which no text contains. As a token's text it means: use the token's bytes
REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns one stream's ids into text."""

    def push(self, ids: list[int]) -> list[str]:
        """Returns one text per id, empty while a character is incomplete or where the id is not shown."""

    def flush(self) -> str:
        """Returns the rest of the text: replacement characters for bytes that never became a character."""


class ByteLevelText:
    """Detokenizes tokens that are bytes of UTF-8: the scheme of GPT-2, Llama 3 and Qwen.

    texts: an id's text, or PARTIAL where its bytes are not complete characters
    raw: an id's bytes
    """

    __slots__ = ("_pending", "_raw", "_text")

    def __init__(self, texts: Mapping[int, str], raw: Mapping[int, bytes]) -> None:
        self._text = texts.__getitem__
        self._raw = raw
        self._pending = b""  # the bytes of a character that is not complete

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
    """Detokenizes tokens that are text, with byte tokens for characters that have no token: Gemma, Llama 2.

    The decoder judges a run of byte tokens as a whole: all of its characters, or one U+FFFD per byte if any byte
    is wrong. A run is therefore held until a token that is not a byte ends it.

    texts: an id's text; PARTIAL for a byte token
    raw: an id's bytes
    strip: how many characters at the beginning of the text are dropped if they are spaces
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
    """Serves any other decoder: decodes a short window with and without the new ids and returns the difference.

    The window begins at an id whose text has been returned, as decoders treat the first token specially. Text that ends
    in U+FFFD may be a partial character and waits, for at most `MAX_WAITING` ids.
    """

    MAX_WAITING = 16

    __slots__ = ("_decode", "_hidden", "_returned", "_window")

    def __init__(self, decode: Callable[[list[int]], str], hidden: Callable[[int], bool]) -> None:
        self._decode = decode
        self._hidden = hidden  # special and unknown ids: a window must not begin with one
        self._window: list[int] = []
        self._returned = 0  # how many of the window's ids have had their text returned

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
    """Shows some ids that `detokenizer` hides. If such an id interrupts a character, the character stays incomplete.

    marks: the text of each of these ids
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


# Ids, the text that each adds, and the stop string that ended the stream. A plain tuple, as one is made for each token.
# Only `OutputText.finish` may return one text more than ids: the rest of a text that was released before.
Released = tuple[list[int], list[str], str | None]


class OutputText:
    """One choice's text: detokenized, ended before the first stop string.

    An id is released when no stop string can touch its text any more. When a stop string is complete, the ids up
    to its end are released, with their texts cut where it begins. Later ids are ignored, and each call returns the stop
    string.
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
        searched: gets each piece of text in order, and returns the text in which to search. It has the same length, and
            other characters where no stop string may be found
        include_stop: the text ends behind the stop string, not before it
        """
        self._include_stop = include_stop
        self._detokenizer = detokenizer
        self._search = None if stops is None else Search(stops)
        self._searched = searched
        self._ids: list[int] = []  # the ids that are held back, like their texts
        self._texts: list[str] = []
        self._position = 0  # how many characters were released
        self.consumed = 0  # how many ids were released; usage counts these
        self.stop: str | None = None  # the stop string that ended the stream

    def push(self, ids: list[int]) -> Released:
        """Adds ids and returns what is certain now. Without stop strings, that is all of `ids`, uncopied."""
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
        """Adds the last ids, if any, and returns all that was held back; incomplete bytes join the last text."""
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

    def _watch(self, search: Search, searched: str, ids: list[int], texts: list[str]) -> Released:
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

    def _cut(self, search: Search) -> Released:
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
