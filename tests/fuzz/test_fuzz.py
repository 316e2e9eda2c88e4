"""A short run of the fuzzers against a real server. `python -m tests.fuzz MINUTES` is the long run."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.fuzz.openapi import ROUTES, fuzz_openapi
from tests.fuzz.raw import fuzz_bodies, fuzz_http, fuzz_sizes


@pytest.fixture(scope="module")
def server(demo: Server) -> Iterator[Server]:
    yield demo
    demo.until_idle()


def statuses(tally: Counter[Any], *kind: str) -> set[int]:
    return {status for *what, status in tally if tuple(what) == kind}


@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")  # schemathesis uses it
def test_openapi_requests_get_documented_answers(server: Server) -> None:
    tally = fuzz_openapi(server.url, "m", 20, deterministic=True)
    for route in ROUTES:
        assert 200 in statuses(tally, route, "positive"), tally
    server.until_idle()


def test_bodies_malformed_are_refused(server: Server) -> None:
    assert {400, 422} & statuses(fuzz_bodies(server.url, 200, deterministic=True), "bodies")
    server.until_idle()


def test_http_malformed_is_refused(server: Server) -> None:
    assert {400, 404, 405} & statuses(fuzz_http(server.url, 200, deterministic=True), "http")
    server.until_idle()


def test_requests_oversized_are_refused(server: Server) -> None:
    tally = fuzz_sizes(server.url)
    assert (statuses(tally, "huge"), statuses(tally, "deep")) == ({413}, {400})
