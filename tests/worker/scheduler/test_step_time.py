"""The prefill budget makes steps with decodes last about the target, on machines of all kinds and in the scheduler."""

from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

import pytest

from tests.worker.scheduler.harness import OracleDrafter, Rig, reference, set_drafter
from worker.scheduler.sequence import TILE, Plan
from worker.scheduler.step_time import MIN_PREFILL_TOKENS, SAMPLES, StepTimePolicy

MAX_STEP_TOKENS = 512
TARGET = 0.2
Seconds = Callable[[int, int], float]  # (decodes, prompt tokens) → duration of a step


def linear(step: float, decode: float, token: float) -> Seconds:
    return lambda decodes, prompt: step + decode * decodes + token * prompt


def roofline(memory: float, token: float) -> Seconds:
    """Returns the time to read all weights or the time to compute all rows, whichever is longer."""
    return lambda decodes, prompt: max(memory, token * (decodes + prompt))


CPU = linear(0.023, 0.001, 0.0009)


class Machine:
    """Runs steps one after another on a machine of given speed."""

    def __init__(self, seconds: Seconds, target: float = TARGET, most: int = MAX_STEP_TOKENS) -> None:
        self.seconds = seconds
        self.policy = StepTimePolicy(target, most)
        self.now = 100.0

    def step(self, decodes: int, prompt: int | None = None, late: float = 0.0) -> float:
        """Runs one step with `prompt` tokens, or with the budget's number. Returns the step's seconds."""
        tokens = self.policy.prefill_budget(decodes) if prompt is None else prompt
        self.policy.planned(self.now, 9, decodes, tokens)
        self.policy.launched(9)
        began, self.now = self.now, self.now + self.seconds(decodes, tokens) + late
        self.policy.computed(self.now)
        return self.now - began

    def warmed_up(self) -> "Machine":
        """Runs a prompt, then some steps without prompts."""
        self.step(0, 128)
        for _ in range(3):
            self.step(4, 0)
        return self


@pytest.mark.parametrize(
    "seconds",
    [CPU, linear(0.04, 0.001, 0.0019), linear(0.0, 0.0, 0.0005), roofline(0.0235, 0.0009), roofline(0.05, 0.0004)],
)
@pytest.mark.parametrize("decodes", [1, 4, 31])
def test_step_lasts_about_the_target_soon(seconds: Seconds, decodes: int) -> None:
    machine = Machine(seconds).warmed_up()
    for _ in range(2 * SAMPLES):
        machine.step(decodes)
    took = machine.step(decodes)
    cost_of_rounding = seconds(decodes, TILE) - seconds(decodes, 0)
    if machine.policy.prefill_budget(decodes) < MAX_STEP_TOKENS:
        assert TARGET * 0.93 - cost_of_rounding <= took <= TARGET * 1.07
    else:
        assert took <= TARGET


def test_first_step_with_decodes_is_limited_already() -> None:
    machine = Machine(CPU)
    machine.step(0, 512)
    assert machine.step(1) < TARGET * 1.1


def test_budget_without_decodes_is_a_full_step() -> None:
    machine = Machine(CPU).warmed_up()
    machine.step(4)
    assert machine.policy.prefill_budget(4) < MAX_STEP_TOKENS == machine.policy.prefill_budget(0)


def test_budget_is_whole_tiles_within_bounds() -> None:
    rng = Random(0)
    for _ in range(300):
        machine = Machine(linear(*(10 ** rng.uniform(-5, 0) for _ in range(3))), 10 ** rng.uniform(-3, 1))
        for _ in range(20):
            machine.step(rng.randrange(4), rng.choice([None, 0, 1, 500]), late=rng.choice([0.0, 0.0, 3.0]))
            budget = machine.policy.prefill_budget(rng.randint(1, 64))
            assert MIN_PREFILL_TOKENS <= budget <= MAX_STEP_TOKENS and budget % TILE == 0


def test_budget_on_the_slowest_machine_still_advances_prompts() -> None:
    assert Machine(linear(5.0, 1.0, 1.0)).warmed_up().policy.prefill_budget(3) == MIN_PREFILL_TOKENS
    assert Machine(linear(5.0, 1.0, 1.0), most=10).warmed_up().policy.prefill_budget(3) == 10


