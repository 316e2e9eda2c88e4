"""/v1/models, and lengths before a worker is known."""

from frontend.text.tokenizer import Tokenizer
from frontend.workers.status import not_ready
from tests.fakes import MODEL, FakePool, sending
from tests.frontend.serving import http_client


async def test_models_lists_the_served_model(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        listing = (await http.get("/v1/models")).json()
        one = (await http.get(f"/v1/models/{MODEL}")).json()
        other = await http.get("/v1/models/org/other")
    ends = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
    assert listing == {"object": "list", "data": [one], **ends}
    assert (one["id"], one["object"], one["max_model_len"]) == (MODEL, "model", 512)
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")


async def test_models_have_no_length_before_a_worker_is_known(tokenizer: Tokenizer) -> None:
    pool = FakePool(readiness=not_ready("loading 42%"), welcome=None)
    async with http_client(pool, tokenizer) as http:
        paths = ("/v1/models", f"/v1/models/{MODEL}")
        (listing, one) = [(await http.get(path)).json() for path in paths]
        counted = (await http.post("/tokenize", json={"prompt": "ab"})).json()
    assert [it["max_model_len"] for it in (*listing["data"], one, counted)] == [None] * 3
    assert counted["count"] > 0


async def test_any_model_name_is_accepted_on_demand(tokenizer: Tokenizer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "model": "gpt"}
    for any_name, status in ((True, 200), (False, 404)):
        async with http_client(FakePool(sending([104])), tokenizer, any_model_name=any_name) as http:
            answers = [await http.post("/v1/chat/completions", json=body), await http.get("/v1/models/gpt")]
        assert [answer.status_code for answer in answers] == [status, status]
        assert not any_name or (answers[0].json()["model"], answers[1].json()["id"]) == (MODEL, "gpt")
