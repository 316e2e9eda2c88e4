"""vLLM's render routes return the ids that the generating routes send to a worker, without asking a worker."""

from typing import Any

from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL, FakePool
from tests.frontend.serving import completing, http_client

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <s> there"}]
DRAWN: dict[str, Any] = {
    "temperature": 0.25, "top_p": 0.5, "frequency_penalty": 1.125, "seed": 7, "stop": ["x"], "max_tokens": 9,
    "logit_bias": {"65": -2.0}, "min_tokens": 2, "bad_words": ["no"],
}  # fmt: skip


class NoWorker(FakePool):
    """A pool to which no worker has connected yet."""

    def __init__(self) -> None:
        super().__init__()
        self.welcome = None


async def test_rendered_ids_are_what_a_worker_gets(tokenizer: Tokenizer) -> None:
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        text = {"model": MODEL, "prompt": ["Hello", [72, 105]], **DRAWN}
        texts = (await http.post(f"{TEXT}/render", json=text)).json()
        chat = (await http.post(f"{CHAT}/render", json={"model": MODEL, "messages": MESSAGES, **DRAWN})).json()
        assert not pool.submitted
        await http.post(TEXT, json=text)
        await http.post(CHAT, json={"model": MODEL, "messages": MESSAGES, **DRAWN})
    submitted = [one.prompt for one in pool.submitted]
    assert [*(one["token_ids"] for one in texts), chat["token_ids"]] == submitted
    assert [one["prompt_token_ids"] for one in texts] == submitted[:2]
    assert [one["prompt"] for one in texts] == ["Hello", tokenizer.decode([72, 105], skip_special=False)]
    for one in (*texts, chat):
        given = one["sampling_params"]
        assert {name: given[name] for name in DRAWN} == DRAWN
        assert (one["model"], one["stream"], given["n"], given["logprobs"]) == (MODEL, False, 1, None)


async def test_no_worker_is_needed(tokenizer: Tokenizer) -> None:
    asked = {"messages": [{"role": "user", "content": "x" * 400}]}
    async with http_client(NoWorker(), tokenizer) as http:
        texts = await http.post(f"{TEXT}/render", json={"prompt": "Hi"})
        chat = await http.post(f"{CHAT}/render", json=asked)
        limited = await http.post(f"{CHAT}/render", json={**asked, "max_tokens": 3})
    assert (texts.status_code, chat.status_code) == (200, 200)
    assert len(chat.json()["token_ids"]) > 400
    assert chat.json()["sampling_params"]["max_tokens"] is None
    assert limited.json()["sampling_params"]["max_tokens"] == 3


async def test_stream_is_preserved_and_the_answer_is_whole(tokenizer: Tokenizer) -> None:
    asked = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, "cache_salt": "s"}
    async with http_client(FakePool(), tokenizer) as http:
        answer = await http.post(f"{CHAT}/render", json=asked)
    said = answer.json()
    assert answer.headers["content-type"] == "application/json"
    assert said["stream"] is True and said["stream_options"]["include_usage"] is True
    assert said["cache_salt"] == "s"


async def test_grammar_of_structured_output_is_shown(tokenizer: Tokenizer) -> None:
    asked = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
    async with http_client(FakePool(), tokenizer) as http:
        free = (await http.post(f"{CHAT}/render", json={"messages": MESSAGES})).json()
        bound = (await http.post(f"{CHAT}/render", json=asked)).json()
    assert "structured_outputs" not in free["sampling_params"]
    assert bound["sampling_params"]["structured_outputs"]["grammar"]


async def test_refusals_are_those_of_chats(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        named = [
            await http.post(f"{TEXT}/render", json={"model": "other", "prompt": "Hi"}),
            await http.post(f"{CHAT}/render", json={"model": "other", "messages": MESSAGES}),
        ]
        empty = await http.post(f"{TEXT}/render", json={"prompt": ""})
        long = await http.post(f"{TEXT}/render", json={"prompt": "x" * 5000})
    assert [answer.status_code for answer in named] == [404, 404]
    assert {answer.json()["error"]["param"] for answer in named} == {"model"}
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "prompt")
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_responses_and_messages_are_rendered_as_their_routes_send_them(tokenizer: Tokenizer) -> None:
    said = [{"role": "user", "content": "Hi <s> there"}]
    response = {"instructions": "Be brief.", "input": said, "max_output_tokens": 7, "bad_words": ["no"]}
    message = {"system": "Be brief.", "messages": said, "max_tokens": 7, "stop_sequences": ["x"]}
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        rendered = [
            (await http.post("/v1/responses/render", json=response)).json(),
            (await http.post("/v1/messages/render", json=message)).json(),
        ]
        assert not pool.submitted
        await http.post("/v1/responses", json=response)
        await http.post("/v1/messages", json=message)
        follows = await http.post("/v1/responses/render", json={**response, "previous_response_id": "resp_1"})
        nameless = await http.post("/v1/messages/render", json={**message, "model": "other"})
    assert [one["token_ids"] for one in rendered] == [one.prompt for one in pool.submitted]
    assert [one["request_id"].partition("_")[0] for one in rendered] == ["resp", "msg"]
    assert [one["sampling_params"]["max_tokens"] for one in rendered] == [7, 7]
    assert (rendered[0]["sampling_params"]["bad_words"], rendered[1]["sampling_params"]["stop"]) == (["no"], ["x"])
    assert (follows.status_code, follows.json()["error"]["param"]) == (400, "previous_response_id")
    assert (nameless.status_code, nameless.json()["type"]) == (404, "error")
