"""Typed questions to a real worker: probabilities are those of the next token, with the same bits in any company."""

import math
from typing import Any

import openai
import pytest

from tests.e2e.server import Server

STATE = "The dog barks all night, and nobody can sleep."
QUESTIONS: dict[str, Any] = {
    "animal": {
        "type": "choice",
        "instructions": "Which animal?",
        "criteria": {"cat": None, "dog": "barks", "cow": None},
    },
    "noise": {"type": "score", "criteria": ["quiet", "loud", "very loud"]},
    "night": {"type": "noul", "instructions": "It is night."},
}


def ask(server: Server, questions: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = server.client.post("/v1/systemone", json={"state": STATE, "questions": questions, **more})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_probabilities_are_those_of_the_labels_as_the_next_token(demo: Server) -> None:
    told = ask(demo, {"noise": QUESTIONS["noise"]})
    question = "Which level fits best?\n\n0: quiet\n1: loud\n2: very loud\n\nAnswer only with the number of one level."
    messages = [{"role": "user", "content": f"{STATE}\n\n{question}"}]
    scored = demo.client.post("/v1/logprobs", json={"messages": messages, "answer": ["0", "1", "2"], "top_logprobs": 1})
    rows = scored.json()["data"]
    shares = [math.exp(row["token_logprobs"][0]) for row in rows]
    assert told["diagnostics"]["noise"]["label_mass"] == pytest.approx(sum(shares), rel=1e-5)
    probabilities = told["answers"]["noise"]["probabilities"]
    assert list(probabilities.values()) == pytest.approx([share / sum(shares) for share in shares], rel=1e-5)


def test_answers_have_the_same_bits_alone_together_and_cached(demo: Server) -> None:
    together = ask(demo, QUESTIONS, cache_salt="a")
    again = ask(demo, QUESTIONS, cache_salt="a")
    assert again["answers"] == together["answers"] and again["diagnostics"] == together["diagnostics"]
    assert again["usage"]["input_tokens_details"]["cached_tokens"] > 0
    for name, question in QUESTIONS.items():
        alone = ask(demo, {name: question}, cache_salt=name)
        assert alone["answers"][name] == together["answers"][name]


def test_openais_sdk_decides(demo: Server) -> None:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as sdk:
        decision = sdk.decisions.create(
            model="", input=STATE,
            questions=[
                {"type": "predicate", "instructions": "It is night.", "name": "night"},
                {"type": "choice", "instructions": "Who?", "choices": [{"value": "dog"}, {"value": False}]},
                {"type": "score", "instructions": "How loud?", "levels": [{"label": "quiet"}, {"label": "loud"}]},
            ],
        )  # fmt: skip
    night, who, loud = decision.answers
    assert night.type == "predicate" and night.name == "night" and 0 < night.probability < 1
    assert who.type == "choice" and sum(one.probability for one in who.probabilities) == pytest.approx(1)
    assert loud.type == "score" and 0 <= loud.score <= 1 and loud.probabilities[1].label == "loud"
    assert decision.usage.input_tokens > 0 and decision.usage.output_tokens == 0
