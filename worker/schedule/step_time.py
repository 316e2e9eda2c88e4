"""How many prompt tokens a step may have while streams wait for its end, from how long steps took before.

A step is taken to last as long as its decodes alone, and so much longer for each prompt token. What that split gets
wrong corrects itself: the time of a prompt token is found with the same split, in steps of the same kind, so that what
is measured comes to the target whatever the parts are.

Medians of the last few steps: one that stood still (a stopped process, memory touched for the first time) changes
nothing. Pure counting, as everything here: the caller passes `now`.
"""

from collections import deque
from math import inf
from statistics import median_low
from typing import NamedTuple

from shared import messages as m
from worker.schedule.plan import TILE

FLOOR = 64  # prompt tokens that a step may have in any case: prompts advance, whatever was measured
WORTH = 3  # prompts may take so many times as long as any step takes, mostly to read the weights
SAMPLES = 7  # steps that an estimate looks back


class _Step(NamedTuple):
    planned: float
    chunks: int
    decodes: int
    prompt_tokens: int


class _Usual:
    """What a quantity mostly was of late; between two values in the middle the lower, as what disturbs takes longer."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=SAMPLES)
        self.value = 0.0

    def add(self, value: float) -> None:
        self._values.append(value)
        self.value = median_low(self._values)


class StepTimePolicy:
    """`target` seconds: what a step in which something decodes shall last; inf: never mind."""

    def __init__(self, target: float, max_step_tokens: int) -> None:
        self._target = target
        self._most = max_step_tokens
        self._decoding: dict[int, _Usual] = {}  # seconds of steps without prompts, by the bits of their decodes' count
        self._least = 0.0  # seconds that any step takes: those of the fewest decodes that were measured
        self._prompt_token = _Usual()  # seconds
        self._decodes = 1  # in the last step that had some
        self._next = _Step(0.0, 0, 0, 0)
        self._under_way: deque[_Step] = deque()
        self._settled = -inf  # when the last step was

    @property
    def estimates(self) -> m.PrefillBudget:
        """For as many decodes as the last step had that had some; may be read in another thread."""
        target = self._target if self._target < inf else 0.0
        return m.PrefillBudget(target, self.room(self._decodes), self._alone(self._decodes), self._prompt_token.value)

    def room(self, decodes: int) -> int:
        """Most prompt tokens of a step with so many decodes."""
        alone, each = self._alone(decodes), self._prompt_token.value
        left = max(self._target - alone, WORTH * self._least)
        if not decodes or each * self._most <= left:
            return self._most
        return min(self._most, max(FLOOR, int(left / each) // TILE * TILE))

    # what becomes of a step

    def planned(self, now: float, chunks: int, decodes: int, prompt_tokens: int) -> None:
        """`decodes`: their rows; a draft takes as long as a decode."""
        self._next = _Step(now, chunks, decodes, prompt_tokens)
        self._decodes = decodes or self._decodes

    def launched(self, chunks: int) -> None:
        """The step that was planned last, or part of it."""
        whole = chunks == self._next.chunks
        self._under_way.append(self._next if whole else _Step(self._next.planned, chunks, 0, 0))

    def settled(self, now: float) -> None:
        """The first of those under way is computed. The device began it when it was planned, or had done the one
        before, whichever was later."""
        step = self._under_way.popleft()
        self._learn(step, now - max(step.planned, self._settled))
        self._settled = now

    def abandoned(self) -> None:
        self._under_way.clear()

    def _learn(self, step: _Step, seconds: float) -> None:
        alone = self._alone(step.decodes)
        if step.decodes and (not step.prompt_tokens or seconds < alone):  # a prompt beside them saves no time
            self._decoding.setdefault(step.decodes.bit_length(), _Usual()).add(seconds)
            self._least = min(known.value for known in self._decoding.values())
        elif step.prompt_tokens >= FLOOR:  # in fewer a token's share of what any step takes is too large
            self._prompt_token.add((seconds - alone) / step.prompt_tokens)

    def _alone(self, decodes: int) -> float:
        """Seconds of a step with so many decodes only: of about as many, or fewer where that is not known."""
        for bits in range(decodes.bit_length(), 0, -1):
            if bits in self._decoding:
                return self._decoding[bits].value
        return 0.0
