"""Compiles grammars in its own threads, so that the compute loop never waits for one.

Knows the vocabulary (tokenizer.json) and llguidance. The most recently used compiled grammars are cached by their text,
invalid ones included. Reading a vocabulary of 128,000 tokens holds the GIL for about a second, so that happens while
the weights are read; compiling a grammar hardly holds it.
"""

import re
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from worker.grammar.matcher import Matcher, error_text

if TYPE_CHECKING:
    from llguidance import LLTokenizer

THREADS = 2
TAG = re.compile(r"<[!-~]+>")
MAX_CACHED = 64  # grammars
MAX_CACHED_CHARS = 4 << 20  # of their texts; compiled they take up to some twenty times as much


class InvalidGrammar(Exception):
    """The text is no grammar, no output fits it, or the tokenizer cannot be used; the message says why."""


class Grammar:
    """A compiled grammar; every sequence that it constrains has its own matcher."""

    def __init__(self, matcher: Matcher) -> None:
        self._initial = matcher

    def new_matcher(self) -> Matcher:
        return Matcher(self._initial.state.deep_copy())


class GrammarCompiler:
    """Begins to read the vocabulary at once. Calls `wake`, in another thread, when a grammar has been compiled."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="grammar")
        self._vocabulary = self._pool.submit(self._load)
        self._cache: OrderedDict[str, Future[Grammar]] = OrderedDict()
        self._chars = 0

    def compile(self, text: str) -> "Future[Grammar]":
        """The grammar's future, done already if the grammar is cached. Its result() raises InvalidGrammar."""
        cached = self._cache.get(text)
        if cached is not None:
            self._cache.move_to_end(text)
            return cached
        future = self._cache[text] = self._pool.submit(_compile, text, self._vocabulary)
        future.add_done_callback(lambda _: self.wake())
        self._chars += len(text)
        while len(self._cache) > MAX_CACHED or (self._chars > MAX_CACHED_CHARS and len(self._cache) > 1):
            self._chars -= len(self._cache.popitem(last=False)[0])
        return future

    def close(self) -> None:
        """Cancels what is not being compiled yet; does not wait for the rest."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        text = with_plain_tags((self._folder / "tokenizer.json").read_text(encoding="utf-8"))
        return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(self._eos_ids) or None)


def with_plain_tags(tokenizer: str) -> str:
    """Moves added tokens such as <think> and <tool_call> into the vocabulary of a tokenizer.json.

    They are not special, and an answer shows them as their text; but llguidance takes every added token in angle
    brackets for a special one, which no text of a grammar matches.
    """
    content = msgspec.json.decode(tokenizer)
    vocabulary = content.get("model", {}).get("vocab")
    tags = [
        entry for entry in content.get("added_tokens", ()) if not entry["special"] and TAG.fullmatch(entry["content"])
    ]
    if not tags or not isinstance(vocabulary, dict):
        return tokenizer
    vocabulary |= {
        entry["content"]: entry["id"] for entry in content["added_tokens"]
    }  # all of them, or others would be renumbered
    content["added_tokens"] = [entry for entry in content["added_tokens"] if entry not in tags]
    return msgspec.json.encode(content).decode()


def _compile(text: str, vocabulary: "Future[LLTokenizer]") -> Grammar:
    from llguidance import LLMatcher, LLParserLimits

    try:
        tokens = vocabulary.result()
    except Exception as error:
        raise InvalidGrammar(f"this model's tokenizer cannot be used with a grammar: {error}") from error
    matcher = LLMatcher(tokens, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
    matcher.compute_bitmask()  # the first one costs the most, and shows whether any token fits
    if matcher.is_error():
        raise InvalidGrammar(f"the grammar cannot be enforced: {error_text(matcher)}")
    return Grammar(Matcher(matcher))
