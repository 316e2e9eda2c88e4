"""Allowed ids and bad words in the real loop: alone, with a grammar, with drafts, preempted, resumed anywhere."""

from typing import Any

import numpy as np
import pytest

from frontend.structured_output import grammar as build
from shared import messages as m
from shared.wire import pack_u32, unpack_u32
from tests.checkpoints import EOS, VOCAB
from tests.worker.engine.harness import ME
from tests.worker.structured_output.harness import Bench, alone, submit
from worker.structured_output.matcher import restriction

OPEN, CLOSE = 10, 11


def budget(tokens: int, **more: Any) -> m.ThinkingBudget:
    return m.ThinkingBudget(tokens, (OPEN,), CLOSE, (CLOSE, 12), **{"begun": True, **more})


def permitted(sampling: m.Sampling, *output: int) -> list[int]:
    rules = restriction(sampling)
    assert rules is not None and rules.replay(output)
    bits = np.full((VOCAB + 31) // 32 * 4, 0xFF, np.uint8)
    rules.narrow(bits)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")[:VOCAB]).tolist()


def test_restriction_of_a_free_output_is_none() -> None:
    assert restriction(m.Sampling(5, logit_bias=((1, 2.0),))) is None


def test_bad_words_forbid_their_last_token_after_the_others() -> None:
    sampling = m.Sampling(9, bad_words=((4,), (1, 2, 3)))
    every = set(range(VOCAB))
    assert set(permitted(sampling)) == every - {4} == set(permitted(sampling, 1)) == set(permitted(sampling, 2))
    assert set(permitted(sampling, 9, 1, 2)) == every - {3, 4}


def test_end_of_reasoning_is_all_that_is_permitted_when_it_is_due() -> None:
    sampling = m.Sampling(9, thinking=budget(2), bad_words=((CLOSE,),))
    assert permitted(sampling, 1, 2) == [CLOSE] and permitted(sampling, 1, 2, CLOSE) == [12]
    assert len(permitted(sampling, 1)) == VOCAB - 1 == len(permitted(sampling, 1, 2, CLOSE, 12))


def test_rules_that_are_fulfilled_are_idle() -> None:
    rules, masks = restriction(m.Sampling(9, thinking=budget(1))), []
    assert rules is not None
    for token in (1, CLOSE, 12):
        assert not rules.idle
        masks.append(rules.masks)
        rules.accept(token)
    assert rules.idle and masks == [False, True, True] and not rules.masks


def test_output_has_allowed_tokens_only(bench: Bench) -> None:
    allowed = {"allowed_token_ids": (20, 21, 22), "temperature": 5.0, "repetition_penalty": 1.5}
    outputs, ends = alone(
        bench, submit(1, "", 30, **allowed), submit(2, "", 4, allowed_token_ids=(EOS,), min_tokens=3),
        submit(3, "", 9, allowed_token_ids=(20, EOS), min_tokens=5, temperature=9.0),
    )  # fmt: skip
    assert {*outputs[1]} == {20, 21, 22} and len(outputs[1]) == 30 and ends[1].outcome is m.Outcome.LENGTH
    assert outputs[2] == [EOS] * 3, "nothing else is allowed"
    assert outputs[3][:5] == [20] * 5


def test_rules_that_leave_no_token_end_with_an_error(bench: Bench) -> None:
    digits = build.regex("[0-9]+", "x")
    _, ends = alone(
        bench, submit(1, "", allowed_token_ids=(20,), bad_words=((20, 20),)), submit(2, digits, allowed_token_ids=(9,))
    )
    assert {end.outcome for end in ends.values()} == {m.Outcome.DEAD_END}
    assert "allowed_token_ids" in ends[1].error and ends[2].error


def test_request_with_malformed_rules_is_rejected(bench: Bench) -> None:
    wrong = [{"allowed_token_ids": (VOCAB,)}, {"bad_words": ((),)}, {"bad_words": ((1, VOCAB),)},
             {"thinking": m.ThinkingBudget(-1, (OPEN,), CLOSE, (CLOSE,))}, {"prompt_top": VOCAB + 1},
             {"thinking": m.ThinkingBudget(1, (OPEN,), CLOSE, (3,))}]  # fmt: skip
    bench.server.sent.clear()
    bench.send(*[submit(i, "", 3, **fields) for i, fields in enumerate(wrong)])
    bench.iterate()
    assert bench.rejected().keys() == {*range(len(wrong))}


def test_thoughts_end_at_the_budget_and_cost_nothing_before(bench: Bench) -> None:
    free = alone(bench, submit(1, "", 40, temperature=1.0, ignore_eos=True))[0][1]
    held = alone(bench, submit(2, "", 40, seed=1, temperature=1.0, ignore_eos=True, thinking=budget(12)))[0][2]
    assert held[:12] == free[:12] and held[12:14] == [CLOSE, 12] and len(held) == 40


RULES = {
    "allowed": {"allowed_token_ids": tuple(range(20, 60))},
    "bad": {"bad_words": ((21,), (22, 23)), "allowed_token_ids": (21, 22, 23, 24)},
    "budget": {"thinking": budget(9)},
    "everywhere": {"thinking": budget(5, begun=False, blanks=None, forbidden=((30, 31),)),
                   "allowed_token_ids": (OPEN, CLOSE, 12, 30, 31)},
    "grammar": {"thinking": budget(7), "grammar": build.regex("(?s:.*)", "x")},
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_answer_with_rules_is_the_same_in_company_preempted_and_resumed(bench: Bench, name: str) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 30, **RULES[name]}
    made = options.pop("grammar", "")
    wanted = alone(bench, submit(1, made, **options))[0][1]
    assert len(wanted) == 30
    others = [submit(i, "", 40, temperature=1.0, **list(RULES.values())[i % 4]) for i in range(3, 9)]
    bench.server.sent.clear()
    bench.send(*others, submit(2, made, seed=1, **options))
    bench.iterate()
    bench.wait_for_grammars()
    for turn in range(80):
        (target,) = [one for one in bench.scheduler.sequences() if one.key == (ME, 2)] or [None]
        if turn in (5, 17) and target in bench.scheduler.state.running:
            bench.scheduler.state.preempt(target, bench.now)
        bench.iterate()
    assert bench.received()[0][2] == wanted
    for have in range(0, len(wanted), 4):
        bench.server.sent.clear()
        bench.request_table._records.clear()
        bench.send(submit(1, made, generated=pack_u32(wanted[:have]), **options))
        bench.finish()
        rest = [token for _, step in bench.server.sent for token in unpack_u32(step.tokens)]
        assert wanted[:have] + rest == wanted, have
