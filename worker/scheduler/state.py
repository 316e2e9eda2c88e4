"""Holds the live sequences of one worker: which of them wait, which run, and which pages the running ones own.

scheduler.py decides what a step computes, and applies its results.
"""

from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from shared.messages import EXPECTED_TOKENS, Outcome, PrefillBudget
from worker.kv_cache.pages import PagePool, chunk_tokens
from worker.scheduler.paging import Paging
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.queue import WaitingQueue
from worker.scheduler.sequence import Chunk, Key, Sequence

if TYPE_CHECKING:
    from worker.scheduler.recurrent_slots import States


class SchedulerStatus(NamedTuple):
    """The current counts of the scheduler, and totals since the start. Other threads may read it."""

    running: int  # the number of running sequences
    waiting: int  # the number of waiting sequences
    waiting_tokens: int
    preemptions: int
    prefill_tokens: int  # tokens computed for prompts, and again for preempted sequences
    generation_tokens: int
    draft_tokens: int
    accepted_tokens: int  # draft tokens that were accepted
    prefix_queries: int  # tokens looked up in the prefix cache: all tokens of a sequence each time it gets pages
    prefix_hits: int
    prefill_budget: PrefillBudget
    prefix_cache_reset: int


class SchedulerState:
    """Holds all live sequences. A sequence either waits and has no pages, or runs and owns its pages.

    reuses_pages: whether a preempted sequence can find its pages again in the prefix cache.
    """

    def __init__(
        self, config: SchedulerConfig, pools: Seq[PagePool], states: "States | None", *, reuses_pages: bool
    ) -> None:
        self.config = config
        self.reuses_pages = reuses_pages
        chunk = chunk_tokens(config, config.max_seq_len)
        self.paging = Paging(pools, config.prefix_cache, config.watermark, chunk, states)
        self.live: dict[Key, Sequence] = {}  # in order of arrival
        self.running: dict[Sequence, None] = {}  # from oldest to newest
        self.outdated: dict[Sequence, int] = {}  # preempted sequences → tokens in flight whose results are ignored
        self.prefix_waits = PrefixWaits(self.paging, self.running.keys())
        self.queue = WaitingQueue(reuses_pages, self.running.keys())
        self.preemptions = 0

    @property
    def expected_tokens(self) -> int:
        """An estimate of how many tokens the live sequences still need. Any thread may read it."""
        each = tuple(self.live.values())
        outputs = sum([max(0, min(EXPECTED_TOKENS, one.sampling.max_tokens - one.output_len)) for one in each])
        return outputs + sum([one.uncomputed_tokens for one in each if one.uncomputed_tokens > 1])

    def join(self, sequence: Sequence, now: float) -> bool:
        """Lets a waiting sequence run. Returns False if there are not enough pages for all its tokens, or if the
        sequence would exceed the number of LoRA adapters that may run together."""
        if sequence.adapter is not None and not sequence.adapter.has_place(self.running, self.config.max_loras):
            return False
        if not self.paging.claim(sequence, alone=not self.running):
            return False
        self.queue.remove(sequence)
        self.queue.tenants.start_running(sequence)
        self.running[sequence] = None
        if not sequence.history.preemptions:
            sequence.history.admitted = now
            sequence.prefix.cached_tokens = sequence.computed_tokens
        return True

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Moves a running sequence to the front of the queue. If an id is in flight for it, the id is sampled again."""
        del self.running[sequence]
        self.paging.free(sequence)
        if sequence.in_flight_tokens:
            self.outdated[sequence] = self.outdated.get(sequence, 0) + sequence.in_flight_tokens
        sequence.computed_tokens = sequence.in_flight_tokens = sequence.pending_outputs = 0
        sequence.history.preemptions += 1
        self.preemptions += 1
        self.queue.push_preempted(sequence, now)

    def is_outdated(self, chunk: Chunk) -> bool:
        """Whether the result of a chunk is ignored. Call it once for each chunk that was in flight.

        It is ignored if its sequence has left, or was preempted meanwhile, even if the sequence runs again.
        """
        if chunk.sequence in self.outdated:
            self.outdated[chunk.sequence] -= chunk.length
            if not self.outdated[chunk.sequence]:
                del self.outdated[chunk.sequence]
            return True
        return chunk.sequence not in self.running

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence for good.

        Its pages are free immediately. A step in flight may still write to them, but every later step runs after it.
        """
        del self.live[sequence.key]
        if sequence in self.running:
            del self.running[sequence]
            self.queue.tenants.stop_running(sequence)
            self.paging.free(sequence)
        else:
            self.queue.remove(sequence)
        if sequence.turn.group:
            self.queue.replace_leader(sequence)
        if not self.live:
            self.queue.tenants.clear()

    def outcome(self, sequence: Sequence) -> Outcome | None:
        """Returns how the tokens so far end the sequence, or None if they do not end it.

        Eos takes precedence over a stop id, a stop id over the length, and the length over the end of a check. The end
        of a grammar counts as an eos even with ignore_eos, because nothing could follow.
        """
        if sequence.constraint is not None and sequence.constraint.ended:
            return Outcome.EOS
        sampling, tokens = sequence.sampling, sequence.tokens
        output = len(tokens) - sequence.prompt_len
        if output and output >= sampling.min_tokens:
            if tokens[-1] in self.config.eos_token_ids and not sampling.ignore_eos:
                return Outcome.EOS
            if tokens[-1] in sampling.stop_token_ids:
                return Outcome.STOP
        if self.at_max_length(sequence, len(tokens)):
            return Outcome.LENGTH if sequence.pooling is None else Outcome.POOLED
        if sequence.check is not None and sequence.check.finished(output, tokens[-1]):
            return Outcome.CHECKED
        return None

    def at_max_length(self, sequence: Sequence, length: int) -> bool:
        """Whether the sequence ends when it has `length` tokens, whatever the tokens are."""
        return length - sequence.prompt_len >= sequence.sampling.max_tokens or length >= self.config.max_seq_len

    def check(self) -> None:
        """Raises AssertionError unless pages, queue and sequences agree; for tests and idle moments."""
        self.paging.check(self.running.keys())
        self.queue.check()
        waiting = set(self.queue)
        for sequence in waiting:
            work = (
                sequence.pages,
                sequence.capacity,
                sequence.computed_tokens,
                sequence.in_flight_tokens,
                sequence.pending_outputs,
                sequence.states is not None,
                sequence.fetch is not None,
            )
            assert not any(work), f"{sequence.key} waits, but has pages or work in flight"
        for sequence in self.running:
            tokens, outputs = sequence.in_flight_tokens, sequence.pending_outputs
            assert sequence.uncomputed_tokens, f"{sequence.key} runs with nothing to do"
            assert sequence.fetch is None or not tokens, f"{sequence.key} is in a step while it is fetching"
            assert 0 <= outputs <= tokens, f"{sequence.key}: {outputs} outputs pending, {tokens} tokens in flight"
            known = tokens - outputs - max(self.config.max_draft_tokens, sequence.known_len - len(sequence.tokens))
            assert known <= sequence.uncomputed_tokens, f"{sequence.key}: more tokens in flight than there are"
        assert not waiting & self.running.keys(), "a sequence waits and runs"
        assert waiting | self.running.keys() == set(self.live.values()), "a live sequence is lost, or a dead one kept"
        assert len(self.running) <= self.config.max_batch_size, "too many sequences run"
        assert set(self.queue.leaders()) <= set(self.live.values()), "a group waits for a leader that is gone"


