"""frontend/server/access.py: which pages may send requests, by the headers that browsers send. HTTP: test_cors."""

import pytest
from starlette.datastructures import Headers

from frontend.errors import Forbidden
from frontend.server.access import Origins

HOST, FOREIGN = "localhost:8000", "https://evil.example"
POLICIES = {
    "none": Origins([]), "one": Origins(["https://app.example"]), "all": Origins(["*"]),
    "machine": Origins(["localhost"]),
}  # fmt: skip


def allows(policy: str, method: str = "POST", **headers: str) -> bool:
    try:
        POLICIES[policy].check(method, Headers({"host": HOST} | {k.replace("_", "-"): v for k, v in headers.items()}))
    except Forbidden as error:
        assert "--cors-origins" in error.message and error.status == 403
        return False
    return True


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_client_that_is_no_browser_may_send_everything(policy: str, method: str) -> None:
    assert allows(policy, method)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:8000"},
        {"origin": "https://LOCALHOST:8000"},  # a proxy terminated TLS
        {"origin": "http://public.example", "sec_fetch_site": "same-origin"},  # a proxy changed Host
        {"sec_fetch_site": "none"},
    ],
)
def test_own_page_may_send_requests(headers: dict[str, str]) -> None:
    assert allows("none", **headers) and allows("one", **headers)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": FOREIGN},
        {"origin": FOREIGN, "sec_fetch_site": "cross-site"},
        {"origin": "http://localhost:3000", "sec_fetch_site": "same-site"},
        {"origin": "http://localhost:80000"},
        {"origin": "http://localhost:8000.evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://[::1"},  # no URL
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"},  # a request for an image or a script
        {"origin": FOREIGN, "sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"},  # a submitted form
    ],
)
def test_foreign_page_is_refused_unless_all_are_allowed(headers: dict[str, str]) -> None:
    assert not allows("none", **headers) and not allows("one", **headers)
    assert allows("all", **headers)


def test_foreign_page_without_a_host_to_compare_is_refused() -> None:
    with pytest.raises(Forbidden):
        Origins([]).check("POST", Headers({"origin": ""}))


def test_allowed_origin_is_compared_whole() -> None:
    assert allows("one", origin="https://app.example", sec_fetch_site="cross-site")
    assert not allows("one", origin="https://app.example.evil")
    assert not allows("one", origin="http://app.example")


def test_link_to_the_page_works_from_everywhere() -> None:
    followed = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert allows("none", "GET", **followed) and allows("none", "HEAD", **followed)
    assert not allows("none", "POST", **followed)


@pytest.mark.parametrize(
    "page", ["http://localhost", "https://localhost:8443", "http://127.0.0.1:3000", "http://[::1]:80"]
)
def test_pages_of_this_machine_may_send_requests_if_localhost_is_allowed(page: str) -> None:
    assert allows("machine", origin=page, sec_fetch_site="cross-site")


@pytest.mark.parametrize(
    "page", [FOREIGN, "http://notlocalhost", "http://localhost.evil.com", "http://localhost:1@evil.com"]
)
def test_no_other_pages_may_then(page: str) -> None:
    assert not allows("machine", origin=page, sec_fetch_site="cross-site")
