"""Requests of browsers, monitors and neighbouring servers to a real server."""

from pathlib import Path

import httpx
import openai
import psutil

from tests.e2e.server import Server, serving
from tests.patience import PATIENCE_S

KEYS = {"Authorization": "Bearer sk-first-Kq3"}, {"X-Api-Key": "sk-second-Kq3"}
LONG = "The cellar of the lighthouse was full of clocks. " * 20


def test_monitors_find_version_ping_and_model(demo: Server) -> None:
    get = demo.client.get
    assert get("/ping").json() == get("/health").json() == {"status": "ok", "model_loaded": True}
    assert list(get("/version").json()) == ["version"] and get("/version").json()["version"]
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none") as sdk:
        [model] = sdk.models.list().data
    fields = model.to_dict()
    assert (fields["id"], fields["root"], fields["parent"]) == ("m", "m", None) and fields["max_model_len"]


def test_reset_empties_the_prefix_cache_while_a_stream_goes_on(tmp_path: Path) -> None:
    with serving("demo", tmp_path / "log", "--api-key", "sk-first-Kq3") as server:
        server.client.headers.update(KEYS[0])
        check_reset(server)


def check_reset(demo: Server) -> None:
    def cached() -> int:
        body = {"model": "m", "prompt": LONG, "max_tokens": 1}
        return int(
            demo.client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        )

    cached()
    assert cached() > 0
    alone = demo.events("Once upon a time", 64)
    with httpx.Client(base_url=demo.url, timeout=PATIENCE_S, headers=KEYS[0]) as other:
        body = {"model": "m", "prompt": "Once upon a time", "max_tokens": 64, "temperature": 0, "stream": True}
        with other.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert demo.client.post("/reset_prefix_cache").json() == {"workers": 1}
            assert [line for line in lines if line][-1] == "data: [DONE]"
    assert demo.events("Once upon a time", 64).ids == alone.ids
    demo.client.post("/reset_prefix_cache")
    assert cached() == 0 and cached() > 0


def test_foreign_page_is_refused_and_the_own_one_served(demo: Server) -> None:
    body = {"model": "m", "prompt": "x", "max_tokens": 1}
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        refused = demo.client.post("/v1/completions", json=body, headers=headers)
        assert refused.status_code == 403 and "--cors-origins" in refused.json()["error"]["message"]
    assert demo.client.post("/v1/completions", json=body, headers={"Origin": demo.url}).status_code == 200


def test_keys_of_flags_guard_the_server_and_stay_secret(tmp_path: Path) -> None:
    log = tmp_path / "log"
    admins = tmp_path / "admins"
    admins.write_text(KEYS[0]["Authorization"].removeprefix("Bearer ") + " boss\n")
    admins.chmod(0o600)
    flags = ["--log-level", "debug", "--cors-origins", "https://app.example", "*", "--admin-keys", str(admins)]
    with serving("demo", log, *flags, "--api-key", "sk-first-Kq3", "--api-key", "sk-second-Kq3") as server:
        post = server.client.post
        assert post("/reset_prefix_cache").status_code == 401
        assert [post("/reset_prefix_cache", headers=key).status_code for key in KEYS] == [200, 403]
        assert server.client.get("/ping").status_code == 200
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
        page = {"Origin": "https://elsewhere.example", "Sec-Fetch-Site": "cross-site"}
        streamed = post("/v1/chat/completions", json=chat, headers=KEYS[0] | page)
        assert streamed.headers["access-control-allow-origin"] == "*" and "[DONE]" in streamed.text
        said = server.client.get("/stats", headers=KEYS[0]).text
        children = psutil.Process(server.process.pid).children(recursive=True)
        commands = " ".join(word for process in children for word in process.cmdline())
    assert children and "Kq3" not in said + commands + log.read_text()
