"""Compiles grammars in its own threads, so that the compute loop never waits for a grammar.

The compiler uses llguidance and the vocabulary in tokenizer.json. It caches the most recently used grammars by their
text, including invalid grammars. A child process compiles each grammar first, with a smaller stack, and with limits of
time and memory. If a grammar crashes llguidance, only the child process and this grammar's request end. Each tenant
uses at most one thread. Tenants whose grammars take long have threads with a lower priority, and so have their
children, because a forward takes twice as long if another thread occupies one of two cores.

Reading a vocabulary of 128,000 tokens holds the GIL for about a second, so it is read while the weights are read.
Compiling a grammar hardly holds the GIL.
"""

import math
import re
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shared import grammar_trial
from shared.checkpoint import spelled
from shared.machine import lower_own_priority, return_memory
from shared.sandbox import (
    SLOW_NICENESS,
    Killed,
    Lost,
    NotStarted,
    Raised,
    Sandbox,
    SlowTenants,
    TookTooLong,
    TurnQueue,
)  # fmt: skip
from worker.structured_output.masks_ahead import Mask, MasksAhead, computed, mask_bytes
from worker.structured_output.matcher import Matcher, error_text

if TYPE_CHECKING:
    from llguidance import LLTokenizer

THREADS = 2
STACK = 64 << 20  # bytes of each thread's stack; the child process has a thirtieth of this
TAG = re.compile(r"<.+>", re.DOTALL)
MAX_CACHED = 64  # the most grammars in the cache
MAX_CACHED_CHARS = 4 << 20  # total length of cached grammar texts; compiled grammars take up to twenty times as much
MAX_CACHED_BYTES = 256 << 20  # by which the process grew while the cached grammars were compiled, in all

TRIMMED_BYTES = 16 << 20  # a compilation by which the process grew more than this returns freed memory to the system


class InvalidGrammar(Exception):
    """The text is not a grammar, or allows no output, or the tokenizer cannot be used. The message says which."""


class Unlucky(InvalidGrammar):
    """The grammar was not compiled in time, or the child process was killed. Another try may succeed."""


class Grammar:
    """A compiled grammar. Each sequence gets its own matcher."""

    def __init__(self, matcher: Matcher) -> None:
        self._initial = matcher

    def new_matcher(self) -> Matcher:
        return self._initial.copy()


