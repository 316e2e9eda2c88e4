"""Under random use in random configurations, no page leaks, no sequence overtakes or starves, and no output changes."""

from contextlib import ExitStack
from math import inf
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.worker.scheduler.harness import EOS, OracleDrafter, Rig, reference, set_drafter
from worker.kv_cache import pages as pages_module
from worker.kv_cache.pages import slots_per_sequence
from worker.scheduler import pipeline as stages_module
from worker.scheduler import step_time
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.queue import QueueFull, TooLong
from worker.scheduler.sequence import Plan, Sequence

BASES = [[1, 2, 3, 4] * 10, [1, 2, 3, 4, 1, 2, 3, 9] * 5, [5] * 40]  # prompts begin alike, some for many tokens

TENANTS = ("", "a", "b")

configs = st.fixed_dictionaries(
    {
        "batching_mode": st.sampled_from(["continuous", "continuous", "static"]),
        "batch_wait_timeout_s": st.sampled_from([0.0, 0.3]),
        "scheduler_policy": st.sampled_from(["fcfs", "prefill_first", "decode_round_robin"]),
        "use_chunked_prefill": st.booleans(),
        "prefill_chunk_size": st.sampled_from([1, 3, 8]),
        "max_prefill_chunks_per_step": st.integers(0, 2),
        "max_step_tokens": st.sampled_from([1, 2, 5, 12, 100]),
        "target_step_s": st.sampled_from([0.0, 0.001]),
        "max_batch_size": st.integers(1, 5),
        "max_waiting_requests": st.sampled_from([0, 2, 100]),
        "max_waiting_tokens": st.sampled_from([0, 40]),
        "max_seq_len": st.sampled_from([24, 48]),
        "prefix_cache": st.booleans(),
        "state_checkpoint_tokens": st.sampled_from([1, 5, 16]),
        "max_draft_tokens": st.sampled_from([0, 1, 4, 15]),
        "watermark": st.sampled_from([0.0, 0.01, 0.2]),
        "eos_token_ids": st.just(frozenset({EOS})),
    }
)
submits = st.fixed_dictionaries(
    {
        "base": st.sampled_from(BASES),
        "length": st.integers(1, 30),
        "tail": st.lists(st.integers(1, 3), max_size=3),
        "max_tokens": st.integers(0, 12),
        "min_tokens": st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (4,)]),
        "group": st.sampled_from([0, 0, 1, 2]),
        "cache_salt": st.sampled_from(["", "", "tenant"]),
        "wait": st.sampled_from([inf, inf, 1.0]),
        "generated": st.integers(0, 6),
    }
)


