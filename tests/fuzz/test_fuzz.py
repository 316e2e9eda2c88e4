"""A short run of the fuzzers against a real server; `python -m tests.fuzz MINUTES` is the long one."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.server import Server, serving
from tests.fuzz.described import ROUTES, fuzz_described
from tests.fuzz.raw import fuzz_bodies, fuzz_http, sizes


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("demo", tmp_path_factory.mktemp("fuzz") / "log") as demo:
        yield demo
        demo.until_idle()


def seen(tally: Counter[Any], *kind: str) -> set[int]:
    return {status for *what, status in tally if tuple(what) == kind}


@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")  # the library does, at times
def test_whatever_the_description_allows_is_answered_as_it_says(server: Server) -> None:
    tally = fuzz_described(server.url, "m", 20, again=True)
    for route in ROUTES:
        assert 200 in seen(tally, route, "positive"), tally
    server.until_idle()


def test_bodies_that_are_no_requests(server: Server) -> None:
    assert {400, 422} & seen(fuzz_bodies(server.url, 200, again=True), "bodies")
    server.until_idle()


def test_http_that_nobody_means(server: Server) -> None:
    assert {400, 404, 405} & seen(fuzz_http(server.url, 200, again=True), "http")
    server.until_idle()


def test_what_is_too_much_is_refused(server: Server) -> None:
    tally = sizes(server.url)
    assert (seen(tally, "huge"), seen(tally, "deep")) == ({413}, {400})
