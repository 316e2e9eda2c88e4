"""Compiles grammars in threads of its own, so that the compute loop never waits for a grammar.

The compiler uses llguidance and the vocabulary in tokenizer.json. It caches the most recently used compiled grammars by
their text, including invalid ones. Reading a vocabulary of 128,000 tokens holds the GIL for about a second, so it is
read while the weights are read. Compiling a grammar hardly holds the GIL.
"""

import re
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shared.byte_level import spelled
from worker.grammar.matcher import Matcher, error_text

if TYPE_CHECKING:
    from llguidance import LLTokenizer

THREADS = 2
TAG = re.compile(r"<.+>", re.DOTALL)
MAX_CACHED = 64  # grammars
MAX_CACHED_CHARS = 4 << 20  # total length of their texts; compiled, grammars take up to about twenty times as much


class InvalidGrammar(Exception):
    """The text is not a grammar, no output fits it, or the tokenizer cannot be used. The message says which."""


class Grammar:
    """A compiled grammar. Each sequence that it constrains gets a matcher of its own."""

    def __init__(self, matcher: Matcher) -> None:
        self._initial = matcher

    def new_matcher(self) -> Matcher:
        return self._initial.copy()


class GrammarCompiler:
    """Compiles grammars. Starts to read the vocabulary at once, and calls `wake` in a thread after each grammar."""

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
        """Returns a future of the compiled grammar. Its result() raises InvalidGrammar.

        The future of a grammar that was compiled before is done already.
        """
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
        """Cancels compilations that have not started. Does not wait for the others."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        text = with_plain_tags((self._folder / "tokenizer.json").read_text(encoding="utf-8"))
        return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(self._eos_ids) or None)


def with_plain_tags(tokenizer: str) -> str:
    """Moves added tokens such as <think> and <tool_call> into the vocabulary of a tokenizer.json.

    These tokens are not special: an answer shows them as text. But llguidance treats every added token in angle
    brackets as special, and then no text in a grammar matches it.
    """
    content = msgspec.json.decode(tokenizer)
    vocabulary = content.get("model", {}).get("vocab")
    tags = [
        entry for entry in content.get("added_tokens", ()) if not entry["special"] and TAG.fullmatch(entry["content"])
    ]
    if not tags or not isinstance(vocabulary, dict):
        return tokenizer
    # Copies all added tokens, not only the tags: otherwise the others would get new ids.
    spell = spelled if _is_byte_level(content) else str
    vocabulary |= {
        spell(entry["content"]) if entry in tags else entry["content"]: entry["id"] for entry in content["added_tokens"]
    }
    content["added_tokens"] = [entry for entry in content["added_tokens"] if entry not in tags]
    return msgspec.json.encode(content).decode()


def _is_byte_level(tokenizer: dict[str, Any]) -> bool:
    decoder = tokenizer.get("decoder") or {}
    return any(one.get("type") == "ByteLevel" for one in (decoder, *decoder.get("decoders", ())))


def _compile(text: str, vocabulary: "Future[LLTokenizer]") -> Grammar:
    from llguidance import LLMatcher, LLParserLimits

    try:
        tokens = vocabulary.result()
    except Exception as error:
        raise InvalidGrammar(f"this model's tokenizer cannot be used with a grammar: {error}") from error
    matcher = LLMatcher(tokens, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
    matcher.compute_bitmask()  # the first bitmask costs the most, and shows whether any token fits
    if matcher.is_error():
        raise InvalidGrammar(f"the grammar cannot be enforced: {error_text(matcher)}")
    return Grammar(Matcher(matcher))
