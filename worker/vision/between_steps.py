"""Encodes the pictures that running sequences wait for, some pieces between two steps.

A large picture takes seconds. If a step encoded it, all other streams would stand still for so long. Therefore the
planner computes a prompt up to its first picture that is not encoded, and the loop calls this module after each step.
It encodes as many pieces as cost about what the step had left for tokens of prompts, and at least one.
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

    token_cost: multiplications of the text model for a token of a prompt. record_step: notes the sequences that are
    to blame if the worker dies now. publish: sends what the step before has computed. check_device:
    raises if the device can compute nothing more. fail: ends a sequence whose picture could not be encoded.
    """

    vision: Vision
    scheduler: Scheduler
    token_cost: int
    record_step: Callable[[list[Sequence]], None]
    publish: Callable[[], None]
    check_device: Callable[[], None]
    fail: Callable[[Sequence, Exception], None]

    def __call__(self, plan: Plan) -> bool:
        """Encodes some pieces of the first picture that a sequence waits for. Returns whether one does.

        plan: of the step before
        """
        seeing = [sequence for sequence in self.scheduler.state.running if sequence.pictures is not None]
        stops = [(sequence, stop) for sequence in seeing if (stop := _stop_of(sequence)) is not None]
        self.vision.forget_unread({picture.digest for _, picture in stops})
        for sequence, picture in stops:
            if picture.digest not in self.vision:
                self.publish()
                in_flight = [chunk.sequence for chunk in plan.chunks if chunk.sequence.in_flight_tokens]
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
        """Returns how many more tokens of prompts the step could have had."""
        prompts = sum(chunk.length for chunk in plan.chunks if chunk.length > 1)
        if len(plan.chunks) == 0 or prompts == plan.tokens:  # nobody waits for the next token of a stream
            return self.scheduler.config.max_step_tokens - prompts
        return self.scheduler.status.prefill_budget.prompt_tokens - prompts


def _stop_of(sequence: Sequence) -> Picture | None:
    assert sequence.pictures is not None
    return sequence.pictures.at(sequence.computed_tokens + sequence.in_flight_tokens)


def token_cost(spec: ModelSpec) -> int:
    """Returns about how many multiplications the layers of a text model have for a token."""
    attention = spec.hidden_size * (spec.qkv_size + spec.heads * spec.head_dim)
    total = 0
    for layer in spec.layers:
        wide = layer.intermediate_size or spec.intermediate_size
        if layer.sparse and spec.experts is not None:
            wide = spec.experts.chosen * spec.experts.intermediate_size + spec.experts.shared_size
        total += attention + (3 if spec.gated else 2) * spec.hidden_size * wide
    return total
