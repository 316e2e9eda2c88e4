"""Continuations of an answer from any position, and the answer's scores, have the same bits as the answer's decode."""

from typing import Any

import openai
import pytest

from tests.e2e.server import Server

STORY = "Once upon a time"
KINDS: dict[str, dict[str, Any]] = {
    "random": {"temperature": 1.0},
    "greedy with penalties": {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "a stop text": {"stop": ["named C", "zz"], "min_tokens": 3},
    "a grammar": {"guided_regex": "[a-z ]{5,60}"},
}


def choice(server: Server, path: str = "/v1/completions", **body: Any) -> Any:
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_completion_goes_on_with_the_same_bytes_from_every_place(kind: str, demo: Server) -> None:
    body = {"prompt": STORY, "max_tokens": 14, "seed": 5, "logprobs": 1, "return_token_ids": True, **KINDS[kind]}
    whole = choice(demo, **body)
    ids = whole["token_ids"]
    assert len(ids) > 3
    for place in range(len(ids) + 1):
        rest = choice(demo, **body, continue_from={"ids": ids, "position": place})
        assert rest["token_ids"] == ids[place:] and whole["text"].endswith(rest["text"])
        assert rest["logprobs"]["token_logprobs"] == whole["logprobs"]["token_logprobs"][place:]
        assert [rest[name] for name in ("finish_reason", "stop_reason", "seed")] == [
            whole[name] for name in ("finish_reason", "stop_reason", "seed")
        ]
    scored = demo.client.post("/v1/logprobs", json={"prompt": STORY, "answer": [ids, ids[:2]]}).json()["data"]
    assert scored[0]["token_logprobs"] == whole["logprobs"]["token_logprobs"]
    assert scored[1]["token_logprobs"] == whole["logprobs"]["token_logprobs"][:2]


def test_receipt_of_a_continued_answer_is_checked_from_its_place_on(demo: Server) -> None:
    body = {"prompt": STORY, "max_tokens": 12, "seed": 5, "receipt": True}
    whole = choice(demo, **body)["receipt"]
    branch = {**body, "seed": 6, "temperature": 1.5, "continue_from": {"receipt": whole, "position": 5}}
    receipt = choice(demo, **branch)["receipt"]
    assert receipt["output_ids"][:5] == whole["output_ids"][:5] and receipt["output_ids"] != whole["output_ids"]
    told = demo.client.post("/v1/receipts/verify", json={"receipt": receipt, "request": branch}).json()
    assert told["identical"], told
    wrong = {**receipt, "output_ids": [*receipt["output_ids"][:7], 9, *receipt["output_ids"][8:]]}
    told = demo.client.post("/v1/receipts/verify", json={"receipt": wrong, "request": branch}).json()
    assert (told["identical"], told["position"]) == (False, 7)


def test_branches_differ_and_come_from_the_openai_sdk(demo: Server) -> None:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as sdk:
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 30}
        more: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
        whole = sdk.chat.completions.create(**body, seed=1, extra_body=more)
        ids = whole.choices[0].token_ids  # type: ignore[attr-defined]
        more["continue_from"] = {"ids": ids, "position": 12}
        branches = sdk.chat.completions.create(**body, seed=1, n=3, temperature=1.5, extra_body=more)
        same = sdk.chat.completions.create(**body, seed=1, extra_body=more)
        streamed = list(sdk.chat.completions.create(**body, seed=1, stream=True, extra_body=more))
    assert len({choice.message.content for choice in branches.choices}) == 3
    content = str(same.choices[0].message.content)
    assert content and str(whole.choices[0].message.content).endswith(content)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == content
    assert same.usage and same.usage.prompt_tokens_details.continued_tokens == 12  # type: ignore[union-attr]


def test_answer_that_does_not_fit_the_grammar_is_refused_in_words(demo: Server) -> None:
    body = {"prompt": STORY, "guided_regex": "[0-9]+", "continue_from": {"ids": [290, 291]}}
    response = demo.client.post("/v1/completions", json=body)
    assert response.status_code == 422 and "does not fit the grammar" in response.json()["error"]["message"]
