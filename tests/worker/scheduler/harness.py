"""A fake model over a fake K/V store, and the scheduler that drives them.

The store holds, for each (group, page, offset), the chain hash of all tokens up to the token written there. The model
computes a token's hash from the stored hash of the position before it, and the next id from the token's hash. So a
wrongly shared, recycled or unwritten slot changes the output. Before a row writes, it reads the positions that kernels
would read: all positions before it or, in a group with a window, the positions from first_kept() on.

With `slots`, the model is recurrent: it reads the hash before a chunk from a state slot, and writes the hash after the
chunk to another slot.
"""

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import Any

from shared.messages import Outcome, Sampling
from worker.kv_cache.pages import PagePool, first_kept
from worker.scheduler.drafts import Drafter
from worker.scheduler.ngrams import NgramDrafter
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import (
    TILE,
    Chunk,
    Constraint,
    Ids,
    Plan,
    PrefixState,
    PromptScores,
    RequestStats,
    SchedulingParams,
    Sequence,
    SequenceUpdate,
    slots_of,
)

VOCAB = 11
EOS = 0
FRONTEND = b"frontend"


def mix(before: int, token: int) -> int:
    return (before * 1_000_003 ^ (token + 1) * 0x9E3779B97F4A7C15) & 0xFFFF_FFFF_FFFF_FFFF


def root(cache_salt: str) -> int:
    return sum(cache_salt.encode()) + 1


def chain(tokens: Iterable[int], cache_salt: str = "") -> list[int]:
    hashes, last = [], root(cache_salt)
    for token in tokens:
        last = mix(last, token)
        hashes.append(last)
    return hashes


def next_id(last: int) -> int:
    return (last >> 20) % VOCAB


def reference(sequence: Sequence, config: SchedulerConfig) -> tuple[list[int], Outcome]:
    """Returns all tokens and the outcome, computed by the simplest loop: without pages, steps or other sequences."""
    sampling, prompt = sequence.sampling, sequence.prompt_len
    tokens = sequence.tokens[:prompt]
    while True:
        output = tokens[prompt:]
        may_end = output and len(output) >= sampling.min_tokens
        if may_end and output[-1] in config.eos_token_ids and not sampling.ignore_eos:
            return tokens, Outcome.EOS
        if may_end and output[-1] in sampling.stop_token_ids:
            return tokens, Outcome.STOP
        if len(output) == sampling.max_tokens or len(tokens) == config.max_seq_len:
            return tokens, Outcome.LENGTH
        tokens.append(next_id(chain(tokens, sequence.prefix.salt)[-1]))


def commit(scheduler: Scheduler, plan: Plan, ids: list[int], now: float) -> list[SequenceUpdate]:
    """Launches a step and applies its results at once, as without overlap."""
    scheduler.launched(plan)
    return scheduler.update(plan, ids, now)


def shape(plan: Plan) -> list[tuple[Sequence, int, int]]:
    return [(chunk.sequence, chunk.start, chunk.length) for chunk in plan.chunks]


def members(plan: Plan) -> list[Sequence]:
    return [chunk.sequence for chunk in plan.chunks]