# Lets a prompt wait while another prompt with the same prefix is being computed.
#
# When many requests with one long system prompt arrive together, each of them would compute this prefix, because the
# prefix cache has it only after the first prompt's steps. So a prompt that has computed nothing yet is left out of a
# step as long as another prompt in this step, or in a step in flight, has pages of the same prefix to compute. Then
# it takes these pages from the prefix cache.


class PrefixWaits:
    """Tracks the pages that prompts in this step and in the steps in flight have yet to compute."""

    def __init__(self, paging: Paging, running: Collection[Sequence]) -> None:
        """running: a live view of the running sequences"""
        self._paging = paging
        self._running = running
        self._size = paging.page_size
        self._expected: set[bytes] | None = None  # digests of pages to be computed; None: not collected yet

    def begin_plan(self) -> None:
        self._expected = None

    def waits(self, sequence: Sequence) -> bool:
        """Whether a prompt should be left out of this step. If False, the prompt has all cached pages of its prefix."""
        if self._expected is None:
            in_flight = [other for other in self._running if other.in_flight_tokens > 1 or other.fetch is not None]
            self._expected = {digest for other in in_flight for digest in self._missing(other)}
        begun = sequence.computed_tokens != sequence.prefix.claimed_tokens or sequence.in_flight_tokens
        if not begun and sequence.check is None:
            usable = min(sequence.cacheable_tokens, len(sequence.tokens) - 1) // self._size
            missing = self._missing(sequence, usable)
            if not self._expected.isdisjoint(missing):
                return True
            if missing and any(pool.find(missing[0]) is not None for pool in self._paging.pools):
                self._paging.claim_again(sequence)
            if self._paging.fetching is not None and self._paging.fetching.begins(sequence):
                self._expected.update(self._missing(sequence))
                return True
        self._expected.update(self._missing(sequence))
        return False

    def _missing(self, sequence: Sequence, end: int | None = None) -> list[bytes]:
        """Returns the digests of a sequence's pages before page `end` that are not fully computed yet."""
        return sequence.prefix.digests[sequence.computed_tokens // self._size : end]