class Machine(RuleBasedStateMachine):
    @initialize(
        config=configs, page_size=st.sampled_from([1, 3, 16, 0]), spare=st.integers(0, 20), overlap=st.booleans(),
        stages=st.sampled_from([1, 1, 2, 3, 4]), least=st.integers(1, 4),
        token_s=st.sampled_from([0.0, 0.001]), floor=st.integers(1, 4),
        windows=st.sampled_from([(), (), (2,), (5,), (9,), (2, 9)]), key_block=st.sampled_from([1, 4]),
        only_windows=st.booleans(), spare_windows=st.integers(0, 12),
        slots=st.sampled_from([0, 0, 0, 1, 3, 9, 40]), tenants=st.sampled_from([1, 1, 3]),
    )  # fmt: skip
    def start(
        self,
        config: dict[str, Any],
        page_size: int,
        spare: int,
        overlap: bool,
        stages: int,
        least: int,
        token_s: float,
        floor: int,
        windows: tuple[int, ...],
        key_block: int,
        only_windows: bool,
        spare_windows: int,
        slots: int,
        tenants: int,
    ) -> None:
        self.small = ExitStack()  # sizes that suit these small prompts
        self.small.enter_context(patch.multiple(step_time, MIN_PREFILL_TOKENS=floor, TILE=1))
        self.small.enter_context(patch.object(stages_module, "LEAST_PROMPT_TOKENS", least))
        self.small.enter_context(patch.object(pages_module, "KEY_BLOCK", key_block))
        overlap = overlap and stages == 1
        if page_size == 0:  # contiguous: a page is a whole sequence
            page_size, spare = config["max_seq_len"], spare // 5
            config, windows = config | {"prefix_cache": False, "watermark": 0.0}, ()
        if slots:
            slots = 1 + slots_per_sequence(overlap=overlap) + slots
        pages = 0 if only_windows and windows else 2 + 24 // page_size + spare
        self.rig = Rig(
            pages=pages, page_size=page_size, overlap=overlap, stages=stages, token_s=token_s, slots=slots,
            windows={each: self.pages_of(each, page_size, spare_windows, config) for each in windows}, **config,
        )  # fmt: skip
        self.tenants = tenants
        self.order: list[Sequence] = []  # sequences in the order of submission
        self.left: set[Sequence] = set()

    def pages_of(self, one: int, page_size: int, spare: int, config: dict[str, Any]) -> int:
        """Returns a pool size: the most pages that a sequence needs at a time, plus `spare` pages."""
        chunk = pages_module.chunk_tokens(SchedulerConfig(**config), config["max_seq_len"])
        return 1 + pages_module.window_pages(one, page_size) + pages_module.chunk_pages(chunk, page_size) + spare

    @rule(sequence=submits)
    def submit(self, sequence: dict[str, Any]) -> None:
        self.add(**sequence)

    @rule(sequence=submits, copies=st.integers(2, 4))
    def submit_several(self, sequence: dict[str, Any], copies: int) -> None:
        for _ in range(copies):
            self.add(**sequence)

    def add(self, base: list[int], length: int, tail: list[int], wait: float, generated: int, **options: Any) -> None:
        rig = self.rig
        tenant = TENANTS[rig.count % self.tenants]
        sequence = rig.sequence(base[:length] + tail, deadline=rig.now + wait, tenant=tenant, **options)
        done, _ = reference(sequence, rig.config)
        sequence.tokens = done[: sequence.prompt_len + generated]  # a resumed stream brings its right output
        set_drafter(rig.scheduler, sequence, OracleDrafter(done, rig.count))
        waiting, tokens = rig.scheduler.status.waiting, rig.scheduler.status.waiting_tokens
        try:
            rig.scheduler.submit(sequence, rig.now)
        except TooLong:
            longest = sequence.prompt_len + sequence.sampling.max_tokens
            full = [pool for pool in rig.pools if not pool.window]
            assert longest > rig.config.max_seq_len or any(pool.pages_for(longest) > pool.usable for pool in full)
        except QueueFull:
            filled = waiting >= rig.config.max_waiting_requests or tokens + len(sequence.tokens) > 40
            assert filled or tenant, "a part of the queue is kept for those who have little in it"
        else:
            self.order.append(sequence)
        rig.scheduler.check()

    def plan(self) -> Plan:
        fresh = [sequence for sequence in self.order if not sequence.pages and not sequence.history.preemptions]
        plan = self.rig.plan()
        alone = [sequence for sequence in fresh if not sequence.turn.group and sequence not in self.left]
        for tenant in TENANTS:
            joined = [bool(sequence.pages) for sequence in alone if sequence.turn.tenant == tenant]
            assert joined == sorted(joined, reverse=True), "a later sequence overtook an earlier one"
            replaces = self.tenants > 1  # instead of a sequence of another tenant
            assert replaces or not (plan.preempted and any(joined)), "a new sequence joined, and another was preempted"
        return plan

    def launch(self) -> Plan:
        """Plans and launches a step, even if another one is in flight."""
        plan = self.plan()
        if plan:
            self.rig.launch(plan)
        return plan

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            if self.rig.steps_behind:
                self.finish_steps(keep=self.rig.kept(self.launch()))
            else:
                plan = self.plan()
                self.commit(plan, self.rig.run(plan))

    @rule(number=st.integers(0, 50))
    def step_while_one_leaves(self, number: int) -> None:
        self.launch()
        self.abort(number)
        self.finish_steps()

    @rule(number=st.integers(0, 50))
    def step_after_one_left(self, number: int) -> None:
        self.abort(number)
        self.finish_steps(keep=self.rig.kept(self.launch()))

    @rule()
    def step_that_raises(self) -> None:
        plan = self.plan()
        self.rig.run(plan)  # the K/V that the lost step wrote must do no harm
        self.finish_steps()

    @rule(again=st.booleans())
    def steps_in_flight_are_lost(self, again: bool) -> None:
        """Loses the steps in flight. The first lost step is retried, or its tokens are planned again."""
        self.launch()
        lost = [plan for plan, _ in self.rig.in_flight]
        self.discard()
        if lost and again:
            rest = Plan(self.rig.scheduler.retryable(lost[0].chunks))
            self.commit(rest, self.rig.run(rest))

    def discard(self) -> None:
        self.rig.in_flight.clear()
        self.rig.scheduler.discard_in_flight()
        self.rig.scheduler.check()

    @rule(number=st.integers(0, 50))
    def step_whose_culprit_fails(self, number: int) -> None:
        plan = self.launch()
        self.discard()
        chunks = self.rig.scheduler.retryable(plan.chunks)
        if chunks:
            culprit = chunks[number % len(chunks)].sequence
            self.rig.scheduler.fail(culprit)
            self.left.add(culprit)
            rest = Plan([chunk for chunk in chunks if chunk.sequence is not culprit])
            self.commit(rest, self.rig.run(rest))

    @rule(number=st.integers(0, 50))
    def abort(self, number: int) -> None:
        live = self.rig.scheduler.sequences()
        if live:
            gone = live[number % len(live)]
            assert self.rig.scheduler.abort(gone.key) is gone and not gone.pages
            self.left.add(gone)
            self.rig.scheduler.check()

    @rule(seconds=st.sampled_from([0.1, 0.4, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.now += seconds
        due = [sequence for sequence in self.rig.scheduler.sequences() if sequence.turn.deadline <= self.rig.now]
        assert self.rig.scheduler.expire(self.rig.now) == due
        self.left.update(due)
        self.rig.scheduler.check()

    def finish_steps(self, keep: int = 0) -> None:
        self.left.update(advance.sequence for advance in self.rig.finish_steps(keep) if advance.outcome)

    def commit(self, plan: Plan, ids: list[int]) -> None:
        scheduler = self.rig.scheduler
        before = scheduler.status.generation_tokens - scheduler.status.accepted_tokens
        advances = self.rig.commit(plan, ids)
        assert scheduler.status.generation_tokens - scheduler.status.accepted_tokens == before + len(plan.sampling)
        self.left.update(advance.sequence for advance in advances if advance.outcome)

    def teardown(self) -> None:
        """Runs until all sequences have ended, and asserts that no page is owned.

        At worst, each token takes a step of its own, and the oldest sequence waits for a token of all others each time.
        """
        if not hasattr(self, "rig"):
            return
        try:
            self.end()
        finally:
            self.small.close()

    def end(self) -> None:
        live = self.rig.scheduler.sequences()
        most = sum(sequence.prompt_len + sequence.sampling.max_tokens + 3 for sequence in live)
        steps = 2 + self.rig.steps_behind  # a preempted sequence loses the token in flight
        self.left |= self.rig.finish(steps * most * (self.rig.config.max_batch_size + 1) + 5)
        assert set(self.order) == self.left | self.rig.ends.keys()
        assert all(pool.counts().owned == 0 for pool in self.rig.pools)
        assert self.rig.slots is None or not self.rig.slots.owners()
        assert self.rig.scheduler.status.waiting_tokens == 0


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, database=None)
TestRandomUse = Machine.TestCase
