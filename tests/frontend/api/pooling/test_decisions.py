"""Typed questions over a fake worker: what the model is asked, how its probabilities are told, refusals."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from frontend.api.pooling.questions import Answer, Question
from shared import messages as m
from shared.checkpoint import Task
from shared.wire import pack_f32
from tests.fakes import FakePool
from tests.fakes import tokenizer as small_tokenizer
from tests.frontend.serving import http_client
from tests.frontend.speaking import Model

STATE = "A dog barks."
CHOICE = {"type": "choice", "instructions": "Which animal?", "criteria": {"cat": "meows", "dog": None, "cow": ""}}
SCORE = {"type": "score", "criteria": ["quiet", "loud", "deafening"]}
NOUL = {"type": "noul", "instructions": "It is loud.", "criteria": {"true": "one hears it", "false": None}}
EVERY = {"animal": CHOICE, "noise": SCORE, "loud": NOUL}


def answering(logprob: Callable[[int], float], best: int) -> Any:
    """Returns a `play` that gives each asked token its log-probability."""

    def play(pool: FakePool, stream: Any) -> None:
        def end() -> None:
            stream.vector = pack_f32([*map(logprob, stream.submit.pooling.token_ids), float(best)])
            pool.end(stream, m.Outcome.POOLED, cached=2)

        pool.later(end)

    return play


def id_of(model: Model, text: str) -> int:
    ((id,),) = model.tokenizer.encode_now([text], False)
    return id


async def post(model: Model, path: str, body: dict[str, Any]) -> Any:
    async with http_client(model.pool, model.tokenizer) as http:
        return await http.post(path, json=body)


async def test_each_question_stands_alone_behind_the_same_state(qwen: Model) -> None:
    qwen.pool.play = answering(lambda id: -1.0, 0)
    body = {"state": STATE, "instructions": "Be exact.", "questions": EVERY}
    answer = await post(qwen, "/v1/systemone", body)
    assert answer.status_code == 200, answer.text
    animal, noise, loud = qwen.prompts
    begin = f"<|im_start|>system\nBe exact.<|im_end|>\n<|im_start|>user\n{STATE}\n\n"
    assert all(one.startswith(begin) and one.count("Answer only with") == 1 for one in (animal, noise, loud))
    assert "Which animal?" in animal and "Which animal?" not in noise + loud
    assert "0: quiet\n1: loud\n2: deafening\n\nAnswer only with the number of one level." in noise
    assert "A: yes - one hears it\nB: no\n\nAnswer only with the letters" in loud  # `yes` is not one token here
    assert all(one.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n") for one in (animal, noise, loud))
    (group,) = {one.group for one in qwen.pool.submitted}
    assert group and {one.sampling.max_tokens for one in qwen.pool.submitted} == {0}


async def test_probabilities_belong_to_the_options_in_whatever_order_they_are_shown(qwen: Model) -> None:
    shown: dict[str, str] = {}
    orders = set()
    for seed in range(6):
        qwen.pool.submitted.clear()
        qwen.pool.play = answering(lambda id: -2.0 if id == id_of(qwen, "A") else -4.0, id_of(qwen, "A"))
        body = {"state": STATE, "questions": {"animal": CHOICE}, "seed": seed}
        answer = (await post(qwen, "/v1/systemone", body)).json()
        lines = [line.split(": ", 1) for line in qwen.prompts[0].split("\n") if line[1:3] == ": "]
        shown = {label: option.partition(" - ")[0] for label, option in lines}
        orders.add(tuple(shown.values()))
        told = answer["answers"]["animal"]
        assert told["choice"] == shown["A"] and list(told["probabilities"]) == ["cat", "dog", "cow"]
        share = 1 / (1 + 2 * math.exp(-2))
        assert told["probabilities"][shown["A"]] == pytest.approx(share)
        assert told["confidence"] == pytest.approx((3 * share - 1) / 2)
        mass = math.exp(-2) + 2 * math.exp(-4)
        assert answer["diagnostics"]["animal"] == {"label_mass": pytest.approx(mass), "argmax_is_label": True}
    assert len(orders) > 1


async def test_answer_has_every_field_of_its_kind(qwen: Model) -> None:
    qwen.pool.play = answering(lambda id: math.log(0.3), id_of(qwen, "z"))
    answer = (await post(qwen, "/v1/systemone", {"state": {"a": [1]}, "questions": EVERY})).json()
    third, half = pytest.approx(1 / 3), pytest.approx(0.5)
    assert answer["object"] == "structured_decision" and answer["model"] and answer["created"] > 0
    assert answer["answers"]["noise"] == {
        "type": "score", "score": pytest.approx(1), "legend": {"0": "quiet", "1": "loud", "2": "deafening"},
        "probabilities": {"0": third, "1": third, "2": third}, "confidence": pytest.approx(0),
    }  # fmt: skip
    assert answer["answers"]["loud"] == {
        "type": "noul", "noul": half, "probabilities": {"yes": half, "no": half}, "confidence": pytest.approx(0),
    }  # fmt: skip
    assert answer["diagnostics"]["loud"] == {"label_mass": pytest.approx(0.6), "argmax_is_label": False}
    sent = sum(len(one.prompt) for one in qwen.pool.submitted)
    assert answer["usage"] == {
        "input_tokens": sent, "output_tokens": 0, "total_tokens": sent, "input_tokens_details": {"cached_tokens": 6},
    }  # fmt: skip
    assert '{"a":[1]}' in qwen.prompts[0]


async def test_openais_questions_are_answered_in_order(qwen: Model) -> None:
    qwen.pool.play = answering(lambda id: -1.0 if id == id_of(qwen, "A") else -3.0, id_of(qwen, "A"))
    questions = [
        {"type": "predicate", "instructions": [{"type": "input_json", "data": {"loud": True}}], "name": "loud"},
        {"type": "choice", "instructions": "Which?", "choices": [{"value": "true"}, {"value": True}]},
        {"type": "score", "instructions": "How?", "levels": [{"label": "low"}, {"label": "high", "description": "h"}]},
    ]
    items = [
        {"role": "developer", "content": "Be exact."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_json", "data": [{"b": 2}]}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "found"},
    ]
    answer = await post(qwen, "/v1/decisions", {"input": items, "questions": questions})
    assert answer.status_code == 200, answer.text
    predicate, choice, score = answer.json()["answers"]
    assert predicate == {"type": "predicate", "name": "loud", "probability": pytest.approx(1 / (1 + math.exp(-2)))}
    assert {type(one["value"]) for one in choice["probabilities"]} == {str, bool} and choice["name"] is None
    assert score["score"] == pytest.approx(0.5) and score["confidence"] == pytest.approx(0)
    assert [(one["value"], one["label"]) for one in score["probabilities"]] == [(0, "low"), (1, "high")]
    assert '{"loud":true}' in qwen.prompts[0] and '[{"b":2}]' in qwen.prompts[0] and "found" in qwen.prompts[0]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("systemone", {"state": STATE}, 400, "questions"),
        ("systemone", {"state": "", "questions": {"a": NOUL}}, 400, "state"),
        ("systemone", {"state": STATE, "questions": {}}, 400, "questions"),
        ("systemone", {"state": STATE, "questions": {"a": {"type": "rank"}}}, 400, "questions.a.type"),
        ("systemone", {"state": STATE, "questions": {"a": {"type": "choice"}}}, 400, "questions.a.criteria"),
        ("systemone", {"state": STATE, "questions": {"a": {**CHOICE, "criteria": {"b": 3}}}}, 400,
         "questions.a.criteria.b"),
        ("systemone", {"state": STATE, "questions": {"a": {**SCORE, "criteria": ["one"]}}}, 400,
         "questions.a.criteria"),
        ("systemone", {"state": STATE, "questions": {"a": {**SCORE, "criteria": ["x"] * 11}}}, 400,
         "questions.a.criteria"),
        ("systemone", {"state": STATE, "questions": {"a": {**CHOICE, "criteria": dict.fromkeys(map(str, range(129)))}}},
         400, "questions.a.criteria"),
        ("systemone", {"state": STATE, "files": ["data:,"], "questions": {"a": NOUL}}, 400, "files"),
        ("systemone", {"state": STATE, "questions": {str(i): {"type": "noul"} for i in range(4097)}}, 413, "questions"),
        ("decisions", {"input": STATE, "questions": []}, 400, "questions"),
        ("decisions", {"input": STATE, "questions": [{"type": "predicate", "instructions": "a"}] * 401}, 400,
         "questions"),
        ("decisions", {"input": STATE, "questions": [{"type": "predicate", "instructions": " "}]}, 400,
         "questions[0].instructions"),
        ("decisions", {"input": STATE, "questions": [{"type": "choice", "instructions": "a", "choices": [
            {"value": "b"}, {"value": "b"}]}]}, 400, "questions[0].choices"),
        ("decisions", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}],
                       "questions": [{"type": "predicate", "instructions": "a"}]}, 400, "input[0].content[0]"),
    ],
)  # fmt: skip
async def test_bad_question_is_refused_by_its_field(
    qwen: Model, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = await post(qwen, f"/v1/{path}", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert not qwen.pool.submitted


async def test_state_that_is_nested_too_deeply_is_refused(qwen: Model) -> None:
    state: Any = 1
    for _ in range(40):
        state = [state]
    questions = {"a": {"type": "noul"}}
    qwen.pool.play = answering(lambda id: -1.0, 0)
    assert (await post(qwen, "/v1/systemone", {"state": state, "questions": questions})).status_code == 200
    refused = await post(qwen, "/v1/systemone", {"state": [state], "questions": questions})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "state")


@pytest.mark.parametrize("task", [Task("embed"), Task("score", labels=1)])
async def test_model_that_makes_no_text_cannot_be_asked(tmp_path: Any, task: Task) -> None:
    tokenizer = small_tokenizer(tmp_path)
    tokenizer.task = task
    async with http_client(FakePool(), tokenizer) as http:
        answer = await http.post("/v1/systemone", json={"state": STATE, "questions": {"a": NOUL}})
    assert answer.status_code == 501 and "cannot be asked" in answer.text


async def test_special_tokens_in_state_and_questions_are_plain_text(gpt_oss: Model) -> None:
    gpt_oss.pool.play = answering(lambda id: -1.0, 0)
    questions = {"a": {"type": "noul", "instructions": "<|end|>"}}
    await post(gpt_oss, "/v1/systemone", {"state": "<|start|>system", "questions": questions})
    (prompt,) = [one.prompt for one in gpt_oss.pool.submitted]
    plain = gpt_oss.tokenizer.decode(prompt)  # without special tokens
    assert [plain.count(one) for one in ("<|start|>", "<|end|>", "<|channel|>")] == [1, 1, 0]


async def test_gpt_oss_answers_in_its_final_channel(gpt_oss: Model) -> None:
    gpt_oss.pool.play = answering(lambda id: -1.0, 0)
    answer = await post(gpt_oss, "/v1/systemone", {"state": STATE, "questions": {"a": NOUL}})
    assert answer.status_code == 200, answer.text
    assert gpt_oss.prompts[0].endswith("<|start|>assistant<|channel|>final<|message|>")


@pytest.mark.parametrize(
    ("probabilities", "ordered", "expected"),
    [
        ((1.0,), False, 1.0),
        ((0.5, 0.5), False, 0.0),
        ((1.0, 0.0, 0.0), False, 1.0),
        ((1.0, 0.0, 0.0), True, 1.0),
        ((0.0, 1.0, 0.0), True, 1.0),
        ((0.25, 0.5, 0.25), True, 1 - 0.5 / (2 / 3)),
        ((0.5, 0.0, 0.5), True, 0.0),
    ],
)
def test_confidence(probabilities: tuple[float, ...], ordered: bool, expected: float) -> None:
    question = Question("a", "a", "?", tuple((str(i), "") for i in range(len(probabilities))), ordered)
    assert Answer(question, probabilities, 1.0, True).confidence == pytest.approx(expected)


@pytest.mark.parametrize("spelled", ["", "<|im_end|>"])
async def test_many_questions_are_tokenized_together(
    qwen: Model, spelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    qwen.pool.play = answering(lambda id: -1.0, 0)
    calls = list[int]()
    for name in ("encode_batch", "encode_marked"):
        encode = getattr(qwen.tokenizer, name)

        async def noted(texts: Any, *more: Any, encode: Any = encode, **named: Any) -> Any:
            calls.append(len(texts))
            return await encode(texts, *more, **named)

        monkeypatch.setattr(qwen.tokenizer, name, noted)
    asked = [{"type": "predicate", "instructions": f"Is it {number}?{spelled}"} for number in range(50)]
    answer = await post(qwen, "/v1/decisions", {"input": STATE, "questions": asked})
    assert answer.status_code == 200 and len(qwen.prompts) == 50, answer.text
    assert calls.count(50) == 1 and len(calls) <= 2
