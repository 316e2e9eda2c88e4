"""Steps with decodes come to last what they shall: the policy alone, on machines of all kinds, and in the scheduler."""

from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

import pytest

from tests.worker.schedule.harness import Prophet, Rig, reference
from worker.schedule.sequence import Plan
from worker.schedule.step_time import MIN_PREFILL_TOKENS, SAMPLES, TILE, StepTimePolicy

MOST = 512
TARGET = 0.2
Seconds = Callable[[int, int], float]  # that a step with so many decodes and prompt tokens takes


def line(decode: float, sequence: float, token: float) -> Seconds:
    return lambda decodes, prompt: decode + sequence * decodes + token * prompt


def roof(memory: float, token: float) -> Seconds:
    """Whichever takes longer: the weights' way from memory, or the rows' arithmetic."""
    return lambda decodes, prompt: max(memory, token * (decodes + prompt))


CPU = line(0.023, 0.001, 0.0009)


class Machine:
    """Steps one after another, each settled when it is done."""

    def __init__(self, seconds: Seconds, target: float = TARGET, most: int = MOST) -> None:
        self.seconds = seconds
        self.pace = StepTimePolicy(target, most)
        self.now = 100.0

    def step(self, decodes: int, prompt: int | None = None, late: float = 0.0) -> float:
        """With as many prompt tokens as it may have, or so many; how long it took."""
        tokens = self.pace.prefill_budget(decodes) if prompt is None else prompt
        self.pace.planned(self.now, 9, decodes, tokens)
        self.pace.launched(9)
        began, self.now = self.now, self.now + self.seconds(decodes, tokens) + late
        self.pace.computed(self.now)
        return self.now - began

    def served(self) -> "Machine":
        """After a prompt, and some steps without one."""
        self.step(0, 128)
        for _ in range(3):
            self.step(4, 0)
        return self


@pytest.mark.parametrize(
    "seconds",
    [CPU, line(0.04, 0.001, 0.0019), line(0.0, 0.0, 0.0005), roof(0.0235, 0.0009), roof(0.05, 0.0004)],
)
@pytest.mark.parametrize("decodes", [1, 4, 31])
def test_a_step_lasts_about_the_target_soon(seconds: Seconds, decodes: int) -> None:
    machine = Machine(seconds).served()
    for _ in range(2 * SAMPLES):
        machine.step(decodes)
    took = machine.step(decodes)
    cost_of_rounding = seconds(decodes, TILE) - seconds(decodes, 0)
    if machine.pace.prefill_budget(decodes) < MOST:
        assert TARGET * 0.93 - cost_of_rounding <= took <= TARGET * 1.07
    else:
        assert took <= TARGET


def test_the_first_step_beside_decodes_is_held_back_already() -> None:
    machine = Machine(CPU)
    machine.step(0, 512)
    assert machine.step(1) < TARGET * 1.1


def test_without_decodes_a_step_is_full() -> None:
    machine = Machine(CPU).served()
    machine.step(4)
    assert machine.pace.prefill_budget(4) < MOST == machine.pace.prefill_budget(0)


def test_the_budget_is_of_whole_tiles_and_within_bounds() -> None:
    rng = Random(0)
    for _ in range(300):
        machine = Machine(line(*(10 ** rng.uniform(-5, 0) for _ in range(3))), 10 ** rng.uniform(-3, 1))
        for _ in range(20):
            machine.step(rng.randrange(4), rng.choice([None, 0, 1, 500]), late=rng.choice([0.0, 0.0, 3.0]))
            room = machine.pace.prefill_budget(rng.randint(1, 64))
            assert MIN_PREFILL_TOKENS <= room <= MOST and room % TILE == 0


def test_prompts_advance_on_the_slowest_machine_and_in_the_smallest_step() -> None:
    assert Machine(line(5.0, 1.0, 1.0)).served().pace.prefill_budget(3) == MIN_PREFILL_TOKENS
    assert Machine(line(5.0, 1.0, 1.0), most=10).served().pace.prefill_budget(3) == 10


def test_where_every_step_takes_long_prompts_get_a_multiple_of_that() -> None:
    machine = Machine(line(0.3, 0.0, 0.001), most=2048).served()
    for _ in range(2 * SAMPLES):
        machine.step(4)
    assert machine.pace.prefill_budget(4) == 896, "0.9 s of prompts to 0.3 s"


def test_where_many_decodes_take_long_prompts_get_a_multiple_of_what_few_take() -> None:
    machine = Machine(line(0.02, 0.01, 0.001)).served()
    for _ in range(2 * SAMPLES):
        machine.step(4)
        machine.step(60, 0)
    assert machine.seconds(60, 0) > 3 * TARGET
    assert machine.pace.prefill_budget(60) == 176, "0.18 s, of 0.06 s for a step of 4"


