"""Limits the prompt tokens of a step in which streams decode, from how long earlier steps took.

A step is modelled as the time of its decodes alone, plus a time for each prompt token. Errors of that split correct
themselves: the time of a prompt token is measured with the same split, in steps of the same kind, so that the sum
comes to the target whatever the parts are.

Medians of the last few steps: a step that stood still (a stopped process, memory touched for the first time) changes
nothing. Pure counting, like everything in this folder: the caller passes `now`.
"""

from collections import deque
from math import inf
from statistics import median_low
from typing import NamedTuple

from shared import messages as m
from worker.schedule.sequence import TILE

MIN_PREFILL_TOKENS = 64  # a step may have so many in any case: prompts advance, whatever was measured
MIN_PREFILL_RATIO = 3  # prefill may take so many times as long as the shortest step, which mostly reads the weights
SAMPLES = 7  # steps in a median


class _Step(NamedTuple):
    planned: float  # when
    chunks: int
    decodes: int
    prompt_tokens: int


class _Median:
    """The median of the last few values; of two in the middle the lower, as disturbances make steps longer."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=SAMPLES)
        self.value = 0.0

    def add(self, value: float) -> None:
        self._values.append(value)
        self.value = median_low(self._values)


class StepTimePolicy:
    """target: seconds that a step with decodes shall last; inf: no limit."""

    def __init__(self, target: float, max_step_tokens: int) -> None:
        self._target = target
        self._max_step_tokens = max_step_tokens
        self._decode_times: dict[int, _Median] = {}  # of steps without prompts, by the bit length of their decodes
        self._shortest = 0.0  # seconds that any step takes: the time of the fewest decodes that were measured
        self._prompt_token = _Median()  # seconds
        self._last_decodes = 1  # in the last step that had some
        self._next = _Step(0.0, 0, 0, 0)
        self._in_flight: deque[_Step] = deque()
        self._last_computed = -inf  # when

    @property
    def estimates(self) -> m.PrefillBudget:
        """For as many decodes as the last step with decodes had; may be read from another thread."""
        target, decodes = self._target if self._target < inf else 0.0, self._last_decodes
        decode_s = self._decode_time(decodes)
        return m.PrefillBudget(target, self.prefill_budget(decodes), decode_s, self._prompt_token.value)

    def prefill_budget(self, decodes: int) -> int:
        """Most prompt tokens of a step with so many decodes."""
        prompt_token = self._prompt_token.value
        left = max(self._target - self._decode_time(decodes), MIN_PREFILL_RATIO * self._shortest)
        if not decodes or prompt_token * self._max_step_tokens <= left:
            return self._max_step_tokens
        return min(self._max_step_tokens, max(MIN_PREFILL_TOKENS, int(left / prompt_token) // TILE * TILE))

    # Events of a step

    def planned(self, now: float, chunks: int, decodes: int, prompt_tokens: int) -> None:
        """decodes: their rows; a draft takes as long as a decode."""
        self._next = _Step(now, chunks, decodes, prompt_tokens)
        self._last_decodes = decodes or self._last_decodes

    def launched(self, chunks: int) -> None:
        """The step that was planned last, or part of it, is in flight."""
        whole = chunks == self._next.chunks
        self._in_flight.append(self._next if whole else _Step(self._next.planned, chunks, 0, 0))

    def computed(self, now: float) -> None:
        """The first step in flight is computed.

        The device began it when it was planned, or when the step before it was computed, whichever was later.
        """
        step = self._in_flight.popleft()
        self._learn(step, now - max(step.planned, self._last_computed))
        self._last_computed = now

    def discarded(self) -> None:
        self._in_flight.clear()

    def _learn(self, step: _Step, seconds: float) -> None:
        decode_s = self._decode_time(step.decodes)
        if step.decodes and (not step.prompt_tokens or seconds < decode_s):  # prompt tokens make no step shorter
            self._decode_times.setdefault(step.decodes.bit_length(), _Median()).add(seconds)
            self._shortest = min(known.value for known in self._decode_times.values())
        elif step.prompt_tokens >= MIN_PREFILL_TOKENS:  # in fewer, a token's share of any step's time is too large
            self._prompt_token.add((seconds - decode_s) / step.prompt_tokens)

    def _decode_time(self, decodes: int) -> float:
        """Seconds of a step with so many decodes only: of about as many, or fewer where that is not known."""
        for bits in range(decodes.bit_length(), 0, -1):
            if bits in self._decode_times:
                return self._decode_times[bits].value
        return 0.0
