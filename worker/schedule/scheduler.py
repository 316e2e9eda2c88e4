"""Which tokens are computed next, and what their results mean: `plan()` decides, `commit()` applies.

    submit(sequence, now)            -> waits, or Refused
    plan(now)                        -> Plan: who advances by how much, whose pages it may write
    commit(plan, ids, now)           -> list[Advance]: a token, an end, or both, for each sequence that got one
    abort(key), expire(now), fail()  -> sequences leave early, their pages are free at once

Pure counting in plain ints: knows nothing of tensors, sockets or clocks (the caller passes `now`).

A step that raised needs no undoing: until commit() nothing counts as computed and nothing is published, and
pages acquired by plan() stay with their sequences, so the next plan() takes up the same work. A plan may also
be committed in parts, each a `Plan` of some of its chunks, to find out which sequence made a step fail.

Two choices. A prompt gets all its pages when it joins, not chunk by chunk: half-computed prompts never wait
for each other's pages, and admission is one comparison. Page growth goes before everything else in a step,
from the oldest sequence to the newest, and takes pages from the newest: the oldest always advances.
"""

from collections.abc import Iterable
from math import inf

from shared.messages import Outcome
from worker.memory.pages import PagePool
from worker.schedule import policy
from worker.schedule.admission import QueueFull, Refused, TooLong, check_possible, check_room
from worker.schedule.paging import Paging
from worker.schedule.plan import Advance, Chunk, Plan
from worker.schedule.policy import SchedulerConfig
from worker.schedule.queue import Queue
from worker.schedule.sequence import Sequence

Key = tuple[bytes, int]


__all__ = ["Advance", "QueueFull", "Refused", "Scheduler", "SchedulerConfig", "TooLong"]


