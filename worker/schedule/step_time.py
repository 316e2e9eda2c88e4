"""Limits the prompt tokens of a step with decodes, based on how long earlier steps took.

The duration of a step is modelled as the time of its decodes alone, plus a time for each prompt token. Errors of that
split cancel out: the time of a prompt token is measured with the same split in steps of the same kind, so the sum
reaches the target however the time is split.

The estimates are medians of the last few steps, so that a single slow step (a stopped process, memory touched for the
first time) changes nothing. The caller passes `now`.
"""

from collections import deque
from math import inf
from statistics import median_low
from typing import NamedTuple

from shared import messages as m
from worker.schedule.sequence import TILE

MIN_PREFILL_TOKENS = 64  # a step may always have this many, so that prompts advance whatever was measured
MIN_PREFILL_RATIO = 3  # prefill may take this many times the shortest step, which mostly reads weights
SAMPLES = 7  # number of steps that a median is computed from
ROW_COST = 1 / 40  # assumed cost of one more row, as a share of a step, before it is measured
LEAST_ROW_COST = 1 / 200  # a lower one is an error of measurement


class _Step(NamedTuple):
    planned: float  # time in seconds
    chunks: int
    decodes: int
    prompt_tokens: int


class _Median:
    """The lower median of the last few values. The lower one, because disturbances make steps longer."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=SAMPLES)
        self.value = 0.0

    def add(self, value: float) -> None:
        self._values.append(value)
        self.value = median_low(self._values)


class StepTimePolicy:
    """Limits the prompt tokens of steps. target: how many seconds a step with decodes shall take; inf: no limit."""

    def __init__(self, target: float, max_step_tokens: int) -> None:
        self._target = target
        self._max_step_tokens = max_step_tokens
        self._decode_times: dict[int, _Median] = {}  # without prompts; by bit length of the number of decodes
        self._row_times: dict[int, _Median] = {}  # the same by the number itself, up to a tile
        self._shortest = 0.0  # seconds that any step takes: the lowest of _decode_times
        self._prompt_token = _Median()  # seconds
        self._last_decodes = 1  # number of decodes in the last step that had any
        self._next = _Step(0.0, 0, 0, 0)
        self._in_flight: deque[_Step] = deque()
        self._last_computed = -inf  # when the last step was computed

    @property
    def estimates(self) -> m.PrefillBudget:
        """The estimates for as many decodes as the last step with decodes had. Other threads may read them."""
        target, decodes = self._target if self._target < inf else 0.0, self._last_decodes
        decode_s = self._decode_time(decodes)
        return m.PrefillBudget(target, self.prefill_budget(decodes), decode_s, self._prompt_token.value)

    def prefill_budget(self, decodes: int) -> int:
        """Returns how many prompt tokens a step with that many decodes may have."""
        prompt_token = self._prompt_token.value
        left = max(self._target - self._decode_time(decodes), MIN_PREFILL_RATIO * self._shortest)
        if not decodes or prompt_token * self._max_step_tokens <= left:
            return self._max_step_tokens
        return min(self._max_step_tokens, max(MIN_PREFILL_TOKENS, int(left / prompt_token) // TILE * TILE))

    def row_cost(self, decodes: int) -> float:
        """Estimates what a row more costs in a step with that many decodes, as a share of the step's time.

        Compares steps of exactly so many rows with the next larger ones that were measured. Where drafts make up the
        rows, both kinds are measured in turn: if larger steps look cheap, they get drafts, and if not, they do not.
        """
        larger = min((rows for rows in self._row_times if rows > decodes), default=0)
        if not larger or decodes not in self._row_times:
            return ROW_COST
        few, many = self._row_times[decodes].value, self._row_times[larger].value
        return max(LEAST_ROW_COST, (many - few) / (larger - decodes) / few) if few > 0 else ROW_COST

    # Events of a step

    def planned(self, now: float, chunks: int, decodes: int, prompt_tokens: int) -> None:
        """Notes the step that was planned last. decodes: their rows, with drafts, which take as long as decodes."""
        self._next = _Step(now, chunks, decodes, prompt_tokens)
        self._last_decodes = decodes or self._last_decodes

    def launched(self, chunks: int) -> None:
        """Notes that the step that was planned last, or a part of it, is in flight."""
        whole = chunks == self._next.chunks
        self._in_flight.append(self._next if whole else _Step(self._next.planned, chunks, 0, 0))

    def computed(self, now: float) -> None:
        """Measures the first step in flight, which is computed now.

        The device started it when it was planned or when the step before it was computed, whichever was later.
        """
        step = self._in_flight.popleft()
        self._learn(step, now - max(step.planned, self._last_computed))
        self._last_computed = now

    def discarded(self) -> None:
        self._in_flight.clear()

    def _learn(self, step: _Step, seconds: float) -> None:
        decode_s = self._decode_time(step.decodes)
        if step.decodes and (not step.prompt_tokens or seconds < decode_s):  # if less, decode_s was too high
            self._decode_times.setdefault(step.decodes.bit_length(), _Median()).add(seconds)
            if step.decodes <= TILE and not step.prompt_tokens:
                self._row_times.setdefault(step.decodes, _Median()).add(seconds)
            self._shortest = min(known.value for known in self._decode_times.values())
        elif step.prompt_tokens >= MIN_PREFILL_TOKENS:  # with fewer, the fixed time of a step distorts the result
            self._prompt_token.add((seconds - decode_s) / step.prompt_tokens)

    def _decode_time(self, decodes: int) -> float:
        """Estimates the seconds of a step with that many decodes and no prompts.

        Uses steps with about as many decodes, or with fewer if there are no such measurements.
        """
        for bits in range(decodes.bit_length(), 0, -1):
            if bits in self._decode_times:
                return self._decode_times[bits].value
        return 0.0
