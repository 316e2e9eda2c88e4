"""Steps bound the time of samplers, masks and log-probabilities, and every sequence still advances."""

import pytest

from shared.messages import SamplerChain, Sampling
from tests.worker.scheduler.harness import SlowMask
from worker.kv_cache.pages import PagePool
from worker.scheduler.host_budget import (
    CHECKED_S,
    DECAY,
    DRAWN_S,
    LOGITS,
    PREFILL_S,
    SCORED_S,
    SEEN_STEPS,
    STEP_S,
    HostBudget,
    HostWork,
    host_work,
)
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Chunk, RequestStats, SchedulingParams, Sequence

VOCAB = 152_000


def sequence(cost: float | None, last: float = 0.0, prompt: float = 0.0, tenant: str = "") -> Sequence:
    one = Sequence((b"", 1), [1, 2], 2, Sampling(9), 0, turn=SchedulingParams(tenant=tenant))
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


def drawn(cost: float, last: float, tenant: str) -> Sequence:
    one = sequence(0.0, last, tenant=tenant)
    one.host = HostWork(draw=cost, drawn=True)
    return one


def test_tenants_share_the_time_of_a_step() -> None:
    one, few = drawn(STEP_S / 3, 9.0, "a"), [drawn(STEP_S / 25, 9.0, "b")]
    many = [drawn(STEP_S / 10, at, "c") for at in range(64)]
    chosen = HostBudget().affordable([*many, one, *few])
    assert one in chosen and few[0] in chosen, "however many rows another tenant has, and however long they waited"
    assert [one for one in chosen if one in many] == many[: len(chosen) - 2]
    assert 0.9 * STEP_S <= sum(one.host.row for one in chosen if one.host) <= STEP_S, "no time is left unused"
    slow = [sequence(3 * STEP_S, tenant=tenant) for tenant in ("a", "b", "b")]
    assert HostBudget().affordable(slow) == slow[:2], "each tenant may have one row"


@pytest.mark.parametrize(("rows", "cost"), [(16, 0.006), (3, 0.05), (1, 0.3)])
def test_heavy_rows_of_a_tenant_take_no_longer_than_the_forward_beside_others(rows: int, cost: float) -> None:
    budget, other, forward = HostBudget(), sequence(None, tenant="b"), 0.02
    heavy = [sequence(cost, last=at, tenant="a") for at in range(rows)]
    for _ in range(9):
        budget.computed(forward, [])
    taken, served, now = 0.0, [0] * rows, 100.0
    for _ in range(600):
        chosen = budget.affordable([*heavy, other])
        assert other in chosen
        for at, one in enumerate(heavy):
            if one in chosen:
                taken, served[at], now = taken + cost, served[at] + 1, now + 1
                one.history.last_token = now
    assert 0.8 * 600 * forward <= taken <= 600 * forward + cost + 1e-9
    assert min(served) > 0.7 * max(served), "they take turns"
    for _ in range(SEEN_STEPS):
        budget.affordable(heavy)
    assert len(budget.affordable(heavy)) == max(1, min(rows, int(STEP_S / cost))), (
        "alone, a tenant may use a whole step"
    )


def masked(tenant: str) -> tuple[Sequence, SlowMask]:
    one, mask = sequence(0.0, tenant=tenant), SlowMask()
    one.host, constraint = HostWork(mask=0.1), mask
    one.constraint = constraint  # type: ignore[assignment]
    return one, mask


def test_row_waits_for_a_heavy_mask_that_is_computed_elsewhere_and_then_costs_nothing() -> None:
    budget, other = HostBudget(), sequence(None, tenant="b")
    (one, mask), (suspect, never) = masked("a"), masked("a")
    suspect.history.crashes = 1
    assert budget.affordable([one]) == [one] and not mask.asked, "alone, a tenant's rows wait for nobody"
    for _ in range(5):
        assert budget.affordable([one], [one, other]) == [] and budget.masked == [one], "the mask wakes the loop"
        assert one not in budget.affordable([one, other]) and budget.crowded
        assert budget.fitting(one, 7, 7, samples=True) == 6, "the rest of a prompt needs no mask"
    mask.is_computed, plain = True, sequence(None, tenant="a")
    for _ in range(2 * SEEN_STEPS):  # the others leave
        assert budget.affordable([one, plain]) == [plain] and budget.masked == [one], "no step waits for the mask"
    assert not budget.crowded
    mask.ready, mask.is_computed = True, False
    assert budget.affordable([one, plain]) == [one, plain]
    budget.affordable([one], [one, other])
    assert all(budget.affordable([one, other]) == [one, other] for _ in range(9)) and not budget.masked
    assert budget.fitting(one, 7, 7, samples=True) == 7 and set(mask.asked) == {"a"}
    assert suspect in budget.affordable([suspect, other]) and not never.asked, "it is computed in a step of its own"
    one.host = HostWork(mask=0.1, rules=0.1)
    assert sum(one in budget.affordable([one, other]) for _ in range(60)) < 9, "what is left for the step is limited"


def test_heavy_rows_advance_if_no_other_sequence_can() -> None:
    budget, heavy, prompt = HostBudget(), sequence(1.0, tenant="a"), sequence(None, tenant="b")
    assert all(budget.affordable([heavy], [heavy, prompt]) == [heavy] for _ in range(9))


