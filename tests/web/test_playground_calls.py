"""The playground before servers that think, call tools, want keys, refuse, fail or vanish: by a script."""

import re
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from playwright.sync_api import expect

from frontend.errors import Overloaded
from frontend.workers.status import READY, ConnectionState, WorkerStatus, not_ready
from shared.messages import Outcome
from tests.fakes import READY_STATUS
from tests.frontend.speaking import Model
from tests.web.scripted import served

pytestmark = pytest.mark.browser

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
KEY = "sk-of-alice"
Opens = Callable[..., Any]


@pytest.mark.parametrize("query", ["", "?probabilities=1"])
def test_thoughts_are_folded_and_calls_go_on_with_results(scripted: Model, opened: Opens, query: str) -> None:
    paris, oslo = CALL % "Paris", CALL % "Oslo"
    scripted.says = [
        f"<think>\nTwo cities.\n</think>\n\nI look.\n{paris}\n{oslo}",
        "<think>\nGood.\n</think>\n\nSun and snow.",
        "<think>\nAgain.\n</think>\n\nStill <b>sun</b>.",
    ]
    with served(scripted) as url, opened(url) as page:
        page.open(query)
        page.panel.locator(".extras > summary").click()
        page.panel.get_by_role("button", name="Fill in a sample").first.click()
        page.ask("Weather in Paris and Oslo?")
        expect(page.turn.locator(".thoughts")).to_be_hidden()
        page.turn.locator(".thought > summary").click()
        expect(page.turn.locator(".thoughts")).to_have_text("Two cities.")
        assert page.answer.strip() == "I look."
        assert page.turn.locator(".name").all_text_contents() == ["get_weather", "get_weather"]
        assert page.turn.locator(".arguments").all_text_contents() == ['{"city": "Paris"}', '{"city": "Oslo"}']
        results = page.turn.get_by_label("Its result")
        results.nth(0).fill("sun")
        results.nth(1).fill("snow")
        page.turn.get_by_role("button", name="Go on with these results").click()
        expect(page.panel.locator(".turn")).to_have_count(2)
        page.until("done")
        assert page.answer == "Sun and snow."
        assert page.panel.get_by_role("button", name="Go on").count() == 0
        page.button("Regenerate").click()
        expect(page.turn.locator(".answer")).to_have_text("Still <b>sun</b>.")
    first, *after = scripted.prompts
    assert '"get_weather"' in first
    results_given = re.compile(r"Two cities\..*Paris.*Oslo.*<tool_response>\nsun\n.*<tool_response>\nsnow\n", re.DOTALL)
    assert all(map(results_given.search, after)) and len(after) == 2


def test_tools_that_are_no_json_or_refused_are_told(scripted: Model, opened: Opens) -> None:
    with served(scripted) as url, opened(url) as page:
        page.open()
        page.extra("tools", "get_weather()")
        page.ask("Weather?", until="failed")
        assert "the tools field is not JSON" in page.error
        page.watch.expected = {400, 422}
        page.extra("tools", '[{"type": "function", "function": {"parameters": {}}}]')
        page.ask("Weather?", until="failed")
        assert re.match(r"4\d\d: .*`tools\[0\]", page.error)
        expect(page.panel.locator("[name=tools]")).to_have_attribute("aria-invalid", "true")
        assert scripted.prompts == []


def test_a_key_is_asked_for_tried_and_kept_in_the_tab(scripted: Model, opened: Opens, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} alice\n")
    scripted.says = ["Hello.", "Hello."]
    with served(scripted, api_keys=str(keys)) as url, opened(url) as page:
        page.watch.expected = {401}
        page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.open()
        hint, field = page.page.locator("#hint"), page.page.get_by_label("API key", exact=True)
        expect(hint).to_have_text("This server wants an API key.")
        asked: list[str] = []
        page.page.on("request", lambda request: asked.append(request.url))
        for _ in range(2):
            page.page.wait_for_event("request", lambda request: request.url.endswith("/ready"))
        assert f"{url}/stats" not in asked  # until there is another key
        page.ask("Hi", until="failed")
        assert page.error.startswith("401: the API key is missing or wrong. Put a key into the field")
        field.fill("sk-wröng")
        field.press("Enter")
        expect(hint).to_contain_text("No key looks like this")
        field.fill("sk-wrong")
        page.page.get_by_role("button", name="Use it").click()
        expect(hint).to_have_text("This server does not know this key.")
        field.fill(KEY)
        field.press("Enter")
        expect(hint).to_contain_text("The server accepts this key.")
        expect(page.page.locator("#facts")).to_contain_text("tiny")  # from /stats
        page.button("Regenerate").click()
        page.until("done")
        assert page.answer == "Hello."
        expect(field).to_be_hidden()
        page.button("Copy as curl").click()
        expect(page.panel.get_by_role("button", name="Copied")).to_be_visible()
        command = page.page.evaluate("navigator.clipboard.readText()")
        assert '-H "Authorization: Bearer $API_KEY"' in command and KEY not in command
        answer = subprocess.run(["bash", "-c", f"API_KEY={KEY}\n{command}"], capture_output=True, text=True, check=True)
        assert answer.stdout.endswith("data: [DONE]\n\n")
        kept = "[Object.values({...localStorage}).join(), document.cookie, location.href].join()"
        assert KEY not in page.page.evaluate(kept)
        page.open()
        expect(page.page.locator("#facts")).to_contain_text("tiny")
        page.page.get_by_role("button", name="API key").click()
        page.page.get_by_role("button", name="Forget it").click()
        expect(hint).to_have_text("This server wants an API key.")
        assert page.page.evaluate("sessionStorage.length") == 0


