"""Steps bound the time of samplers, masks and log-probabilities, and every sequence still advances."""

import pytest

from shared.messages import SamplerChain, Sampling
from worker.scheduler.host_budget import CHECKED_S, PREFILL_S, SCORED_S, STEP_S, HostBudget, HostWork, host_work
from worker.scheduler.sequence import Sequence


def sequence(cost: float | None, last: float = 0.0, prompt: float = 0.0) -> Sequence:
    one = Sequence((b"", 1), [1, 2], 2, Sampling(9), 0)
    one.host = None if cost is None else HostWork(chain=cost, prompt=prompt, measured=prompt != SCORED_S)
    one.history.last_token = last
    return one


def test_cheap_rows_are_in_every_step_and_expensive_ones_take_turns() -> None:
    budget, plain, cheap = HostBudget(), sequence(None), [sequence(0.001, last=9.0) for _ in range(10)]
    costly = [sequence(0.02, last=at) for at in range(20)]
    now, served = 100.0, [0] * len(costly)
    for _ in range(40):
        chosen = budget.affordable([*costly, plain, *cheap])
        assert plain in chosen and all(one in chosen for one in cheap)
        assert sum(one.host.row for one in chosen if one.host) <= STEP_S
        for at, one in enumerate(costly):
            if one in chosen:
                served[at] += 1
                one.history.last_token = now = now + 1
    assert max(served) - min(served) <= 1 and sum(served) == 40 * 4


def test_a_row_that_costs_more_than_a_step_is_alone_in_its_turn() -> None:
    slow = [sequence(3 * STEP_S, last=2.0), sequence(3 * STEP_S, last=1.0)]
    assert HostBudget().affordable(slow) == slow[1:]


def test_few_rows_are_not_touched() -> None:
    decodes = [sequence(STEP_S / 4) for _ in range(4)]
    assert HostBudget().affordable(decodes) is decodes


def test_chunks_of_scored_and_checked_prompts_are_cut() -> None:
    budget = HostBudget()
    budget.affordable([])
    scored, plain = sequence(0.0, prompt=0.001), sequence(None)
    assert budget.fitting(scored, 512, 600, samples=True) == round(PREFILL_S / 0.001)
    assert budget.fitting(plain, 512, 600, samples=True) == 512
    assert budget.fitting(scored, 512, 600, samples=True) == 0, "the other one has used the time of this step"
    budget.affordable([])
    checked = sequence(0.01)
    assert budget.fitting(checked, 300, 45, samples=True) == 45 - 1 + 5, "five rows of ids are sampled"
    assert budget.fitting(sequence(0.01), 7, 7, samples=True) == 6, "and the last token waits"
    budget.affordable([])
    assert budget.fitting(sequence(3.0), 7, 7, samples=True) == 7, "one row is always allowed"


def test_a_new_scored_prompt_is_assumed_to_cost_what_the_latest_did() -> None:
    budget, first = HostBudget(), sequence(0.0, prompt=SCORED_S)
    budget.affordable([])
    assert budget.fitting(first, 512, 600, samples=False) == round(PREFILL_S / SCORED_S)
    assert first.host is not None
    first.host.prompt, first.host.measured = PREFILL_S / 1000, True
    budget.affordable([])
    new = [sequence(0.0, prompt=SCORED_S) for _ in range(4)]
    assert [budget.fitting(one, 512, 600, samples=False) for one in new] == [512, 488, 0, 0]
    many = sequence(0.0, prompt=SCORED_S)
    many.sampling = Sampling(9, prompt_top=500)
    budget.affordable([])
    assert budget.fitting(many, 512, 600, samples=False) == round(PREFILL_S / SCORED_S), "these are sorted"


def test_a_new_chain_is_assumed_to_cost_by_its_samplers_or_what_an_equal_one_did() -> None:
    budget = HostBudget()

    def new(samplers: int) -> Sequence:
        asked = Sampling(9, chain=SamplerChain(("typ_p",) * samplers, typical_p=0.9))
        return Sequence((b"", 1), [1, 2], 2, asked, 0, host=host_work(asked))

    def planned(sequences: list[Sequence]) -> int:
        budget.affordable([])
        return sum(budget.fitting(one, 2, 2, samples=True) == 2 for one in sequences)

    long, short = [new(16) for _ in range(4)], [new(1) for _ in range(4)]
    assert planned(long) == 1, "sixteen samplers take longer than a step has"
    assert planned(short) == 4
    assert long[0].host is not None
    long[0].host.chain, long[0].host.chained = PREFILL_S / 3, True
    assert planned(long) == 3, "the time of an equal chain is known now"


def test_a_check_of_a_plain_answer_is_cut_by_the_time_of_its_draws() -> None:
    host = host_work(Sampling(500, temperature=1.0), checked=True)
    assert host is not None
    check = Sequence((b"", 1), [1, 2], 2, Sampling(500), 0, host=host)
    budget = HostBudget()
    budget.affordable([])
    assert budget.fitting(check, 501, 2, samples=True) == 1 + round(PREFILL_S / CHECKED_S)
    host.checked, host.chain = 0.0001, 0.01
    budget.affordable([])
    assert budget.fitting(check, 501, 2, samples=True) == 1 + round(PREFILL_S / 0.01), "a chain is a part of the time"


@pytest.mark.parametrize(
    ("asked", "counts"),
    [
        (Sampling(1), False), (Sampling(1, logit_bias=((1, 1.0),)), False), (Sampling(1, logprobs=0), True),
        (Sampling(1, grammar="x"), True), (Sampling(1, chain=SamplerChain(("typ_p",))), True),
        (Sampling(1, prompt_logprobs=True), True), (Sampling(1, bad_words=((1,),)), True),
    ],
)  # fmt: skip
def test_only_requests_with_work_for_the_host_are_counted(asked: Sampling, counts: bool) -> None:
    assert (host_work(asked) is not None) == counts
