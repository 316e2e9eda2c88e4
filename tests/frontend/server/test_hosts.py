"""frontend/server/access.py: the names in `Host` that a server accepts, by its settings."""

from typing import Any

import pytest
from starlette.datastructures import Headers

from frontend.errors import Forbidden
from frontend.server.access import Hosts
from frontend.text.tokenizer import Tokenizer
from shared.config.frontend import FrontendConfig
from tests.fakes import FakePool
from tests.frontend.serving import http_client

OWN = (
    "localhost", "LOCALHOST:8000", "localhost.", "app.localhost:1", "127.0.0.1", "127.0.0.1:8000", "127.9.9.9",
    "[::1]", "[::1]:8000", "localhost:",
)  # fmt: skip
FOREIGN = (
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "127.evil.example",
    "evillocalhost", "localhost@evil.example", "localhost:80@evil.example", "192.168.0.7", "0.0.0.0", "", ":8000",
    "[::1", "[::1]evil.example", "[::2]", "localhost evil", "localhost,evil.example",
)  # fmt: skip


def allows(host: str | None, /, **config: Any) -> bool:
    try:
        Hosts.of(FrontendConfig(**config)).check(Headers({} if host is None else {"host": host}))
    except Forbidden as error:
        assert error.status == 403 and "--allowed-hosts" in error.message
        return False
    return True


@pytest.mark.parametrize("bind", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_loopback_bind_answers_only_to_names_of_this_machine(bind: str) -> None:
    assert [host for host in OWN if not allows(host, host=bind)] == []
    assert [host for host in FOREIGN if allows(host, host=bind)] == []
    assert allows(None, host=bind)  # HTTP/1.0, which no browser sends


def test_listed_names_are_answered_on_any_bind() -> None:
    for bind in ("127.0.0.1", "0.0.0.0"):
        listed = {"host": bind, "allowed_hosts": "api.example.com,*.Sluice.example"}
        assert allows("API.example.com:443", **listed) and allows("a.sluice.example", **listed)
        assert all(allows(host, **listed) for host in OWN)
        for host in ("example.com", "x.api.example.com", "sluice.example", "asluice.example", *FOREIGN):
            assert not allows(host, **listed), host


@pytest.mark.parametrize("config", [{"host": "0.0.0.0"}, {"host": "::"}, {"api_key": "sk"}, {"allowed_hosts": "*"}])
def test_every_name_is_answered_with_keys_or_a_public_bind_or_by_the_flag(config: dict[str, str]) -> None:
    assert all(allows(host, **config) for host in (*OWN, *FOREIGN))


def test_listed_names_hold_with_keys_too() -> None:
    assert not allows("evil.example", api_key="sk", allowed_hosts="api.example.com")


async def test_rebound_page_reaches_only_the_probes(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    page = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
    async with http_client(pool, tokenizer, allowed_hosts="") as http:
        answer = await http.post("/v1/completions", json={"prompt": "a"}, headers=page)
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "host_not_allowed"
        for path in ("/", "/metrics", "/stats", "/v1/models", "/openapi.json", "/web/main.js"):
            assert (await http.get(path, headers=page)).status_code == 403, path
        assert (await http.get("/health", headers={"Host": "evil.example"})).status_code == 200
        assert (await http.get("/openapi.json", headers={"Host": "127.0.0.1:8000"})).status_code == 200
    assert not pool.submitted