def test_no_key_is_asked_for_where_none_is_needed(scripted: Model, opened: Opens) -> None:
    with served(scripted) as url, opened(url) as page:
        page.open()
        expect(page.page.locator("#facts")).to_contain_text("tiny")
        expect(page.page.locator("#access")).to_be_hidden()
        expect(page.page.get_by_role("button", name="API key")).to_have_attribute("aria-expanded", "false")


def test_refusals_are_told_beside_the_question(scripted: Model, opened: Opens) -> None:
    scripted.pool.refusals[0] = Overloaded("the queue is full", code="queue_full", retry_after=7)
    scripted.says = ["Good day."]
    with served(scripted) as url, opened(url) as page:
        page.watch.expected = {422, 503}
        page.open()
        page.ask("First", until="failed")
        assert page.error == "503: the queue is full. Try again in 7 s."
        page.knob("top_p", "5")
        page.ask("Second", until="failed")
        assert page.error.startswith("422: `top_p` must be")
        expect(page.settings.locator("[name=top_p]")).to_have_attribute("aria-invalid", "true")
        page.knob("top_p", "")
        page.ask("<img src=x onerror=alert(1)>")
        assert page.answer == "Good day."
        assert page.panel.locator(".error:visible").count() == 2
        assert page.panel.locator("img").count() == 0
    (prompt,) = scripted.prompts
    assert "First" not in prompt and "Second" not in prompt


def test_an_error_in_midstream_keeps_what_was_said(scripted: Model, opened: Opens) -> None:
    scripted.says = ["Half an answer", "<think>\nHalf a thought"]
    scripted.outcome = Outcome.ERROR
    with served(scripted) as url, opened(url) as page:
        page.open()
        page.ask("Hi", until="failed")
        assert page.answer == "Half an answer"
        assert page.error and "finished: " not in page.timing
        page.ask("Hi again", until="failed")
        expect(page.turn.locator(".thought > summary")).to_have_text(re.compile("^Thought, not to its end, for "))


def test_an_answer_that_waits_for_its_worker_says_so(scripted: Model, opened: Opens) -> None:
    said = "getComputedStyle(document.querySelector('.timing'), '::before').content"
    scripted.pool.play = lambda pool, stream: None
    with served(scripted) as url, opened(url) as page:
        page.watch.expected = {503}
        page.open()
        page.ask("Hi", until="running")
        assert page.page.evaluate(said) == "none"
        scripted.pool.readiness = not_ready("the worker is lost")
        expect(page.page.locator("#state")).to_have_text("not ready: the worker is lost")
        assert "This answer goes on" in page.page.evaluate(said)
        scripted.pool.readiness = READY
        expect(page.page.locator("#state")).to_have_text("ready")
        assert page.page.evaluate(said) == "none"
        page.button("Stop").click()
        page.until("stopped")


def test_a_server_that_goes_and_comes_back(scripted: Model, opened: Opens) -> None:
    (hi,) = scripted.tokenizer.encode_now(["Hi"], False)
    scripted.pool.play = lambda pool, stream: pool.later(partial(pool.send_tokens, stream, hi))  # and it never ends
    with ExitStack() as first:
        url = first.enter_context(served(scripted))
        with opened(url) as page:
            page.watch.expected = {0}
            page.open()
            page.ask("Hi", until="running")
            expect(page.turn.locator(".answer")).to_have_text("Hi")
            first.close()
            page.until("failed")
            assert page.answer == "Hi"
            assert re.search("lost before the end|broke off before its end|shutting down", page.error)
            expect(page.page.locator("#state")).to_have_text("not ready: the server cannot be reached")
            page.ask("Anybody there?", until="failed")
            assert page.error == "the server cannot be reached."
            with served(scripted, int(url.rpartition(":")[2])):
                expect(page.page.locator("#state")).to_have_text("ready")
                events = page.page.locator("#events li").all_text_contents()
                assert [event[9:] for event in events] == ["ready", "not ready: the server cannot be reached", "ready"]


def test_several_workers_are_counted_and_told_apart(scripted: Model, opened: Opens) -> None:
    pages = replace(READY_STATUS.pages, free=9, cached=0, owned=1)
    statuses = {"a": replace(READY_STATUS, pages=pages), "b": replace(READY_STATUS, pages=pages, epoch=5)}
    scripted.pool.statuses = lambda: [  # type: ignore[method-assign]
        WorkerStatus(name, ConnectionState.READY if name == "a" else ConnectionState.LOST, "", status)
        for name, status in statuses.items()
    ]
    with served(scripted) as url, opened(url) as page:
        page.open()
        expect(page.page.locator("#facts")).to_contain_text("1 of 2 workers ready")
        requests = page.page.locator("#charts figure").filter(has_text="Requests").locator(".key")
        expect(requests).to_have_text(["running 4", "waiting 2"])
        cache = page.page.locator("#charts figure").filter(has_text="K/V cache").locator(".key")
        expect(cache).to_have_text(["in use 10 %", "reusable 0 %"])
        statuses["b"] = replace(statuses["b"], epoch=6, pid=12)
        restarts = page.page.locator("#events li").filter(has_text="restarted")
        expect(restarts).to_have_text([re.compile("worker b restarted: epoch 6, pid 12")])
