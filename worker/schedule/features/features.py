"""Makes the parts of a scheduler that only some models or settings need, and loads their modules only then."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from worker.kv_cache.pages import PagePool
from worker.schedule.policy import SchedulerConfig
from worker.schedule.queue import WaitingQueue
from worker.schedule.sequence import Sequence
from worker.schedule.step_time import StepTimePolicy

if TYPE_CHECKING:
    from worker.schedule.features.speculation import Speculation
    from worker.schedule.features.stages import StageShares
    from worker.schedule.features.states import States


def states_of(config: SchedulerConfig, slots: PagePool | None, page_size: int) -> "States | None":
    """Returns the States that give slots for recurrent states to sequences; None if no layer has a recurrent state."""
    if slots is None:
        return None
    from worker.schedule.features.states import States

    interval = config.state_checkpoint_tokens if config.prefix_cache else 0
    return States(slots, page_size, interval, overlap=config.overlap)


def speculation_of(config: SchedulerConfig, states: "States | None" = None) -> "Speculation | None":
    """Returns the Speculation that proposes drafts for decodes; None if speculation is off."""
    if not config.max_draft_tokens:
        return None
    from worker.schedule.features.speculation import Speculation

    return Speculation(config, states)


def stages_of(
    config: SchedulerConfig, running: Collection[Sequence], queue: WaitingQueue, step_time: StepTimePolicy,
    most_in_flight: float,
) -> "StageShares | None":  # fmt: skip
    """Returns the StageShares that limit steps if the model is cut into stages; None if it is not."""
    if config.pipeline_parallel_size == 1:
        return None
    from worker.schedule.features.stages import StageShares

    return StageShares(config.pipeline_parallel_size, running, queue, step_time, most_in_flight)
