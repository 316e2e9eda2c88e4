"""The cost of one more row is found despite noise in step times, and found again when the machine changes."""

import random
from math import inf

import pytest

from tests.worker.scheduler.harness import OracleDrafter, Rig, reference, set_drafter
from worker.scheduler.host_budget import HostWork
from worker.scheduler.step_time import (
    COMPARISONS,
    FORGET_AFTER,
    LEAST_ROW_COST,
    PLAIN_EVERY,
    PROPOSAL_COST,
    ROW_COST,
    RowCosts,
    StepTimePolicy,
)


def measured(cost: float, sequences: int, steps: int = 60, noise: float = 0.0, seed: int = 1) -> RowCosts:
    """Returns the costs learnt from steps with and without drafts. Steps take 20 ms, and longer as contexts grow."""
    draw, costs = random.Random(seed), RowCosts()
    for step in range(steps):
        drafted = draw.randint(1, 4) if step % 2 else 0
        seconds = 0.020 * (1 + step / 1000) * (1 + cost * drafted) * draw.uniform(1 - noise, 1 + noise)
        costs.add(sequences, sequences + drafted, seconds)
    return costs


def test_cost_is_assumed_until_it_is_measured() -> None:
    costs = RowCosts()
    assert costs(1) == inf, "the first step has no drafts, to compare others with it"
    costs.add(1, 1, 0.5)
    assert costs(1) == costs(9) == ROW_COST
    costs.add(2, 4, 0.5)
    assert costs(2) == ROW_COST, "there is nothing to compare with"


def test_host_time_is_a_share_of_a_step_without_drafts() -> None:
    costs = RowCosts()
    assert costs.of_host(1, 0.001) == inf
    costs.add(2, 2, 0.020)
    costs.add(2, 5, 0.080)
    assert costs.of_host(2, 0.001) == costs.of_host(7, 0.001) == pytest.approx(0.05)


def test_host_time_of_rows_after_drafts_is_no_cost_of_other_rows() -> None:
    def cost(host_s: float) -> float:
        rig = Rig(page_size=64, max_draft_tokens=3, token_s=0.01)
        sequence = rig.submit([1, 2, 3], 40, ignore_eos=True)
        set_drafter(rig.scheduler, sequence, OracleDrafter(reference(sequence, rig.config)[0]))
        sequence.host = HostWork(mask=host_s)
        while rig.scheduler.has_work:
            plan = rig.plan()
            rig.now += host_s * plan.drafts
            rig.commit(plan, rig.run(plan))
        return rig.scheduler._step_time.row_cost(1)

    assert cost(0.02) == pytest.approx(cost(0.0))


def test_a_step_without_drafts_is_measured_from_time_to_time() -> None:
    costs = RowCosts()
    costs.add(3, 3, 0.020)
    for _ in range(PLAIN_EVERY):
        assert costs(3) < 1
        costs.add(3, 6, 0.021)
    assert costs(3) == inf > costs(2)
    costs.add(3, 3, 0.020)
    assert costs(3) < 1


@pytest.mark.parametrize("cost", [0.01, 0.08, 0.3])
def test_cost_is_found_through_the_noise_of_steps(cost: float) -> None:
    for seed in range(20):
        assert measured(cost, 8, noise=0.05, seed=seed)(8) == pytest.approx(cost, abs=0.025)


def test_one_step_that_was_held_up_changes_little() -> None:
    costs = measured(0.05, 8)
    costs.add(8, 9, 3.0)
    assert costs(8) == pytest.approx(0.05, abs=0.01)


def test_cost_of_another_number_of_sequences_is_that_of_the_nearest() -> None:
    costs = measured(0.3, 8)
    for step in range(40):
        costs.add(2, 2 + step % 2, 0.010 * (1 + 0.1 * (step % 2)))
    assert costs(3) == costs(1) == costs(2) == pytest.approx(0.1)
    assert costs(7) == costs(16) == pytest.approx(0.3, abs=0.01)


def test_cost_is_never_nothing() -> None:
    assert measured(-0.2, 4)(4) == LEAST_ROW_COST


def test_cost_that_forbids_drafts_is_forgotten() -> None:
    costs = measured(5.0, 4)
    assert costs(4) > 4
    for _ in range(FORGET_AFTER * COMPARISONS):
        costs.add(4, 4, 0.02)
    assert costs(4) == ROW_COST


def test_time_of_a_model_that_proposes_is_measured_by_itself() -> None:
    costs = RowCosts()
    assert costs.of_proposals(1) == PROPOSAL_COST
    costs.add(1, 1, 0.020)
    costs.proposed(1, 2, 0.004)
    assert costs.of_proposals(1) == costs.of_proposals(3) == pytest.approx(0.1)
    costs.proposed(1, 1, 0.5, first=True)
    assert costs.of_proposals(1) == pytest.approx(0.1), "a prompt was read"
    assert (costs.take_proposing(), costs.take_proposing()) == (0.504, 0.0)
    for _ in range(FORGET_AFTER):
        costs.add(1, 1, 0.020)
    assert costs.of_proposals(1) == PROPOSAL_COST
    policy = StepTimePolicy(inf, 64)
    for seconds, rows, proposing in ((0.020, 1, 0.0), (0.030, 2, 0.005)) * 20:
        policy.row_cost.proposed(1, 1, proposing)
        policy.planned(0.0, 1, rows, 0)
        policy.launched(1)
        policy._last_computed = 0.0
        policy.computed(seconds)
    assert policy.row_cost(1) == pytest.approx(0.25)


def test_steps_of_a_scheduler_are_compared_by_their_sequences() -> None:
    """In this test, a step takes 10 ms for each row."""
    rig = Rig(page_size=64, max_draft_tokens=3, token_s=0.01)
    stream = rig.submit([1, 2, 3], 40, ignore_eos=True)
    for _ in range(4):
        rig.step()
    set_drafter(rig.scheduler, stream, OracleDrafter(reference(stream, rig.config)[0]))
    for _ in range(5):
        rig.step()
    assert rig.scheduler._step_time.row_cost(1) == pytest.approx(1.0)