class GrammarCompiler:
    """Compiles grammars. It begins to read the vocabulary at once. wake: called in a thread after each compilation"""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._pool = _roomy_threads()
        self._slow_pool = _roomy_threads(SLOW_NICENESS)
        self._slow = SlowTenants()
        self._turns = TurnQueue(THREADS)
        self._ahead = MasksAhead(vocab_size, lambda: self.wake())
        self._trials = threading.local()  # each thread has its own child process
        self._vocabulary = self._pool.submit(self._load)
        self._cache: OrderedDict[str, Future[Grammar]] = OrderedDict()
        self._chars = 0
        self._grown: dict[str, int] = {}  # bytes by which the process grew while a cached grammar was compiled

    def compile(self, text: str, tenant: str = "") -> "Future[Grammar]":
        """Returns a future of the compiled grammar. Its result() raises InvalidGrammar.

        The future is already done if the same grammar was compiled before.
        """
        cached = self._cache.get(text)
        if cached is not None and not (cached.done() and isinstance(cached.exception(), Unlucky)):
            self._cache.move_to_end(text)
            return cached
        self._chars -= len(text) if cached is not None else 0
        future = self._cache[text] = Future()
        future.add_done_callback(lambda _: self.wake())
        self._turns.enter(tenant, lambda: self._start(text, tenant, future))
        self._chars += len(text)
        while len(self._cache) > MAX_CACHED or (self._takes_too_much and len(self._cache) > 1):
            oldest, _ = self._cache.popitem(last=False)
            self._chars -= len(oldest)
            self._grown.pop(oldest, None)
        return future

    @property
    def _takes_too_much(self) -> bool:
        return self._chars > MAX_CACHED_CHARS or sum([*self._grown.values()]) > MAX_CACHED_BYTES

    def _start(self, text: str, tenant: str, future: "Future[Grammar]") -> None:
        slow = tenant in self._slow
        try:
            (self._slow_pool if slow else self._pool).submit(self._run, text, tenant, future, slow)
        except RuntimeError:  # the pool was shut down
            future.cancel()

    def _run(self, text: str, tenant: str, future: "Future[Grammar]", slow: bool) -> None:
        before, trial, began = rss_bytes(), self._trial(slow), math.inf
        try:
            self._try(text, trial)
            before, began = rss_bytes(), time.monotonic()
            grammar = _compile(text, self._vocabulary, self._vocab_size, self._ahead)
            if (grown := rss_bytes() - before) > 0 and text in self._cache:
                self._grown[text] = grown
            future.set_result(grammar)
        except BaseException as error:  # a panic in Rust is a BaseException, but not an Exception
            future.set_exception(error)
        finally:
            if rss_bytes() - before >= TRIMMED_BYTES:
                return_memory()  # of grammars that left the cache, or could not be compiled
            self._slow.note(tenant, trial.took + max(0.0, time.monotonic() - began))
            self._turns.leave(tenant)

    def _trial(self, slow: bool) -> Sandbox:
        """Returns the child process of this thread."""
        trial: Sandbox | None = getattr(self._trials, "child", None)
        if trial is None:
            trial = self._trials.child = Sandbox(grammar_trial.COMPILE, megabytes=grammar_trial.MEGABYTES, slow=slow)
        return trial

    def _try(self, text: str, trial: Sandbox) -> None:
        """Compiles a grammar in a child process. Raises InvalidGrammar if the compilation fails or the child dies."""
        try:
            trial.call(text, seconds=grammar_trial.SECONDS)
        except (TookTooLong, Killed, NotStarted) as failure:
            raise Unlucky(f"the grammar cannot be enforced: {failure}") from None
        except (Lost, Raised) as failure:
            raise InvalidGrammar(f"the grammar cannot be enforced: {failure}") from None

    def close(self) -> None:
        """Cancels compilations that have not started. Does not wait for running compilations."""
        for pool in (self._pool, self._slow_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self._ahead.close()

    def _load(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        text = with_plain_tags((self._folder / "tokenizer.json").read_text(encoding="utf-8"))
        return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=list(self._eos_ids) or None)


def rss_bytes() -> int:
    """Returns the memory of this process that is in RAM; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def _roomy_threads(niceness: int = 0) -> ThreadPoolExecutor:
    """Returns a pool of threads with large stacks. Starts all threads at once, while the large stack size is set.

    niceness: how much lower the priority of the threads is, on Linux
    """
    pool = ThreadPoolExecutor(
        THREADS, thread_name_prefix="grammar", initializer=lower_own_priority, initargs=(niceness,)
    )
    all_run = threading.Barrier(THREADS)
    before = threading.stack_size(STACK)
    try:
        for _ in range(THREADS):
            pool.submit(all_run.wait)
    finally:
        threading.stack_size(before)
    return pool


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
    # Copies all added tokens, not only the tags, because otherwise the other added tokens would get new ids.
    spell = spelled if _is_byte_level(content) else str
    vocabulary |= {
        spell(entry["content"]) if entry in tags else entry["content"]: entry["id"] for entry in content["added_tokens"]
    }
    content["added_tokens"] = [entry for entry in content["added_tokens"] if entry not in tags]
    return msgspec.json.encode(content).decode()


def _is_byte_level(tokenizer: dict[str, Any]) -> bool:
    decoder = tokenizer.get("decoder") or {}
    return any(one.get("type") == "ByteLevel" for one in (decoder, *decoder.get("decoders", ())))


def _compile(text: str, vocabulary: "Future[LLTokenizer]", vocab_size: int, ahead: MasksAhead) -> Grammar:
    from llguidance import LLMatcher

    try:
        tokens = vocabulary.result()
    except Exception as error:
        raise InvalidGrammar(f"this model's tokenizer cannot be used with a grammar: {error}") from error
    matcher = LLMatcher(tokens, text, log_level=0, limits=grammar_trial.limits())
    matcher.compute_bitmask()  # the first bitmask is the most expensive one, and shows whether any token is allowed
    if matcher.is_error():
        raise InvalidGrammar(f"the grammar cannot be enforced: {error_text(matcher)}")
    mask = Mask()  # computed a second time: its time stands for later masks, and the first one took longer
    mask.set_result(computed(matcher.deep_copy(), mask_bytes(vocab_size)))
    return Grammar(Matcher(matcher, ahead, mask))
