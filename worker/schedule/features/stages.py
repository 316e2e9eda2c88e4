"""Shares the work of a pipeline among the steps in flight, so that each stage has a step to compute.

A model whose layers are cut into P stages (worker/ranks/) computes up to P steps at once, each in another stage. The
ids of a step are known only when it is read. So a sequence is not planned again while an id of it is in flight, and a
step takes no more than about the P-th part of the work, which leaves work for the steps behind it. The next chunk of a
prompt may be in flight behind the last one, because each stage computes the steps in order.

No decode is starved: P steps in a row have room for all decodes.
"""

from math import inf

from worker.kv_cache.window import chunk_tokens
from worker.schedule.policy import SchedulerConfig
from worker.schedule.sequence import Sequence
from worker.schedule.state import SchedulerState
from worker.schedule.step_time import StepTimePolicy

LEAST_PROMPT_TOKENS = 128  # a prompt is not cut into smaller chunks: each chunk reads all weights


class StageShares:
    """Limits what the next step of a pipeline contains."""

    def __init__(self, config: SchedulerConfig, state: SchedulerState, step_time: StepTimePolicy) -> None:
        self._stages = config.pipeline_parallel_size
        self._state, self._step_time = state, step_time
        # With so many tokens in flight, a sequence may still be planned. A recurrent state has no third slot, and pages
        # of a window are for two chunks (worker/kv_cache/window.py).
        self._most_in_flight = inf
        if state.paging.states is not None:
            self._most_in_flight = 0
        elif any(pool.window for pool in state.paging.pools):
            self._most_in_flight = chunk_tokens(config, config.max_seq_len)

    def may_plan(self, sequence: Sequence) -> bool:
        """Whether the next tokens of a running sequence are known, and may be computed behind those in flight."""
        return not sequence.pending_outputs and sequence.in_flight_tokens <= self._most_in_flight

    def decodes(self, ready: list[Sequence]) -> list[Sequence]:
        """Returns the decodes of this step: the oldest of those that are ready."""
        return ready[: self._share(len(self._state.running))]

    def prefill_budget(self, decodes: int) -> int:
        """Returns how many prompt tokens the step may have. decodes: how many decodes it has

        A step without decodes is limited, too, if decodes are in flight, because they wait for it in every stage.
        """
        running = self._state.running
        waiting_ids = decodes or sum([sequence.pending_outputs for sequence in running])
        prompts = sum([left for sequence in running if (left := sequence.uncomputed_tokens) > 1])
        share = self._share(prompts + self._state.queue.tokens)
        return min(self._step_time.prefill_budget(waiting_ids), max(LEAST_PROMPT_TOKENS, share))

    def _share(self, work: int) -> int:
        return -(-work // self._stages)
