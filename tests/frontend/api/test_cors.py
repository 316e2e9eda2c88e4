"""Which requests from pages of other sites are refused, and the CORS headers of answers, streams and errors."""

from pathlib import Path

import httpx
import pytest

from frontend.server.http_protocol import ConnectionLimits
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL
from tests.frontend.serving import app_over, completing, http_client, serving

PAGE, FOREIGN, LOCAL = "https://app.example", "https://evil.example", "http://localhost:3000"
BODY = {"model": MODEL, "prompt": "abc", "max_tokens": 8}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
ASKS = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_foreign_page_is_refused_in_the_routes_own_format(tokenizer: Tokenizer, path: str) -> None:
    pool = completing(tokenizer)
    async with http_client(pool, tokenizer) as http:
        answer = await http.post(path, json=CHAT, headers={"Origin": FOREIGN, "Content-Type": "text/plain"})
        asked = await http.options(path, headers=ASKS)
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "permission_error")
    assert "--cors-origins" in answer.json()["error"]["message"] and pool.calls == 0
    assert answer.json().get("type") == ("error" if path == "/v1/messages" else None)
    assert asked.status_code == 403 and "access-control-allow-origin" not in asked.headers


async def test_foreign_page_cannot_read_or_reset_anything_either(tokenizer: Tokenizer) -> None:
    async with http_client(completing(tokenizer), tokenizer) as http:
        image = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
        for path in ("/v1/models", "/stats", "/metrics", "/health", "/"):
            assert (await http.get(path, headers=image)).status_code == 403
        assert (await http.post("/reset_prefix_cache", headers={"Origin": FOREIGN})).status_code == 403
        followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        assert (await http.get("/", headers=followed)).status_code == 200


async def test_own_page_works_without_any_flag(tokenizer: Tokenizer) -> None:
    async with http_client(completing(tokenizer), tokenizer) as http:
        answer = await http.post("/v1/completions", json=BODY, headers={"Origin": "http://sluice"})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("flag", "told"),
    [("*", "*"), (f"https://other.example,{PAGE}", PAGE), (f"localhost,{PAGE}", PAGE), ("localhost", LOCAL)],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_allowed_page_reads_answers_streams_and_errors(
    tokenizer: Tokenizer, flag: str, told: str, stream: bool, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("sk-one\n")
    (tmp_path / "keys").chmod(0o600)
    app = app_over(completing(tokenizer), tokenizer, cors_origins=flag, api_keys=str(tmp_path / "keys"))
    page = LOCAL if told == LOCAL else PAGE
    mine = {"Origin": page, "Sec-Fetch-Site": "cross-site", "Authorization": "Bearer sk-one"}
    async with serving(app, ConnectionLimits()) as url, httpx.AsyncClient(base_url=url) as http:
        asked = await http.options("/v1/chat/completions", headers=ASKS | {"Origin": page})
        answers = [
            await http.post("/v1/chat/completions", json=CHAT | {"stream": stream}, headers=mine),
            await http.post("/v1/chat/completions", json=CHAT | {"temperature": -1}, headers=mine),
            await http.post("/v1/chat/completions", json=CHAT, headers={"Origin": page}),
            await http.get("/nowhere", headers=mine),
        ]
    assert [answer.status_code < 300 for answer in answers] == [True, False, False, False]
    assert answers[2].status_code == 401
    for answer in (asked, *answers):
        assert answer.headers["access-control-allow-origin"] == told
    for answer in answers:
        assert answer.headers["access-control-expose-headers"] == "*" and answer.headers["x-request-id"]
    assert asked.status_code == 200, "a browser asks without a key"
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert not stream or answers[0].text.endswith("data: [DONE]\n\n")


async def test_page_that_is_not_listed_stays_refused(tokenizer: Tokenizer) -> None:
    async with http_client(completing(tokenizer), tokenizer, cors_origins=PAGE) as http:
        answer = await http.post("/v1/completions", json=BODY, headers={"Origin": FOREIGN})
        asked = await http.options("/v1/completions", headers=ASKS | {"Origin": FOREIGN})
    assert answer.status_code == 403 and asked.status_code == 400
    assert all("access-control-allow-origin" not in said.headers for said in (answer, asked))