class Scheduler:
    """All sequences of one worker. Every live one either waits (no pages) or runs (owns its pages)."""

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        self.preemptions_total = 0
        self.prefill_tokens_total = 0  # computed for prompts, and again for preempted sequences
        self.generation_tokens_total = 0
        self._config = config
        self._paging = Paging(pool, config.prefix_cache, config.watermark)
        self._batching = policy.batching(config)
        self._cutting = policy.cutting(config)
        self._order = policy.order(config)
        self._live: dict[Key, Sequence] = {}
        self._running: dict[Sequence, None] = {}  # from oldest to newest
        self._returns = config.prefix_cache and not self._batching.closed  # who goes finds its pages again
        self._queue = Queue(self._returns, self._running.keys())
        self._earliest = inf  # no live sequence's deadline is before

    # What there is

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        return self._queue.tokens

    @property
    def max_seq_len(self) -> int:
        """Most tokens of one sequence."""
        return self._config.max_seq_len

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def prefix_queries(self) -> int:
        """Tokens looked up in the prefix cache: those of a sequence each time it gets pages."""
        return self._paging.prefix.queries if self._paging.prefix else 0

    @property
    def prefix_hits(self) -> int:
        return self._paging.prefix.hits if self._paging.prefix else 0

    def get(self, key: Key) -> Sequence | None:
        return self._live.get(key)

    def sequences(self) -> list[Sequence]:
        """All live sequences, in order of arrival."""
        return list(self._live.values())

    def next_wakeup(self, now: float) -> float:
        """When to expire() and plan() next if no message comes before: `now` or earlier is at once, inf is never."""
        if self._running or self._queue.resuming:
            return now
        opens = self._batching.opens(now, self._queue.fresh, self._queue.oldest) if self._queue else inf
        return min(opens, self._earliest)

    # Coming and going

    def submit(self, sequence: Sequence, now: float) -> None:
        """Takes a sequence in: it waits. Raises Refused, and takes nothing, if it cannot.

        A sequence may bring output already (a stream that goes on): it is computed over, not sampled again,
        and one whose output is complete ends without a new token.
        """
        if sequence.key in self._live:
            raise Refused(f"request {sequence.key[1]} is live already")
        check_possible(sequence, self._config, self._paging)
        if not sequence.resumed:  # it has been admitted once
            check_room(sequence, self._config, self._queue, len(self._running))
        self._earliest = min(self._earliest, sequence.deadline)
        self._live[sequence.key] = sequence
        self._queue.push(sequence, now)

    def abort(self, key: Key) -> Sequence | None:
        """Ends a sequence, waiting or running; None if there is none (any more)."""
        sequence = self._live.get(key)
        if sequence is not None:
            self._leave(sequence)
        return sequence

    def expire(self, now: float) -> list[Sequence]:
        """Ends and returns the sequences whose deadline has passed. Costs nothing while none has."""
        if now < self._earliest:
            return []
        late = [sequence for sequence in self._live.values() if sequence.deadline <= now]
        self.fail(late)
        self._earliest = min((sequence.deadline for sequence in self._live.values()), default=inf)
        return late

    def fail(self, sequences: Iterable[Sequence]) -> None:
        """Ends these; what they computed in committed steps stays cached, what a failed step wrote never is."""
        for sequence in sequences:
            if self._live.get(sequence.key) is sequence:
                self._leave(sequence)

    # A step

    def plan(self, now: float) -> Plan:
        """Decides the next step: decodes, then prompt chunks. Empty when there is nothing to compute yet."""
        plan = Plan()
        self._make_room(plan.preempted, now)
        decodes, prompts = self._grow(plan.preempted, now)
        budget = self._config.max_step_tokens
        reserved = min(len(decodes), self._order.reserve(budget))
        chunks, used = self._prompt_chunks(prompts, budget - reserved, now, joining=not plan.preempted)
        served = self._order.arrange(decodes)[: max(reserved, budget - used)]
        self._order.advanced(len(served), len(decodes))
        plan.chunks.extend(self._decode_chunks(served))
        plan.chunks.extend(chunks)
        return plan

    def commit(self, plan: Plan, ids: list[int], now: float) -> list[Advance]:
        """Applies a step that was computed: `ids[i]` was sampled for `plan.sampling[i]`.

        Sequences that left since the plan was made are passed over. Raises ValueError, and applies nothing,
        if the ids do not fit the plan or the plan was committed before.
        """
        self._check_fresh(plan, ids)
        advances: list[Advance] = []
        sampled, running = iter(ids), self._running
        for chunk in plan.chunks:
            sequence = chunk.sequence
            token = next(sampled) if chunk.samples else None
            if sequence not in running:
                continue
            self._computed(chunk)
            if token is not None and sequence.constraint is not None and not sequence.constraint.advance(token):
                self._leave(sequence)
                advances.append(Advance(sequence, None, Outcome.ERROR))
                continue
            if token is not None:
                sequence.tokens.append(token)
                sequence.first_token = sequence.first_token or now
            elif sequence.computed < len(sequence.tokens):
                continue
            outcome = self._outcome(sequence)
            if outcome is not None:
                self._leave(sequence)
            advances.append(Advance(sequence, token, outcome))
        self.generation_tokens_total += len(ids)
        return advances

    def check(self) -> None:
        """Raises AssertionError unless pages, queue and sequences agree; for tests and idle moments."""
        self._paging.check(self._running.keys())
        self._queue.check()
        waiting = set(self._queue)
        assert all(not sequence.pages and not sequence.computed for sequence in waiting), "a waiting sequence has pages"
        assert not waiting & self._running.keys(), "a sequence waits and runs"
        assert waiting | self._running.keys() == set(self._live.values()), "a live sequence is lost, or a gone one kept"
        assert all(sequence.pending for sequence in self._running), "a sequence runs with nothing to do"
        assert len(self._running) <= self._config.max_batch_size, "too many sequences run"
        assert set(self._queue.leaders()) <= set(self._live.values()), "somebody waits for a sequence that is gone"

    # Inside plan

    def _grow(self, preempted: list[Sequence], now: float) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences as decodes (one token behind, with a page to put it) and prompts."""
        decodes: list[Sequence] = []
        prompts: list[Sequence] = []
        size = self._paging.pool.page_size
        for sequence in list(self._running):
            if preempted and sequence not in self._running:
                continue
            computed = sequence.computed
            if len(sequence.tokens) - computed > 1:
                prompts.append(sequence)
            elif computed < len(sequence.pages) * size or self._add_page(sequence, preempted, now):
                decodes.append(sequence)
        return decodes, prompts

    def _add_page(self, sequence: Sequence, preempted: list[Sequence], now: float) -> bool:
        """One more page, at the newest sequences' expense; False if that is this one."""
        while not self._paging.grow(sequence):
            newest = next(reversed(self._running))
            self._preempt(newest, now)
            preempted.append(newest)
            if newest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, now: float) -> None:
        del self._running[sequence]
        self._paging.free(sequence)
        sequence.computed = 0
        sequence.preemptions += 1
        self.preemptions_total += 1
        self._queue.resume(sequence, now)

    def _make_room(self, preempted: list[Sequence], now: float) -> None:
        """Lets in one whose owner has nothing running, in the place of one whose owner runs more than its share.

        Only where a preempted sequence finds its pages again, and once for each that waits: a try may be in vain.
        """
        needy = self._queue.turns.needy if self._returns else None
        if needy is None:
            return
        while len(self._running) >= self._config.max_batch_size or not self._join(needy, now):
            greedy = self._queue.turns.greedy(self._config.max_batch_size)
            if greedy is None:
                return
            newest = next(sequence for sequence in reversed(self._running) if sequence.owner == greedy)
            self._preempt(newest, now)
            preempted.append(newest)
            needy.helped = True

    def _decode_chunks(self, decodes: list[Sequence]) -> list[Chunk]:
        return [
            # The one token may be a prompt's last, and max_tokens 0: then nothing is sampled.
            Chunk(sequence, sequence.computed, 1, sequence.first_token != 0.0 or self._outcome(sequence) is None)
            for sequence in decodes
        ]

    def _prompt_chunks(
        self, prompts: list[Sequence], budget: int, now: float, *, joining: bool
    ) -> tuple[list[Chunk], int]:
        """Chunks of running prompts, then of sequences that join for them; and how many tokens they take."""
        chunks: list[Chunk] = []
        left = budget
        most = self._config.max_prefill_chunks_per_step or inf
        for sequence in prompts:
            left -= self._cut(sequence, left, chunks, most)
        if not joining or not self._queue:
            return chunks, budget - left
        queue = self._queue
        queue.turns.settle()
        places = self._batching.joining(now, len(self._running), queue.resuming, queue.fresh, queue.oldest)
        while places > 0 and (self._batching.closed or (left > 0 and len(chunks) < most)):
            head = queue.head
            if head is None or not self._join(head, now):
                break
            places -= 1
            left -= self._cut(head, left, chunks, most)
        return chunks, budget - left

    def _cut(self, sequence: Sequence, budget: int, chunks: list[Chunk], most: float) -> int:
        """Adds the sequence's next chunk if the step has room for one; its length."""
        behind = len(sequence.tokens) - sequence.computed
        length = self._cutting.cut(behind, budget) if len(chunks) < most else 0
        if length:
            samples = length == behind and self._outcome(sequence) is None
            chunks.append(Chunk(sequence, sequence.computed, length, samples))
        return length

    def _join(self, sequence: Sequence, now: float) -> bool:
        """Moves the head of the queue to the running ones, if all its tokens' pages fit."""
        if not self._paging.claim(sequence, alone=not self._running):
            return False
        self._queue.remove(sequence)
        self._queue.turns.join(sequence)
        self._running[sequence] = None
        if not sequence.preemptions:
            sequence.admitted = now
            sequence.cached = min(sequence.computed, sequence.prompt_len)
        return True

    # Inside commit

    def _check_fresh(self, plan: Plan, ids: list[int]) -> None:
        samples, running = 0, self._running
        for chunk in plan.chunks:
            samples += chunk.samples
            if chunk.sequence.computed != chunk.start and chunk.sequence in running:
                raise ValueError(f"{chunk.sequence.key} has moved on since this plan was made")
        if samples != len(ids):
            raise ValueError(f"the plan samples {samples} tokens, but {len(ids)} came")

    def _computed(self, chunk: Chunk) -> None:
        sequence, start, size = chunk.sequence, chunk.start, self._paging.pool.page_size
        end = start + chunk.length
        sequence.computed = end
        if start // size != end // size:
            self._paging.publish(sequence, start, end)
        if chunk.length > 1 or start < sequence.prompt_len:
            self.prefill_tokens_total += chunk.length
        if sequence.group and end >= sequence.prompt_len:
            self._queue.prompt_done(sequence)

    def _outcome(self, sequence: Sequence) -> Outcome | None:
        """The end that the tokens so far amount to. Eos goes before a stop id, a stop id before the length.

        The end of a grammar is an eos, whatever was asked of eos tokens: nothing could follow.
        """
        if sequence.constraint is not None and sequence.constraint.ended:
            return Outcome.EOS
        sampling, tokens = sequence.sampling, sequence.tokens
        output = len(tokens) - sequence.prompt_len
        if output and output >= sampling.min_tokens:
            if tokens[-1] in self._config.eos_token_ids and not sampling.ignore_eos:
                return Outcome.EOS
            if tokens[-1] in sampling.stop_token_ids:
                return Outcome.STOP
        if output >= sampling.max_tokens or len(tokens) >= self._config.max_seq_len:
            return Outcome.LENGTH
        return None

    # Inside coming and going

    def _leave(self, sequence: Sequence) -> None:
        del self._live[sequence.key]
        if sequence in self._running:
            del self._running[sequence]
            self._queue.turns.stop(sequence)
            self._paging.free(sequence)
        else:
            self._queue.remove(sequence)
        if sequence.group:
            self._queue.gone(sequence)
        if not self._live:
            self._queue.turns.forget()
