"""The scheduling modes, as small objects that the scheduler asks.

    BatchingPolicy    how many sequences may join now, and when           ContinuousBatching | StaticBatching
    ChunkPolicy       how much of a prompt a step computes                ChunkedPrefill | WholePrefill
    OrderPolicy       which sequences go first if a step is full          Fcfs | PrefillFirst | DecodeRoundRobin
    StepTimePolicy    how many prompt tokens a step with decodes has      step_time.py

No policy touches a page or changes a sequence. The same scheduler works with all policies.
"""

from dataclasses import dataclass, fields, replace
from math import inf
from typing import Protocol

from shared.config.worker import WorkerConfig
from worker.scheduler.sequence import Sequence
from worker.scheduler.step_time import StepTimePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The settings of the scheduler. Fields with the same name in WorkerConfig have the same meaning there."""

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
    max_loras: int = 8
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 0
    prefix_cache: bool = True
    state_checkpoint_tokens: int = 512
    overlap: bool = False
    pipeline_parallel_size: int = 1
    max_draft_tokens: int = 0  # per sequence and step; 0: no speculation
    cpu_vocab_size: int = 0  # the vocabulary, if a CPU computes logits and draws; 0: a GPU does
    watermark: float = 0.01  # share of the pool that new sequences leave free for running ones to grow

    @classmethod
    def of(cls, worker: WorkerConfig, max_seq_len: int, eos_token_ids: frozenset[int]) -> "SchedulerConfig":
        """Makes the config from the worker's settings. max_seq_len: the resolved value (the setting may be 0)."""
        paged = worker.kv_cache_backend == "paged"
        same = {field.name: getattr(worker, field.name) for field in fields(cls) if hasattr(worker, field.name)}
        return replace(
            cls(**same, max_seq_len=max_seq_len, eos_token_ids=eos_token_ids),
            prefix_cache=worker.prefix_cache and paged,
            max_draft_tokens=worker.max_draft_tokens if worker.speculation == "ngram" else 0,
            watermark=0.01 if paged else 0.0,  # without paging, a sequence has one page of max_seq_len tokens
        )


class BatchingPolicy(Protocol):
    """Decides when waiting sequences may join the running ones."""

    closed: bool  # whether all sequences of a batch join in one step and no sequence joins later

    def places(self, now: float, running: int, preempted: int, fresh: int, oldest: float) -> int:
        """Returns how many sequences may join in the step that is being planned.

        running: how many sequences run; preempted: how many waiting sequences were preempted; fresh: how many waiting
        sequences never ran; oldest: since when the first fresh one has been waiting.
        """

    def opens(self, now: float, fresh: int, oldest: float) -> float:
        """Returns when places() will admit the `fresh` waiting sequences, if no sequence runs and no more arrive."""


class ContinuousBatching:
    """Lets a sequence join at the next step if the batch has a free place."""

    closed = False

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size

    def places(self, now: float, running: int, preempted: int, fresh: int, oldest: float) -> int:
        return self._max_batch_size - running

    def opens(self, now: float, fresh: int, oldest: float) -> float:
        return now


class StaticBatching:
    """Runs each batch until all its sequences have finished, before others may join.

    A batch starts when `max_batch_size` sequences wait, or `timeout` seconds after the first of them could have started
    (it arrived, or the last batch ended, whichever is later).
    """

    closed = True

    def __init__(self, max_batch_size: int, timeout: float) -> None:
        self._max_batch_size = max_batch_size
        self._timeout = timeout
        self._idle_since: float | None = None

    def places(self, now: float, running: int, preempted: int, fresh: int, oldest: float) -> int:
        if running or preempted:
            self._idle_since = None
            return preempted
        if self._idle_since is None:
            self._idle_since = now
        if not fresh or now < self.opens(now, fresh, oldest):
            return 0
        self._idle_since = None
        return self._max_batch_size

    def opens(self, now: float, fresh: int, oldest: float) -> float:
        if fresh >= self._max_batch_size or self._idle_since is None:
            return now
        return max(self._idle_since, oldest) + self._timeout


