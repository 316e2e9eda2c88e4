"""Keeps special tokens that a user writes ordinary text.

Finds spellings of added tokens in untrusted texts. Puts before each spelling a mark that chat templates keep.
"""

import re
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec
from tokenizers import Encoding
from tokenizers import Tokenizer as Engine

from frontend.errors import BadRequest, Unprocessable

Trie = dict[str, Any]


def new_mark() -> str:
    """Returns a random text that clients cannot guess. It has only digits, which JSON, URLs and case changes keep."""
    return f"{secrets.randbits(128):039}"


class TokenTexts:
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


# A copy of a tokenizer in which added tokens have secret names, so that untrusted text cannot spell them.
#
# Apart from those names, the copy encodes text as the original does: same rules, same vocabulary, same ids.


class AliasedEngine:
    """Encodes texts so that an added token stands only where a trusted author wrote it.

    engine: the tokenizer
    spellings: the added tokens to rename; all of them are in the tokenizer's vocabulary

    Raises Unprocessable if the tokenizer cannot be copied with renamed tokens.
    """

    def __init__(self, engine: Engine, spellings: Iterable[str]) -> None:
        secret = secrets.token_hex(16)
        self._aliases = {one: f"q{secret}q{engine.token_to_id(one):x}q" for one in spellings}
        self._token_texts = TokenTexts(self._aliases)
        self._engine = Engine.from_str(msgspec.json.encode(_renamed(engine, self._aliases)).decode())
        find = self._engine.token_to_id
        if any(find(alias) != engine.token_to_id(one) for one, alias in self._aliases.items()):
            raise Unprocessable(
                "the text has the spelling of a special token, which this model's tokenizer cannot encode as text",
                param="messages", code="unsupported_content",
            )  # fmt: skip

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Returns the ids of a text with marks (see TokenTexts). A spelling after a mark is encoded as plain text."""
        return self.encode_plain([self._token_texts.replaced(text, self._aliases, mark)], False)[0]

    def encode_plain(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], add_special_tokens: bool
    ) -> list[list[int]]:
        """Returns the ids of texts, or of pairs of texts, in which no added token is recognized.

        Raises BadRequest for text that is not Unicode.
        """
        return [one.ids for one in encodings_of(self._engine, texts, add_special_tokens)]

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[tuple[list[int], int]]:
        """Does what `pairs_of` does, but recognizes no added token in the texts."""
        return pairs_of(self._engine, texts)


def encodings_of(
    engine: Engine, texts: Sequence[str] | Sequence[tuple[str, str]], add_special_tokens: bool
) -> list[Encoding]:
    """Encodes texts. Raises BadRequest for text that is not Unicode."""
    try:
        # Only the functions for batches release the GIL.
        found: list[Encoding] = engine.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    except TypeError as error:  # a lone surrogate, which UTF-8 cannot express
        raise BadRequest("the text is not valid Unicode") from error
    return found


def beginnings_of(engine: Engine, texts: Sequence[str], most: int) -> list[str]:
    """Does what `Tokenizer.beginnings` does. Raises BadRequest for text that is not Unicode."""
    try:
        # Not the fast function, which does not say where in the text a token begins.
        found: list[Encoding] = engine.encode_batch(list(texts), add_special_tokens=False)
    except TypeError as error:
        raise BadRequest("the text is not valid Unicode") from error
    return [
        text if len(one.ids) <= most else text[: one.offsets[most][0]] for text, one in zip(texts, found, strict=True)
    ]


def pairs_of(engine: Engine, texts: Sequence[tuple[str, str]]) -> list[tuple[list[int], int]]:
    """Returns the ids of each pair, joined by the tokenizer's own rule, and where its second text begins.

    The second text has the token type 1. If the tokenizer does not tell the texts apart, the place is 0.
    """
    found = []
    for one in encodings_of(engine, texts, True):
        types = one.type_ids
        begin = types.index(1) if 1 in types else 0
        found.append((one.ids, begin if types == [0] * begin + [1] * (len(types) - begin) else 0))
    return found


def _renamed(engine: Engine, aliases: dict[str, str]) -> dict[str, Any]:
    """Returns the tokenizer's description (the content of tokenizer.json), with tokens renamed by `aliases`."""
    state: dict[str, Any] = msgspec.json.decode(engine.to_str())
    model = state["model"]
    for entry in state["added_tokens"]:
        if alias := aliases.get(entry["content"]):
            entry |= {"content": alias, "single_word": False}
    if isinstance(model["vocab"], dict):
        model["vocab"] = {aliases.get(token, token): id for token, id in model["vocab"].items()}
    else:  # a Unigram vocabulary is a list of tokens with their scores
        model["vocab"] = [[aliases.get(token, token), score] for token, score in model["vocab"]]
    if model.get("unk_token"):
        model["unk_token"] = aliases.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & aliases.keys()]
    return state
