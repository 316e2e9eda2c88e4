"""/tokenize and /detokenize."""

from frontend.text.tokenizer import Tokenizer
from frontend.workers.status import not_ready
from tests.fakes import FakePool
from tests.frontend.serving import http_client


async def test_tokenize_and_detokenize_round_trip(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(readiness=not_ready("worker lost")), tokenizer) as http:
        text = (await http.post("/tokenize", json={"prompt": "the €"})).json()
        bare = (await http.post("/tokenize", json={"prompt": "the €", "add_special_tokens": False})).json()
        back = (await http.post("/detokenize", json={"tokens": bare["tokens"]})).json()
        chat = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
        both = await http.post("/tokenize", json={"prompt": "a", "messages": []})
        outside = await http.post("/detokenize", json={"tokens": [269]})
    assert text["tokens"] == [264, *bare["tokens"]] and text["count"] == len(text["tokens"])
    assert back == dict.fromkeys(("prompt", "content", "text"), "the €")
    assert tokenizer.decode(chat["tokens"]) == "<user>hi\n<assistant>"
    assert (both.status_code, outside.status_code) == (400, 400)


async def test_tokenize_tells_the_length_of_the_context_for_all_bodies(tokenizer: Tokenizer) -> None:
    bodies = ({"prompt": "a"}, {"messages": [{"role": "user", "content": "hi"}]}, {"content": "a"})
    async with http_client(FakePool(), tokenizer) as http:
        told = [(await http.post("/tokenize", json=body)).json()["max_model_len"] for body in bodies]
    assert told == [512] * 3


async def test_tokenize_of_an_empty_text_gives_the_tokens_that_the_tokenizer_adds(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        added = (await http.post("/tokenize", json={"prompt": ""})).json()
        bare = (await http.post("/tokenize", json={"prompt": "", "add_special_tokens": False})).json()
    assert (added["tokens"], added["count"]) == ([264], 1)
    assert (bare["tokens"], bare["count"]) == ([], 0)


async def test_several_texts_have_several_arrays_of_ids_and_back(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        ids = (await http.post("/v1/tokenize", json={"prompt": ["the €", ""]})).json()
        bare = (await http.post("/v1/detokenize", json={"tokens": ids["tokens"], "skip_special_tokens": True})).json()
        whole = (await http.post("/v1/detokenize", json={"tokens": ids["tokens"]})).json()
        none = (await http.post("/detokenize", json={"tokens": []})).json()
        refused = {
            name: (await http.post(path, json=body)).json()["error"]["param"]
            for name, path, body in (
                ("mixed", "/detokenize", {"tokens": [1, [2]]}),
                ("negative", "/detokenize", {"tokens": [[1], [-1]]}),
                ("outside", "/detokenize", {"tokens": [[1], [269]]}),
                ("number", "/tokenize", {"prompt": 1}),
                ("texts of tokens", "/tokenize", {"prompt": ["a"], "return_token_strs": True}),
            )
        }
    assert [one[0] for one in ids["tokens"]] == [264, 264] and ids["count"] == [len(one) for one in ids["tokens"]]
    assert bare["text"] == bare["prompt"] == ["the €", ""]
    assert whole["text"] == [tokenizer.decode(one, skip_special=False) for one in ids["tokens"]] != bare["text"]
    assert none["text"] == ""
    assert refused == {
        "mixed": "tokens", "negative": "tokens[1][0]", "outside": "tokens", "number": "prompt",
        "texts of tokens": "return_token_strs",
    }  # fmt: skip