@pytest.mark.parametrize("seconds", [line(0.005, 0.00001, 0.000013), line(0.002, 0.0, 0.0), line(0.0, 0.0, 0.0)])
def test_a_fast_machine_is_never_held_back(seconds: Seconds) -> None:
    machine = Machine(seconds, most=2048).served()
    rng = Random(1)
    for _ in range(200):
        machine.step(rng.randint(1, 64), rng.choice([None, None, 0, 1, 100]), late=rng.uniform(0.0, 0.001))
        assert machine.pace.prefill_budget(4) == 2048


def test_no_target_no_limit() -> None:
    machine = Machine(line(5.0, 1.0, 1.0), inf).served()
    machine.step(4)
    assert machine.pace.prefill_budget(4) == MOST
    assert machine.pace.estimates.target_s == 0.0


@pytest.mark.parametrize("late", [0.3, 60.0])
def test_a_step_that_stood_still_changes_little(late: float) -> None:
    machine = Machine(CPU).served()
    for _ in range(2 * SAMPLES):
        machine.step(4)
        machine.step(4, 0)
    usual = machine.pace.prefill_budget(4)
    for prompt in (None, 0):
        for _ in range(2):
            machine.step(4, prompt, late)
            assert abs(machine.pace.prefill_budget(4) - usual) <= TILE


def test_a_first_step_that_stood_still_is_forgotten_at_once() -> None:
    machine = Machine(CPU)
    machine.step(0, 512, late=30.0)
    assert machine.pace.prefill_budget(1) == MIN_PREFILL_TOKENS
    machine.step(1)
    assert machine.pace.prefill_budget(1) > 2 * MIN_PREFILL_TOKENS
    slow = Machine(CPU)
    slow.step(0, 512)
    slow.step(1, 0, late=30.0)
    slow.step(1, 0)
    assert slow.step(1) < TARGET * 1.1


@pytest.mark.parametrize(("change", "room"), [(0.2, MOST), (1.5, 112), (5.0, MIN_PREFILL_TOKENS)])
def test_a_machine_that_becomes_another_one_is_measured_anew(change: float, room: int) -> None:
    """Even if no step is without prompts from then on."""
    machine = Machine(CPU).served()
    for _ in range(2 * SAMPLES):
        machine.step(4)
        machine.step(4, 0)
    machine.seconds = lambda decodes, prompt: CPU(decodes, prompt) * change
    for _ in range(2 * SAMPLES):
        machine.step(4)
    assert abs(machine.pace.prefill_budget(4) - room) <= TILE


def test_few_tokens_say_nothing_of_many() -> None:
    machine = Machine(roof(0.1, 0.0001))
    machine.step(0, 3)  # as long as 1,000 would take
    assert machine.pace.prefill_budget(1) == MOST


def test_a_step_that_waits_for_another_one_is_counted_from_its_end() -> None:
    """Two under way, as on a device that is never idle; then a pause."""
    pace = StepTimePolicy(TARGET, MOST)
    pace.planned(0.0, 1, 0, 100)
    pace.launched(1)
    pace.planned(0.001, 2, 1, 100)
    pace.launched(2)
    pace.computed(0.1)
    assert pace.estimates.prompt_token_s == pytest.approx(0.001)
    pace.planned(0.101, 2, 2, 0)
    pace.launched(2)
    pace.computed(0.3)
    pace.computed(0.33)
    assert pace.estimates.decodes_s == pytest.approx(0.03)
    pace.planned(50.0, 2, 2, 0)
    pace.launched(2)
    pace.computed(50.02)
    assert pace.estimates.decodes_s == pytest.approx(0.02)


def test_parts_of_a_step_and_steps_that_were_lost_say_nothing() -> None:
    pace = StepTimePolicy(TARGET, MOST)
    pace.planned(0.0, 5, 2, 100)
    pace.launched(3)
    pace.launched(2)
    pace.computed(1.0)
    pace.computed(2.0)
    pace.planned(3.0, 5, 2, 100)
    pace.launched(5)
    pace.discarded()
    pace.planned(7.0, 2, 2, 0)
    pace.launched(2)
    pace.computed(7.1)
    assert (pace.estimates.decodes_s, pace.estimates.prompt_token_s) == (pytest.approx(0.1), 0.0)


# In the scheduler


