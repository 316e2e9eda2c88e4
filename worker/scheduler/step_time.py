"""Limits the prompt tokens of a step with decodes, based on how long earlier steps took.

The duration of a step is modelled as the time of its decodes alone, plus a time for each prompt token. If the time of
the decodes is estimated too low, the time of the prompt tokens is measured too high by as much, because it is the rest
of the measured step. The target limits the sum of both, and the sum stays right.

The estimates are medians of the last few steps, so a single slow step (a stopped process, memory touched for the first
time) changes nothing. The caller passes `now`.
"""

from collections import deque
from math import inf
from typing import NamedTuple

from shared import messages as m
from worker.schedule.recent import Median
from worker.schedule.row_costs import RowCosts
from worker.schedule.sequence import TILE

MIN_PREFILL_TOKENS = 64  # a step may always have this many prompt tokens, so that prompts always advance
MIN_PREFILL_RATIO = 3  # prefill may always take this many times as long as the shortest step


class _Step(NamedTuple):
    planned: float  # when the step was planned, in seconds
    chunks: int
    decodes: int
    prompt_tokens: int
    proposing: float  # seconds of the step that a draft model has taken


class StepTimePolicy:
    """Limits the prompt tokens of steps. target: the maximum seconds of a step with decodes; inf: no limit."""

    def __init__(self, target: float, max_step_tokens: int) -> None:
        self._target = target
        self._max_step_tokens = max_step_tokens
        self._decode_times: dict[int, Median] = {}  # bit length of the number of decodes → seconds, without prompts
        self.row_cost = RowCosts()
        self._shortest = 0.0  # seconds of the shortest kind of step: the lowest of _decode_times
        self._prompt_token = Median()  # seconds per prompt token
        self._last_decodes = 1  # number of decodes in the last step that had any
        self._next = _Step(0.0, 0, 0, 0, 0.0)
        self._in_flight: deque[_Step] = deque()
        self._last_computed = -inf  # when the last step was computed

    @property
    def estimates(self) -> m.PrefillBudget:
        """The estimates for a step with as many decodes as the last step with decodes. Other threads may read them."""
        target, decodes = self._target if self._target < inf else 0.0, self._last_decodes
        decode_s = self._decode_time(decodes)
        return m.PrefillBudget(target, self.prefill_budget(decodes), decode_s, self._prompt_token.value)

    @property
    def in_flight(self) -> int:
        """How many steps are in flight."""
        return len(self._in_flight)

    def prefill_budget(self, decodes: int) -> int:
        """Returns how many prompt tokens a step with `decodes` decodes may have."""
        prompt_token = self._prompt_token.value
        left = max(self._target - self._decode_time(decodes), MIN_PREFILL_RATIO * self._shortest)
        if not decodes or prompt_token * self._max_step_tokens <= left:
            return self._max_step_tokens
        return min(self._max_step_tokens, max(MIN_PREFILL_TOKENS, int(left / prompt_token) // TILE * TILE))

    # Events of a step

    def planned(self, now: float, chunks: int, decodes: int, prompt_tokens: int) -> None:
        """Notes the step that was just planned. decodes: the rows of decodes and of drafts, which take equally long."""
        self._next = _Step(now, chunks, decodes, prompt_tokens, self.row_cost.take_proposing())
        self._last_decodes = decodes or self._last_decodes

    def launched(self, chunks: int) -> None:
        """Notes that the step that was planned last, or a part of it, is in flight."""
        whole = chunks == self._next.chunks
        self._in_flight.append(self._next if whole else _Step(self._next.planned, chunks, 0, 0, 0.0))

    def computed(self, now: float) -> None:
        """Measures the oldest step in flight, which has just been computed.

        The device is assumed to have started this step when it was planned or when the step before it was computed,
        whichever was later.
        """
        step = self._in_flight.popleft()
        self._learn(step, now - max(step.planned, self._last_computed))
        self._last_computed = now

    def discarded(self) -> None:
        self._in_flight.clear()

    def _learn(self, step: _Step, seconds: float) -> None:
        decode_s = self._decode_time(step.decodes)
        if step.decodes and (not step.prompt_tokens or seconds < decode_s):  # a step shorter than decode_s corrects it
            self._decode_times.setdefault(step.decodes.bit_length(), Median()).add(seconds)
            if step.decodes <= TILE and not step.prompt_tokens:
                self.row_cost.add(step.chunks, step.decodes, seconds - step.proposing)
            self._shortest = min(known.value for known in self._decode_times.values())
        elif step.prompt_tokens >= MIN_PREFILL_TOKENS:  # with fewer tokens, a step's fixed time distorts the result
            self._prompt_token.add((seconds - decode_s) / step.prompt_tokens)

    def _decode_time(self, decodes: int) -> float:
        """Estimates the seconds of a step with `decodes` decodes and no prompts.

        Uses measurements of steps with about as many decodes, or else with fewer decodes. Returns 0 if there are no
        such measurements.
        """
        for bits in range(decodes.bit_length(), 0, -1):
            if bits in self._decode_times:
                return self._decode_times[bits].value
        return 0.0
