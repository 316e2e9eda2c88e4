"""The place of the receipt in each API format, and the facts about a request in it."""

import hashlib
import json
from typing import Any

import pytest

from frontend.api.receipts import prompt_hash, sampling_used
from frontend.request import GenerationRequest
from frontend.text.tokenizer import Tokenizer
from shared.messages import Outcome, Sampling, ThinkingBudget
from tests.fakes import FakePool, sending
from tests.frontend.generation.harness import encode
from tests.frontend.serving import http_client

HELLO = [{"role": "user", "content": "a"}]
ANSWER = [97, 98, 265]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 5},
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 5},
    "/api/generate": {"model": "tiny", "prompt": "a"},
    "/api/chat": {"model": "tiny", "messages": HELLO},
}


def receipt_in(event: dict[str, Any]) -> Any:
    """Returns the receipt from the place where the event's API format puts it, or None."""
    holders = [event, *event.get("choices", ()), event.get("response")]
    found = [holder["receipt"] for holder in holders if isinstance(holder, dict) and "receipt" in holder]
    return found[0] if found else None


@pytest.mark.parametrize("route", BODIES)
async def test_whole_answer_and_stream_have_equal_receipts(route: str, tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(play=sending(ANSWER)), tokenizer) as http:
        body = BODIES[route] | {"receipt": True}
        whole = (await http.post(route, json=body | {"stream": False})).json()
        text = (await http.post(route, json=body | {"stream": True})).text
        without = (await http.post(route, json=BODIES[route] | {"stream": False})).json()
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.removeprefix("data: ").startswith("{")]
    told = [(at, receipt) for at, line in enumerate(lines) if (receipt := receipt_in(json.loads(line)))]
    receipt = receipt_in(whole)
    assert receipt["output_ids"] == ANSWER and receipt["route"] == route
    assert [one | {"created": 0} for _, one in told] == [receipt | {"created": 0}]
    assert told[0][0] >= len(lines) - 2, "only the end of a stream may follow"
    assert receipt_in(without) is None


async def test_typed_events_have_it_in_the_last_event(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(play=sending(ANSWER)), tokenizer) as http:
        body = BODIES["/v1/completions"] | {"receipt": True, "stream_format": "events"}
        last = (await http.post("/v1/completions", json=body)).text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["receipt"]["output_ids"] == ANSWER


async def test_answer_that_a_stop_text_ends_has_the_ids_up_to_it(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)
    async with http_client(FakePool(play=sending(ids("abcdef"), outcome=Outcome.LENGTH)), tokenizer) as http:
        body = BODIES["/v1/completions"] | {"receipt": True, "stop": "cd"}
        choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
    assert (choice["text"], choice["receipt"]["finish_reason"]) == ("ab", "stop")
    assert choice["receipt"]["output_ids"] == ids("abcd")


async def test_answer_that_goes_on_has_all_ids_and_its_receipt_can_be_gone_on_from(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)
    pool = FakePool(play=sending(ids("abc")))
    async with http_client(pool, tokenizer) as http:
        body = BODIES["/v1/completions"] | {"receipt": True, "max_tokens": 9}
        first = (await http.post("/v1/completions", json=body)).json()["choices"][0]["receipt"]
        pool.play = sending(ids("xy"))
        again = body | {"continue_from": {"receipt": first, "position": 2}}
        second = (await http.post("/v1/completions", json=again)).json()["choices"][0]
        other = await http.post("/v1/completions", json=again | {"prompt": "other"})
    assert (second["text"], second["receipt"]["output_ids"]) == ("xy", ids("abxy"))
    assert (other.status_code, other.json()["error"]["param"]) == (422, "continue_from.receipt.prompt_sha256")


def test_sampling_used_names_what_was_set() -> None:
    budget = ThinkingBudget(9, (1,), 2, (2,))
    sampling = Sampling(
        5, temperature=0.5, logit_bias=((7, 1.5),), grammar="secret words", thinking=budget, bad_words=((1, 2),)
    )
    used = sampling_used(GenerationRequest(prompts=([1],), sampling=sampling, stops=("end",)), 11)
    assert used["seed"] == 11 and used["max_tokens"] == 5 and used["temperature"] == 0.5
    assert used["logit_bias"] == {"7": 1.5} and used["stop"] == ["end"] and used["bad_words"] == [[1, 2]]
    assert used["max_thinking_tokens"] == 9 and len(used["grammar_sha256"]) == 64
    assert "secret" not in str(used) and "allowed_token_ids" not in used
    assert set(sampling_used(GenerationRequest(prompts=([1],), sampling=Sampling(5)), 1)) == {
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "seed",
    }  # fmt: skip


def test_prompt_hash_is_that_of_the_packed_ids() -> None:
    assert prompt_hash([1, 256]) == hashlib.sha256(b"\x01\0\0\0\0\x01\0\0").hexdigest()
