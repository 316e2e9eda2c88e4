"""frontend/server/middleware.py around a route that fails in a given way."""

import httpx
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from frontend.api.openai import completions
from frontend.errors import DeadlineExceeded, MethodNotAllowed, Overloaded
from frontend.server.access import ApiKeys, Hosts, Origins, own_tenant
from frontend.server.middleware import RequestMiddleware, RequestRecord


class Site:
    """One route behind the middleware, and the middleware's reports."""

    def __init__(self, failure: Exception | None = None, keys: str = "") -> None:
        self.rejected: list[str] = []
        self.records: list[RequestRecord] = []
        self._failure = failure
        self._app = RequestMiddleware(
            self._route, keys=ApiKeys(keys), envelope=lambda path: completions, rejected=self.rejected.append,
            ended=self.records.append, origins=Origins(()), hosts=Hosts(["*"]),
            admission=own_tenant,
        )  # fmt: skip

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._failure is not None:
            raise self._failure
        await PlainTextResponse("ok")(scope, receive, send)

    async def get(self, path: str = "/stats", **headers: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url="http://x") as http:
            return await http.get(path, headers=headers)


async def test_response_has_the_clients_request_id_if_it_is_valid() -> None:
    answer = await Site().get(**{"x-request-id": "a.b-1"})
    assert answer.headers["x-request-id"] == answer.headers["request-id"] == "a.b-1"
    assert (await Site().get(**{"x-request-id": "a b"})).headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("failure", "status", "headers"),
    [
        (Overloaded("full", code="queue_full", retry_after=2.5), 503, {"retry-after": "3"}),
        (DeadlineExceeded("late", code="deadline_exceeded"), 504, {"x-should-retry": "false"}),
        (MethodNotAllowed("no", allow="POST"), 405, {"allow": "POST"}),
        (HTTPException(404), 404, {}),
        (ValueError("secret"), 500, {}),
    ],
)
async def test_exception_becomes_its_response(failure: Exception, status: int, headers: dict[str, str]) -> None:
    site = Site(failure)
    answer = await site.get()
    assert answer.status_code == status and answer.json()["error"]["message"]
    assert "secret" not in answer.text
    assert {name: answer.headers[name] for name in headers} == headers
    assert site.rejected == (["queue_full"] if status == 503 else [])
    assert [record.status for record in site.records] == [status]


async def test_client_that_left_is_recorded_as_gone() -> None:
    site = Site(ClientDisconnect())
    with pytest.raises(AssertionError):  # the client's transport asserts that there is a response
        await site.get()
    assert [record.outcome for record in site.records] == ["client_gone"]


@pytest.mark.parametrize(("path", "status"), [("/stats", 401), ("/health", 200), ("/web/main.js", 200), ("/", 200)])
async def test_key_is_needed_except_on_open_routes(
    tmp_path_factory: pytest.TempPathFactory, path: str, status: int
) -> None:
    keys = tmp_path_factory.mktemp("auth") / "keys"
    keys.write_text("sk-one alice\n")
    keys.chmod(0o600)
    site = Site(keys=str(keys))
    answer = await site.get(path)
    assert answer.status_code == status
    assert answer.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
    assert (await site.get(path, authorization="Bearer sk-one")).status_code == 200
    assert site.records[-1].tenant == ("alice" if status == 401 else "")
