"""/v1/logprobs with a fake worker: rows, boundaries, forms of the arrays, refusals that name the field."""

import base64
import math
from typing import Any

import httpx
import pytest

from frontend.text.tokenizer import Tokenizer
from shared import messages as m
from shared.wire import pack_f32, pack_u32, unpack_f32, unpack_u32
from tests.fakes import FakePool
from tests.frontend.generation.harness import encode
from tests.frontend.serving import http_client

TOP = [9, 8]


def scoring(pool: FakePool, stream: Any) -> None:
    """Simulates a worker that gives a prompt's token at index i the log-probability -i, in two messages."""
    submit = stream.submit
    count, start, k = len(submit.prompt) // 4, max(1, submit.scored_from), submit.sampling.prompt_top

    def end() -> None:
        half = (start + count + 1) // 2
        for first, last in ((start, half), (half, count)):
            values = [float(-at) for at in range(first, last)]
            tops = pack_u32(TOP[:k] * len(values)), pack_f32([-0.5, -1.5][:k] * len(values))
            stream.add_logprobs(m.Logprobs(stream.id, first, pack_f32(values), k, *tops, True))
        pool.end(stream, m.Outcome.LENGTH, cached=1)

    pool.later(end)


async def post(tokenizer: Tokenizer, **body: Any) -> tuple[FakePool, httpx.Response]:
    pool = FakePool(play=scoring)
    async with http_client(pool, tokenizer) as http:
        return pool, await http.post("/v1/logprobs", json=body)


async def test_prompts_are_scored_from_their_second_token_on(tokenizer: Tokenizer) -> None:
    pool, told = await post(tokenizer, prompt=["ab", [70, 71]], return_token_ids=True)
    ids = [264, *encode(tokenizer)("ab")]
    assert [submitted.prompt for submitted in pool.submitted] == [ids, [70, 71]]
    first, second = told.json()["data"]
    assert first == {"index": 0, "token_ids": ids, "token_logprobs": [None, *(float(-at) for at in range(1, len(ids)))]}
    assert second == {"index": 1, "token_ids": [70, 71], "token_logprobs": [None, -1.0]}
    usage = told.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids) + 2, 0)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    assert {submitted.group for submitted in pool.submitted} == {0}


async def test_answers_alone_are_scored_in_one_group_behind_their_prompt(tokenizer: Tokenizer) -> None:
    pool, told = await post(tokenizer, prompt=[70, 71], answer=["ab", [72]], top_logprobs=2)
    ab = encode(tokenizer)("ab")
    assert [submitted.prompt for submitted in pool.submitted] == [[70, 71, *ab], [70, 71, 72]]
    assert [submitted.stream.submit.scored_from for submitted in pool.submitted] == [2, 2]
    assert len({submitted.group for submitted in pool.submitted} - {0}) == 1
    first, second = told.json()["data"]
    assert first["token_logprobs"] == [float(-at) for at in range(2, 2 + len(ab))]
    assert first["top_token_ids"] == [TOP] * len(ab) and first["top_logprobs"] == [[-0.5, -1.5]] * len(ab)
    assert second["token_logprobs"] == [-2.0] and "token_ids" not in second


async def test_prompts_and_answers_are_paired(tokenizer: Tokenizer) -> None:
    pool, _ = await post(tokenizer, prompt=[[70, 71], [73]], answer=[[72], [74, 75]])
    assert [submitted.prompt for submitted in pool.submitted] == [[70, 71, 72], [73, 74, 75]]
    assert [submitted.stream.submit.scored_from for submitted in pool.submitted] == [2, 1]


async def test_arrays_in_base64_and_bytes_have_the_same_numbers(tokenizer: Tokenizer) -> None:
    body: dict[str, Any] = {"prompt": [[70, 71, 72], [73]], "top_logprobs": 1, "return_token_ids": True}
    _, told = await post(tokenizer, **body, encoding_format="base64")
    packed = {name: base64.b64decode(value) for name, value in told.json()["data"][0].items() if name != "index"}
    assert unpack_u32(packed["token_ids"]).tolist() == [70, 71, 72]
    first, *others = unpack_f32(packed["token_logprobs"])
    assert math.isnan(first) and others == [-1.0, -2.0]
    assert unpack_u32(packed["top_token_ids"]).tolist() == [0, 9, 9]
    assert unpack_f32(packed["top_logprobs"])[1:].tolist() == [-0.5, -0.5]
    _, raw = await post(tokenizer, **body, encoding_format="bytes")
    assert raw.headers["content-type"] == "application/octet-stream" and raw.headers["x-sluice-token-counts"] == "3,1"
    nan = pack_f32([math.nan])
    assert raw.content == b"".join(
        [pack_u32([70, 71, 72, 73]), packed["token_logprobs"], nan, packed["top_token_ids"], pack_u32([0]),
         packed["top_logprobs"], nan]
    )  # fmt: skip


async def test_messages_are_written_by_the_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    pool, told = await post(tokenizer, messages=messages, answer="ab")
    async with http_client(FakePool(), tokenizer) as http:
        ids = (await http.post("/tokenize", json={"messages": messages})).json()["tokens"]
    assert told.status_code == 200 and pool.submitted[0].prompt == [*ids, *encode(tokenizer)("ab")]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"answer": "a"}, "prompt", "either `prompt` or `messages`"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt", "either `prompt` or `messages`"),
        ({"prompt": []}, "prompt", "is empty"),
        ({"prompt": "a", "answer": [[]]}, "answer", "is empty"),
        ({"prompt": [1, "a"]}, "prompt", "array of either"),
        ({"prompt": [[99999]]}, "prompt", "outside 0 to"),
        ({"prompt": "a", "answer": [99999]}, "answer", "outside 0 to"),
        ({"prompt": ["a", "b"], "answer": ["c", "d", "e"]}, "prompt", "has 2 entries and `answer` has 3"),
        ({"prompt": [[1]] * 2049}, "prompt", "at most 2048 entries"),
        ({"prompt": [[1] * 60] * 60, "top_logprobs": 1000}, "top_logprobs", "at most 4194304"),
        ({"prompt": [[1]] * 513, "encoding_format": "bytes"}, "encoding_format", "at most 512 rows"),
    ],
)
async def test_bad_requests_are_refused_with_their_field(
    body: dict[str, Any], param: str, words: str, tokenizer: Tokenizer
) -> None:
    _, told = await post(tokenizer, **body)
    assert told.status_code == 400 and told.json()["error"]["param"] == param
    assert words in told.json()["error"]["message"]