def test_budget_where_every_step_is_long_is_a_multiple_of_that() -> None:
    machine = Machine(linear(0.3, 0.0, 0.001), most=2048).warmed_up()
    for _ in range(2 * SAMPLES):
        machine.step(4)
    assert machine.policy.prefill_budget(4) == 896, "0.9 s of prompts to 0.3 s"


def test_budget_where_many_decodes_are_long_is_a_multiple_of_few() -> None:
    machine = Machine(linear(0.02, 0.01, 0.001)).warmed_up()
    for _ in range(2 * SAMPLES):
        machine.step(4)
        machine.step(60, 0)
    assert machine.seconds(60, 0) > 3 * TARGET
    assert machine.policy.prefill_budget(60) == 176, "0.18 s, of 0.06 s for a step of 4"


@pytest.mark.parametrize("seconds", [linear(0.005, 0.00001, 0.000013), linear(0.002, 0.0, 0.0), linear(0.0, 0.0, 0.0)])
def test_budget_on_a_fast_machine_is_never_limited(seconds: Seconds) -> None:
    machine = Machine(seconds, most=2048).warmed_up()
    rng = Random(1)
    for _ in range(200):
        machine.step(rng.randint(1, 64), rng.choice([None, None, 0, 1, 100]), late=rng.uniform(0.0, 0.001))
        assert machine.policy.prefill_budget(4) == 2048


def test_budget_without_a_target_is_unlimited() -> None:
    machine = Machine(linear(5.0, 1.0, 1.0), inf).warmed_up()
    machine.step(4)
    assert machine.policy.prefill_budget(4) == MAX_STEP_TOKENS
    assert machine.policy.estimates.target_s == 0.0


@pytest.mark.parametrize("late", [0.3, 60.0])
def test_budget_after_a_stalled_step_changes_little(late: float) -> None:
    machine = Machine(CPU).warmed_up()
    for _ in range(2 * SAMPLES):
        machine.step(4)
        machine.step(4, 0)
    usual = machine.policy.prefill_budget(4)
    for prompt in (None, 0):
        for _ in range(2):
            machine.step(4, prompt, late)
            assert abs(machine.policy.prefill_budget(4) - usual) <= TILE


def test_budget_after_a_stalled_first_step_recovers_at_once() -> None:
    machine = Machine(CPU)
    machine.step(0, 512, late=30.0)
    assert machine.policy.prefill_budget(1) == MIN_PREFILL_TOKENS
    machine.step(1)
    assert machine.policy.prefill_budget(1) > 2 * MIN_PREFILL_TOKENS
    slow = Machine(CPU)
    slow.step(0, 512)
    slow.step(1, 0, late=30.0)
    slow.step(1, 0)
    assert slow.step(1) < TARGET * 1.1


@pytest.mark.parametrize(("change", "budget"), [(0.2, MAX_STEP_TOKENS), (1.5, 112), (5.0, MIN_PREFILL_TOKENS)])
def test_budget_on_a_machine_that_changes_is_measured_anew(change: float, budget: int) -> None:
    """The budget is measured anew even if all later steps are without prompts."""
    machine = Machine(CPU).warmed_up()
    for _ in range(2 * SAMPLES):
        machine.step(4)
        machine.step(4, 0)
    machine.seconds = lambda decodes, prompt: CPU(decodes, prompt) * change
    for _ in range(2 * SAMPLES):
        machine.step(4)
    assert abs(machine.policy.prefill_budget(4) - budget) <= TILE


def test_estimate_is_not_taken_from_few_tokens() -> None:
    machine = Machine(roofline(0.1, 0.0001))
    machine.step(0, 3)  # takes as long as 1,000 prompt tokens would
    assert machine.policy.prefill_budget(1) == MAX_STEP_TOKENS


