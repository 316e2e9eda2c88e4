"""A short run of the fuzzers against a real server; `python -m tests.fuzz MINUTES` is the long one."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server import Server
from tests.fuzz.described import ROUTES, fuzz_described
from tests.fuzz.raw import fuzz_bodies, fuzz_http, sizes


@pytest.fixture(scope="module")
def server(demo: Server) -> Iterator[Server]:
    yield demo
    demo.until_idle()


def seen(tally: Counter[Any], *kind: str) -> set[int]:
    return {status for *what, status in tally if tuple(what) == kind}


@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")  # schemathesis does
def test_described_requests_get_described_answers(server: Server) -> None:
    tally = fuzz_described(server.url, "m", 20, again=True)
    for route in ROUTES:
        assert 200 in seen(tally, route, "positive"), tally
    server.until_idle()


def test_malformed_bodies_are_refused(server: Server) -> None:
    assert {400, 422} & seen(fuzz_bodies(server.url, 200, again=True), "bodies")
    server.until_idle()


def test_malformed_http_is_refused(server: Server) -> None:
    assert {400, 404, 405} & seen(fuzz_http(server.url, 200, again=True), "http")
    server.until_idle()


def test_oversized_requests_are_refused(server: Server) -> None:
    tally = sizes(server.url)
    assert (seen(tally, "huge"), seen(tally, "deep")) == ({413}, {400})
