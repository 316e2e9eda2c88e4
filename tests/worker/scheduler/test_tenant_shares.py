"""A tenant with few sequences waits little for one with many, on machines of all kinds, and all rows advance."""

from itertools import pairwise
from typing import Any

import pytest

from tests.worker.scheduler.harness import OracleDrafter, Rig, reference, set_drafter
from worker.scheduler.sequence import Plan, Sequence
from worker.scheduler.step_time import FORGET_AFTER
from worker.scheduler.tenant_shares import LEAD, MEASURED_EVERY, SEEN_STEPS, SHARE, SOON

TARGET = 0.15
SHORT = max(SHARE * TARGET, 2 * (0.018 + 0.003))  # of two tenants, one of which has one stream


class Machine(Rig):
    """A rig whose steps take `base` seconds and `row` for each token; notes each step's plan and seconds."""

    def __init__(self, base: float = 0.018, row: float = 0.003, **settings: Any) -> None:
        settings = {"target_step_s": TARGET, "max_batch_size": 64, "max_seq_len": 8192} | settings
        super().__init__(pages=4000, page_size=32, max_step_tokens=512, **settings)
        self.base, self.row = base, row
        self.steps: list[tuple[Plan, float]] = []

    def run(self, plan: Plan) -> list[int]:
        ids = super().run(plan)
        seconds = self.base + self.row * plan.tokens
        self.now += seconds
        self.steps.append((plan, seconds))
        return ids

    def one_stream(self, tokens: int = 24, prompt: int = 38) -> tuple[float, list[float]]:
        """Runs a request of the tenant with few. Returns its time to the first token, and its gaps, in seconds."""
        sent = self.now
        stream = self.submit(prompt, tokens, ignore_eos=True, tenant="few")
        times = []
        while stream not in self.ends:
            if any(update.sequence is stream and update.tokens for update in self.step()):
                times.append(self.now)
        return times[0] - sent, [after - before for before, after in pairwise(times)]


class Crowd:
    """Requests of a tenant with many: as soon as one has ended, the next one arrives. Each is for eight answers."""

    def __init__(self, rig: Machine, requests: int = 8, *, answer: int = 64) -> None:
        self.rig, self.requests, self.answer, self.groups = rig, requests, answer, 0
        self.live: list[Sequence] = []
        step = rig.step
        rig.step = lambda: (self.arrive(), step())[1]  # type: ignore[method-assign]

    def arrive(self) -> None:
        self.live = [one for one in self.live if one not in self.rig.ends]
        while len(self.live) <= 8 * (self.requests - 1):
            self.groups += 1
            prompt = [10_000 + self.groups] * 38
            for answer in range(8):
                options = {"group": self.groups, "tenant": "many", "ignore_eos": True}
                self.live.append(self.rig.submit(prompt, self.answer + answer % 3, **options))


def alone(**settings: Any) -> tuple[float, list[float]]:
    rig = Machine(**settings)
    rig.one_stream()
    return rig.one_stream()


def test_stream_beside_many_requests_takes_at_most_twice_as_long_as_alone() -> None:
    """On this machine, sixty-four rows take ten times as long as one."""
    first_alone, gaps_alone = alone()
    rig = Machine()
    rig.one_stream()
    crowd = Crowd(rig)
    for _ in range(50):
        rig.step()
    rig.one_stream()  # from its second request on, the tenant is known
    for _ in range(8):
        for _ in range(3):
            rig.step()
        first, gaps = rig.one_stream()
        assert first <= 2.2 * first_alone
        assert max(gaps) <= 1.1 * 2 * max(gaps_alone), gaps
    assert crowd.groups > 8, "the other tenant's prompts and rows advance"


def test_long_prompts_of_another_tenant_leave_gaps_short() -> None:
    rig = Machine()
    rig.one_stream()
    for _ in range(4):
        rig.submit(1000, 4, ignore_eos=True, tenant="many")
    _, gaps = rig.one_stream(60)
    assert max(gaps[2:]) <= 1.1 * SHORT
    advanced = rig.steps[-1][0].tokens
    assert advanced >= 8, "what is left of the step is for the prompts"


def test_short_prompt_goes_before_the_prompts_of_a_tenant_with_many() -> None:
    rig = Machine()
    for _ in range(3):
        rig.submit(20, 400, ignore_eos=True, tenant="many")
    rig.one_stream()
    for _ in range(20):
        rig.submit(200, 400, ignore_eos=True, tenant="many")
    for _ in range(3):
        rig.step()
        short = rig.submit(38, 1, ignore_eos=True, tenant="few")
        rig.step()
        plan, seconds = rig.steps[-1]
        assert short in rig.ends and plan.tokens > 38 + 3, "the others advance, too"
        assert seconds <= 1.1 * SHORT + 38 * rig.row


