"""Encodes the pictures that running sequences wait for, some pieces between two steps.

Encoding a large picture takes seconds. If a step did it, all other streams would stop for that time. Therefore the
planner computes a prompt only up to its first picture that is not encoded, and the compute loop calls this module after
each step. The module encodes pieces that together cost about as much as the prompt tokens that still fitted in the
step, and at least one piece.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shared.messages import Picture
from worker.schedule.scheduler import Scheduler
from worker.schedule.sequence import Plan, Sequence
from worker.spec import ModelSpec
from worker.vision.vision import Vision


@dataclass(frozen=True, slots=True)
class BetweenSteps:
    """Encodes pictures between steps.

    token_cost: multiplications of the text model for one prompt token
    record_step: records the sequences that are to blame if the worker dies now
    publish: sends the results of the step before
    check_device: raises if the device is unusable
    fail: ends a sequence whose picture could not be encoded
    """

    vision: Vision
    scheduler: Scheduler
    token_cost: int
    record_step: Callable[[list[Sequence]], None]
    publish: Callable[[], None]
    check_device: Callable[[], None]
    fail: Callable[[Sequence, Exception], None]

    def __call__(self, plan: Plan) -> bool:
        """Encodes some pieces of the first picture that a sequence waits for. Returns False if no sequence waits.

        plan: the plan of the step before
        """
        seeing = [sequence for sequence in self.scheduler.state.running if sequence.pictures is not None]
        stops = [(sequence, stop) for sequence in seeing if (stop := _stop_of(sequence)) is not None]
        self.vision.forget_unread({picture.digest for _, picture in stops})
        for sequence, picture in stops:
            if picture.digest not in self.vision:
                self.publish()
                in_flight = [other for other in self.scheduler.state.running if other.in_flight_tokens]
                self.record_step([sequence, *in_flight])
                self._encode(sequence, picture, self._room(plan) * self.token_cost)
                return True
        return False

    def _encode(self, sequence: Sequence, picture: Picture, most: int) -> None:
        try:
            self.vision.advance(picture, most)
        except Exception as error:
            self.check_device()  # raises before the sequence is reported as failed
            self.fail(sequence, error)

    def _room(self, plan: Plan) -> int:
        """Returns how many more prompt tokens would have fitted in the step."""
        prompts = sum(chunk.length for chunk in plan.chunks if chunk.length > 1)
        if len(plan.chunks) == 0 or prompts == plan.tokens:  # no stream waits for its next token
            return self.scheduler.config.max_step_tokens - prompts
        return self.scheduler.status.prefill_budget.prompt_tokens - prompts


def _stop_of(sequence: Sequence) -> Picture | None:
    assert sequence.pictures is not None
    return sequence.pictures.at(sequence.computed_tokens + sequence.in_flight_tokens)


def token_cost(spec: ModelSpec) -> int:
    """Returns about how many multiplications the layers of a text model do for one token."""
    attention = spec.hidden_size * (spec.qkv_size + spec.heads * spec.head_dim)
    total = 0
    for layer in spec.layers:
        wide = layer.intermediate_size or spec.intermediate_size
        if layer.sparse and spec.experts is not None:
            wide = spec.experts.chosen * spec.experts.intermediate_size + spec.experts.shared_size
        total += attention + (3 if spec.gated else 2) * spec.hidden_size * wide
    return total