class ChunkPolicy(Protocol):
    """Decides how much of a prompt a step computes."""

    def length(self, remaining: int, budget: int) -> int:
        """Returns how many of the `remaining` tokens of a prompt to compute.

        budget: how many tokens are left in the step. If 0 or less, no token is computed.
        """


class ChunkedPrefill:
    """Computes at most `size` tokens of each prompt in a step, as long as the budget lasts."""

    def __init__(self, size: int) -> None:
        self._size = size

    def length(self, remaining: int, budget: int) -> int:
        return max(0, min(remaining, self._size, budget))


class WholePrefill:
    """Computes each prompt in one step. The last prompt of a step may exceed the budget."""

    def length(self, remaining: int, budget: int) -> int:
        return remaining if budget > 0 else 0


class OrderPolicy(Protocol):
    """Decides which sequences go first when a step cannot hold all sequences.

    Tokens that decodes do not use are free for prompts, and the other way round.
    """

    def reserve(self, budget: int) -> int:
        """Returns how many tokens of the step are for decodes before prompts get any."""

    def arrange(self, decodes: list[Sequence]) -> list[Sequence]:
        """Returns the decodes in the order in which they get a token. decodes: from oldest to newest."""

    def served(self, count: int, decodes: int) -> None:
        """Notes that the first `count` of the `decodes` sequences that arrange() returned got a token."""


class Fcfs:
    """Serves decodes first, from oldest to newest. Prompts share the remaining tokens in order of arrival."""

    def reserve(self, budget: int) -> int:
        return budget

    def arrange(self, decodes: list[Sequence]) -> list[Sequence]:
        return decodes

    def served(self, count: int, decodes: int) -> None:
        pass


class PrefillFirst(Fcfs):
    """Serves prompts first, in order of arrival. Decodes share the remaining tokens from oldest to newest.

    Decodes are not starved: once `max_batch_size` sequences run, no prompt joins until one of them has finished.
    """

    def reserve(self, budget: int) -> int:
        return 0


class DecodeRoundRobin:
    """Reserves the larger half of the step for decodes. Prompts share the rest.

    If not all decodes fit, the next step starts with the first one that was left out, so that all advance in turn.
    """

    def __init__(self) -> None:
        self._next = 0

    def reserve(self, budget: int) -> int:
        return budget - budget // 2

    def arrange(self, decodes: list[Sequence]) -> list[Sequence]:
        start = self._next % len(decodes) if decodes else 0
        return decodes[start:] + decodes[:start]

    def served(self, count: int, decodes: int) -> None:
        self._next = (self._next + count) % decodes if count < decodes else 0


def batching_policy(config: SchedulerConfig) -> BatchingPolicy:
    if config.batching_mode == "static":
        return StaticBatching(config.max_batch_size, config.batch_wait_timeout_s)
    return ContinuousBatching(config.max_batch_size)


def chunk_policy(config: SchedulerConfig) -> ChunkPolicy:
    return ChunkedPrefill(config.prefill_chunk_size) if config.use_chunked_prefill else WholePrefill()


def order_policy(config: SchedulerConfig) -> OrderPolicy:
    orders: dict[str, type[OrderPolicy]] = {
        "fcfs": Fcfs,
        "prefill_first": PrefillFirst,
        "decode_round_robin": DecodeRoundRobin,
    }
    return orders[config.scheduler_policy]()


def step_time_policy(config: SchedulerConfig) -> StepTimePolicy:
    return StepTimePolicy(step_time_target(config), config.max_step_tokens)


def step_time_target(config: SchedulerConfig) -> float:
    """Returns the seconds that a step with decodes may take; inf if prompts are never split, or go before decodes.

    A step in a pipeline goes through all stages, but its measured time is that of one of them, because other stages
    compute other steps meanwhile.
    """
    whole = config.batching_mode == "static" or not config.use_chunked_prefill
    unlimited = whole or config.scheduler_policy == "prefill_first"
    return inf if unlimited else config.target_step_s / config.pipeline_parallel_size or inf
