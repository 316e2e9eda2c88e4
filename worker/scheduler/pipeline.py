"""Shares the work of a pipeline among the steps in flight, so that each stage has a step to compute.

A model whose layers are cut into P stages (worker/distributed/) computes up to P steps at once, each in another stage.
The ids of a step are known only when it is read. So a sequence is not planned again while an id of it is in flight, and
a step takes no more than about the P-th part of the work, which leaves work for the steps behind it. The next chunk of
a prompt may be in flight behind the last one, because each stage computes the steps in order.

No decode is starved: P steps in a row have room for all decodes.
"""

from collections.abc import Collection

from worker.scheduler.queue import WaitingQueue
from worker.scheduler.sequence import Sequence
from worker.scheduler.step_time import StepTimePolicy

LEAST_PROMPT_TOKENS = 128  # a prompt is not cut into smaller chunks: each chunk reads all weights


class StageShares:
    """Limits what the next step of a pipeline contains."""

    def __init__(
        self, stages: int, running: Collection[Sequence], queue: WaitingQueue, step_time: StepTimePolicy,
        most_in_flight: float,
    ) -> None:  # fmt: skip
        """running: a live view of the running sequences. most_in_flight: see Paging."""
        self._stages, self._running, self._queue = stages, running, queue
        self._step_time, self._most_in_flight = step_time, most_in_flight

    def may_plan(self, sequence: Sequence) -> bool:
        """Whether the next tokens of a running sequence are known, and may be computed behind those in flight."""
        return not sequence.pending_outputs and sequence.in_flight_tokens <= self._most_in_flight

    def share_of(self, ready: list[Sequence]) -> list[Sequence]:
        """Returns the decodes of this step: the oldest ones of those that could be computed.

        They are shared among the steps that can still be launched before one is read. No step has more than its share
        of all sequences, so that batches stay about equal when sequences come and go.
        """
        free = max(1, self._stages - self._step_time.in_flight)
        return ready[: min(-(-len(ready) // free), self._share(len(self._running)))]

    def prefill_budget(self, decodes: int, least: int) -> int:
        """Returns how many prompt tokens the step may have.

        decodes: how many decodes it has; least: how many prompt tokens it may have, however long they take

        A step without decodes is limited, too, if decodes are in flight, because they wait for it in every stage.
        """
        decodes = decodes or sum([sequence.pending_outputs for sequence in self._running])
        prompts = sum([left for sequence in self._running if (left := sequence.uncomputed_tokens) > 1])
        share = self._share(prompts + self._queue.tokens)
        return min(self._step_time.prefill_budget(decodes, least), max(LEAST_PROMPT_TOKENS, share))

    def _share(self, work: int) -> int:
        return -(-work // self._stages)
