"""Answers match their grammar, whatever happens to their sequence: preemption, failures, resumption."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from jsonschema_rs import Draft202012Validator

from frontend.structured_output import grammar as build
from shared import messages as m
from shared.wire import pack_u32, unpack_u32
from tests.checkpoints import VOCAB, Checkpoints
from tests.schemas import SCHEMAS, TEMPERATURES
from tests.worker.engine.harness import ME
from tests.worker.structured_output.harness import NAMED, Bench, alone, engine_of, submit


@settings(max_examples=25, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SCHEMAS)
def test_answer_that_ends_by_itself_keeps_to_its_schema(bench: Bench, whole: dict[str, Any]) -> None:
    made = build.json_schema(whole, "x")
    bench.server.sent.clear()
    first = max([id for _, id in bench.request_table._records], default=0) + 1
    bench.send(*(submit(first + i, made, 150, temperature=t) for i, t in enumerate(TEMPERATURES)))
    bench.finish()
    outputs, ends = bench.received()
    assert not bench.rejected() and len(ends) == len(TEMPERATURES)
    for id, end in ends.items():
        assert end.outcome in (m.Outcome.EOS, m.Outcome.LENGTH), end
        if end.outcome is m.Outcome.EOS:
            Draft202012Validator(whole).validate(json.loads(bench.text(outputs[id])))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_answers_keep_to_every_kind_of_grammar_and_vocabulary(kind: str, checkpoints: Checkpoints) -> None:
    bench = Bench(engine_of(checkpoints(kind)))
    made = [build.one_of(["yes", "naïve 日本"], "x"), build.regex("[0-9]{3}-(a|ü)+z", "x"), build.json_object(),
            build.lark('start: "<" WORD ">" start | "."\nWORD: /[a-z]{2}/', "x"), NAMED]  # fmt: skip
    outputs, ends = alone(bench, *(submit(i, text, temperature=1.0) for i, text in enumerate(made)))
    texts = {id: bench.text(outputs[id]) for id in ends if ends[id].outcome is m.Outcome.EOS}
    assert {0, 1, 4} <= texts.keys()
    assert texts[0] in ("yes", "naïve 日本") and texts[1][3] == "-" and json.loads(texts[4]).keys() == {"name", "age"}


def test_matcher_moves_once_for_each_token_whatever_happens(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is the same alone, beside others, preempted, in steps that fail and are retried, and when resumed."""
    ((wanted, end),) = zip(*(part.values() for part in alone(bench, submit(1, NAMED, temperature=0.9))), strict=True)
    assert end.outcome is m.Outcome.EOS
    others = [submit(i, build.json_object() if i % 2 else "", 40, temperature=1.0) for i in range(3, 9)]
    bench.server.sent.clear()
    bench.send(*others, submit(2, NAMED, temperature=0.9, seed=1))
    bench.iterate()
    bench.wait_for_grammars()
    failing = {8, 20}  # iterations whose first try fails after the masks were made
    launch = bench.engine.runner.launch
    for turn in range(200):
        (target,) = [one for one in bench.scheduler.sequences() if one.key == (ME, 2)] or [None]
        if turn in (5, 17) and target in bench.scheduler.state.running:
            bench.scheduler.state.preempt(target, bench.now)

        def trouble(plan: Any, before: Any, turn: int = turn) -> Any:
            flight = launch(plan, before)
            if turn in failing:
                failing.remove(turn)
                raise MemoryError
            return flight

        monkeypatch.setattr(bench.engine.runner, "launch", trouble)
        bench.iterate()
    assert not failing
    assert bench.received()[0][2] == wanted and bench.received()[1][2].outcome is m.Outcome.EOS
    monkeypatch.setattr(bench.engine.runner, "launch", launch)
    for have in range(0, len(wanted) + 1, 3):
        bench.server.sent.clear()
        bench.request_table._records.clear()
        bench.send(submit(1, NAMED, temperature=0.9, generated=pack_u32(wanted[:have])))
        bench.finish()
        rest = [token for _, step in bench.server.sent for token in unpack_u32(step.tokens)]
        assert wanted[:have] + rest == wanted, have


def token_of(bench: Bench, text: str) -> int:
    (token,) = bench.compiler._vocabulary.result().tokenize_str(text)
    return token


@pytest.mark.parametrize("choices", [[str(i) for i in range(4096)], ["", *(f"a{i} " * 9 for i in range(4095))]])
def test_choice_of_the_most_texts_gives_one_of_them(bench: Bench, choices: list[str]) -> None:
    outputs, ends = alone(bench, submit(1, build.one_of(choices, "x"), temperature=2.0))
    assert ends[1].outcome == m.Outcome.EOS and bench.text(outputs[1]) in choices


def test_outcomes_with_grammars(bench: Bench) -> None:
    some = build.regex("[a-z]+", "x")
    either = build.one_of(["a", "b"], "x")
    dead = json.dumps({"grammars": [{"lark_grammar": 'start: "a" B\nB: /[a-b]/ & /[c-d]/'}]})  # frontends refuse it
    letter = token_of(bench, "a")
    banned = tuple((token, -100.0) for token in range(VOCAB) if token != 5)
    outputs, ends = alone(
        bench,
        submit(1, NAMED, 3),
        submit(2, some, 40, min_tokens=30, temperature=1.0),
        submit(3, either, 9, min_tokens=5, temperature=5.0),
        submit(4, either, ignore_eos=True),
        submit(5, build.regex("(ab)?", "x"), ignore_eos=True, temperature=3.0),
        submit(6, dead),
        submit(7, either, 9, logit_bias=banned, temperature=1.0),
        submit(8, "", 5, logit_bias=banned, ignore_eos=True),
        submit(9, either, 0),
        submit(10, build.regex("[a-c]{5}", "x"), stop_token_ids=(letter,), logit_bias=((letter, 50.0),)),
    )  # fmt: skip
    ended = {id: end.outcome for id, end in ends.items()}
    assert ended[1] is m.Outcome.LENGTH and len(outputs[1]) == 3
    assert len(outputs[2]) >= 30 and bench.text(outputs[2]).islower()
    assert ended[3] is m.Outcome.EOS and bench.text(outputs[3]) in "ab", "nothing may follow, so it ends early"
    assert ended[4] is ended[5] is ended[7] is m.Outcome.EOS and bench.text(outputs[7]) in "ab", (
        "a bias changes nothing"
    )
    assert bench.text(outputs[5]) in ("", "ab")
    assert ended[6] is m.Outcome.DEAD_END and "grammar" in ends[6].error and bench.text(outputs[6]) == "a"
    assert ended[8] is m.Outcome.LENGTH and outputs[8] == [5] * 5, "neighbours are not masked"
    assert ended[9] is m.Outcome.LENGTH and 9 not in outputs
    assert ended[10] is m.Outcome.STOP and bench.text(outputs[10]) == "a"


def test_logprobs_are_those_of_the_model_without_the_mask(bench: Bench) -> None:
    alone(bench, submit(1, build.one_of(["a"], "x"), 9, logprobs=3))
    masked = [one for _, step in bench.server.sent for one in step.logprobs]
    alone(bench, submit(2, "", 1, logprobs=3))
    free = [one for _, step in bench.server.sent for one in step.logprobs]
    assert masked[0].top_ids == free[0].top_ids and masked[0].top_logprobs == free[0].top_logprobs