class Rig:
    """A scheduler with its pool and fake model. Every step checks the invariants of plans.

    windows: sliding window → number of pages, for each further group of layers
    slots: number of slots for recurrent states, with the scratch slot; 0: the model is not recurrent
    overlap: whether step() leaves the last launched step in flight
    stages: number of stages of the model; step() leaves one step less in flight
    token_s: seconds that computing a token takes
    """

    def __init__(
        self,
        pages: int = 65,
        page_size: int = 4,
        *,
        windows: dict[int, int] | None = None,
        slots: int = 0,
        overlap: bool = False,
        stages: int = 1,
        token_s: float = 0.0,
        **settings: Any,
    ) -> None:
        self.steps_behind = stages - 1 or int(overlap)  # how many steps step() leaves in flight
        self.token_s = token_s
        # plans that are launched but not applied, with their ids
        self.in_flight: deque[tuple[Plan, list[int]]] = deque()
        self.config = SchedulerConfig(
            **{"max_seq_len": 64, "overlap": overlap, "pipeline_parallel_size": stages, **settings}
        )
        self.pools = [PagePool(pages, page_size)] if pages else []
        self.pools += [PagePool(count, page_size, window) for window, count in (windows or {}).items()]
        self.pool = self.pools[0]
        self.slots = PagePool(slots, page_size) if slots else None
        self.scheduler = Scheduler(self.config, self.pools, self.slots)
        self.states: dict[int, int] = {}  # hashes by state slot
        self.store: dict[tuple[int, int, int], int] = {}
        self.now = 0.0
        self.count = 0
        self.ends: dict[Sequence, Outcome] = {}

    def sequence(
        self, prompt: list[int] | int, max_tokens: int = 8, *, generated: tuple[int, ...] = (),
        cache_salt: str = "", group: int = 0, deadline: float = inf, tenant: str = "", priority: int = 0,
        **sampling: Any,
    ) -> Sequence:  # fmt: skip
        """Makes a sequence. prompt: tokens, or the length of a prompt that shares no prefix with other prompts"""
        self.count += 1
        tokens = [1000 + self.count] * prompt if isinstance(prompt, int) else prompt
        return Sequence(
            key=(FRONTEND, self.count),
            tokens=[*tokens, *generated],
            prompt_len=len(tokens),
            sampling=Sampling(max_tokens=max_tokens, **sampling),
            seed=0,
            turn=SchedulingParams(group, priority, deadline, tenant),
            history=RequestStats(self.now),
            prefix=PrefixState(cache_salt),
            scores=PromptScores() if sampling.get("prompt_logprobs") else None,
        )

    def submit(self, prompt: list[int] | int, max_tokens: int = 8, **options: Any) -> Sequence:
        sequence = self.sequence(prompt, max_tokens, **options)
        self.scheduler.submit(sequence, self.now)
        self.scheduler.check()
        return sequence

    def plan(self) -> Plan:
        plan = self.scheduler.plan(self.now)
        self.check_plan(plan)
        self.scheduler.check()
        return plan

    def step(self) -> list[SequenceUpdate]:
        plan = self.plan()
        if not self.steps_behind:
            return self.commit(plan, self.run(plan))
        if plan:
            self.launch(plan)
        return self.finish_steps(keep=self.kept(plan))

    def kept(self, plan: Plan) -> int:
        """Returns how many steps stay in flight after one was launched; one less than before if none was."""
        return self.steps_behind if plan else max(0, len(self.in_flight) - 1)

    def launch(self, plan: Plan) -> None:
        """Computes the step at once; finish_steps() passes its ids to the scheduler later."""
        ids = self.run(plan)
        self.scheduler.launched(plan)
        self.in_flight.append((plan, ids))
        self.scheduler.check()

    def finish_steps(self, keep: int = 0) -> list[SequenceUpdate]:
        updates: list[SequenceUpdate] = []
        while len(self.in_flight) > keep:
            plan, ids = self.in_flight.popleft()
            updates += self.check_updates(self.scheduler.update(plan, ids, self.now))
        return updates

    def commit(self, plan: Plan, ids: list[int]) -> list[SequenceUpdate]:
        return self.check_updates(commit(self.scheduler, plan, ids, self.now))

    def check_updates(self, updates: list[SequenceUpdate]) -> list[SequenceUpdate]:
        self.scheduler.check()
        for update in updates:
            if update.outcome is not None:
                assert update.sequence not in self.ends, "a second end"
                self.ends[update.sequence] = update.outcome
                assert (update.sequence.tokens, update.outcome) == reference(update.sequence, self.config)
        return updates

    def finish(self, steps: int) -> set[Sequence]:
        """Runs steps at the times that the scheduler asks for, until no work is left. Returns what expired.

        Raises AssertionError if work is left after `steps` steps.
        """
        late: set[Sequence] = set()
        for _ in range(steps):
            late.update(self.scheduler.expire(self.now))
            if not self.scheduler.has_work:
                return late
            self.now = max(self.now, min(self.scheduler.next_wakeup(self.now), self.now + 1.0))
            self.step()
        assert not self.scheduler.has_work, (
            f"{self.scheduler.status.running} run and {self.scheduler.status.waiting} wait for ever"
        )
        return late

    def tokens(self, sequence: Sequence) -> list[int]:
        """Returns the tokens of a sequence as the device knows them, with the ids of steps in flight."""
        pending = []
        for plan, ids in self.in_flight:
            pending += [id for (sampled, *_), id in zip(plan.rows, ids, strict=True) if sampled is sequence]
        return sequence.tokens + pending[len(pending) - sequence.pending_outputs :]

    def run(self, plan: Plan) -> list[int]:
        """Simulates a forward: reads and writes K/V through the pages, and returns the sampled ids."""
        for chunk in plan.chunks:
            self.check_read(chunk.sequence, chunk.start)
        before = self.read_states(plan)
        written: set[tuple[int, int, int]] = set()
        ids = []
        for chunk in plan.chunks:
            tokens = [*self.tokens(chunk.sequence), *chunk.drafts]
            end = chunk.start + chunk.length
            last = before[chunk.sequence]
            for position in range(chunk.start, end):
                last = mix(last, tokens[position])
                for group in range(len(self.pools)):
                    slot = self.slot(chunk.sequence, group, position)
                    assert slot not in written, f"{slot} is written twice in a step"
                    written.add(slot)
                    self.store[slot] = last
                if position >= end - chunk.rows:
                    ids.append(next_id(last))
            if self.slots is not None:
                self.states[slots_of(chunk.sequence).free[-1]] = last
        self.now += self.token_s * plan.tokens
        return ids

    def read_states(self, plan: Plan) -> dict[Sequence, int]:
        """Returns the hash of all tokens before each chunk, as read from the chunk's state slot."""
        before, sequences = {}, [chunk.sequence for chunk in plan.chunks]
        for chunk, one in zip(plan.chunks, sequences, strict=True):
            if not chunk.start:
                before[one] = root(one.prefix.salt)
            elif self.slots is None:
                before[one] = self.store[self.slot(one, 0, chunk.start - 1)]
            else:
                before[one] = self.states[slots_of(one).at[chunk.start]]
                assert before[one] == chain(self.tokens(one)[: chunk.start], one.prefix.salt)[-1], "another's state"
        if self.slots is not None:
            writes = [slots_of(one).free[-1] for one in sequences]
            kept = {slot for one in self.scheduler.state.running for slot in slots_of(one).at.values()}
            assert len(set(writes)) == len(writes) and not kept & set(writes), "a slot in use would be written"
            assert all(self.slots.owners()[slot] == 1 for slot in writes) and 0 not in writes
            assert not any(self.slots.is_published(slot) for slot in writes), "a checkpoint would be written"
        return before

    def slot(self, sequence: Sequence, group: int, position: int) -> tuple[int, int, int]:
        page = sequence.pages[group][position // self.pool.page_size]
        assert page != 0, "the scratch page holds no sequence"
        return group, page, position % self.pool.page_size

    def check_read(self, sequence: Sequence, end: int) -> None:
        expected = chain(self.tokens(sequence)[:end], sequence.prefix.salt)
        for group, pool in enumerate(self.pools):
            first = first_kept(pool.window, end)
            found = [self.store.get(self.slot(sequence, group, position)) for position in range(first, end)]
            assert found == expected[first:], f"{sequence.key} would read another sequence's K/V"

    def check_plan(self, plan: Plan) -> None:
        """Checks the chunks of a plan, except their drafts, which check_drafts() checks."""
        if plan.drafts:
            self.check_drafts(plan)
        config = self.config
        chunks = [Chunk(one.sequence, one.start, one.length - len(one.drafts), one.samples) for one in plan.chunks]
        sequences = [chunk.sequence for chunk in chunks]
        assert len(set(sequences)) == len(sequences) <= config.max_batch_size
        assert not set(sequences) & set(plan.preempted)
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.start + chunk.length
            length = len(sequence.tokens) + sequence.pending_outputs
            assert (
                chunk.length > 0
                and chunk.start == sequence.computed_tokens + sequence.in_flight_tokens
                and end <= length
            )
            assert not sequence.pending_outputs or sequence.next_output < sequence.sampling.max_tokens, (
                "a row beyond its length"
            )
            assert not sequence.pending_outputs or length < config.max_seq_len, "a row beyond its length"
            assert end <= sequence.capacity, "no page to write to"
            assert end == length or not chunk.samples
            for pool, pages in zip(self.pools, sequence.pages, strict=True):
                shared = pages[chunk.start // pool.page_size :]
                assert all(pool.owners()[page] == 1 for page in shared), "a shared page would be written"
        ends = [chunk.start + chunk.length for chunk in chunks]
        cuts = [self.cut(chunk) for chunk in chunks]
        assert all(end <= cut for end, cut in zip(ends, cuts, strict=True)), "a chunk crosses a checkpoint"
        prompts = [chunk for chunk in chunks if chunk.length > 1 or chunk.start + 1 < len(self.tokens(chunk.sequence))]
        assert len(prompts) <= (config.max_prefill_chunks_per_step or len(prompts))
        if config.use_chunked_prefill:
            assert plan.tokens <= config.max_step_tokens
            assert all(chunk.length <= config.prefill_chunk_size for chunk in chunks)
        else:
            last = chunks[-1].length if chunks else 0
            assert plan.tokens <= config.max_step_tokens or plan.tokens - last < config.max_step_tokens
            lengths = [len(self.tokens(chunk.sequence)) for chunk in chunks]
            assert all(end in both for end, *both in zip(ends, lengths, cuts, strict=True))

    def cut(self, chunk: Chunk) -> int:
        """Returns the first checkpoint after the chunk's start."""
        config, size = self.config, self.pool.page_size
        scores = chunk.sequence.scores
        prompt = (scores and scores.start) or chunk.sequence.prompt_len  # without a scored end, the whole prompt
        if self.slots is None or not config.prefix_cache:
            return config.max_seq_len
        spacing = -(-config.state_checkpoint_tokens // size) * size
        candidates = [(prompt - 1) // size * size, *range(spacing, chunk.start + spacing + 1, spacing)]
        return min(at for at in candidates if at > chunk.start)

    def check_drafts(self, plan: Plan) -> None:
        assert plan.tokens <= min(TILE, self.config.max_step_tokens)
        for chunk in plan.chunks:
            sequence, drafts = chunk.sequence, len(chunk.drafts)
            repeats = chunk.length > 1 + drafts
            assert drafts <= self.config.max_draft_tokens
            assert not repeats or chunk.start >= sequence.prompt_len, "a prompt's step has drafts"
            if drafts:
                last = len(sequence.tokens) - 1
                assert chunk.samples and chunk.start + chunk.length - drafts - 1 == last >= sequence.prompt_len
                assert chunk.start + chunk.length <= self.cut(chunk), "drafts cross a checkpoint"
                assert not sequence.in_flight_tokens, "the token before them is not known yet"
                assert chunk.start + chunk.length <= sequence.capacity, "no page to write to"
                assert sequence.output_len + drafts < sequence.sampling.max_tokens, "a row beyond its length"
                assert len(sequence.tokens) + drafts < self.config.max_seq_len, "a row beyond its length"


def set_drafter(scheduler: Scheduler, sequence: Sequence, drafter: Drafter) -> None:
    """Sets the drafter of a sequence, if the scheduler speculates at all."""
    if scheduler.speculation is not None:
        scheduler.speculation.drafters[sequence] = drafter


def feed(rig: Rig, sequence: Sequence, ids: list[int]) -> Outcome | None:
    """Runs steps in which the model samples `ids`. Returns the outcome, or None if the sequence continues."""
    outcome = None
    for token in ids:
        assert outcome is None, "it has ended already"
        (update,) = commit(rig.scheduler, rig.scheduler.plan(rig.now), [token], rig.now)
        rig.scheduler.check()
        assert update.sequence is sequence and update.tokens == [token]
        outcome = update.outcome
    return outcome


def join_order(rig: Rig, steps: int = 500) -> list[Sequence]:
    """Runs until all sequences have ended; returns them in the order in which they first ran."""
    joined: dict[Sequence, None] = {}
    for _ in range(steps):
        if not rig.scheduler.has_work:
            return list(joined)
        rig.now += 1.0
        plan = rig.plan()
        joined |= dict.fromkeys(members(plan))
        rig.commit(plan, rig.run(plan))
    raise AssertionError("it does not end")


class OracleDrafter(NgramDrafter):
    """Proposes the next tokens of `tokens`, a few of them wrong, and after the end of `tokens` only wrong tokens."""

    def __init__(self, tokens: list[int], salt: int = 0) -> None:
        super().__init__()
        self._tokens = tokens
        self._salt = salt
        self._stopped = False

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0, ahead: Ids = ()) -> Ids:
        if self._stopped:
            return ()
        places = range(len(tokens) + len(ahead), len(tokens) + len(ahead) + limit)
        return tuple(self._guess(place) for place in places)

    def stop(self) -> None:
        self._stopped = True

    def _guess(self, place: int) -> int:
        if place >= len(self._tokens) or mix(self._salt, place) % 5 == 0:
            return (place + self._salt) % VOCAB
        return self._tokens[place]


class Rule(Constraint):
    """Forbids some ids, and forces ids at some lengths of the output."""

    idle, error = False, ""

    def __init__(self, forbidden: Ids = (), forced: dict[int, Ids] | None = None, at: int = 0, last: int = 99) -> None:
        self._forbidden, self._forced, self._at, self._last = forbidden, forced or {}, at, last

    masks = True

    @property
    def ended(self) -> bool:
        return self._at >= self._last

    def accept(self, token: int) -> bool:
        self._at += 1
        return token not in self._forbidden

    def forced(self, limit: int) -> Ids:
        return self._forced.get(self._at, ())[:limit]

    def after(self, ids: Ids) -> "tuple[Rule, int]":
        count = next((at for at, id in enumerate(ids) if id in self._forbidden), len(ids))
        count = min(count, self._last - self._at)
        return Rule(self._forbidden, self._forced, self._at + count, self._last), count


class SlowMask:
    """A constraint whose masks take long. ready: whether the next one is there; is_computed: whether it was begun"""

    ended = is_computed = False

    def __init__(self) -> None:
        self.ready, self.asked = False, list[str]()

    def prepare(self, tenant: str) -> bool:
        self.asked.append(tenant)
        return self.ready
