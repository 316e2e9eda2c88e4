"""The scheduler's modes as small objects that answer questions.

    batching   how many may join now, and when may some           Continuous | Static
    cutting    how much of this prompt in this step               Chunked | Whole
    order      who gets a full step's tokens first                Fcfs | PrefillFirst | DecodeRoundRobin
    pace       how many prompt tokens beside decodes              Pace (pace.py)

None of them touches a page or changes a sequence, and there is one scheduler for all of them.
"""

from dataclasses import dataclass, fields, replace
from math import inf
from typing import Protocol

from shared.config import WorkerConfig
from worker.schedule.sequence import Sequence
from worker.schedule.step_time import StepTimePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler has to know; names and meanings are those of WorkerConfig."""

    max_seq_len: int
    eos_token_ids: frozenset[int] = frozenset()
    batching_mode: str = "continuous"
    batch_wait_timeout_s: float = 0.05
    scheduler_policy: str = "fcfs"
    use_chunked_prefill: bool = True
    prefill_chunk_size: int = 512
    max_prefill_chunks_per_step: int = 0
    max_step_tokens: int = 1024
    target_step_s: float = 0.0
    max_batch_size: int = 64
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 0
    prefix_cache: bool = True
    max_draft_tokens: int = 0  # for one sequence in a step; 0: --speculation off
    watermark: float = 0.01  # share of the pool that new sequences leave to the growth of running ones

    @classmethod
    def of(cls, worker: WorkerConfig, max_seq_len: int, eos_token_ids: frozenset[int]) -> "SchedulerConfig":
        """From the worker's settings; `max_seq_len` as the worker resolved it (the setting may be 0)."""
        paged = worker.kv_cache_backend == "paged"
        same = {one.name: getattr(worker, one.name) for one in fields(cls) if hasattr(worker, one.name)}
        return replace(
            cls(**same, max_seq_len=max_seq_len, eos_token_ids=eos_token_ids),
            prefix_cache=worker.prefix_cache and paged,
            max_draft_tokens=worker.max_draft_tokens if worker.speculation == "ngram" else 0,
            watermark=0.01 if paged else 0.0,  # a sequence with a page of max_seq_len tokens never grows
        )


class Batching(Protocol):
    """When sequences may join those that run."""

    closed: bool  # a batch is closed once it formed: all its members join in one step, and nobody later

    def joining(self, now: float, running: int, resuming: int, fresh: int, oldest: float) -> int:
        """How many may join in the step that is being planned.

        `running` sequences run, `resuming` were preempted, `fresh` never ran, the first of them came at `oldest`.
        """

    def opens(self, now: float, fresh: int, oldest: float) -> float:
        """When joining() should be asked again, if nothing runs, `fresh` wait and nothing else happens."""


class Continuous:
    """Whoever finds a place joins at the next step."""

    closed = False

    def __init__(self, max_batch_size: int) -> None:
        self._places = max_batch_size

    def joining(self, now: float, running: int, resuming: int, fresh: int, oldest: float) -> int:
        return self._places - running

    def opens(self, now: float, fresh: int, oldest: float) -> float:
        return now


class Static:
    """A batch forms when `max_batch_size` wait, or `timeout` seconds after the first of them could have started:
    after it came or after the last batch was over, whichever is later. It runs until all its members finished.
    """

    closed = True

    def __init__(self, max_batch_size: int, timeout: float) -> None:
        self._places = max_batch_size
        self._timeout = timeout
        self._idle_since: float | None = None

    def joining(self, now: float, running: int, resuming: int, fresh: int, oldest: float) -> int:
        if running or resuming:
            self._idle_since = None
            return resuming
        if self._idle_since is None:
            self._idle_since = now
        if not fresh or now < self.opens(now, fresh, oldest):
            return 0
        self._idle_since = None
        return self._places

    def opens(self, now: float, fresh: int, oldest: float) -> float:
        if fresh >= self._places or self._idle_since is None:
            return now
        return max(self._idle_since, oldest) + self._timeout


class ChunkPolicy(Protocol):
    """How much of a prompt a step computes."""

    def cut(self, behind: int, budget: int) -> int:
        """How many of a prompt's `behind` tokens to compute when `budget` are left in the step (0 or less: none)."""


class Chunked:
    """At most `size` tokens of a prompt, and of all prompts as many as the budget has left."""

    def __init__(self, size: int) -> None:
        self._size = size

    def cut(self, behind: int, budget: int) -> int:
        return max(0, min(behind, self._size, budget))


class Whole:
    """A prompt is never cut: the last one of a step may exceed the budget."""

    def cut(self, behind: int, budget: int) -> int:
        return behind if budget > 0 else 0


class Order(Protocol):
    """Who goes first when a step cannot hold everybody. What one side leaves, the other may use."""

    def reserve(self, budget: int) -> int:
        """How many of the step's tokens decodes may claim before prompts are looked at."""

    def arrange(self, decodes: list[Sequence]) -> list[Sequence]:
        """Decodes, given from oldest to newest, in the order in which they get their token."""

    def advanced(self, count: int, decodes: int) -> None:
        """The first `count` of the `decodes` arranged ones were served."""


class Fcfs:
    """Decodes first, from oldest to newest; prompts share what is left, in order of arrival."""

    def reserve(self, budget: int) -> int:
        return budget

    def arrange(self, decodes: list[Sequence]) -> list[Sequence]:
        return decodes

    def advanced(self, count: int, decodes: int) -> None:
        pass


class PrefillFirst(Fcfs):
    """Prompts first, in order of arrival; decodes share what is left, from oldest to newest.

    Decodes are not starved: once `max_batch_size` sequences run, no prompt joins until one of them has finished.
    """

    def reserve(self, budget: int) -> int:
        return 0


class DecodeRoundRobin:
    """Decodes may claim half of the step, the larger one, before prompts share the rest. When not all of them
    fit, the next step goes on with the first that was left out, so that all advance in turn.
    """

    def __init__(self) -> None:
        self._turn = 0

    def reserve(self, budget: int) -> int:
        return budget - budget // 2

    def arrange(self, decodes: list[Sequence]) -> list[Sequence]:
        turn = self._turn % len(decodes) if decodes else 0
        return decodes[turn:] + decodes[:turn]

    def advanced(self, count: int, decodes: int) -> None:
        self._turn = (self._turn + count) % decodes if count < decodes else 0


def batching(config: SchedulerConfig) -> Batching:
    if config.batching_mode == "static":
        return Static(config.max_batch_size, config.batch_wait_timeout_s)
    return Continuous(config.max_batch_size)


def chunk_policy(config: SchedulerConfig) -> ChunkPolicy:
    return Chunked(config.prefill_chunk_size) if config.use_chunked_prefill else Whole()


def order(config: SchedulerConfig) -> Order:
    orders: dict[str, type[Order]] = {
        "fcfs": Fcfs,
        "prefill_first": PrefillFirst,
        "decode_round_robin": DecodeRoundRobin,
    }
    return orders[config.scheduler_policy]()


def step_time_policy(config: SchedulerConfig) -> StepTimePolicy:
    """Where a prompt is never cut, or goes before decodes, there is nothing to hold back."""
    whole = config.batching_mode == "static" or not config.use_chunked_prefill
    free = whole or config.scheduler_policy == "prefill_first"
    return StepTimePolicy(inf if free else config.target_step_s or inf, config.max_step_tokens)