def test_step_behind_another_one_is_counted_from_its_end() -> None:
    """Two steps are in flight, as on a device that is never idle; then comes a pause."""
    policy = StepTimePolicy(TARGET, MAX_STEP_TOKENS)
    policy.planned(0.0, 1, 0, 100)
    policy.launched(1)
    policy.planned(0.001, 2, 1, 100)
    policy.launched(2)
    policy.computed(0.1)
    assert policy.estimates.prompt_token_s == pytest.approx(0.001)
    policy.planned(0.101, 2, 2, 0)
    policy.launched(2)
    policy.computed(0.3)
    policy.computed(0.33)
    assert policy.estimates.decodes_s == pytest.approx(0.03)
    policy.planned(50.0, 2, 2, 0)
    policy.launched(2)
    policy.computed(50.02)
    assert policy.estimates.decodes_s == pytest.approx(0.02)


def test_parts_of_a_step_and_discarded_steps_are_not_measured() -> None:
    policy = StepTimePolicy(TARGET, MAX_STEP_TOKENS)
    policy.planned(0.0, 5, 2, 100)
    policy.launched(3)
    policy.launched(2)
    policy.computed(1.0)
    policy.computed(2.0)
    policy.planned(3.0, 5, 2, 100)
    policy.launched(5)
    policy.discarded()
    policy.planned(7.0, 2, 2, 0)
    policy.launched(2)
    policy.computed(7.1)
    assert (policy.estimates.decodes_s, policy.estimates.prompt_token_s) == (pytest.approx(0.1), 0.0)


class TimedRig(Rig):
    """A rig whose steps take as long as on a CPU."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(pages=400, page_size=16, max_seq_len=2048, max_step_tokens=MAX_STEP_TOKENS, **settings)

    def run(self, plan: Plan) -> list[int]:
        ids = super().run(plan)
        self.now += CPU(sum(chunk.length == 1 for chunk in plan.chunks), plan.tokens)
        return ids


@pytest.mark.parametrize("overlap", [False, True])
def test_scheduler_streams_stay_smooth_beside_a_long_prompt(overlap: bool) -> None:
    rig = TimedRig(target_step_s=TARGET, overlap=overlap)
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
    rig.finish_steps()
    rig.finish(100)


def test_scheduler_prompt_without_streams_gets_the_full_step() -> None:
    rig = TimedRig(target_step_s=TARGET)
    rig.submit(1200, 2, ignore_eos=True)
    rig.step()
    assert rig.plan().tokens == MAX_STEP_TOKENS
    rig.submit(300, 2)
    rig.step()
    assert rig.plan().tokens == 1200 - 2 * MAX_STEP_TOKENS + 300


def test_scheduler_prompt_advances_in_every_step_beside_many_streams() -> None:
    rig = TimedRig(target_step_s=0.001, max_batch_size=40)
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


def test_scheduler_draft_counts_as_a_row() -> None:
    """If it did not, the time of a decode with seven drafts would count as the time of a plain decode."""
    rig = Rig(page_size=32, max_draft_tokens=7, target_step_s=TARGET, token_s=0.01)
    stream = rig.submit([1, 2, 3], 24, ignore_eos=True)
    drafter = OracleDrafter(reference(stream, rig.config)[0])
    set_drafter(rig.scheduler, stream, drafter)
    rig.step()
    assert rig.plan().tokens == 8
    rig.step()
    assert rig.scheduler.status.prefill_budget.decodes_s == pytest.approx(0.08)
    drafter.stop()
    rig.step()
    assert rig.scheduler.status.prefill_budget.decodes_s == pytest.approx(0.01)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_scheduler_under_random_load_keeps_to_its_budget(seed: int, overlap: bool) -> None:
    """Step times are checked here; the rig also checks the tokens of each stream."""
    rng = Random(seed)
    rig = TimedRig(target_step_s=rng.choice([0.01, 0.1, 0.3]), max_batch_size=rng.choice([4, 20]), overlap=overlap)
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
def test_scheduler_modes_without_a_limit(settings: dict[str, Any]) -> None:
    rig = TimedRig(batch_wait_timeout_s=0.0, **settings)
    rig.submit(100, 40, ignore_eos=True)
    for _ in range(4):
        rig.step()
    assert (
        rig.scheduler.status.prefill_budget.target_s == 0.0
        and rig.scheduler.status.prefill_budget.prompt_tokens == MAX_STEP_TOKENS
    )
