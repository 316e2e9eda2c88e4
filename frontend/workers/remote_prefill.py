"""Prompts that a prefill worker computes before another worker generates: which ones, and how each attempt ended.

A stream is at one worker at a time. It begins at a prefill worker if its prompt is long, and probably in no cache. When
the prefill worker has computed the prompt, and the K/V store has its pages, the stream moves to a worker that generates
and finds them there. If the attempt ends otherwise, the stream moves, too, and that worker computes the prompt.

    done      the prompt was computed, and its pages were written
    failed    the prefill worker ended it otherwise: its step failed, or it shut down
    lost      the prefill worker was lost, or lost the stream
    late      it took longer than --remote-prefill-timeout
    refused   the prefill worker did not admit it
    ended     the stream ended: its client left, or its deadline passed
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b

from frontend.workers.connection import ConnectionCounters, WorkerConnection
from frontend.workers.routing import Router
from frontend.workers.stream import Stream
from shared import messages as m

TOKENS = 1024  # the default of --remote-prefill-tokens
TIMEOUT_S = 60.0  # the default of --remote-prefill-timeout
STEP_TOKENS = 128  # prompts are remembered in steps of so many tokens
MOST_STEPS = 1 << 16  # 8 million tokens of prompts, in some 12 MB


class RemotePrefill:
    """The streams of a pool that are at a prefill worker for their prompt."""

    def __init__(
        self, counters: ConnectionCounters, *, tokens: int = TOKENS, timeout: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """tokens: a prompt goes to a prefill worker if at least so many of its tokens are probably in no cache

        timeout: seconds after which a prompt is computed elsewhere
        """
        self.router = Router()  # chooses among prefill workers
        self.tokens = tokens
        self._counters, self._timeout, self._clock = counters, timeout, clock
        self._until: dict[Stream, float] = {}
        self._prompts = RecentPrompts()
        self._resets: dict[str, int] = {}  # worker → the latest reset of its prefix cache that it reported

    def __len__(self) -> int:
        return len(self._until)

    def helpers(
        self, submit: m.Submit, prompt: bytes, takers: Sequence[WorkerConnection], ready: Sequence[WorkerConnection],
        cached: Callable[[], int],
    ) -> list[WorkerConnection]:  # fmt: skip
        """Returns the workers that may compute the prompt of a new stream; empty: the worker that generates does it.

        prompt: packed token ids, with the digests of images in the place of their tokens
        takers: the workers that may generate; ready: all workers that can be used now
        cached: estimates how many tokens of the prompt one of the takers has cached
        """
        if len(prompt) < 4 * self.tokens or not is_generated(submit):
            return []
        spaces = {(one.fingerprint, kv_space(one)) for one in takers if one.role is not m.Role.PREFILL}
        length = len(prompt) // 4
        found = [one for one in ready if hands_over(one, length) and (one.fingerprint, kv_space(one)) in spaces]
        if not found:
            return []
        known = max(self._prompts.longest(prompt, submit.cache_salt), cached())
        return found if length - known >= self.tokens else []

    def reported(self, worker: str, status: m.Status) -> None:
        """Forgets all prompts if a worker has emptied its prefix cache, and with it the store."""
        if status.prefix_cache_reset not in (0, self._resets.get(worker)):
            self._resets[worker] = status.prefix_cache_reset
            self._prompts.clear()

    def begin(self, stream: Stream) -> None:
        """Notes that a stream goes to a prefill worker."""
        self._until[stream] = self._clock() + self._timeout

    def end(self, stream: Stream, how: str) -> None:
        """Counts how the attempt of a stream ended, once. how: see the module"""
        if self._until.pop(stream, None) is not None:
            name = f"prefill_{how}"
            setattr(self._counters, name, getattr(self._counters, name) + 1)

    def late(self) -> list[Stream]:
        """Returns the streams whose prompt should have been computed by now."""
        now = self._clock()
        return [stream for stream, until in self._until.items() if now >= until]

    def generates(self, prompt: bytes, identity: str) -> None:
        """Notes that a worker generates from a prompt, whose pages are then in its cache and in the store."""
        if len(prompt) >= 4 * self.tokens:
            self._prompts.remember(prompt, identity)


def is_generated(submit: m.Submit) -> bool:
    """Whether a request asks for tokens alone, so that no row of its prompt is part of the result."""
    asks = submit.pooling is None and submit.answer is None and not submit.sampling.prompt_logprobs
    return asks and submit.sampling.max_tokens > 0


def hands_over(connection: WorkerConnection, tokens: int) -> bool:
    """Whether a worker is a prefill worker with a K/V store that works, and has room for so many tokens."""
    status, welcome = connection.status, connection.welcome
    if status is None or welcome is None or status.role is not m.Role.PREFILL:
        return False
    return tokens <= welcome.kv_store_tokens and any([tier.usable for tier in status.kv_store])


def kv_space(connection: WorkerConnection) -> str:
    return connection.welcome.kv_space if connection.welcome else ""


class RecentPrompts:
    """Remembers the prompts of the last streams, so that the next turn of a conversation is not taken for a new one.

    The keys that workers report (shared/prefix_identity.py) are too few for that: they end at 16,384 tokens, and say of
    a prompt of 15,000 tokens only that 8,192 are known.
    """

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._most = most
        self._known: OrderedDict[bytes, None] = OrderedDict()  # hashes of the first tokens of prompts

    def clear(self) -> None:
        self._known.clear()

    def longest(self, prompt: bytes, identity: str) -> int:
        """Returns how many of the first tokens a prompt has in common with one that was remembered."""
        found = 0
        for at, key in enumerate(_steps(prompt, identity), 1):
            if key not in self._known:
                break
            found = at * STEP_TOKENS
        return found

    def remember(self, prompt: bytes, identity: str) -> None:
        for key in reversed(_steps(prompt, identity)):  # the longest is forgotten first
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)


def _steps(prompt: bytes, identity: str) -> list[bytes]:
    """Returns a hash of the first STEP_TOKENS tokens of a prompt, of twice as many, and so on."""
    hashed = blake2b(digest_size=8, key=blake2b(identity.encode(), digest_size=16).digest())
    keys = list[bytes]()
    for begin in range(0, len(prompt) - 4 * STEP_TOKENS + 1, 4 * STEP_TOKENS):
        hashed.update(prompt[begin : begin + 4 * STEP_TOKENS])
        keys.append(hashed.copy().digest())
    return keys
