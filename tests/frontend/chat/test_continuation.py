"""`continue_from` with a fake worker: the Submit for it, the client's answer, and refusals that name the field."""

from typing import Any

import pytest

from frontend.text.tokenizer import Tokenizer
from shared.messages import Outcome
from shared.wire import unpack_u32
from tests.fakes import FakePool, sending
from tests.frontend.generation.harness import encode
from tests.frontend.serving import http_client

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


async def answer(tokenizer: Tokenizer, before: list[int], new: list[int], **body: Any) -> tuple[FakePool, Any]:
    pool = FakePool(sending(new, outcome=Outcome.LENGTH))
    async with http_client(pool, tokenizer) as http:
        request = {
            "prompt": "abc",
            "max_tokens": 20,
            "return_token_ids": True,
            "continue_from": {"ids": before},
            **body,
        }
        told = await http.post(COMPLETIONS, json=request)
    return pool, told.json()


async def test_answer_has_only_what_is_new_and_usage_says_how_much_is_not(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)
    pool, told = await answer(tokenizer, ids("Hello "), ids("there"), n=2)
    assert [choice["text"] for choice in told["choices"]] == ["there"] * 2
    assert [choice["token_ids"] for choice in told["choices"]] == [ids("there")] * 2
    for submitted in pool.submitted:
        assert unpack_u32(submitted.stream.submit.generated).tolist() == ids("Hello ") and submitted.group
    prompt, before, new = len(pool.submitted[0].prompt), len(ids("Hello ")), len(ids("there"))
    assert told["usage"] == {
        "prompt_tokens": prompt + before, "completion_tokens": 2 * new, "total_tokens": prompt + before + 2 * new,
        "prompt_tokens_details": {"cached_tokens": 0, "continued_tokens": before},
    }  # fmt: skip


async def test_position_takes_the_first_ids_and_zero_takes_none(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)("Hello ")
    pool, _ = await answer(tokenizer, [], [65], continue_from={"ids": ids, "position": 2})
    assert unpack_u32(pool.submitted[0].stream.submit.generated).tolist() == ids[:2]
    pool, told = await answer(tokenizer, [], [65], continue_from={"ids": ids, "position": 0})
    assert not pool.submitted[0].stream.submit.generated
    assert told["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_character_that_the_place_cuts_belongs_to_the_new_text(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)("a€")
    for place in range(len(ids) + 1):
        _, told = await answer(tokenizer, ids[:place], [*ids[place:], *encode(tokenizer)("b")])
        assert told["choices"][0]["text"] in ("a€b" if not place else "€b", "b")
        assert told["choices"][0]["token_ids"] == [*ids[place:], *encode(tokenizer)("b")]


async def test_stop_text_that_begins_before_the_place_ends_the_answer(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)
    _, told = await answer(tokenizer, ids("say E"), ids("ND more"), stop="END")
    (choice,) = told["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "END")
    assert choice["token_ids"] == ids("ND more")[: told["usage"]["completion_tokens"]] != []
    _, told = await answer(tokenizer, ids("say E"), ids("lse"), stop="END")
    assert told["choices"][0]["text"] == "lse"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"continue_from": {"ids": [65], "position": 2}}, "continue_from.position", "the answer has 1 tokens"),
        ({"continue_from": {"ids": [65, 66]}, "max_tokens": 1}, "continue_from.ids", "`max_tokens`, which counts them"),
        ({"continue_from": {"ids": [99999]}}, "continue_from.ids", "outside 0 to"),
        ({"continue_from": {"ids": [65]}, "prompt": ["a", "b"]}, "continue_from", "a single prompt"),
        ({"continue_from": {"ids": [65]}, "echo": True}, "echo", "cannot go with `echo`"),
        ({"continue_from": {"ids": [65]}, "prompt_logprobs": 0}, "prompt_logprobs", "`prompt_logprobs`"),
    ],
)
async def test_what_cannot_go_on_is_refused_with_its_field(
    body: dict[str, Any], param: str, words: str, tokenizer: Tokenizer
) -> None:
    _, told = await answer(tokenizer, [], [65], **body)
    assert told["error"]["param"] == param and words in told["error"]["message"]


async def test_receipt_lends_its_ids_to_the_same_prompt_of_the_same_model(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)
    _, told = await answer(tokenizer, [], ids("Hello there"), receipt=True)
    receipt = told["choices"][0]["receipt"]
    pool, told = await answer(tokenizer, [], ids("you"), continue_from={"receipt": receipt, "position": 3})
    assert unpack_u32(pool.submitted[0].stream.submit.generated).tolist() == ids("Hello there")[:3]
    assert told["choices"][0]["text"] == "you"
    changes: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"model": "another"}, {}, "`another`, but this server serves"),
        ({}, {"prompt": "abd"}, "another prompt"),
        ({"output_ids": [99999]}, {}, "outside 0 to"),
        (
            {"signature": {"algorithm": "ed25519", "public_key": "", "value": ""}},
            {},
            "`continue_from.receipt.signature`",
        ),
    ]
    for changed, more, words in changes:
        pool, told = await answer(tokenizer, [], [65], continue_from={"receipt": receipt | changed}, **more)
        assert words in told["error"]["message"] and not pool.submitted


@pytest.mark.parametrize("field", [{}, {"ids": None}, {"position": 1}])
async def test_place_without_an_answer_is_refused(field: dict[str, Any], tokenizer: Tokenizer) -> None:
    _, told = await answer(tokenizer, [], [65], continue_from=field)
    assert told["error"]["param"] == "continue_from.ids" and "`receipt` must be given" in told["error"]["message"]


async def test_chat_goes_on_in_the_same_way(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer)
    pool = FakePool(sending(ids("there"), outcome=Outcome.EOS))
    body = {"messages": [{"role": "user", "content": "Hi"}], "continue_from": {"ids": ids("Hello ")}}
    async with http_client(pool, tokenizer) as http:
        told = (await http.post(CHAT, json=body)).json()
    assert told["choices"][0]["message"]["content"] == "there"
    assert unpack_u32(pool.submitted[0].stream.submit.generated).tolist() == ids("Hello ")
