"""Compiles grammars into matchers on threads of its own: the compute loop never waits for one.

Knows the vocabulary (tokenizer.json) and llguidance. Compiled grammars, refused ones included, are kept by text, the
most recently used ones. To read a vocabulary of 128,000 tokens holds the GIL for about a second, so that is done while
the weights are read; to compile a grammar hardly holds it.
"""

import re
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from worker.grammar.matcher import Matcher, reason

if TYPE_CHECKING:
    from llguidance import LLTokenizer

THREADS = 2
TAG = re.compile(r"<[!-~]+>")
MAX_KEPT = 64  # grammars
MAX_KEPT_CHARS = 4 << 20  # of their texts; compiled they take up to some twenty times as much


class Invalid(Exception):
    """The text is no grammar, nothing fits it, or the tokenizer cannot be used; says why in a sentence."""


class Grammar:
    """A compiled text; every sequence that keeps to it has a matcher of its own."""

    def __init__(self, first: Matcher) -> None:
        self._first = first

    def matcher(self) -> Matcher:
        return Matcher(self._first.state.deep_copy())


class Compiler:
    """Begins to read the vocabulary at once. `wake` is called, in another thread, when something has been compiled."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._vocabulary = self._pool.submit(self._load)
        self._kept: OrderedDict[str, Future[Grammar]] = OrderedDict()
        self._chars = 0

    def grammar(self, text: str) -> "Future[Grammar]":
        """At once when it is known. Its result raises Invalid."""
        known = self._kept.get(text)
        if known is not None:
            self._kept.move_to_end(text)
            return known
        made = self._kept[text] = self._pool.submit(_compile, text, self._vocabulary)
        made.add_done_callback(lambda _: self.wake())
        self._chars += len(text)
        while len(self._kept) > MAX_KEPT or (self._chars > MAX_KEPT_CHARS and len(self._kept) > 1):
            self._chars -= len(self._kept.popitem(last=False)[0])
        return made

    def close(self) -> None:
        """Compiles nothing more, and waits for nothing."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        text = with_plain_tags((self._folder / "tokenizer.json").read_text(encoding="utf-8"))
        return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(self._eos_ids) or None)


def with_plain_tags(tokenizer: str) -> str:
    """tokenizer.json with added tokens such as <think> and <tool_call> as words of the vocabulary.

    They are not special, and an answer shows them as the text they are; but llguidance takes every added token in
    angle brackets for a special one, which no text of a grammar matches.
    """
    said = msgspec.json.decode(tokenizer)
    vocabulary = said.get("model", {}).get("vocab")
    tags = [entry for entry in said.get("added_tokens", ()) if not entry["special"] and TAG.fullmatch(entry["content"])]
    if not tags or not isinstance(vocabulary, dict):
        return tokenizer
    vocabulary |= {entry["content"]: entry["id"] for entry in said["added_tokens"]}  # or others would be renumbered
    said["added_tokens"] = [entry for entry in said["added_tokens"] if entry not in tags]
    return msgspec.json.encode(said).decode()


def _compile(text: str, vocabulary: "Future[LLTokenizer]") -> Grammar:
    from llguidance import LLMatcher, LLParserLimits

    try:
        tokens = vocabulary.result()
    except Exception as error:
        raise Invalid(f"this model's tokenizer cannot be held to a grammar: {error}") from error
    first = LLMatcher(tokens, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
    first.compute_bitmask()  # the first one costs the most, and shows whether anything fits at all
    if first.is_error():
        raise Invalid(f"the grammar cannot be enforced: {reason(first)}")
    return Grammar(Matcher(first))