class Timed(Rig):
    """Its steps take time."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(pages=400, page_size=16, max_seq_len=2048, max_step_tokens=MOST, **settings)

    def run(self, plan: Plan) -> list[int]:
        ids = super().run(plan)
        self.now += CPU(sum(chunk.length == 1 for chunk in plan.chunks), plan.tokens)
        return ids


@pytest.mark.parametrize("overlap", [False, True])
def test_streams_go_on_smoothly_while_a_long_prompt_comes(overlap: bool) -> None:
    rig = Timed(target_step_s=TARGET, overlap=overlap)
    stream = rig.submit(100, 40, ignore_eos=True)
    assert rig.plan().tokens == 100
    for _ in range(4):
        rig.step()
    long = rig.submit(1000, 2, ignore_eos=True)
    sizes = []
    while not long.output_len and long in rig.scheduler.sequences():
        before = rig.now, long.computed_tokens + long.in_flight_tokens
        rig.step()
        sizes.append(long.computed_tokens + long.in_flight_tokens - before[1])
        assert rig.now - before[0] <= TARGET * 1.1
    assert all(96 <= size < 256 for size in sizes[:5]) and stream.output_len >= 6
    rig.land()
    rig.finish(100)


def test_a_prompt_that_nobody_waits_beside_gets_the_full_step() -> None:
    rig = Timed(target_step_s=TARGET)
    rig.submit(1200, 2, ignore_eos=True)
    rig.step()
    assert rig.plan().tokens == MOST
    rig.submit(300, 2)
    rig.step()
    assert rig.plan().tokens == 1200 - 2 * MOST + 300


def test_a_prompt_advances_in_every_step_beside_many_streams() -> None:
    rig = Timed(target_step_s=0.001, max_batch_size=40)
    for _ in range(30):
        rig.submit(20, 60, ignore_eos=True)
    for _ in range(6):
        rig.step()
    long = rig.submit(900, 1)
    while long in rig.scheduler.sequences():
        before = long.computed_tokens
        rig.step()
        assert long.computed_tokens >= before + MIN_PREFILL_TOKENS or long.computed_tokens >= 900
    rig.finish(100)


def test_a_draft_counts_as_a_row() -> None:
    """So that one decode with seven of them does not pass for what one decode takes."""
    rig = Rig(page_size=32, max_draft_tokens=7, target_step_s=TARGET, token_s=0.01)
    stream = rig.submit([1, 2, 3], 24, ignore_eos=True)
    stream.drafter = prophet = Prophet(reference(stream, rig.config)[0])
    rig.step()
    assert rig.plan().tokens == 8
    rig.step()
    assert rig.scheduler.status.prefill_budget.decodes_s == pytest.approx(0.08)
    prophet.stop()
    rig.step()
    assert rig.scheduler.status.prefill_budget.decodes_s == pytest.approx(0.01)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_prompts_advance_and_steps_keep_to_their_budget(seed: int, overlap: bool) -> None:
    """What each stream is told is checked by the rig."""
    rng = Random(seed)
    rig = Timed(target_step_s=rng.choice([0.01, 0.1, 0.3]), max_batch_size=rng.choice([4, 20]), overlap=overlap)
    for _ in range(60):
        for _ in range(rng.choice([0, 0, 1, 3])):
            rig.submit(rng.choice([1, 20, 100, 300]), rng.randint(1, 12), ignore_eos=True)
        plan = rig.plan()
        prompts = [chunk for chunk in plan.chunks if chunk.start < chunk.sequence.prompt_len]
        decodes = len(plan.chunks) - len(prompts)
        unread = [
            one
            for one in rig.scheduler.sequences()
            if one.pages and one.computed_tokens + one.in_flight_tokens < one.prompt_len
        ]
        assert prompts or not unread, "a prompt waits"
        if decodes:
            assert sum(chunk.length for chunk in prompts) <= rig.scheduler.status.prefill_budget.prompt_tokens + len(
                prompts
            )
        rig.step()
    rig.finish(2000)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_step_s": 0.0},
        {"target_step_s": TARGET, "use_chunked_prefill": False},
        {"target_step_s": TARGET, "batching_mode": "static"},
        {"target_step_s": TARGET, "scheduler_policy": "prefill_first"},
    ],
)
def test_some_modes_hold_nothing_back(settings: dict[str, Any]) -> None:
    rig = Timed(batch_wait_timeout_s=0.0, **settings)
    rig.submit(100, 40, ignore_eos=True)
    for _ in range(4):
        rig.step()
    assert (
        rig.scheduler.status.prefill_budget.target_s == 0.0
        and rig.scheduler.status.prefill_budget.prompt_tokens == MOST
    )
