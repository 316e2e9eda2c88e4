"""A grammar that crashes llguidance, or takes long, costs only its own request, and no time of other tenants."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from frontend import turns
from frontend.errors import Overloaded, Unprocessable
from frontend.structured_output import grammar as build
from frontend.structured_output import grammar_check
from frontend.text.tokenizer import Tokenizer
from shared import grammar_trial
from shared.sandbox import Sandbox
from tests.deep_grammars import ANCHORS, CHAINS, IDS, NAMED_DEFINITIONS, PERCENT, chain, rules
from tests.fakes import MODEL, FakePool
from tests.frontend.serving import http_client
from tests.patience import PATIENCE_S

DEEP = "nested, or its references are chained, too deeply"


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    for cached in (grammar_check.error, grammar_check.translated):
        cached.cache_clear()
    yield
    for cached in (grammar_check.error, grammar_check.translated):
        cached.cache_clear()


@pytest.mark.parametrize(
    "make",
    [
        lambda: build.json_schema(chain(CHAINS, 1000), "x"),
        lambda: build.json_schema(chain(ANCHORS, 1500), "x"),
        lambda: build.json_schema(chain(IDS, 1500), "x"),
        lambda: build.json_schema(chain(PERCENT, 1500), "x"),
        lambda: build.json_schema(chain(NAMED_DEFINITIONS, 1500), "x"),
        lambda: build.lark(rules("r", 2800), "x"),
        lambda: build.lark(rules("r", 2800, '[capture="x"]'), "x"),
        lambda: build.lark(rules("T", 4500), "x"),
        lambda: build.composed("start: %json " + build.embedded(chain(CHAINS, 1000), "x"), "x"),
    ],
    ids=["schema", "anchors", "ids", "percent", "named", "rules", "attributes", "terminals", "schema in lark"],
)
def test_grammar_that_overflows_the_librarys_stack_is_refused_and_the_next_works(make: Callable[[], str]) -> None:
    with pytest.raises(Unprocessable, match=f"`x` cannot be enforced: it is {DEEP}"):
        make()
    assert build.json_schema(chain(CHAINS, 50), "x")


SCHEMA_FORMAT = {"type": "json_schema", "name": "n", "schema": chain(CHAINS, 1000)}
MESSAGES = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES | {"response_format": {"type": "json_schema", "json_schema": SCHEMA_FORMAT}},
    "/v1/completions": {"prompt": "a", "guided_grammar": rules("r", 2800)},
    "/v1/responses": {"input": "a", "text": {"format": SCHEMA_FORMAT}},
    "/v1/messages": MESSAGES | {"output_config": {"format": SCHEMA_FORMAT}},
    "/api/chat": {"messages": MESSAGES["messages"], "format": SCHEMA_FORMAT["schema"]},
    "/api/generate": {"prompt": "a", "format": SCHEMA_FORMAT["schema"]},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_route_with_a_deep_grammar_refuses_it_by_name(path: str, tokenizer: Tokenizer) -> None:
    pool = FakePool()
    async with http_client(pool, tokenizer, unknown_fields="ignore") as http:
        answer = await http.post(path, json={"model": MODEL} | ROUTES[path])
    assert answer.status_code in (400, 422) and DEEP in answer.text and pool.calls == 0, answer.text


def test_error_of_a_known_grammar_asks_no_child() -> None:
    made = build.regex("abc", "x")
    for child in grammar_check.CHECKS.idle():
        child.close()
    assert grammar_check.error(made, True) == "" and not any(one.pid for one in grammar_check.CHECKS.idle())


def test_check_of_a_grammar_that_takes_too_long_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "SECONDS", 1e-4)
    with pytest.raises(Unprocessable, match=r"`x` cannot be enforced: it takes longer than 0\.0001 s to check"):
        build.json_schema(chain(CHAINS, 149), "x")
    monkeypatch.undo()
    assert build.json_schema(chain(CHAINS, 149), "x")  # built again, because it was not cached


def suspended(child: Sandbox) -> psutil.Process:
    """Returns the process of a child that has stopped: one thread takes the signal first and stops the others."""
    process = psutil.Process(child.pid)
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    return process


async def stopped(make: Callable[[], str], tenant: str) -> str:
    turns.tenant.set(tenant)
    return await build.in_thread(make)


async def test_in_turn_gives_each_tenant_one_check_at_a_time() -> None:
    begun: list[int] = []
    go_on = threading.Event()

    def slow(number: int) -> str:
        made = build.regex(f"slow {number}", "x")
        begun.append(number)
        assert go_on.wait(PATIENCE_S)
        return made

    jobs = [asyncio.create_task(stopped(lambda number=number: slow(number), "a")) for number in range(3)]
    async with asyncio.timeout(PATIENCE_S):
        while not begun:
            await asyncio.sleep(0.01)
        # while the check of the other tenant's grammar runs
        assert await stopped(lambda: build.regex("quick", "x"), "b")
        assert len(begun) == 1
        go_on.set()
        assert len(set(await asyncio.gather(*jobs))) == 3


async def test_in_turn_with_too_many_waiting_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        made = build.regex("slow and alone", "x")
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return made

    monkeypatch.setattr(grammar_check.CHECKS.threads, "most_waiting", 0)
    running = asyncio.create_task(stopped(slow, "a"))
    try:
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        with pytest.raises(Overloaded, match="0 grammars wait to be checked"):
            await stopped(lambda: build.regex("never seen", "x"), "a")
        assert await stopped(lambda: build.regex("never seen", "x"), "b")
    finally:
        go_on.set()
        await running


async def test_check_whose_client_leaves_ends_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    build.regex("warm", "x")
    called = threading.Event()
    ask = Sandbox.call

    def hanging(child: Sandbox, *arguments: Any, seconds: float) -> Any:
        suspended(child)
        called.set()
        return ask(child, *arguments, seconds=PATIENCE_S)

    monkeypatch.setattr(Sandbox, "call", hanging)
    check = asyncio.create_task(stopped(lambda: build.regex("left", "x"), "a"))
    assert await asyncio.to_thread(called.wait, PATIENCE_S)
    begun = time.monotonic()
    check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await check
    monkeypatch.undo()
    assert await stopped(lambda: build.regex("next of the same tenant", "x"), "a")
    assert time.monotonic() - begun < PATIENCE_S / 2


def test_grammar_of_llama_cpp_is_translated_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "yes" in build.lark('root ::= "yes" | "no"', "x")
    monkeypatch.setattr(grammar_trial, "SECONDS", 1e-4)
    with pytest.raises(Unprocessable, match=r"`x` cannot be enforced: it takes longer than 0\.0001 s"):
        build.lark("root ::= " + '"a" ' * 20_000, "x")


async def test_in_turn_with_a_known_grammar_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build.regex("seen", "x")
    monkeypatch.setattr(grammar_check.CHECKS.threads, "most_waiting", 0)
    assert await stopped(lambda: build.regex("seen", "x"), "a") == made


def test_child_killed_during_a_check_costs_that_request(monkeypatch: pytest.MonkeyPatch) -> None:
    build.regex("first", "x")
    ask = Sandbox.call

    def killed(child: Sandbox, *arguments: Any, seconds: float) -> Any:
        threading.Timer(0.1, suspended(child).kill).start()
        return ask(child, *arguments, seconds=seconds)

    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "call", killed)
        with pytest.raises(Unprocessable, match="the process that examined it ended"):
            build.regex("second", "x")
    assert build.regex("second", "x")


def test_check_without_a_child_asks_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for child in grammar_check.CHECKS.idle():
        child.close()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(Overloaded, match="cannot be checked"):
        build.regex("without", "x")