def test_the_time_of_the_forward_is_that_of_steps_without_the_rows_of_the_host() -> None:
    budget, rows = HostBudget(), [sequence(0.03, tenant="a"), sequence(0.03, tenant="a")]
    chunks = [Chunk(one, 1, 1, True) for one in rows]
    for _ in range(9):
        budget.computed(0.08, chunks)
    beside = [*rows, sequence(None, tenant="b")]
    assert [sum(one in budget.affordable(beside) for one in rows) for _ in range(60)].count(1) in range(38, 43)


def test_a_new_row_waits_its_turn_from_its_arrival() -> None:
    old = [sequence(STEP_S, last=at) for at in (5.0, 4.0)]
    new = sequence(STEP_S)
    new.history = RequestStats(arrival=4.5)
    assert HostBudget().affordable([*old, new]) == [old[1]]
    old[1].history.last_token = 6.0
    assert HostBudget().affordable([*old, new]) == [new]


def test_random_draws_from_a_large_vocabulary_are_counted_on_a_cpu() -> None:
    def new(**asked: float) -> Sequence:
        one = Sequence((b"", 1), [1, 2], 2, Sampling(9, **{"temperature": 1.0, **asked}), 0)
        budget.entered(one)
        return one

    def planned(sequences: list[Sequence]) -> int:
        budget.affordable([])
        return sum(budget.fitting(one, 2, 2, samples=True) == 2 for one in sequences)

    budget = HostBudget(VOCAB)
    assert new(temperature=0.0).host is None
    flat = [new(top_p=0.99) for _ in range(64)]
    assert planned(flat) == int(PREFILL_S / (DRAWN_S * VOCAB)) == 25
    slow = 0.013
    for one in flat[:25]:
        assert one.host is not None
        one.host.draw, one.host.drawn = slow, True
    assert planned([new(top_p=0.9) for _ in range(64)]) == int(PREFILL_S / slow), "an equal kind has been measured"
    assert planned([new() for _ in range(64)]) == 25, "another kind has not"
    cheap = new(top_p=0.5)
    planned([cheap])
    assert cheap.host is not None
    cheap.host.draw, cheap.host.drawn = 0.0001, True
    assert planned([new(top_p=0.99) for _ in range(64)]) == int(PREFILL_S / (slow * DECAY)), (
        "one cheap row proves little"
    )
    for small in (HostBudget(), HostBudget(512)):
        budget = small
        assert new().host is None


def test_a_request_with_many_answers_has_a_bounded_number_of_draws_in_a_step() -> None:
    config = SchedulerConfig(max_seq_len=64, max_batch_size=64, cpu_vocab_size=VOCAB)
    scheduler = Scheduler(config, [PagePool(400, 16)])
    other = Sequence((b"", 1), [1, 2], 2, Sampling(60, temperature=0.0), 0)
    scheduler.submit(other, 0.0)
    for id in range(2, 130):
        prompt, sampling = [id, 2], Sampling(4, temperature=1.0, ignore_eos=True)
        scheduler.submit(Sequence((b"", id), prompt, 2, sampling, id, turn=SchedulingParams(tenant="b")), 0.0)
    steps, counts = 0, list[int]()
    while len(scheduler.state.live) > 1 or not steps:
        plan = scheduler.plan(float(steps))
        sampled = [sequence for sequence, *_ in plan.rows]
        assert other in sampled, "another client's stream gains a token in every step"
        counts.append(len(sampled) - 1)
        scheduler.launched(plan)
        scheduler.update(plan, [5] * len(sampled), float(steps + 1))
        for one in sampled:
            if one.host is not None:
                one.host.draw, one.host.drawn = STEP_S / 10, True
                one.history.last_token = float(steps + 1)
        steps += 1
    first = int(PREFILL_S / (DRAWN_S * VOCAB))
    assert counts[0] == first and max(counts[1:]) <= 10 + 5, "draws of a step, and first draws of prompts"
    assert sum(counts) == 128 * 4


def test_prompts_of_a_step_on_a_cpu_have_a_bounded_number_of_logits() -> None:
    budget, most = HostBudget(VOCAB), LOGITS // VOCAB
    budget.affordable([])
    check = sequence(0.0)
    assert check.host is not None
    check.host.checked = 1e-6  # a greedy check draws nothing, but the model computes its rows of logits
    assert budget.fitting(check, 501, 2, samples=True) == 1 + most
    assert budget.fitting(sequence(1e-6), 501, 2, samples=True) == 1
    budget.affordable([])
    assert budget.fitting(sequence(0.0, prompt=1e-6), 512, 600, samples=False) == most
    assert HostBudget().fitting(check, 501, 2, samples=True) == 501, "a GPU computes them"


def test_every_tenant_has_a_row_of_a_prompt_in_a_step() -> None:
    budget = HostBudget()
    budget.affordable([])
    first, same, other = (sequence(3.0, tenant=tenant) for tenant in "aab")
    assert [budget.fitting(one, 7, 7, samples=True) for one in (first, same, other)] == [7, 6, 7]


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