def test_rows_of_a_tenant_above_its_share_take_turns() -> None:
    rig = Machine()
    rig.submit(30, 400, ignore_eos=True, tenant="few")
    many = [rig.submit(3, 400, ignore_eos=True, tenant="many") for _ in range(40)]
    while any(one.output_len < 2 for one in many):
        rig.step()
    before = [one.output_len for one in many]
    for _ in range(150):
        rig.step()
    advanced = [one.output_len - length for one, length in zip(many, before, strict=True)]
    assert max(advanced) - min(advanced) <= 2 and min(advanced) > 20


def test_drafts_make_no_limited_step_longer() -> None:
    rig = Machine(max_draft_tokens=7)
    for _ in range(40):
        rig.submit(3, 400, ignore_eos=True, tenant="many")
    for _ in range(3):
        rig.step()
    stream = rig.submit(3, 60, ignore_eos=True, tenant="few")
    expected = reference(stream, rig.config)[0]
    rig.step()
    while stream not in rig.ends:
        set_drafter(rig.scheduler, stream, OracleDrafter(expected))
        rig.step()
    assert max(seconds for _, seconds in rig.steps[-40:]) <= 1.1 * SHORT
    assert sum(len(plan.chunks) for plan, _ in rig.steps[-40:]) > 40 * 6, "the others advance"


def test_tenant_that_was_just_there_still_counts_and_then_no_longer() -> None:
    rig = Machine()
    for _ in range(40):
        rig.submit(3, 8000, ignore_eos=True, tenant="many")
    rig.one_stream()
    sizes = []
    for _ in range(SEEN_STEPS + 2):
        rig.step()
        sizes.append(rig.steps[-1][0].tokens)
    assert max(sizes[: SEEN_STEPS - 1]) < 20 and sizes[-1] == 40


@pytest.mark.parametrize(
    ("settings", "tenant"),
    [
        ({"base": 0.3, "row": 0.0005}, "many"),  # 31 rows take hardly longer than one
        ({"base": 0.002, "row": 0.0001}, "many"),  # no step is long
        ({"target_step_s": 0.0}, "many"),
        ({"scheduler_policy": "prefill_first"}, "many"),
        ({}, "few"),  # there is one tenant
    ],
)
def test_nothing_is_limited_where_it_would_help_nobody(settings: dict[str, Any], tenant: str) -> None:
    rig = Machine(**settings)
    rig.submit(20, 400, ignore_eos=True, tenant="few")
    many = [rig.submit(3, 400, ignore_eos=True, tenant=tenant) for _ in range(30)]
    while any(one.output_len < 9 for one in many):  # one of these steps shows how long one row takes
        rig.step()
    for _ in range(MEASURED_EVERY + SOON):
        rig.step()
        assert rig.steps[-1][0].tokens == 31


def test_few_rows_are_measured_alone_from_time_to_time() -> None:
    """All steps take four times as long from some moment on: then a step may, too."""
    rig = Machine()
    rig.submit(20, 4000, ignore_eos=True, tenant="few")
    for _ in range(30):
        rig.submit(3, 4000, ignore_eos=True, tenant="many")
    for _ in range(60):
        rig.step()
    rig.base, rig.row = 4 * rig.base, 4 * rig.row
    for _ in range(10 * MEASURED_EVERY):
        rig.step()
    plan, seconds = max(rig.steps[-3:], key=lambda step: step[1])  # one of them may be such a measurement
    assert 2 * 4 * 0.018 < seconds < 2 * 4 * 0.03 and plan.tokens > 5
    assert any(plan.tokens == 1 for plan, _ in rig.steps[-MEASURED_EVERY - 2 :])


def test_steps_grow_again_after_a_time_in_which_rows_took_long() -> None:
    rig = Machine()
    rig.submit(20, 4000, ignore_eos=True, tenant="few")
    for _ in range(30):
        rig.submit(3, 4000, ignore_eos=True, tenant="many")
    for row in (0.003, 0.02, 0.003):
        rig.row = row
        for _ in range(3 * FORGET_AFTER):
            rig.step()
    assert max(plan.tokens for plan, _ in rig.steps[-3:]) == 8


def test_tenant_that_sends_prompts_without_end_is_protected_no_longer() -> None:
    rig = Machine()
    many = [rig.submit(3, 8000, ignore_eos=True, tenant="many") for _ in range(40)]
    while any(one.output_len < 2 for one in many):
        rig.step()
    while rig.steps[-1][0].tokens < 60 + len(many):
        assert len(rig.steps) < 100
        rig.one_stream(tokens=1, prompt=60)
    assert rig.scheduler.state.queue.tenants.served(["few"])["few"] > LEAD
    for _ in range(8):
        rig.one_stream(tokens=1, prompt=60)
        assert rig.steps[-1][0].tokens == 60 + len(many), "then all rows are in each step"
