"""Who is there: all live sequences of one worker, which of them run, what they hold; and how one comes and goes.

Counts only. What a step computes is decided in planning.py, what came of it is applied in settling.py.
"""

from shared.messages import Outcome
from worker.kv_cache.pages import PagePool
from worker.schedule.paging import Paging
from worker.schedule.policy import SchedulerConfig
from worker.schedule.queue import Queue
from worker.schedule.sequence import Key, Sequence


class State:
    """Every live sequence either waits (no pages) or runs (owns its pages).

    `returns`: who is preempted finds its pages again, in the prefix cache.
    """

    def __init__(self, config: SchedulerConfig, pool: PagePool, *, returns: bool) -> None:
        self.config = config
        self.returns = returns
        self.paging = Paging(pool, config.prefix_cache, config.watermark)
        self.live: dict[Key, Sequence] = {}
        self.running: dict[Sequence, None] = {}  # from oldest to newest
        self.queue = Queue(returns, self.running.keys())
        self.preemptions_total = 0

    def join(self, sequence: Sequence, now: float) -> bool:
        """Moves one that waits to the running ones, if all its tokens' pages fit."""
        if not self.paging.claim(sequence, alone=not self.running):
            return False
        self.queue.remove(sequence)
        self.queue.turns.join(sequence)
        self.running[sequence] = None
        if not sequence.preemptions:
            sequence.admitted = now
            sequence.cached_tokens = min(sequence.computed_tokens, sequence.prompt_len)
        return True

    def preempt(self, sequence: Sequence, now: float) -> None:
        """Moves a running one to the front of those that wait; an id that is on its way for it is sampled again."""
        del self.running[sequence]
        self.paging.free(sequence)
        sequence.computed_tokens = sequence.in_flight_tokens = sequence.pending_outputs = 0
        sequence.preemptions += 1
        self.preemptions_total += 1
        self.queue.resume(sequence, now)

    def leave(self, sequence: Sequence) -> None:
        """Its pages are free at once: a step under way may still write to them, but every later step comes after it."""
        del self.live[sequence.key]
        sequence.drafter = None  # somebody may keep the sequence for a while
        if sequence in self.running:
            del self.running[sequence]
            self.queue.turns.stop(sequence)
            self.paging.free(sequence)
        else:
            self.queue.remove(sequence)
        if sequence.group:
            self.queue.gone(sequence)
        if not self.live:
            self.queue.turns.forget()

    def outcome(self, sequence: Sequence) -> Outcome | None:
        """The end that the tokens so far amount to. Eos goes before a stop id, a stop id before the length.

        The end of a grammar is an eos, whatever was asked of eos tokens: nothing could follow.
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
        return Outcome.LENGTH if self.full(sequence, len(tokens)) else None

    def full(self, sequence: Sequence, length: int) -> bool:
        """Whether it ends with so many tokens, whatever they are."""
        return length - sequence.prompt_len >= sequence.sampling.max_tokens or length >= self.config.max_seq_len

    def check(self) -> None:
        """Raises AssertionError unless pages, queue and sequences agree; for tests and idle moments."""
        self.paging.check(self.running.keys())
        self.queue.check()
        waiting = set(self.queue)
        for sequence in waiting:
            held = (*sequence.pages, sequence.computed_tokens, sequence.in_flight_tokens, sequence.pending_outputs)
            assert not any(held), f"{sequence.key} waits, but has pages or work under way"
        for sequence in self.running:
            assert sequence.uncomputed_tokens, f"{sequence.key} runs with nothing to do"
            assert 0 <= sequence.pending_outputs <= sequence.in_flight_tokens, (
                f"{sequence.key}: {sequence.pending_outputs} due of {sequence.in_flight_tokens}"
            )
            under_way = sequence.in_flight_tokens - sequence.pending_outputs - self.config.max_draft_tokens
            assert under_way <= sequence.uncomputed_tokens, f"{sequence.key}: more under way than there is"
        assert not waiting & self.running.keys(), "a sequence waits and runs"
        assert waiting | self.running.keys() == set(self.live.values()), "a live sequence is lost, or a gone one kept"
        assert len(self.running) <= self.config.max_batch_size, "too many sequences run"
        assert set(self.queue.leaders()) <= set(self.live.values()), "somebody waits for a sequence that is gone"
